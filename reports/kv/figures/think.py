"""Later turns: time since the turn before against tokens that were loaded and not computed again."""

from __future__ import annotations

from typing import Any, Final

import altair as alt

from harness.run_folder import RunFolder
from reports.figures.style import NARROW, WIDE, Drawing, Panel, axis, data, svg, y_axis
from reports.figures.timeline import SALTIRE
from reports.kv.designs import Design
from reports.kv.setup import setup
from reports.kv.turns import Fate, Turn, turns
from reports.words import duration, given

HEIGHT: Final = 200
LOOKS: Final = {
    Fate.LOADED: ("circle", 26, ""), Fate.DECLINED: ("circle", 34, "var(--ink-2)"),
    Fate.TOO_LATE: (SALTIRE, 40, "var(--bad)"), Fate.TOO_EARLY: ("triangle-up", 46, "var(--bad)"),
    Fate.OTHER: (SALTIRE, 34, "var(--ink-2)"),
}  # fmt: skip


def think_panels(runs: list[RunFolder], designs: list[Design]) -> list[Panel]:
    """Return a panel a run that keeps turns, with one scale for all."""
    keeping = [(run, d) for run, d in zip(runs, designs, strict=True) if setup(run).terms.bidirectional_kv_xfer]
    found = [(run, design, [t for t in turns(run) if t.gap_s is not None]) for run, design in keeping]
    tokens = max((t.tokens for _, _, all_ in found for t in all_), default=0)
    ends = [_ttl_s(run) for run, _, _ in found]
    ends += [(t.gap_s or 0) * run.manifest.time_scale for run, _, all_ in found for t in all_]
    return [_panel(run, design, all_, max(tokens, 1), max(ends)) for run, design, all_ in found]


def _ttl_s(run: RunFolder) -> float:
    return setup(run).terms.decoder_kv_blocks_ttl * run.manifest.time_scale


def _panel(run: RunFolder, design: Design, found: list[Turn], tokens: int, end_s: float) -> Panel:
    if not found:
        return Panel(design.tone, design.title, None, "No later turn came with a hand-off.")
    rows = _rows(run, found)
    label = f"Tokens loaded by time since the turn before, {design.title}: {len(found)} turns"

    def chart(width: int) -> alt.LayerChart:
        x = alt.X("x:Q", scale=alt.Scale(domain=[0, end_s * 1.05], nice=False), axis=axis(
            title="seconds from the end of the turn before" + _scale_word(run), grid=False, titleAnchor="end",
            tickCount=6 if width >= WIDE else 4, titlePadding=4))  # fmt: skip
        y = alt.Y("y:Q", scale=alt.Scale(domain=[-0.06 * tokens, tokens * 1.16], nice=False),
                  axis=y_axis(tickCount=4, labelExpr="format(datum.value, ',.0f')"))  # fmt: skip
        dots = [_dots([r for r in rows if r["fate"] == fate], fate, design).encode(
            x=x, y=y, description=alt.Description("text:N")) for fate in LOOKS]  # fmt: skip
        return alt.layer(*_limit(_ttl_s(run), x), *dots)

    wide, narrow = (svg(chart(width), width, HEIGHT, label) for width in (WIDE, NARROW))
    return Panel(design.tone, design.title, Drawing(wide, narrow))


def _scale_word(run: RunFolder) -> str:
    return "" if run.manifest.time_scale == 1 else ", at full scale"


def _rows(run: RunFolder, found: list[Turn]) -> list[dict[str, Any]]:
    scale = run.manifest.time_scale
    return [
        {
            "x": (t.gap_s or 0) * scale, "y": t.tokens, "fate": t.fate,
            "text": f"{t.request_id}: {t.fate} after {duration((t.gap_s or 0) * scale)}, {t.tokens:,} tokens loaded",
        }
        for t in found
    ]  # fmt: skip


def _dots(rows: list[dict[str, Any]], fate: Fate, design: Design) -> alt.Chart:
    shape, size, colour = LOOKS[fate]
    filled = fate in (Fate.LOADED, Fate.TOO_EARLY)
    return alt.Chart(data(rows)).mark_point(
        shape=shape, size=size, color=colour or design.colour, filled=filled, opacity=0.75, strokeWidth=1.5, clip=False
    )  # fmt: skip


def _limit(ttl_s: float, x: alt.X) -> list[alt.Chart]:
    base = alt.Chart(data([{"x": ttl_s, "name": f"time to live {given(duration(ttl_s))}"}])).encode(x=x)
    line = base.mark_rule(color="var(--ink-2)", strokeDash=[3, 3], strokeWidth=1)
    text = base.mark_text(align="right", baseline="top", dx=-5, dy=1, fontSize=10, color="var(--ink-2)")
    return [line, text.encode(y=alt.YValue(0), text=alt.Text("name:N"))]

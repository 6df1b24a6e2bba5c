"""A case over time: the share of each server's blocks that are in use, and what was done meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import altair as alt

from harness.cases.metrics import USAGE
from harness.cases.observations import CaseRun
from harness.cases.steps import Mark
from harness.run_folder import RunFolder
from reports.figures.style import NARROW, WIDE, Drawing, Panel, axis, data, svg, y_axis

HEIGHT: Final = 150
MARKS_MAX: Final = 12
QUIET: Final = {"machine", "poke", "end"}
"""Marks that say nothing of the case."""
APART_SHARE: Final = 0.04
COLOURS: Final = (("prefill", "var(--shadow)", [1, 0]), ("decode", "var(--cold)", [4, 2]))


def _marks(seen: CaseRun) -> list[Mark]:
    return [mark for mark in seen.all_marks() if mark.name not in QUIET]


def _apart(moments: list[float], names: list[str], end: float) -> list[dict[str, Any]]:
    """Return the marks within the drawing; of those that stand too close to be read, only the first has its name."""
    found: list[dict[str, Any]] = []
    named = -end
    for x, name in zip(moments, names, strict=True):
        if 0 <= x <= end:
            free = x - named >= APART_SHARE * end
            named = x if free else named
            found.append({"x": x, "text": name if free else ""})
    return found[:MARKS_MAX]


def case_panel(folder: str) -> Panel:
    """Return the drawing of a case's run folder, or the words why there is none."""
    seen = CaseRun(RunFolder(Path(folder)))
    workers = (seen.p, seen.d)
    sampled = {worker: seen.sampled(worker, USAGE) for worker in workers}
    moments = [t for rows in sampled.values() for t, _ in rows]
    if not moments:
        return Panel("", "", None, "No gauge of blocks was scraped.")
    begin = min(moments)
    end = (max(moments) - begin) / 1e9
    top = max(0.02, max(v for rows in sampled.values() for _, v in rows) * 1.15)
    marks = _apart([(m.t_ns - begin) / 1e9 for m in _marks(seen)], [m.name for m in _marks(seen)], end)

    def chart(width: int) -> alt.LayerChart:
        look_x = axis(
            title="seconds", grid=False, titleAnchor="end", titlePadding=4, tickCount=6 if width >= WIDE else 4
        )
        x = alt.X("x:Q", scale=alt.Scale(domain=[0, end], nice=False), axis=look_x)
        scale = alt.Scale(domain=[0, top], nice=False)
        look = y_axis(tickCount=4, labelExpr="format(datum.value, '.0%')")
        layers: list[Any] = []
        for (_, colour, dash), worker in zip(COLOURS, workers, strict=True):
            rows = [{"x": (t - begin) / 1e9, "y": v} for t, v in sampled[worker]]
            line = alt.Chart(data(rows)).mark_line(
                interpolate="step-after", color=colour, strokeWidth=1.8, strokeDash=dash, clip=True
            )
            layers.append(line.encode(x=x, y=alt.Y("y:Q", scale=scale, axis=look)))
        base = alt.Chart(data(marks)).encode(x=x)
        layers.append(base.mark_rule(color="var(--ink-2)", strokeDash=[2, 3], strokeWidth=1))
        text = base.mark_text(align="left", baseline="top", angle=90, dx=3, dy=-9, fontSize=9, color="var(--ink-2)")
        layers.append(text.encode(y=alt.YValue(0), text=alt.Text("text:N")))
        return alt.layer(*layers)

    label = f"{seen.info.name}: share of blocks in use over {end:.0f} s, at most {top / 1.15:.1%}"
    wide, narrow = (svg(chart(width), width, HEIGHT, label) for width in (WIDE, NARROW))
    return Panel("", "", Drawing(wide, narrow))

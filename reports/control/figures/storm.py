"""The retry storm with the budget and without, side by side on one scale: offered, possible, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import altair as alt

from reports.control.storms import WITH, WITHOUT
from reports.figures.style import NARROW, WIDE, Drawing, Panel, axis, data, svg, y_axis

if TYPE_CHECKING:
    from workloads.retry_storm import StormResult

HEIGHT: Final = 230
BINS_MAX: Final = 48
TONES: Final = {WITH: "lease", WITHOUT: "long"}
TITLES: Final = {WITH: "With the retry budget", WITHOUT: "Without it"}
NAMES: Final = ("attempts_arrived", "calls_started", "succeeded")
COLOURS: Final = {"calls_started": ("var(--ink-2)", [2, 2], 1.4), "succeeded": ("var(--pass)", [1, 0], 2.0)}


def storm_panels(results: list[StormResult]) -> list[Panel]:
    """Return a panel a storm, the one with the budget first; none if there was no storm."""
    known = {WITH if r.budget else WITHOUT: r for r in results}
    rows = {kind: _binned(result) for kind, result in known.items()}
    rates = [row[name] for of in rows.values() for row in of for name in NAMES]
    top = max([*rates, *(r.capacity_per_s for r in known.values())], default=1.0)
    return [_panel(kind, known.get(kind), rows.get(kind, []), top * 1.1) for kind in (WITH, WITHOUT)] if known else []


def _binned(result: StormResult) -> list[dict[str, float]]:
    """Rates a second, of as many rows together as keep the lines readable. The storm's tail is left out."""
    rows = [row for row in result.rows if row.t_ms < result.seconds * 1e3]
    if not rows:
        return []
    width = rows[1].t_ms - rows[0].t_ms if len(rows) > 1 else 100
    together = max(1, -(-len(rows) // BINS_MAX))
    found = []
    for n in range(0, len(rows), together):
        of = rows[n : n + together]
        seconds = len(of) * width / 1e3
        found.append({"x": of[0].t_ms / 1e3} | {name: sum(getattr(r, name) for r in of) / seconds for name in NAMES})
    return [*found, found[-1] | {"x": (rows[-1].t_ms + width) / 1e3}]


def _panel(kind: str, result: StormResult | None, rows: list[dict[str, float]], top: float) -> Panel:
    if result is None or not rows:
        return Panel(TONES[kind], TITLES[kind], None, "No such storm was run.")
    label = (
        f"{TITLES[kind]}: {result.storm_amplification:.2f} attempts a call in the outage, capacity "
        f"{result.capacity_per_s:,.0f} a second"
    )

    def chart(width: int) -> alt.LayerChart:
        x = alt.X("x:Q", scale=alt.Scale(domain=[0, result.seconds], nice=False), axis=axis(
            title="seconds since the storm began", grid=False, titleAnchor="end", titlePadding=4,
            tickCount=6 if width >= WIDE else 4))  # fmt: skip
        scale = alt.Scale(domain=[0, top], nice=False)
        look = y_axis(tickCount=5, labelExpr="format(datum.value, ',.0f')")
        offered = alt.Chart(data(rows)).mark_line(
            interpolate="step-after", color=f"var(--{TONES[kind]})", strokeWidth=2, clip=True
        )
        layers = [
            *_outage(result, x), offered.encode(x=x, y=alt.Y("attempts_arrived:Q", scale=scale, axis=look)),
            *(_line(rows, name, x, scale) for name in COLOURS), *_capacity(result, scale),
        ]  # fmt: skip
        return alt.layer(*layers).resolve_scale(y="independent")

    wide, narrow = (svg(chart(width), width, HEIGHT, label) for width in (WIDE, NARROW))
    return Panel(TONES[kind], TITLES[kind], Drawing(wide, narrow))


def _line(rows: list[dict[str, float]], name: str, x: alt.X, scale: alt.Scale) -> alt.Chart:
    colour, dash, width = COLOURS[name]
    mark = alt.Chart(data(rows)).mark_line(
        interpolate="step-after", color=colour, strokeDash=dash, strokeWidth=width, clip=True
    )
    return mark.encode(x=x, y=alt.Y(f"{name}:Q", scale=scale, axis=None))


def _outage(result: StormResult, x: alt.X) -> list[alt.Chart]:
    row: dict[str, Any] = {
        "x": result.outage_from_ms / 1e3,
        "end": result.outage_to_ms / 1e3,
        "text": "server stands still",
    }
    base = alt.Chart(data([row])).encode(x=x)
    shade = base.mark_rect(color="var(--ink-2)", opacity=0.16, clip=True).encode(x2=alt.X2("end:Q"))
    text = base.mark_text(align="left", baseline="top", dx=4, dy=2, fontSize=10, color="var(--ink-2)")
    return [shade, text.encode(y=alt.YValue(0), text=alt.Text("text:N"))]


def _capacity(result: StormResult, scale: alt.Scale) -> list[alt.Chart]:
    base = alt.Chart(data([{"y": result.capacity_per_s, "text": "capacity"}]))
    y = alt.Y("y:Q", scale=scale, axis=None)
    line = base.mark_rule(color="var(--ink)", strokeDash=[5, 4], strokeWidth=1).encode(y=y)
    text = base.mark_text(align="right", baseline="bottom", dy=-2, fontSize=10, color="var(--ink)")
    return [line, text.encode(x=alt.XValue("width"), y=y, text=alt.Text("text:N"))]

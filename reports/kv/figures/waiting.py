"""Requests that wait at the decode engines, over time: all designs in one chart, on the axis of the blocks held."""

from __future__ import annotations

from typing import Any, Final

import altair as alt

from harness.run_folder import RunFolder
from reports.figures.style import data, y_axis
from reports.kv.designs import Design
from reports.kv.figures.axis import TimeAxis, thin, time_axis
from reports.kv.figures.drawing import Sized, sized
from reports.kv.figures.held import EXTENT, RIGHT, fault_layers, fault_marks, painted, right_axis
from reports.kv.gauges import waiting
from reports.kv.setup import DECODE, setup

HEIGHT: Final = 120


def waiting_chart(runs: list[RunFolder], designs: list[Design]) -> list[Sized]:
    """Return the chart in every size; none if nobody scraped the engines."""
    shared = time_axis(runs)
    lines = [(design, _steps(run, shared)) for run, design in zip(runs, designs, strict=True)]
    if not any(steps for _, steps in lines):
        return []
    highest = max((step["y"] for _, steps in lines for step in steps), default=0.0)
    scale = alt.Scale(domain=[0, highest * 1.08 or 1.0], nice=False)
    look = y_axis(tickCount=3, grid=True, **EXTENT, labelExpr="format(datum.value, ',.0f')")
    marks = fault_marks(runs[0], shared)

    def chart(width: int) -> alt.LayerChart:
        curves = [
            (
                design,
                _curve(design, steps, shared, width).encode(
                    y=alt.Y("y:Q", scale=scale, axis=look if place == 0 else None)
                ),
            )
            for place, (design, steps) in enumerate(lines)
        ]
        layers = [*fault_layers(marks, shared, width, named=False), *painted(curves), right_axis(shared, width, None)]
        return alt.layer(*layers).resolve_scale(y="independent")

    return sized(chart, HEIGHT, f"Requests waiting at the decode engines over time, at most {highest:,.0f}",
                 right=RIGHT)  # fmt: skip


def _steps(run: RunFolder, shared: TimeAxis) -> list[dict[str, Any]]:
    rows = waiting(run, setup(run).workers(DECODE))
    points = [(shared.place(run, int(t)), float(value)) for t, value in rows.itertuples(index=False)]
    low, high = shared.domain
    return [{"x": x, "y": y} for x, y in thin(points, shared) if low <= x <= high]


def _curve(design: Design, steps: list[dict[str, Any]], shared: TimeAxis, width: int) -> alt.Chart:
    mark = alt.Chart(data(steps)).mark_line(
        interpolate="step-after", strokeWidth=1.8, color=design.colour, strokeDash=design.dash, clip=True
    )
    return mark.encode(x=shared.x("x", width))

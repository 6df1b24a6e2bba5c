"""Decode rate of each request over time, and the tokens that all requests together received."""

from __future__ import annotations

import math
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from harness.run_folder import RunFolder
from reports.figures.style import NARROW, WIDE, Drawing, Panel, data, svg, y_axis
from reports.figures.timeline import Axis, faults, limit_line, saltires, thin, time_axes
from reports.published import DECODE_LIMIT_TOKENS_S
from reports.split import timed, with_rate
from reports.words import arm_colour, arm_title, given, rate

HEIGHT = 190
THROUGHPUT_HEIGHT = 120
WINDOWS_MAX = 120
"""Steps of the throughput; more cannot be seen at the width of a column."""


def decode_panels(runs: list[RunFolder]) -> list[Panel]:
    """Return a panel a run, with one scale for all: a dot a whole answer, at its first token."""
    rates = pd.concat([1000 / with_rate(timed(run)).mean_decode_gap_ms.dropna() for run in runs])
    if rates.empty:
        return [Panel(r.manifest.arm, arm_title(r.manifest.arm), None, "No answer came to its end.") for r in runs]
    limits = [DECODE_LIMIT_TOKENS_S * run.manifest.time_scale for run in runs]
    y = alt.Scale(domain=[0, max(float(rates.max()), *limits) * 1.06], nice=False)
    return [_decode_panel(run, axis, y) for run, axis in zip(runs, time_axes(runs), strict=True)]


def _decode_panel(run: RunFolder, axis: Axis, y: alt.Scale) -> Panel:
    dots, lost = _rows(run, axis)
    arm = run.manifest.arm
    label = f"Decode rate over time, {arm_title(arm)}: {len(dots)} whole answers, {len(lost)} broken off"
    dots = thin(dots, axis, "y")
    wide, narrow = (
        svg(_decode_chart(run, axis, y, dots=dots, lost=lost, width=w), w, HEIGHT, label) for w in (WIDE, NARROW)
    )
    return Panel(arm, arm_title(arm), Drawing(wide, narrow))


def _rows(run: RunFolder, axis: Axis) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return whole answers at their first token, and those broken off at their end."""
    whole: list[dict[str, Any]] = []
    broken: list[dict[str, Any]] = []
    for row in with_rate(timed(run)).to_dict("records"):
        if math.isnan(row["mean_decode_gap_ms"]):
            text = f"{row['request_id']}: broken off ({row['outcome']})"
            x = axis.place(run.seconds(row["end_ns"]))
            broken.append({"x": x, "text": text, "failed": row["outcome"] == "fail"})
        else:
            value = 1000 / row["mean_decode_gap_ms"]
            text = f"{row['request_id']} on {row['node_d']}: {rate(value)}"
            whole.append({"x": axis.place(run.seconds(row["first_token_ns"])), "y": value, "text": text})
    return whole, broken


def _decode_chart(
    run: RunFolder,
    axis: Axis,
    scale: alt.Scale,
    *,
    dots: list[dict[str, Any]],
    lost: list[dict[str, Any]],
    width: int,
) -> alt.LayerChart:
    colour = arm_colour(run.manifest.arm)
    limit = DECODE_LIMIT_TOKENS_S * run.manifest.time_scale
    points = alt.Chart(data(dots)).mark_circle(size=17, color=colour, opacity=0.62, clip=True)
    y = alt.Y("y:Q", scale=scale, axis=y_axis(tickCount=5))
    return alt.layer(
        *faults(run, axis, width, colour),
        *limit_line(limit, y, f"limit {given(rate(limit))}"),
        points.encode(x=axis.x("x", width), y=y, description=alt.Description("text:N")),
        saltires([r for r in lost if r["failed"]], axis, width, alt.YValue(HEIGHT - 5), "var(--bad)"),
        saltires([r for r in lost if not r["failed"]], axis, width, alt.YValue(HEIGHT - 5), "var(--ink-2)"),
    )


def throughput_panels(runs: list[RunFolder]) -> list[Panel]:
    """Return a panel a run, with one scale for all: tokens/s received by all requests together, in windows."""
    axes = time_axes(runs)
    windows = [throughput(run, axis) for run, axis in zip(runs, axes, strict=True)]
    highest = max((row["y"] for rows in windows for row in rows), default=0.0)
    y = alt.Scale(domain=[0, highest * 1.06 or 1.0], nice=False)
    return [_throughput_panel(run, axis, y, rows) for run, axis, rows in zip(runs, axes, windows, strict=True)]


def window_s(axis: Axis) -> float:
    """Return the shortest of 0.1, 0.2, 0.5, 1, 2, 5, ... seconds that cuts the axis into at most 120 windows."""
    at_least = axis.length_s / WINDOWS_MAX
    return next(m * 10.0**d for d in range(-1, 7) for m in (1, 2, 5) if m * 10.0**d >= at_least)


def throughput(run: RunFolder, axis: Axis) -> list[dict[str, Any]]:
    """Return tokens/s of each window, empty ones included."""
    if run.chunks.empty:
        return []
    width = window_s(axis)
    edges = np.arange(0, axis.length_s + width, width)
    tokens, _ = np.histogram(run.seconds(run.chunks.t_ns.to_numpy()), bins=edges, weights=run.chunks.tokens.to_numpy())
    return [
        {"x": axis.place(float(a)), "x2": axis.place(float(b)), "y": float(t) / width}
        for a, b, t in zip(edges[:-1], edges[1:], tokens, strict=True)
    ]


def _throughput_panel(run: RunFolder, axis: Axis, y: alt.Scale, rows: list[dict[str, Any]]) -> Panel:
    arm = run.manifest.arm
    if not rows:
        return Panel(arm, arm_title(arm), None, "No token was received.")
    colour = arm_colour(arm)

    def chart(width: int) -> alt.LayerChart:
        base = alt.Chart(data(rows)).encode(
            x=axis.x("x", width),
            y=alt.Y("y:Q", scale=y, axis=y_axis(tickCount=3, labelExpr="format(datum.value, ',.0f')")),
        )
        area = base.mark_area(color=colour, opacity=0.28, interpolate="step-after", clip=True)
        line = base.mark_line(color=colour, strokeWidth=1.2, interpolate="step-after", clip=True)
        return alt.layer(*faults(run, axis, width, colour), area, line)

    label = f"Tokens received each second over time, {arm_title(arm)}"
    wide, narrow = (svg(chart(w), w, THROUGHPUT_HEIGHT, label) for w in (WIDE, NARROW))
    return Panel(arm, arm_title(arm), Drawing(wide, narrow))

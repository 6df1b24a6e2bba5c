"""TTFT of each request over time, with the median of windows, and crosses for requests that never had a first token."""

from __future__ import annotations

import math
from typing import Any

import altair as alt
import pandas as pd

from harness.run_folder import RunFolder
from reports.figures.style import NARROW, WIDE, Drawing, Panel, data, svg, y_axis
from reports.figures.timeline import Axis, faults, limit_line, saltires, thin, time_axes
from reports.published import TTFT_LIMIT_S, WINDOW_S
from reports.split import NS_PER_S, timed, window_medians
from reports.words import arm_colour, arm_title, duration, given

HEIGHT = 210


def ttft_panels(runs: list[RunFolder]) -> list[Panel]:
    """Return a panel a run, with one logarithmic scale for all."""
    seconds = pd.concat([timed(run).ttft_ms.dropna() / 1000 for run in runs])
    limits = [TTFT_LIMIT_S / run.manifest.time_scale for run in runs]
    if seconds.empty:
        return [Panel(r.manifest.arm, arm_title(r.manifest.arm), None, "No request had a first token.") for r in runs]
    low = min(float(seconds.min()), *limits) * 0.8
    high = max(float(seconds.max()), *limits) * 1.6
    labels = "datum.value < 1 ? format(datum.value * 1000, ',.3~g') + ' ms' : format(datum.value, ',.3~g') + ' s'"
    look = y_axis(values=log_ticks(low, high), labelExpr=labels)
    y = alt.Y("y:Q", scale=alt.Scale(type="log", domain=[low, high], nice=False), axis=look)
    return [_panel(run, axis, y) for run, axis in zip(runs, time_axes(runs), strict=True)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5 of each decade within the range; only the decades if those would crowd."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
    whole = [10.0**d for d in decades if low <= 10.0**d <= high]
    return fine if len(fine) <= 8 or len(whole) < 2 else whole


def _panel(run: RunFolder, axis: Axis, y: alt.Y) -> Panel:
    rows, lost = _rows(run, axis)
    arm = run.manifest.arm
    label = f"TTFT over time, {arm_title(arm)}: {len(rows)} requests answered, {len(lost)} without a first token"
    dots = thin([r | {"log": math.log10(r["y"]) + 6} for r in rows], axis, "log")
    wide, narrow = (svg(_chart(run, axis, y, dots=dots, lost=lost, width=w), w, HEIGHT, label) for w in (WIDE, NARROW))
    return Panel(arm, arm_title(arm), Drawing(wide, narrow))


def _rows(run: RunFolder, axis: Axis) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return requests with a first token, and those without."""
    answered: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    for row in timed(run).to_dict("records"):
        x = axis.place(run.seconds(row["intended_ns"]))
        if math.isnan(row["ttft_ms"]):
            text = f"{row['request_id']}: no first token ({row['outcome']})"
            lost.append({"x": x, "text": text, "failed": row["outcome"] == "fail"})
        else:
            text = f"{row['request_id']} on {row['node_d']}: TTFT {duration(row['ttft_ms'] / 1000)}"
            answered.append({"x": x, "y": row["ttft_ms"] / 1000, "text": text})
    return answered, lost


def _chart(
    run: RunFolder,
    axis: Axis,
    y: alt.Y,
    *,
    dots: list[dict[str, Any]],
    lost: list[dict[str, Any]],
    width: int,
) -> alt.LayerChart:
    colour = arm_colour(run.manifest.arm)
    limit_s = TTFT_LIMIT_S / run.manifest.time_scale
    points = alt.Chart(data(dots)).mark_circle(size=17, color=colour, opacity=0.62, clip=True)
    return alt.layer(
        *faults(run, axis, width, colour),
        *limit_line(limit_s, y, f"limit {given(duration(limit_s))}"),
        points.encode(x=axis.x("x", width), y=y, description=alt.Description("text:N")),
        _medians(run, axis, width, y),
        saltires([r for r in lost if r["failed"]], axis, width, alt.YValue(5), "var(--bad)"),
        saltires([r for r in lost if not r["failed"]], axis, width, alt.YValue(5), "var(--ink-2)"),
    )


def _medians(run: RunFolder, axis: Axis, width: int, y: alt.Y) -> alt.Chart:
    """The median of each window as a step; a gap where more than half of a window never had a first token."""
    window_s = WINDOW_S / run.manifest.time_scale
    medians = window_medians(timed(run), run.origin_ns, round(window_s * NS_PER_S))
    rows = [
        {"x": axis.place(run.seconds(start) + window_s / 2), "y": None if p50 is None else p50 / 1000}
        for start, p50 in medians
    ]
    line = alt.Chart(data(rows)).mark_line(
        color="var(--ink)",
        opacity=0.8,
        strokeWidth=1.2,
        interpolate="step",
        invalid="break-paths-show-path-domains",
        clip=True,
    )
    return line.encode(x=axis.x("x", width), y=y)

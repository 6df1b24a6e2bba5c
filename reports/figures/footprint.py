"""Memory of a worker over time: its engines' PSS piled up, and what its device's memory service holds."""

from __future__ import annotations

from typing import Any

import altair as alt

from harness.recovery import recoveries
from harness.run_folder import RunFolder
from reports.figures.style import NARROW, WIDE, Drawing, Panel, data, svg, y_axis
from reports.figures.timeline import Axis, faults, time_axes
from reports.memory import KV, WEIGHTS, device_gauge, pss_by_engine, workers
from reports.words import arm_colour, arm_title

HEIGHT = 170
GIB = 2**30


def watched_worker(run: RunFolder) -> str | None:
    """Return the worker that is drawn: the first that was killed, else the first with gauges."""
    known = workers(run)
    hit = [r.worker_id for r in recoveries(run) if r.worker_id in known]
    return hit[0] if hit else known[0] if known else None


def memory_panels(runs: list[RunFolder]) -> list[Panel]:
    """Return a panel a run, with one scale for all."""
    tops = [top for run in runs if (top := _highest_gib(run)) is not None]
    if not tops:
        return [Panel(r.manifest.arm, arm_title(r.manifest.arm), None, "No memory was sampled.") for r in runs]
    y = alt.Scale(domain=[0, max(tops) * 1.08 or 1.0], nice=False)
    return [_panel(run, axis, y) for run, axis in zip(runs, time_axes(runs), strict=True)]


def _highest_gib(run: RunFolder) -> float | None:
    worker = watched_worker(run)
    if worker is None:
        return None
    pss = pss_by_engine(run, worker).sum(axis=1)
    gauges = [device_gauge(run, worker, name).value for name in (WEIGHTS, KV)]
    return max(float(s.max()) for s in [pss, *gauges] if len(s)) / GIB


def _panel(run: RunFolder, axis: Axis, y: alt.Scale) -> Panel:
    arm, worker = run.manifest.arm, watched_worker(run)
    if worker is None:
        return Panel(arm, arm_title(arm), None, "No memory was sampled.")
    engines, lines = _engine_rows(run, worker, axis), _gauge_rows(run, worker, axis)
    label = f"Memory of worker {worker} over time, {arm_title(arm)}"
    wide, narrow = (
        svg(_chart(run, axis, y, engines=engines, lines=lines, width=w), w, HEIGHT, label) for w in (WIDE, NARROW)
    )
    return Panel(arm, f"{arm_title(arm)}, worker {worker}", Drawing(wide, narrow))


def _engine_rows(run: RunFolder, worker: str, axis: Axis) -> list[dict[str, Any]]:
    """Engines piled up in the order of their first appearance; two shades take turns, so that neighbours differ."""
    table = pss_by_engine(run, worker)
    order = sorted(table.columns, key=lambda engine: int((table[engine] > 0).to_numpy().argmax()))
    return [
        {"x": axis.place(x), "y": value / GIB, "order": place, "shade": place % 2, "engine": engine}
        for place, engine in enumerate(order)
        for x, value in zip(table.index.tolist(), table[engine].tolist(), strict=True)
    ]


def _gauge_rows(run: RunFolder, worker: str, axis: Axis) -> list[dict[str, Any]]:
    return [
        {"x": axis.place(float(x)), "y": float(value) / GIB, "name": name}
        for name in (WEIGHTS, KV)
        for x, value in device_gauge(run, worker, name).itertuples(index=False)
    ]


def _chart(
    run: RunFolder,
    axis: Axis,
    scale: alt.Scale,
    *,
    engines: list[dict[str, Any]],
    lines: list[dict[str, Any]],
    width: int,
) -> alt.LayerChart:
    colour = arm_colour(run.manifest.arm)
    look = y_axis(tickCount=4, labelExpr="format(datum.value, '.2~f')")
    area = alt.Chart(data(engines)).mark_area(interpolate="step-after", color=colour, clip=True)
    piled = area.encode(
        x=axis.x("x", width),
        y=alt.Y("y:Q", scale=scale, axis=look, stack="zero"),
        detail=alt.Detail("engine:N"),
        order=alt.Order("order:O"),
        opacity=alt.Opacity("shade:N", scale=alt.Scale(domain=[0, 1], range=[0.5, 0.24]), legend=None),
    )
    line = alt.Chart(data(lines)).mark_line(interpolate="step-after", strokeWidth=1.6, color="var(--ink)", clip=True)
    held = line.encode(
        x=axis.x("x", width),
        y=alt.Y("y:Q", scale=scale, axis=look),
        strokeDash=alt.StrokeDash("name:N", scale=alt.Scale(domain=[WEIGHTS, KV], range=[[1, 0], [4, 3]]), legend=None),
    )
    return alt.layer(*faults(run, axis, width, colour), piled, held)

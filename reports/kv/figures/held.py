"""KV blocks that the prefill side holds for readers, over time: all designs in one chart."""

from __future__ import annotations

from typing import Any, Final

import altair as alt
import msgspec

from harness.holding import Held, blocks_over_time, held, reclaims
from harness.run_folder import RunFolder
from reference_impl.rules.events import EventKind
from reports.figures.style import axis, data, y_axis
from reports.kv.designs import Design
from reports.kv.figures.axis import TimeAxis, thin, time_axis
from reports.kv.figures.drawing import Sized, sized
from reports.kv.setup import setup
from reports.words import duration

HEIGHT: Final = 300
DEAD_HEIGHT: Final = 180
RIGHT: Final = 50
EXTENT: Final = {"minExtent": 42, "maxExtent": 42}
"""Room for the labels of the value axis: the same in charts below one another, however long their labels are."""
LABEL_PX: Final = 15
"""Height of a line of labels at the top, which the curves leave free."""
FAULT_WORDS: Final = {"kill": "killed", "router_hold": "hand-offs held"}


class Line(msgspec.Struct, frozen=True):
    """One design's steps, and the moment at which the dead reader's last block was free."""

    design: Design
    steps: list[dict[str, Any]]
    freed: list[dict[str, Any]]


def held_chart(runs: list[RunFolder], designs: list[Design]) -> list[Sized]:
    """Return the chart of all leases on prefills, in every size; none if no block was ever held."""
    kept = [[lease for lease in held(run) if not lease.turn] for run in runs]
    return _sized(runs, designs, kept, HEIGHT, "KV blocks held for readers on the prefill side over time")


def dead_chart(runs: list[RunFolder], designs: list[Design]) -> list[Sized]:
    """Return the chart of the leases that readers' crashes left behind; none if there were none."""
    left = [[lease for reclaim in reclaims(run) for lease in reclaim.left] for run in runs]
    return _sized(runs, designs, left, DEAD_HEIGHT, "Of them, blocks held for readers that died")


def _sized(
    runs: list[RunFolder], designs: list[Design], leases: list[list[Held]], height: int, about: str
) -> list[Sized]:
    shared = time_axis(runs)
    lines = [_line(*each, shared) for each in zip(runs, designs, leases, strict=True)]
    highest = max((step["y"] for line in lines for step in line.steps), default=0)
    if not highest:
        return []
    rows = 1 + sum(bool(line.freed) for line in lines)
    top = highest / (1 - (rows * LABEL_PX + 6) / height)
    marks, pool = fault_marks(runs[0], shared), _pool(runs)
    label = f"{about}: " + "; ".join(
        f"{line.design.title}: at most {max((s['y'] for s in line.steps), default=0):,.0f}" for line in lines
    )

    def chart(width: int) -> alt.LayerChart:
        return _chart(lines, shared, width, height, top=top, pool=pool, marks=marks)

    return sized(chart, height, label, right=RIGHT)


def _pool(runs: list[RunFolder]) -> int | None:
    """Return the prefill side's pool, where it is the same in all runs."""
    pools = {setup(run).pool_blocks for run in runs}
    return pools.pop() if len(pools) == 1 else None


def _line(run: RunFolder, design: Design, leases: list[Held], shared: TimeAxis) -> Line:
    steps = [(run.origin_ns, 0), *blocks_over_time(leases)]
    end_ns = max(run.events[-1].t_ns, steps[-1][0])
    placed = [(shared.place(run, t_ns), float(blocks)) for t_ns, blocks in [*steps, (end_ns, steps[-1][1])]]
    freed = [
        {
            "x": shared.place(run, r.fault_ns + round(r.seconds * 1e9)),
            "name": f"free after {duration(r.seconds * run.manifest.time_scale)}",
        }
        for r in reclaims(run) if r.seconds is not None
    ]  # fmt: skip
    return Line(design, [{"x": x, "y": y} for x, y in thin(placed, shared)], freed)


def fault_marks(run: RunFolder, shared: TimeAxis) -> list[dict[str, Any]]:
    """Return the faults of the first run, by their place on the axis."""
    found = run.events_of(EventKind.FAULT_INJECTED)
    return [{"x": shared.place(run, e.t_ns), "name": _fault_name(run, str(e.detail.get("fault", "")),
             str(e.detail.get("worker_id", "")))} for e in found]  # fmt: skip


def _fault_name(run: RunFolder, fault: str, worker_id: str) -> str:
    role = {"prefill": "P", "decode": "D"}.get(setup(run).roles.get(worker_id, ""), "")
    said = FAULT_WORDS.get(fault, fault)
    return f"{role} {said}" if role else said


def fault_layers(marks: list[dict[str, Any]], shared: TimeAxis, width: int, *, named: bool) -> list[alt.Chart]:
    """Return a line at each fault, and its name at the top."""
    base = alt.Chart(data(marks)).encode(x=shared.x("x", width))
    rule = base.mark_rule(color="var(--ink)", strokeWidth=1, opacity=0.7)
    text = base.mark_text(align="left", baseline="top", dx=5, dy=1, fontSize=11, color="var(--ink)", clip=False)
    return [rule, text.encode(y=alt.YValue(0), text=alt.Text("name:N"))] if named else [rule]


def _chart(
    lines: list[Line],
    shared: TimeAxis,
    width: int,
    height: int,
    *,
    top: float,
    pool: int | None,
    marks: list[dict[str, Any]],
) -> alt.LayerChart:
    scale = alt.Scale(domain=[0, top], nice=False)
    curves = [(line.design, _curve(line, shared, width, scale, first=place == 0)) for place, line in enumerate(lines)]
    freed = [
        layer for place, line in enumerate(_labelled(lines), 1) for layer in _freed(line, shared, width, height, place)
    ]
    right = right_axis(shared, width, None if pool is None else top / pool)
    layers = [*fault_layers(marks, shared, width, named=True), *freed, *painted(curves), right]
    return alt.layer(*layers).resolve_scale(y="independent")


def painted(curves: list[tuple[Design, alt.Chart]]) -> list[alt.Chart]:
    """Return the curves in the order of painting: the first design over the others, dashed ones over all.

    So curves that run on one another show both.
    """
    below = list(reversed(curves))
    return [curve for _, curve in sorted(below, key=lambda each: each[0].dash[1] > 0)]


def _labelled(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line.freed]


def _curve(line: Line, shared: TimeAxis, width: int, scale: alt.Scale, *, first: bool) -> alt.Chart:
    look = y_axis(tickCount=6, grid=True, **EXTENT, labelExpr="format(datum.value, ',.0f')") if first else None
    mark = alt.Chart(data(line.steps)).mark_line(
        interpolate="step-after", strokeWidth=2.2 if first else 1.8, color=line.design.colour,
        strokeDash=line.design.dash, clip=True,
    )  # fmt: skip
    return mark.encode(x=shared.x("x", width), y=alt.Y("y:Q", scale=scale, axis=look))


def _freed(line: Line, shared: TimeAxis, width: int, height: int, place: int) -> list[alt.Chart]:
    """A thin line down from the label at the moment when the last block was free; labels stand below one another."""
    y = place * LABEL_PX
    low, high = shared.domain
    base = alt.Chart(data(line.freed))
    rule = base.mark_rule(color=line.design.colour, strokeWidth=1, strokeDash=[2, 3]).encode(
        x=shared.x("x", width), y=alt.YValue(y), y2=alt.Y2Value(height)
    )
    layers = [rule]
    for align, rows in (
        ("left", [r for r in line.freed if r["x"] < low + 0.7 * (high - low)]),
        ("right", [r for r in line.freed if r["x"] >= low + 0.7 * (high - low)]),
    ):
        text = alt.Chart(data(rows)).mark_text(
            align=align, baseline="top", dx=5 if align == "left" else -5, dy=1, fontSize=11, fontWeight=600,
            color=line.design.colour,
        )  # fmt: skip
        layers.append(text.encode(x=shared.x("x", width), y=alt.YValue(y), text=alt.Text("name:N")))
    return layers


def right_axis(shared: TimeAxis, width: int, top_share: float | None) -> alt.Chart:
    """Return an unseen mark that carries the second scale: the share of the prefill side's pool.

    Without a share it only takes the room, so that charts below one another have one time axis.
    """
    look = axis(
        title=None, orient="right", grid=False, ticks=False, tickCount=6, labels=top_share is not None,
        format=".0%" if (top_share or 1.0) >= 0.05 else ".1%", minExtent=RIGHT - 14, maxExtent=RIGHT - 14,
    )  # fmt: skip
    mark = alt.Chart(data([{"x": shared.domain[0], "y": 0.0}])).mark_point(opacity=0, size=1)
    y = alt.Y("y:Q", scale=alt.Scale(domain=[0, top_share or 1.0], nice=False), axis=look)
    return mark.encode(x=shared.x("x", width), y=y)

"""The run over time, a chart a node: what was applied, what was replayed, what came to nothing, and each fault."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import altair as alt
import msgspec

from harness.run_folder import RunFolder
from reference_impl.rules.events import EventKind
from reports.control.outages import away
from reports.control.setup import node_of
from reports.control.strikes import Sort
from reports.control.summary import Read
from reports.figures.style import WIDE, axis, data, y_axis
from reports.figures.timeline import SALTIRE
from reports.kv.figures.drawing import Sized, sized
from reports.words import duration

HEIGHT: Final = 132
RIGHT: Final = 14
MARKS_PX: Final = 20
"""Room for the faults above the lines."""
BINS_MAX: Final = 240
BIN_S: Final = 1.0
_LONG_S: Final = 1200.0
LOOKS: Final = {
    Sort.CRASH: (SALTIRE, 46, "var(--bad)", False), Sort.LOST: ("diamond", 52, "var(--cold)", True),
    Sort.TWICE: ("circle", 40, "var(--short)", True), Sort.FULL: ("square", 40, "var(--ink)", True),
    Sort.OTHER: ("triangle-down", 40, "var(--ink-2)", True),
}  # fmt: skip
"""Shape, size, colour, filled."""


class NodeChart(msgspec.Struct, frozen=True):
    """One node's chart; `text` says what it adds up to."""

    node: str
    text: str
    drawings: list[Sized]


class _Time(msgspec.Struct, frozen=True):
    """The time axis that all nodes share: seconds, or minutes, since the load began."""

    origin_ns: int
    length_s: float

    @property
    def unit(self) -> tuple[str, float]:
        return ("minutes", 60.0) if self.length_s > _LONG_S else ("seconds", 1.0)

    @property
    def bin_s(self) -> float:
        return bin_s(self.length_s)

    def place(self, t_ns: int) -> float:
        return (t_ns - self.origin_ns) / 1e9 / self.unit[1]

    def x(self, field: str, width: int) -> alt.X:
        ticks = 10 if width > WIDE else 6 if width == WIDE else 4
        look = axis(title=f"{self.unit[0]} since the load began", grid=False, tickCount=ticks, titleAnchor="end",
                    titlePadding=4)  # fmt: skip
        scale = alt.Scale(domain=[0, self.length_s / self.unit[1]], nice=False)
        return alt.X(f"{field}:Q", scale=scale, axis=look)


class _Counts(msgspec.Struct, frozen=True):
    """Counts a bin of one node."""

    applied: Counter[int]
    replayed: Counter[int]
    lost: Counter[int]


def bin_s(length_s: float) -> float:
    """Return the width of a bin: a second, or so many that there are not too many bins."""
    return max(BIN_S, float(round(length_s / BINS_MAX)))


def node_charts(found: Read) -> list[NodeChart]:
    """Return a chart for every node that was asked anything or struck by anything, on one scale."""
    run = found.run
    if not found.end_ns or not found.summary.counts.invocations:
        return []
    time = _Time(run.origin_ns, max(1.0, (found.end_ns - run.origin_ns) / 1e9))
    counts = {node: _counts(run, node, time) for node in found.made.nodes}
    top = max((n for c in counts.values() for of in (c.applied, c.replayed, c.lost) for n in of.values()), default=1)
    return [NodeChart(node, _text(of), _drawn(found, node, of, time, top / time.bin_s)) for node, of in counts.items()]


def _counts(run: RunFolder, node: str, time: _Time) -> _Counts:
    def bin_of(t_ns: int) -> int:
        return int((t_ns - time.origin_ns) / 1e9 // time.bin_s)

    said = {
        kind: Counter(bin_of(e.t_ns) for e in run.events_of(kind) if node_of(e) == node)
        for kind in (EventKind.OPERATION_APPLIED, EventKind.OPERATION_REPLAYED)
    }
    lost: Counter[int] = Counter()
    for i in run.control.invocations:
        if i.node == node:
            without, span_ns = max(0, i.attempts - bool(i.answer)), i.end_ns - i.start_ns
            lost.update(bin_of(i.start_ns + span_ns * n // i.attempts) for n in range(without))
    return _Counts(said[EventKind.OPERATION_APPLIED], said[EventKind.OPERATION_REPLAYED], +lost)


def _text(of: _Counts) -> str:
    return (
        f"{of.applied.total():,} applied, {of.replayed.total():,} replayed, {of.lost.total():,} attempts without an "
        "answer"
    )


def _drawn(found: Read, node: str, of: _Counts, time: _Time, highest: float) -> list[Sized]:
    top = highest / (1 - MARKS_PX / HEIGHT)
    scale = alt.Scale(domain=[0, top or 1.0], nice=False)
    marks, shades = _marks(found, node, time), _shades(found, node, time)
    lines = [_steps(of.applied, time), *(_present(_steps(each, time)) for each in (of.replayed, of.lost))]

    def chart(width: int) -> alt.LayerChart:
        x = time.x("x", width)
        look = y_axis(tickCount=3, grid=True, labelExpr="format(datum.value, ',.0f')")
        applied = alt.Chart(data(lines[0])).encode(x=x, y=alt.Y("y:Q", scale=scale, axis=look))
        layers = [
            alt.Chart(data(shades)).mark_rect(color="var(--ink-2)", opacity=0.2, clip=True).encode(
                x=x, x2=alt.X2("end:Q")
            ),
            applied.mark_area(interpolate="step-after", color="var(--shadow)", opacity=0.22, clip=True),
            _line(lines[0], x, scale, "var(--shadow)", []),
            _line(lines[1], x, scale, "var(--cold)", []), _line(lines[2], x, scale, "var(--bad)", [4, 3]),
            *_fault_layers(marks, x),
        ]  # fmt: skip
        return alt.layer(*layers).resolve_scale(y="independent")

    label = f"Operations a second at {node} over time: {_text(of)}; {len(marks)} moments of faults"
    return sized(chart, HEIGHT, label, right=RIGHT)


def _line(rows: list[dict[str, Any]], x: alt.X, scale: alt.Scale, colour: str, dash: list[int]) -> alt.Chart:
    mark = alt.Chart(data(rows)).mark_line(
        interpolate="step-after", strokeWidth=1.6, color=colour, strokeDash=dash or [1, 0], clip=True
    )
    return mark.encode(x=x, y=alt.Y("y:Q", scale=scale, axis=None))


def _fault_layers(marks: list[dict[str, Any]], x: alt.X) -> list[alt.Chart]:
    base = alt.Chart(data(marks)).encode(x=x)
    layers = [base.mark_rule(color="var(--ink)", strokeWidth=1, opacity=0.25, clip=True)]
    for sort, (shape, size, colour, filled) in LOOKS.items():
        rows = [mark for mark in marks if mark["sort"] == sort]
        point = alt.Chart(data(rows)).mark_point(
            shape=shape, size=size, color=colour, filled=filled, opacity=1, strokeWidth=1.8, clip=False
        )
        layers.append(point.encode(x=x, y=alt.YValue(8), description=alt.Description("text:N")))
    return layers


def _steps(counts: Counter[int], time: _Time) -> list[dict[str, Any]]:
    """A step a bin, also where nothing happened; the last one is drawn to its end."""
    bins = int(time.length_s // time.bin_s) + 1
    rows = [{"x": n * time.bin_s / time.unit[1], "y": counts[n] / time.bin_s} for n in range(bins)]
    return [*rows, {"x": bins * time.bin_s / time.unit[1], "y": rows[-1]["y"]}]


def _present(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Draw no line where nothing happens for longer: it would only run along the axis."""
    before = [{"y": 0}, *rows]
    return [row | {"y": row["y"] or (0 if last["y"] else None)} for last, row in zip(before, rows, strict=False)]


def _marks(found: Read, node: str, time: _Time) -> list[dict[str, Any]]:
    """A mark at each moment at which a fault struck a node; those without a node strike all."""
    return [
        {
            "x": time.place(t_ns), "sort": strike.sort,
            "text": f"{strike.fault_id}: {strike.title}{', ' if strike.where else ''}{strike.where}, at "
                    f"{duration(found.run.seconds(t_ns))}{'' if strike.proved else '; not proved'}",
        }
        for strike in found.strikes if strike.node in (node, "") for t_ns in strike.moments
    ]  # fmt: skip


def _shades(found: Read, node: str, time: _Time) -> list[dict[str, Any]]:
    return [
        {"x": time.place(start_ns), "end": time.place(end_ns)}
        for start_ns, end_ns in away(found.outages, found.end_ns).get(node, [])
    ]

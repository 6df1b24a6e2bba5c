"""What the charts over time have in common: their axis, the faults on it, and the marks that cannot be measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import altair as alt
import msgspec

from harness.recovery import recoveries
from harness.run_folder import RunFolder
from reference_impl.rules.events import EventKind
from reports.figures.style import WIDE, data, x_axis
from reports.split import duration_s

SALTIRE: Final = "M-1,-1L1,1M1,-1L-1,1"
"""A diagonal cross, told from a dot without its colour."""
DOTS_MAX: Final = 2000
ALIKE: Final = 1.5
"""Time axes share one scale if the longer run is at most this many times as long."""


class Axis(msgspec.Struct, frozen=True):
    """The time axis of one run."""

    length_s: float
    unit: str
    scale: float
    """Seconds a unit."""

    def place(self, seconds: float) -> float:
        """Return seconds since the origin in the axis's unit."""
        return seconds / self.scale

    @property
    def encoding(self) -> alt.Scale:
        """The axis as a scale."""
        return alt.Scale(domain=[0, self.place(self.length_s)], nice=False)

    def x(self, field: str, width: int) -> alt.X:
        """Return the x channel for `field`."""
        return alt.X(f"{field}:Q", scale=self.encoding, axis=x_axis(width, f"{self.unit} since the load began"))


def time_axes(runs: Iterable[RunFolder]) -> list[Axis]:
    """Return the time axes of `runs`: one scale for all, unless the runs are of very different lengths."""
    lengths = [duration_s(run) for run in runs]
    shared = max(lengths) <= ALIKE * min(lengths)
    lengths = [max(lengths)] * len(lengths) if shared else lengths
    return [Axis(s, "minutes", 60.0) if s > 1200 else Axis(s, "seconds", 1.0) for s in lengths]


def faults(run: RunFolder, axis: Axis, width: int, colour: str) -> list[alt.Chart]:
    """Return the layers of shaded windows fault -> registered, each with a line and a number at its fault."""
    rows = _fault_rows(run, axis)
    x = axis.x("start", width)
    base = alt.Chart(data(rows))
    shade = base.mark_rect(color=colour, opacity=0.14).encode(x=x, x2=alt.X2("end:Q"))
    line = base.mark_rule(color="var(--ink)", strokeWidth=1, opacity=0.55).encode(x=x)
    name = base.mark_text(
        align="left", baseline="top", dx=4, dy=-11, fontSize=10, color="var(--ink-2)", clip=False
    ).encode(x=x, y=alt.YValue(0), text=alt.Text("name:N"))
    return [shade, line, name]


def _fault_rows(run: RunFolder, axis: Axis) -> list[dict[str, Any]]:
    """A fault without a successor is shaded to the end of the run; one without proof has a line only."""
    ends = {r.fault_id: run.seconds(r.registered_ns) if r.registered_ns else axis.length_s for r in recoveries(run)}
    events = run.events_of(EventKind.FAULT_INJECTED)
    return [
        {
            "start": axis.place(run.seconds(e.t_ns)),
            "end": axis.place(ends.get(e.subject, run.seconds(e.t_ns))),
            "name": f"kill {number}" if len(events) < 6 else str(number),
        }
        for number, e in enumerate(events, 1)
    ]


def limit_line(value: float, y: alt.Y, text: str) -> list[alt.Chart]:
    """Return the layers of a dashed line at a limit, with its name at the right end."""
    base = alt.Chart(data([{"y": value, "text": text}]))
    line = base.mark_rule(color="var(--ink-2)", strokeDash=[3, 3], strokeWidth=1).encode(y=y)
    name = base.mark_text(align="right", baseline="bottom", dy=-3, fontSize=10, color="var(--ink-2)").encode(
        x=alt.XValue("width"), y=y, text=alt.Text("text:N")
    )
    return [line, name]


def saltires(rows: list[dict[str, Any]], axis: Axis, width: int, at: alt.YValue, colour: str) -> alt.Chart:
    """Return crosses for requests whose figure was never measured."""
    mark = alt.Chart(data(rows)).mark_point(shape=SALTIRE, size=26, strokeWidth=1.4, color=colour, clip=False)
    return mark.encode(x=axis.x("x", width), y=at, description=alt.Description("text:N"))


def thin(rows: list[dict[str, Any]], axis: Axis, y: str) -> list[dict[str, Any]]:
    """Leave out dots that would lie on another: one a cell of a grid, which is coarser the more dots there are."""
    if not rows:
        return []
    highest = max(row[y] for row in rows) or 1.0
    across = axis.place(axis.length_s)
    for columns in (2 * WIDE, WIDE, WIDE // 2, WIDE // 4):
        cells = {(round(r["x"] / across * columns), round(r[y] / highest * columns / 4)): r for r in reversed(rows)}
        if len(cells) <= DOTS_MAX:
            break
    return list(reversed(cells.values()))

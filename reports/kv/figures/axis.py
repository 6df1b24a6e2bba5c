"""The time axis that the runs of a page share: full scale, from the first fault on, or from the load's start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import altair as alt
import msgspec

from harness.run_folder import RunFolder
from reference_impl.rules.events import EventKind
from reports.figures.style import WIDE, axis
from reports.split import duration_s

NS_PER_S: Final = 1e9
MINUTES_FROM_S: Final = 1200.0
POINTS_MAX: Final = 400
"""Steps that a line is drawn with: more cannot be seen."""


class TimeAxis(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds at full scale, from `start_s` to `end_s`; 0 is the first fault of each run, or its load's start."""

    start_s: float
    end_s: float
    faults: bool
    scales: list[float]

    @property
    def _unit(self) -> tuple[str, float]:
        return ("minutes", 60.0) if self.end_s - self.start_s > MINUTES_FROM_S else ("seconds", 1.0)

    @property
    def title(self) -> str:
        """What the axis says."""
        since = "the first fault" if self.faults else "the load began"
        return f"{self._unit[0]} since {since}{self._scale}"

    @property
    def _scale(self) -> str:
        if set(self.scales) == {1.0}:
            return ""
        return f", at full scale (ran {' and '.join(f'{k:g}' for k in dict.fromkeys(self.scales))} × faster)"

    def zero_ns(self, run: RunFolder) -> int:
        """Return the moment of a run that is 0 on the axis."""
        found = run.events_of(EventKind.FAULT_INJECTED)
        return found[0].t_ns if found and self.faults else run.origin_ns

    def place(self, run: RunFolder, t_ns: int) -> float:
        """Return a moment of a run on the axis, in its unit."""
        return (t_ns - self.zero_ns(run)) / NS_PER_S * run.manifest.time_scale / self._unit[1]

    @property
    def domain(self) -> list[float]:
        """The axis from end to end, in its unit."""
        return [self.start_s / self._unit[1], self.end_s / self._unit[1]]

    def x(self, field: str, width: int, *, title: bool = True) -> alt.X:
        """Return the x channel for `field`."""
        ticks = 10 if width > WIDE else 6 if width == WIDE else 4
        look = axis(title=self._short(width) if title else None, grid=False, tickCount=ticks, titleAnchor="end",
                    titlePadding=4)  # fmt: skip
        return alt.X(f"{field}:Q", scale=alt.Scale(domain=self.domain, nice=False), axis=look)

    def _short(self, width: int) -> str:
        return self.title if width >= WIDE else self.title.replace("ran ", "").replace(" faster", "")


def time_axis(runs: list[RunFolder]) -> TimeAxis:
    """Return the axis of `runs`: of faults only if each run has one."""
    faults = all(run.events_of(EventKind.FAULT_INJECTED) for run in runs)
    axis_ = TimeAxis(start_s=0.0, end_s=0.0, faults=faults, scales=[run.manifest.time_scale for run in runs])
    starts = [(run.origin_ns - axis_.zero_ns(run)) / NS_PER_S * run.manifest.time_scale for run in runs]
    ends = [s + duration_s(run) * run.manifest.time_scale for s, run in zip(starts, runs, strict=True)]
    return TimeAxis(start_s=min(starts), end_s=max(ends), faults=faults, scales=axis_.scales)


def thin(points: Iterable[tuple[float, float]], axis_: TimeAxis) -> list[tuple[float, float]]:
    """Leave out steps that nobody can see: of each of `POINTS_MAX` stretches stay the first, extremes and last."""
    low, high = axis_.domain
    stretch = (high - low) / POINTS_MAX or 1.0
    cells: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        cells.setdefault(int((point[0] - low) / stretch), []).append(point)
    found: list[tuple[float, float]] = []
    for cell in cells.values():
        kept = {id(p): p for p in (cell[0], max(cell, key=_value), min(cell, key=_value), cell[-1])}
        found += [p for p in cell if id(p) in kept]
    return found


def _value(point: tuple[float, float]) -> float:
    return point[1]

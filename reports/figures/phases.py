"""Recoveries as stacked bars of their phases: boxes of HTML, so that they reflow, hatch and print.

A shadow's recovery is a sliver beside a cold start, which is the point; below the true scale each arm is drawn once
more on its own scale, so that every phase can be read.
"""

from __future__ import annotations

import msgspec

from harness.latency import Spread, spread
from harness.recovery import Recovery, recoveries
from harness.run_folder import RunFolder
from reports.words import arm_title, duration

SHADES = 6
"""Shades that the style sheet has for the phases of an arm (`.s0` to `.s5`)."""
NARROWEST = 0.35
"""Percent of a bar below which a phase is not drawn but still listed."""


class Segment(msgspec.Struct, frozen=True):
    """One phase of one bar."""

    name: str
    shade: int
    percent: float
    emulated: bool
    text: str


class Bar(msgspec.Struct, frozen=True):
    """One recovery. `percent` is its length on the arm's own scale; a kill without a successor has no segments."""

    title: str
    total: str
    percent: float
    segments: list[Segment]


class PhaseRow(msgspec.Struct, frozen=True):
    """One phase over the repeats, in seconds."""

    name: str
    shade: int
    emulated: bool
    seconds: Spread
    percent: float


class Phases(msgspec.Struct, frozen=True):
    """All recoveries of one run."""

    arm: str
    title: str
    bars: list[Bar]
    rows: list[PhaseRow]
    true_percent: float
    """Length of the median recovery on the scale that all arms share."""
    median: str
    scale: str
    """How long a full bar is."""


def phases(runs: list[RunFolder]) -> list[Phases]:
    """Return the recoveries of each run. Runs that recovered from nothing have no bars."""
    medians = [spread(r.recovery_s for r in recoveries(run)).median for run in runs]
    longest = max([m for m in medians if m is not None], default=None)
    return [_of_run(run, median, longest) for run, median in zip(runs, medians, strict=True)]


def _of_run(run: RunFolder, median: float | None, longest: float | None) -> Phases:
    found = recoveries(run)
    names = list(dict.fromkeys(span.name for r in found for span in r.spans))
    shades = {name: place % SHADES for place, name in enumerate(names)}
    full_s = max((r.recovery_s for r in found if r.recovery_s is not None), default=0.0)
    return Phases(
        arm=run.manifest.arm,
        title=arm_title(run.manifest.arm),
        bars=[_bar(number, r, shades, full_s) for number, r in enumerate(found, 1)],
        rows=[_row(name, shades[name], found) for name in names],
        true_percent=100 * median / longest if median is not None and longest else 0.0,
        median=duration(median),
        scale=duration(full_s),
    )


def _bar(number: int, recovery: Recovery, shades: dict[str, int], full_s: float) -> Bar:
    title, total_s = f"kill {number}", recovery.recovery_s
    if total_s is None or full_s == 0:
        return Bar(title, "no successor", 0.0, [])
    segments = [
        Segment(s.name, shades[s.name], 100 * s.seconds / total_s, s.emulated, f"{s.name}: {duration(s.seconds)}")
        for s in recovery.spans
    ]
    drawn = [s for s in segments if s.percent >= NARROWEST]
    return Bar(title, duration(total_s), 100 * total_s / full_s, drawn)


def _row(name: str, shade: int, found: list[Recovery]) -> PhaseRow:
    """Sum the phase within each recovery first: a name may occur twice in one."""
    repeats = [r for r in found if r.spans]
    sums = [sum(s.seconds for s in r.spans if s.name == name) for r in repeats]
    totals = sum(r.recovery_s or 0.0 for r in repeats)
    emulated = any(s.emulated for r in repeats for s in r.spans if s.name == name)
    return PhaseRow(name, shade, emulated, spread(sums), 100 * sum(sums) / totals if totals else 0.0)


def real_seconds(run: RunFolder) -> Spread:
    """Return how much of each recovery was real work and not emulated time."""
    return spread(
        sum(s.seconds for s in r.spans if not s.emulated) for r in recoveries(run) if r.recovery_s is not None
    )

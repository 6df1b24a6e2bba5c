"""The one place of the project that reads a clock, so that everything else can be run in virtual time."""

from __future__ import annotations

import time


def now_ns() -> int:
    """Return CLOCK_MONOTONIC in nanoseconds: one base for every process of a host (and of a time namespace)."""
    return time.monotonic_ns()


def wall_ns() -> int:
    """Return the wall clock in nanoseconds since the epoch. It may step: use it for display only."""
    return time.time_ns()


class RealClock:
    """`rules.clock.Clock` on the machine's monotonic clock."""

    def now_ns(self) -> int:
        """Return CLOCK_MONOTONIC in nanoseconds."""
        return now_ns()

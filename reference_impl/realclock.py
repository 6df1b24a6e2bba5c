"""The one place of the project that reads a clock, so that everything else can be run in virtual time."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

_NS_PER_S: Final = 1_000_000_000


def _namespace_offset_ns() -> int:
    """Return how far this process's CLOCK_MONOTONIC is ahead of the host's: 0 outside of a time namespace.

    The file tells of the namespace that *children* will be in, which is one's own until `time_namespace` changes that.
    So it is read when this module is loaded, which is before.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/timens_offsets").read_text().splitlines():
            clock, seconds, nanoseconds = line.split()
            if clock in ("monotonic", "1"):
                return int(seconds) * _NS_PER_S + int(nanoseconds)
    return 0


_OFFSET_NS: Final = _namespace_offset_ns()


def now_ns() -> int:
    """Return this process's CLOCK_MONOTONIC in nanoseconds: one base for every process of its time namespace.

    What an engine stamps and compares with is its own clock, wherever it runs. For one base a host, see `host_ns`.
    """
    return time.monotonic_ns()


def host_ns() -> int:
    """Return the host's CLOCK_MONOTONIC in nanoseconds, whatever time namespace this process is in: for events."""
    return time.monotonic_ns() - _OFFSET_NS


def wall_ns() -> int:
    """Return the wall clock in nanoseconds since the epoch. It may step: use it for display only."""
    return time.time_ns()


class RealClock:
    """`rules.clock.Clock` on the machine's monotonic clock."""

    def now_ns(self) -> int:
        """Return this process's CLOCK_MONOTONIC in nanoseconds."""
        return now_ns()

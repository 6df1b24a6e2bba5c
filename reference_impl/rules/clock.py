"""Time as the rules see it: a number of nanoseconds that somebody hands in.

Rules never read a clock. The rim reads one (`reference_impl.realclock`) and tests turn one by hand (`ManualClock`).
"""

from __future__ import annotations

from typing import Protocol

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
PPM = 1_000_000


def s_to_ns(seconds: float) -> int:
    """Return `seconds` as whole nanoseconds."""
    return round(seconds * NS_PER_S)


class Clock(Protocol):
    """A monotonic clock."""

    def now_ns(self) -> int:
        """Return the time in nanoseconds; it never goes back."""
        ...


class ManualClock:
    """A clock that moves only when told to, seen through an offset and a drift.

    `offset_ns` is what this clock shows at true time zero; `drift_ppm` is how much faster it runs than true time.
    """

    def __init__(self, *, offset_ns: int = 0, drift_ppm: int = 0) -> None:
        self._true_ns = 0
        self._offset_ns = offset_ns
        self._drift_ppm = drift_ppm

    def now_ns(self) -> int:
        """Return this clock's reading."""
        return self._offset_ns + self._true_ns + self._true_ns * self._drift_ppm // PPM

    def advance(self, true_ns: int) -> None:
        """Let `true_ns` nanoseconds of true time pass. Raises ValueError if time would go back."""
        if true_ns < 0:
            raise ValueError(f"true_ns must not be negative, got {true_ns}")
        self._true_ns += true_ns

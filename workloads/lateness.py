"""The client's own lateness: when its event loop stood still, and which rows that spoilt. Pure.

A loop that stands still stamps everything late that arrives meanwhile. Means hide it; so each row that has a number
made from such a stamp says so, with the figure. What a stand did to chunks in the middle of a long answer touches none
of a row's numbers: they are made from when it was sent and when its first and its last chunk came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from workloads.rows import NS_PER_MS

TICK_S: Final = 0.005
"""How often the loop is asked for its time: 200 times a second cost about 0.3 % of a core."""
TICK_NS: Final = round(TICK_S * 1e9)
LOOP_LAG_LIMIT_MS: Final = 10.0
"""A loop this late spoils the stamps that it made late. The bar for a TTFT is 1 ms; timers and the kernel's scheduler
stay well under 10 ms on a machine that is fit to measure on."""
SCHEDULE_LAG_LIMIT_MS: Final = 10.0
"""A request that starts this late is no longer the request of the schedule."""
STANDS_MAX: Final = 100_000
"""Stands remembered; the oldest go first. At the limit a client was late for a thousand seconds at least."""


class LagLog:
    """Remembers when the loop stood still: from the moment that its tick was due to the moment that it came."""

    def __init__(self) -> None:
        self._stands: deque[tuple[int, int]] = deque(maxlen=STANDS_MAX)
        self._due_ns = 0

    def expect(self, due_ns: int) -> None:
        """Say when the next tick is due."""
        self._due_ns = due_ns

    def tick(self, now_ns: int) -> None:
        """Say that the tick came at `now_ns`."""
        if now_ns - self._due_ns > LOOP_LAG_LIMIT_MS * NS_PER_MS:
            self._stands.append((self._due_ns, now_ns))

    def worst_ms(self, begin_ns: int, end_ns: int) -> float:
        """Return the longest stand above the limit that overlaps the time from `begin_ns` to `end_ns`; 0 if none does.

        A tick that is overdue at `end_ns` counts: what ends in the same turn of the loop may come before the tick.
        """
        overdue_ns = end_ns - self._due_ns if self._due_ns else 0
        worst_ns = overdue_ns if overdue_ns > LOOP_LAG_LIMIT_MS * NS_PER_MS else 0
        for due_ns, came_ns in reversed(self._stands):
            if came_ns < begin_ns:
                break
            if due_ns <= end_ns:
                worst_ns = max(worst_ns, came_ns - due_ns)
        return worst_ns / NS_PER_MS

    def worst_at_ms(self, stamps_ns: Iterable[int]) -> float:
        """Return the longest stand above the limit that made one of these stamps late; 0 if none did.

        A stamp counts that fell into a stand, or came within a tick behind it: what had waited is worked off then.
        """
        return max((self.worst_ms(stamp_ns - TICK_NS, stamp_ns) for stamp_ns in stamps_ns if stamp_ns), default=0.0)


def spoilt(schedule_lag_ms: float, loop_lag_ms: float) -> str:
    """Return why a row with these lags must not be trusted, or ""."""
    if schedule_lag_ms > SCHEDULE_LAG_LIMIT_MS:
        return f"schedule lag {schedule_lag_ms:.1f} ms (limit {SCHEDULE_LAG_LIMIT_MS:g})"
    if loop_lag_ms > LOOP_LAG_LIMIT_MS:
        return f"loop lag {loop_lag_ms:.1f} ms (limit {LOOP_LAG_LIMIT_MS:g})"
    return ""

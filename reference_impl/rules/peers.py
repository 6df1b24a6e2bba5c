"""The engines that we read from: which are connected, which are being tried, and when to try again.

A handshake that fails fails what waits for it, once, and is tried again with back-off; one peer's trouble is its own
(L6, KVC-HSK-002, KVC-HB-005, -008).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from reference_impl.rules.clock import NS_PER_S
from reference_impl.rules.clocksync import ClockSync
from reference_impl.rules.messages import Report

FIRST_PAUSE_NS: Final = NS_PER_S // 10
LONGEST_PAUSE_NS: Final = 5 * NS_PER_S
OUTBOX_MAX: Final = 1024
MEASURE_PAUSE_NS: Final = NS_PER_S
FORGET_IDLE_NS: Final = 600 * NS_PER_S
"""A peer of which nothing was wanted for so long is forgotten: an incarnation that died leaves nothing behind (K1)."""
FORGET_AFTER_FAILURES: Final = 8
"""Handshakes in a row; then the peer is dropped with all that is tracked at it (KVC-HB-008)."""


class Link(enum.StrEnum):
    """Where a connection stands."""

    WANTED = "wanted"
    TRYING = "trying"
    UP = "up"


@dataclass(slots=True)
class Peer:
    """One engine that we read from. Its id is of one incarnation: a restarted engine is another peer (S5)."""

    engine_id: str
    host: str
    port: int
    link: Link = Link.WANTED
    try_at_ns: int = 0
    wanted_ns: int = 0
    """When something was last wanted of it."""
    failures: int = 0
    interval_ns: int = 0
    """Between heartbeats, as its own terms say; 0: it wants none."""
    clock: ClockSync = field(default_factory=ClockSync)
    measuring: bool = False
    measure_at_ns: int = 0
    """Not before this is its clock measured again: a measurement that fails at once is not repeated at once."""
    outbox: list[Report] = field(default_factory=list)
    """Reports that wait for the connection."""

    def keep(self, report: Report) -> None:
        """Put a report aside until the connection is up; the oldest goes if there are too many."""
        self.outbox = [*self.outbox, report][-OUTBOX_MAX:]

    def failed(self, now_ns: int) -> None:
        """Note a handshake that failed, and when to try again."""
        self.failures += 1
        pause_ns = min(FIRST_PAUSE_NS << min(self.failures - 1, 10), LONGEST_PAUSE_NS)
        self.link, self.try_at_ns = Link.WANTED, now_ns + pause_ns

    @property
    def hopeless(self) -> bool:
        """Whether it has been tried often enough."""
        return self.failures >= FORGET_AFTER_FAILURES

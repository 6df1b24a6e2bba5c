"""Holding hand-offs back between the two legs: the fault `router_hold` (KVC-LEASE-011).

A router, a queue or a proxy in front of the decode side may keep a hand-off for longer than its lease lasts. This does
it on request, and keeps the proof: how many were held, and for how long.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S, s_to_ns

SECONDS_MAX: Final = 3600.0
REQUESTS_MAX: Final = 1_000_000


class Hold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The order: keep the next `requests` hand-offs for `seconds` each. Raises ValueError for what makes no sense."""

    seconds: float
    requests: int

    def __post_init__(self) -> None:
        """Refuse what nobody can mean."""
        if not 0 < self.seconds <= SECONDS_MAX:
            raise ValueError(f"seconds must be above 0 and at most {SECONDS_MAX:g}, got {self.seconds!r}")
        if not 0 <= self.requests <= REQUESTS_MAX:
            raise ValueError(f"requests must be 0 (hold no more) to {REQUESTS_MAX}, got {self.requests!r}")


class HoldReport(msgspec.Struct, frozen=True):
    """What was held. A hand-off whose client went away meanwhile counts with the time until then."""

    seconds: float
    """Of the last order."""
    requests_left: int
    """Hand-offs still to be held by it."""
    holding: int
    """Held at this moment."""
    held: int
    """Held and let go, over the router's life."""
    held_s: float
    """How long, all together."""
    held_s_min: float
    """The shortest, 0 if there was none."""
    held_s_max: float


class HandoffHold:
    """Holds hand-offs as ordered."""

    def __init__(self) -> None:
        self._order = Hold(1.0, 0)
        self._left = 0
        self._holding = 0
        self._held = 0
        self._sum_ns = self._min_ns = self._max_ns = 0

    def order(self, hold: Hold) -> None:
        """Take an order in place of the last one; what is held already stays as long as it was told."""
        self._order, self._left = hold, hold.requests

    async def pass_through(self) -> None:
        """Return at once, or after the time ordered."""
        if self._left <= 0:
            return
        self._left -= 1
        self._holding += 1
        begun_ns = now_ns()
        until_ns = begun_ns + s_to_ns(self._order.seconds)
        try:
            while (left_ns := until_ns - now_ns()) > 0:  # a timer may come a little early
                await asyncio.sleep(left_ns / NS_PER_S)
        finally:
            self._holding -= 1
            self._count(now_ns() - begun_ns)

    def _count(self, lasted_ns: int) -> None:
        self._min_ns = min(self._min_ns, lasted_ns) if self._held else lasted_ns
        self._max_ns = max(self._max_ns, lasted_ns)
        self._sum_ns += lasted_ns
        self._held += 1

    def report(self) -> HoldReport:
        """Return what was held up to now."""
        return HoldReport(
            seconds=self._order.seconds, requests_left=self._left, holding=self._holding, held=self._held,
            held_s=self._sum_ns / NS_PER_S, held_s_min=self._min_ns / NS_PER_S, held_s_max=self._max_ns / NS_PER_S,
        )  # fmt: skip

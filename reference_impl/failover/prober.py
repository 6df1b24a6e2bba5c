"""Watches one engine for a hang and reports it once (KVC-LOCK-005). What follows, the kill, is the supervisor's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from reference_impl.failover.pidfd import read_stat
from reference_impl.realclock import RealClock
from reference_impl.rules.clock import NS_PER_MS, Clock, s_to_ns
from reference_impl.rules.probe import HangDetector, Liveness


class ProbeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When an engine counts as hung (`rules.probe`), and how often to look, in seconds."""

    silent_s: float = 1.0
    busy_s: float = 30.0
    interval_s: float = 0.1


class Prober:
    """Probes the process `pid` until it hangs or ends.

    Args:
        pid: the engine's process; it must be alive, and its pid's reuse is noticed.
        read_ticks: returns the counter that the engine's event loop raises. It must not block.
        on_hung: awaited once, with the milliseconds since the last tick, when the engine hangs.
        limits: see `ProbeLimits`.
        clock: for tests.

    Raises:
        ValueError: limits that make no sense.
        ProcessLookupError: no such process.

    """

    def __init__(
        self,
        pid: int,
        read_ticks: Callable[[], int],
        on_hung: Callable[[int], Awaitable[None]],
        limits: ProbeLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        limits = limits or ProbeLimits()
        if not 0 < limits.interval_s <= limits.silent_s / 4:
            raise ValueError(f"interval_s must be above 0 and at most silent_s / 4, got {limits}")
        stat = read_stat(pid)
        if stat is None:
            raise ProcessLookupError(f"process {pid} has gone: nothing to probe")
        self.pid = pid
        self.liveness = Liveness.SILENT
        self._start_ticks = stat.start_ticks
        self._read_ticks = read_ticks
        self._on_hung = on_hung
        self._interval_s = limits.interval_s
        self._clock = clock or RealClock()
        self._detector = HangDetector(s_to_ns(limits.silent_s), s_to_ns(limits.busy_s))

    async def run(self) -> None:
        """Probe until the engine hangs (and `on_hung` has returned) or its process ends. Stop it by cancelling."""
        while self._probe():
            if self.liveness is Liveness.HUNG:
                await self._on_hung(self._detector.silent_ns // NS_PER_MS)
                return
            await asyncio.sleep(self._interval_s)

    def _probe(self) -> bool:
        """Look once; false if the process has ended, which is for whoever waits on its pidfd to tell."""
        stat = read_stat(self.pid)
        if stat is None or stat.is_dead or stat.start_ticks != self._start_ticks:
            return False
        self.liveness = self._detector.observe(self._clock.now_ns(), self._read_ticks(), stat.cpu_ns)
        return True

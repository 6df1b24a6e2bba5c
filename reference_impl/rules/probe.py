"""Telling a hung engine from a busy one (KVC-LOCK-005).

An engine's event loop raises a counter every 20 ms or so, and the kernel counts the CPU time its process uses. A loop
that turns is alive. Without ticks, CPU time decides: a long forward pass burns CPU and is left alone for
`busy_limit_ns`; a stopped or deadlocked engine burns none and is hung after `silent_limit_ns`.
"""

from __future__ import annotations

import enum


class Liveness(enum.StrEnum):
    """What the evidence so far comes to."""

    ALIVE = "alive"
    """Its ticks have moved."""
    BUSY = "busy"
    """No tick, but CPU time was used."""
    SILENT = "silent"
    """Neither, though not for long enough to say more. Also the answer to the first observation."""
    HUNG = "hung"
    """Neither for the silent limit, or no tick for the busy limit (a livelock)."""


class HangDetector:
    """Judges one engine from a series of observations.

    `cpu_noise_ns` is the CPU time within one silent window that does not count as work; the default is 4 % of the
    window. It has to cover the stray wake-ups of an idle process's helper threads, and the grain of /proc/PID/stat,
    where user and system time may each jump by 10 ms at once. An engine so starved that it gets less than that share of
    a core is taken for a hung one.

    `gap_limit_ns` is the longest time between two observations that the observer vouches for; the default is half the
    silent limit. If more has passed, the observer itself did not run, nor perhaps did the machine: such a gap can show
    that the engine moved, but never that it did not. The silent window starts anew and the busy one leaves the gap out.

    Raises ValueError unless 0 < silent_limit_ns <= busy_limit_ns, 0 <= cpu_noise_ns and 0 < gap_limit_ns.
    """

    def __init__(
        self,
        silent_limit_ns: int,
        busy_limit_ns: int,
        *,
        cpu_noise_ns: int | None = None,
        gap_limit_ns: int | None = None,
    ) -> None:
        if not 0 < silent_limit_ns <= busy_limit_ns:
            raise ValueError(f"need 0 < silent_limit_ns <= busy_limit_ns, got {silent_limit_ns} and {busy_limit_ns}")
        self._silent_limit_ns = silent_limit_ns
        self._busy_limit_ns = busy_limit_ns
        self._cpu_noise_ns = silent_limit_ns // 25 if cpu_noise_ns is None else cpu_noise_ns
        self._gap_limit_ns = max(1, silent_limit_ns // 2) if gap_limit_ns is None else gap_limit_ns
        if self._cpu_noise_ns < 0 or self._gap_limit_ns <= 0:
            raise ValueError(f"need cpu_noise_ns >= 0 and gap_limit_ns > 0, got {cpu_noise_ns} and {gap_limit_ns}")
        self._started = False
        self._now_ns = 0
        self._ticks = 0
        self._tick_ns = 0  # when they last moved, later by every gap since
        self._quiet_ns = 0  # since when neither ticks nor CPU have moved
        self._quiet_cpu_ns = 0  # the CPU time then

    @property
    def silent_ns(self) -> int:
        """How long, as of the last observation, no tick was seen; gaps of the observer not counted."""
        return self._now_ns - self._tick_ns

    def observe(self, now_ns: int, ticks: int, cpu_ns: int) -> Liveness:
        """Take in one observation and return the verdict. HUNG lasts until something moves.

        Any change of `ticks` counts, also a fall. Raises ValueError if `now_ns` goes back.
        """
        if not self._started:
            self._started = True
            self._see_tick(now_ns, ticks, cpu_ns)
            return Liveness.SILENT
        gap_ns = now_ns - self._now_ns
        if gap_ns < 0:
            raise ValueError(f"now_ns went back from {self._now_ns} to {now_ns}")
        if ticks != self._ticks:
            self._see_tick(now_ns, ticks, cpu_ns)
            return Liveness.ALIVE
        self._now_ns = now_ns
        used_cpu = cpu_ns - self._quiet_cpu_ns > self._cpu_noise_ns
        if gap_ns > self._gap_limit_ns:
            self._tick_ns += gap_ns
            self._quiet_ns, self._quiet_cpu_ns = now_ns, cpu_ns
        if used_cpu:
            self._quiet_ns, self._quiet_cpu_ns = now_ns, cpu_ns
        if self.silent_ns >= self._busy_limit_ns or now_ns - self._quiet_ns >= self._silent_limit_ns:
            return Liveness.HUNG
        return Liveness.BUSY if used_cpu else Liveness.SILENT

    def _see_tick(self, now_ns: int, ticks: int, cpu_ns: int) -> None:
        self._now_ns = self._tick_ns = self._quiet_ns = now_ns
        self._ticks = ticks
        self._quiet_cpu_ns = cpu_ns

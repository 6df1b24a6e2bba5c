"""The fault `kill`: SIGKILL of one process, proved by the kernel and not by the sending of a signal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from faults.fault import Evidence, FaultMissed, ProcessRef
from reference_impl.failover.pidfd import ProcessWatch
from reference_impl.realclock import now_ns

DEATH_LIMIT_S = 10.0
HEAL_LIMIT_S = 60.0
LOOK_INTERVAL_S = 0.02


class Kill:
    """SIGKILL of `target`. `successor` tells whether another process has taken its place; None: nobody looks.

    Proof: the target's pidfd reports its exit, and /proc shows no live process of that pid and start time.
    """

    name = "kill"

    def __init__(self, target: ProcessRef, successor: Callable[[], str | None] | None = None) -> None:
        self.target = target
        self._successor = successor
        self._watch: ProcessWatch | None = None

    def available(self) -> str | None:
        """A kill needs a live target that this user may signal."""
        try:
            with ProcessWatch(self.target.pid, self.target.start_ticks) as watch:
                signal.pidfd_send_signal(watch.pidfd, 0)  # 0: only ask whether one may
        except ProcessLookupError:
            return f"{self.target.name} (pid {self.target.pid}) is not running"
        except PermissionError:
            return f"{self.target.name} (pid {self.target.pid}) belongs to another user"
        return None

    async def inject(self) -> int:
        """Send the signal through a pidfd, so that a reused pid cannot be hit; return the moment before."""
        try:
            self._watch = ProcessWatch(self.target.pid, self.target.start_ticks)
        except ProcessLookupError as error:
            raise FaultMissed(f"{self.target.name} had gone before it could be killed: {error}") from error
        moment = now_ns()
        if not self._watch.send(signal.SIGKILL):
            raise FaultMissed(f"{self.target.name} (pid {self.target.pid}) ended by itself before the signal")
        return moment

    async def prove(self) -> Evidence:
        """Wait for the kernel's word that the target has exited."""
        if self._watch is None:
            return Evidence(False, "no signal was ever sent")
        try:
            async with asyncio.timeout(DEATH_LIMIT_S):
                await self._watch.exited()
        except TimeoutError:
            return Evidence(False, f"pid {self.target.pid} still runs {DEATH_LIMIT_S:g} s after SIGKILL")
        stat = self._watch.stat()
        self._watch.close()
        if stat is not None and not stat.is_dead:
            return Evidence(False, f"/proc/{self.target.pid} shows a live process in state {stat.state}")
        seen = "has gone from /proc" if stat is None else f"is a zombie ({stat.state}) in /proc"
        return Evidence(True, f"pidfd of pid {self.target.pid} reports its exit; it {seen}")

    async def heal(self) -> None:
        """Nothing to undo: whoever supervises the target starts another."""

    async def prove_healed(self) -> Evidence:
        """Wait until another process has taken the target's place."""
        if self._successor is None:
            return Evidence(False, "nobody was asked who took its place")
        try:
            async with asyncio.timeout(HEAL_LIMIT_S):
                while (name := self._successor()) is None:
                    await asyncio.sleep(LOOK_INTERVAL_S)
        except TimeoutError:
            return Evidence(False, f"nothing took {self.target.name}'s place within {HEAL_LIMIT_S:g} s")
        return Evidence(True, f"{name} has taken {self.target.name}'s place")

"""The fault `stop`: SIGSTOP of one process, so that it stands still as if its machine had stalled, and SIGCONT."""

from __future__ import annotations

import asyncio
import signal
from typing import Final

from faults.fault import Evidence, FaultMissed, ProcessRef
from reference_impl.failover.pidfd import ProcessWatch
from reference_impl.realclock import now_ns

LIMIT_S: Final = 5.0
LOOK_INTERVAL_S: Final = 0.005
_STOPPED: Final = "Tt"


class Stop:
    """SIGSTOP of `target`, until `heal`.

    Proof: /proc shows it stopped, and no more CPU time used a moment later.
    """

    name = "stop"

    def __init__(self, target: ProcessRef) -> None:
        self.target = target
        self._watch: ProcessWatch | None = None

    def available(self) -> str | None:
        """A stop needs a live target that this user may signal."""
        try:
            with ProcessWatch(self.target.pid, self.target.start_ticks) as watch:
                signal.pidfd_send_signal(watch.pidfd, 0)  # 0: only ask whether one may
        except ProcessLookupError:
            return f"{self.target.name} (pid {self.target.pid}) is not running"
        except PermissionError:
            return f"{self.target.name} (pid {self.target.pid}) belongs to another user"
        return None

    async def inject(self) -> int:
        """Send the signal through a pidfd; return the moment before."""
        try:
            self._watch = ProcessWatch(self.target.pid, self.target.start_ticks)
        except ProcessLookupError as error:
            raise FaultMissed(f"{self.target.name} had gone before it could be stopped: {error}") from error
        moment = now_ns()
        if not self._watch.send(signal.SIGSTOP):
            raise FaultMissed(f"{self.target.name} (pid {self.target.pid}) ended by itself before the signal")
        return moment

    async def prove(self) -> Evidence:
        """Wait until the kernel shows it stopped."""
        if not await self._until(stopped=True):
            return Evidence(False, f"pid {self.target.pid} was not seen to stand still within {LIMIT_S:g} s")
        return Evidence(True, f"/proc/{self.target.pid} shows it stopped (T), and it uses no CPU time")

    async def heal(self) -> None:
        """Let it go on. One that has died meanwhile needs nothing."""
        if self._watch is not None:
            self._watch.send(signal.SIGCONT)

    async def prove_healed(self) -> Evidence:
        """Wait until the kernel shows that it goes on."""
        if not await self._until(stopped=False):
            return Evidence(False, f"pid {self.target.pid} was not seen to go on within {LIMIT_S:g} s")
        self.close()
        return Evidence(True, f"/proc/{self.target.pid} shows it running again")

    def close(self) -> None:
        """Let it go on, and give back the hold on it. Closing twice is harmless."""
        if self._watch is not None:
            self._watch.send(signal.SIGCONT)
            self._watch.close()
            self._watch = None

    async def _until(self, *, stopped: bool) -> bool:
        if self._watch is None:
            return False
        try:
            async with asyncio.timeout(LIMIT_S):
                used_ns = -1
                while True:
                    stat = self._watch.stat()
                    if stat is None or stat.is_dead:
                        return False
                    still = stat.state in _STOPPED and stat.cpu_ns == used_ns
                    if still if stopped else stat.state not in _STOPPED:
                        return True
                    used_ns = stat.cpu_ns
                    await asyncio.sleep(LOOK_INTERVAL_S)
        except TimeoutError:
            return False

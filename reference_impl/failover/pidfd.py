"""Processes as the kernel sees them: their exit through a pidfd, their identity and CPU time through /proc.

A process that has gone is an ordinary answer here, `None` or false, and not an error. Linux only.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import TracebackType

import msgspec

NS_PER_CLOCK_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")

# Fields of /proc/PID/stat after the command's name, counted from the state (field 3 in proc(5)).
_STATE, _FLAGS, _UTIME, _STIME, _START = 0, 6, 11, 12, 19
_PF_EXITING = 0x4


class ProcessStat(msgspec.Struct, frozen=True):
    """One reading of /proc/PID/stat.

    `state` is the kernel's letter: R running, S sleeping, D in the disk, T stopped, Z zombie, X dead. `start_ticks` is
    the start in clock ticks since boot; with the pid it names one process for good. `cpu_ns` is user and system time of
    all threads, also of those that have ended; it moves in steps of 10 ms.
    """

    state: str
    start_ticks: int
    cpu_ns: int

    @property
    def is_dead(self) -> bool:
        """Whether nothing of it will run again: a zombie waits only for its parent."""
        return self.state in "ZXx"


def read_stat(pid: int) -> ProcessStat | None:
    """Return the state, start and CPU time of `pid` as of one moment; None if it has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may hold anything, also ") R 1 1": the last parenthesis is the one that counts.
    fields = text[text.rindex(b")") + 2 :].split()
    cpu_ticks = int(fields[_UTIME]) + int(fields[_STIME])
    return ProcessStat(fields[_STATE].decode(), int(fields[_START]), cpu_ticks * NS_PER_CLOCK_TICK)


def start_ticks(pid: int) -> int | None:
    """Return the start of `pid` in clock ticks since boot; None if it has gone."""
    stat = read_stat(pid)
    return None if stat is None else stat.start_ticks


def cpu_ns(pid: int) -> int | None:
    """Return the CPU time that all threads of `pid` have used, in ns, in steps of 10 ms; None if it has gone."""
    stat = read_stat(pid)
    return None if stat is None else stat.cpu_ns


def process_state(pid: int) -> str | None:
    """Return the kernel's letter for the state of `pid` (see `ProcessStat`); None if it has gone."""
    stat = read_stat(pid)
    return None if stat is None else stat.state


def can_run(pid: int, start_ticks: int) -> bool:
    """Whether a thread of the process can still execute an instruction of its own.

    A killed process tears its memory down for tens of milliseconds, and only then is its pidfd readable. It runs
    nothing of its own from the moment when the kernel has marked its last thread as exiting (PF_EXITING): from there no
    thread returns to its program.
    """
    if not same_process(pid, start_ticks):
        return False
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            text = (task / "stat").read_bytes()
            fields = text[text.rindex(b")") + 2 :].split()
            if fields[_STATE] not in (b"Z", b"X", b"x") and not int(fields[_FLAGS]) & _PF_EXITING:
                return True
    except (FileNotFoundError, ProcessLookupError):
        return can_run(pid, start_ticks)  # a thread ended while they were looked at
    return False


def same_process(pid: int, start_ticks: int) -> bool:
    """Whether `pid` is still the process that started at `start_ticks`. A zombie still is; a reused pid is not."""
    stat = read_stat(pid)
    return stat is not None and stat.start_ticks == start_ticks


async def wait_exit(pidfd: int) -> None:
    """Return once the process behind `pidfd` has exited, woken by the kernel. The process need not be a child.

    It does not reap, and several may wait on one pidfd: each wait uses a copy of its own, since an event loop keeps one
    callback for a descriptor.
    """
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    own = os.dup(pidfd)
    try:
        loop.add_reader(own, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(own)
    finally:
        os.close(own)


class ProcessWatch:
    """A hold on one process, child or not, that no reuse of its pid can mislead. Use it in a `with`.

    Raises ProcessLookupError if `pid` has gone, or is not the process that started at `start_ticks` (if given).
    """

    def __init__(self, pid: int, start_ticks: int | None = None) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        # The pidfd comes first: from here on the pid cannot pass to another process unnoticed.
        stat = read_stat(pid)
        if stat is None or start_ticks not in (None, stat.start_ticks):
            self.close()
            raise ProcessLookupError(f"process {pid} that started at tick {start_ticks} has gone")
        self.start_ticks = stat.start_ticks

    async def exited(self) -> None:
        """Return once it has exited."""
        await wait_exit(self.pidfd)

    def send(self, signum: signal.Signals) -> bool:
        """Send a signal to this very process. False if it has exited and been reaped."""
        try:
            signal.pidfd_send_signal(self.pidfd, signum)
        except ProcessLookupError:
            return False
        return True

    def stat(self) -> ProcessStat | None:
        """Return its state and CPU time; None if it has gone."""
        stat = read_stat(self.pid)
        return stat if stat is not None and stat.start_ticks == self.start_ticks else None

    def close(self) -> None:
        """Close the pidfd. Closing twice is harmless."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def __enter__(self) -> ProcessWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

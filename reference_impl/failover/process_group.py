"""A server that is several processes: started together, named, watched, and ended to the last one.

Whoever owns the group is its subreaper: a process whose parent dies becomes its child, and stays in sight. So the group
is all that descends from the owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

from reference_impl.failover.pidfd import ProcessWatch, can_run, read_stat

_PR_SET_CHILD_SUBREAPER = 36
GONE_LIMIT_S = 10.0
SILENCE_LOOK_S = 0.001


class Member(msgspec.Struct, frozen=True):
    """One process of a group. `pid` and `start_ticks` together name it for good."""

    role: str
    pid: int
    start_ticks: int


class Predecessor(msgspec.Struct, frozen=True):
    """Whose turn it was: an engine, and every process that it was made of."""

    engine_id: str
    members: list[Member]


def become_subreaper() -> None:
    """Make orphaned descendants of this process its children. Raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


def descendants(pid: int, roles: dict[str, str], first: str) -> list[Member]:
    """Return every live process below `pid`.

    A process whose name in /proc begins with a key of `roles` has that role; a child of `pid` that has no such name is
    `first`; any other is a `helper`.
    """
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                name = Path(f"/proc/{process.pid}/comm").read_text().strip()
                stat = read_stat(process.pid)
                if stat is None or stat.is_dead:
                    continue
                own = next((role for begin, role in roles.items() if name.startswith(begin)), "")
                role = own or (first if process.ppid() == pid else "helper")
                found.append(Member(role, process.pid, stat.start_ticks))
    return found


async def first_death(members: Iterable[Member]) -> Member:
    """Return the first of the processes to die, as soon as the kernel says so."""
    with contextlib.ExitStack() as held:
        waits: dict[asyncio.Task[None], Member] = {}
        try:
            for member in members:
                try:
                    watch = held.enter_context(ProcessWatch(member.pid, member.start_ticks))
                except ProcessLookupError:
                    return member
                waits[asyncio.create_task(watch.exited())] = member
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[done.pop()]
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


async def silence_all(members: Iterable[Member], limit_s: float = GONE_LIMIT_S) -> list[Member]:
    """SIGKILL the processes, and wait until none of them can run an instruction any more. Return those that still can.

    The kernel may have their memory to tear down yet; the kernel tells no event of the moment before that, so it is
    looked for every millisecond.
    """
    running = list(members)
    for member in running:
        with contextlib.suppress(ProcessLookupError), ProcessWatch(member.pid, member.start_ticks) as watch:
            watch.send(signal.SIGKILL)
            _hurry(member.pid)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while running := [m for m in running if can_run(m.pid, m.start_ticks)]:
                await asyncio.sleep(SILENCE_LOOK_S)
    return running


async def end_all(members: Iterable[Member], limit_s: float = GONE_LIMIT_S) -> list[Member]:
    """SIGKILL the processes, and wait until the kernel says of each that it is gone. Return those that still run."""
    with contextlib.ExitStack() as held:
        watches: list[tuple[Member, ProcessWatch]] = []
        for member in members:
            try:
                watch = held.enter_context(ProcessWatch(member.pid, member.start_ticks))
            except ProcessLookupError:
                continue
            watch.send(signal.SIGKILL)
            _hurry(member.pid)
            watches.append((member, watch))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for _, watch in watches:
                    await watch.exited()
        return [m for m, w in watches if (stat := w.stat()) is not None and not stat.is_dead]


def _hurry(pid: int) -> None:
    """Let a dying process tear its memory down on any core, and first: nobody may serve before it is gone."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(pid, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0))


def in_session(session: int) -> list[Member]:
    """Return the live processes of a session, whoever their parent is by now."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        pid = int(entry.name)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            stat = read_stat(pid)
            if stat is not None and not stat.is_dead and os.getsid(pid) == session:
                found.append(Member("", pid, stat.start_ticks))
    return found


def reap() -> None:
    """Take the exit codes of children that have ended, so that no zombie is left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass

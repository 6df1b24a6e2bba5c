"""Processes: tying one's life to its parent's, and ending a child for good."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_ppid: int) -> None:
    """Have the kernel SIGKILL this process when its parent dies, so that no run leaves a process behind.

    `expected_ppid` is the parent's process id as the parent knows it: if it died before we asked, this process ends at
    once (SystemExit). The kernel means the *thread* that started us: start such processes from a thread that lasts.
    Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != expected_ppid:
        raise SystemExit(f"parent {expected_ppid} is gone (now {os.getppid()}); ending with it")


async def end_child(child: asyncio.subprocess.Process, limit_s: float) -> None:
    """Ask a child to end (SIGTERM), and after `limit_s` make it (SIGKILL). Returns once it has ended."""
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        async with asyncio.timeout(limit_s):
            await child.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def last_line(log: Path) -> str:
    """Return the last line of a process's output, "" if it said nothing."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1] if lines else ""

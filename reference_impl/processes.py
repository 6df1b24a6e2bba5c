"""What a process asks of the kernel about itself."""

from __future__ import annotations

import ctypes
import os
import signal

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

"""A clock of one's own: a Linux time namespace, in which CLOCK_MONOTONIC is ahead of the host's by a fixed offset.

Two engines with clocks hours apart stand for two hosts that were booted hours apart (KVC-CLK-005). Only
CLOCK_MONOTONIC is shifted: CLOCK_BOOTTIME stays, so that a process's start time in /proc, which is half of its name,
reads the same from everywhere.

A clock cannot stand before its boot: an offset may be negative only as far as the machine has been up.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from reference_impl.realclock import host_ns
from reference_impl.rules.clock import NS_PER_S, s_to_ns

EXIT_CODE: Final = 8
"""Of a process that cannot have the clock it was told to have."""
BOOT_MARGIN_S: Final = 60.0
"""What a shifted clock must still show, at least."""
PROBE_LIMIT_S: Final = 20.0
OFFSET_MAX_S: Final = 10 * 366 * 86_400.0
_CLONE_NEWTIME: Final = 0x80
_OFFSETS: Final = Path("/proc/self/timens_offsets")


class TimeNamespaceError(Exception):
    """There is no such clock to be had here; the message says why and what to do."""


def enter_for_children(offset_s: float) -> None:
    """Give every later child of this process a CLOCK_MONOTONIC that is `offset_s` ahead. Its own stays as it is.

    Raises TimeNamespaceError. To be called once, before the first child: the offset is fixed by then.
    """
    check_offset(offset_s)
    if not _OFFSETS.exists():
        raise TimeNamespaceError("this kernel has no time namespaces: Linux 5.6 or later is needed")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWTIME) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise TimeNamespaceError(f"unshare(CLONE_NEWTIME): {reason}; a time namespace needs the right CAP_SYS_ADMIN")
    seconds, nanoseconds = divmod(s_to_ns(offset_s), NS_PER_S)
    try:
        _OFFSETS.write_text(f"monotonic {seconds} {nanoseconds}\n")
    except OSError as error:
        raise TimeNamespaceError(
            f"{_OFFSETS}: {error.strerror} for an offset of {offset_s:g} s; the machine has been up {uptime_s():.0f} s"
        ) from error


def check_offset(offset_s: float) -> None:
    """Raise TimeNamespaceError for an offset that no clock can have now."""
    if not abs(offset_s) <= OFFSET_MAX_S:
        raise TimeNamespaceError(f"a clock offset must be within {OFFSET_MAX_S:g} s, got {offset_s!r}")
    if not can_shift(offset_s):
        raise TimeNamespaceError(
            f"a clock cannot be {-offset_s:g} s behind on a machine that has been up {uptime_s():.0f} s; "
            "put the other side's ahead instead"
        )


def can_shift(offset_s: float) -> bool:
    """Whether a clock with this offset would stand well after its boot."""
    return offset_s >= 0 or uptime_s() + offset_s >= BOOT_MARGIN_S


def uptime_s() -> float:
    """Return what the host's CLOCK_MONOTONIC shows, in seconds."""
    return host_ns() / NS_PER_S


def available() -> str | None:
    """Return why no time namespace can be had here, None if one can. Asks the kernel, in a child: about 0.1 s."""
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "reference_impl.time_namespace"], stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=PROBE_LIMIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"time namespaces could not be tried: {error}"
    return None if ran.returncode == 0 else ran.stderr.strip().rpartition("\n")[2] or f"exit code {ran.returncode}"


def _try() -> None:
    """Do all that a worker's supervisor does. Older kernels let a process that has unshared start no thread."""
    enter_for_children(1.0)
    try:
        thread = threading.Thread(target=threading.active_count)
        thread.start()
    except RuntimeError as error:
        raise TimeNamespaceError(f"this kernel starts no threads beside a time namespace: {error}") from error
    thread.join(PROBE_LIMIT_S)


if __name__ == "__main__":
    try:
        _try()
    except TimeNamespaceError as error:
        print(error, file=sys.stderr)  # noqa: T201 # read by `available`
        sys.exit(EXIT_CODE)

"""Real processes for tests: forked with a function to run, and gone when the test is over."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from tests.waiting import until

PATIENCE_S = 10.0
PR_SET_PDEATHSIG = 1


class Child:
    """A forked process. `status` is its exit code, or -signal, once it was reaped."""

    def __init__(self, body: Callable[[], object]) -> None:
        self.status: int | None = None
        with warnings.catch_warnings():  # from 3.12 on: fork with threads, which here are all blocked in flock
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _run_and_exit(body)

    def signal(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def has_ended(self) -> bool:
        """Reaps it if so."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def wait(self) -> int:
        until(self.has_ended, PATIENCE_S, f"child {self.pid} ends")
        assert self.status is not None
        return self.status

    def kill(self) -> None:
        """SIGKILL it and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()


def _run_and_exit(body: Callable[[], object]) -> None:
    code = 1
    faulthandler.disable()  # pytest's: a crash on purpose needs no stack
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no orphan if pytest itself is killed
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Family:
    """Starts children, and at the end kills those that are left, and grandchildren that were `adopt`ed."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._adopted: list[int] = []

    def start(self, body: Callable[[], object]) -> Child:
        child = Child(body)
        self._children.append(child)
        return child

    def adopt(self, pid: int) -> None:
        self._adopted.append(pid)

    def end(self) -> None:
        for pid in self._adopted:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for child in self._children:
            if not child.has_ended():
                child.kill()


class Board:
    """A file that every process appends lines to, each in one write, so their order is the order of the events."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def say(self, line: str) -> None:
        os.write(self._fd, line.encode() + b"\n")

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    def wait_for(self, word: str) -> str:
        """Wait for a line that starts with `word` and return the rest of the first one."""
        until(lambda: self._starting(word), PATIENCE_S, f"somebody says {word!r}")
        return self._starting(word)[0].removeprefix(word).strip()

    def _starting(self, word: str) -> list[str]:
        return [line for line in self.lines() if line.split(" ")[0] == word]

    def close(self) -> None:
        os.close(self._fd)


def blocked_count(pid: int, path: Path) -> int:
    """How many threads of `pid` the kernel has in its queue for a flock on the file at `path`."""
    inode = path.stat().st_ino
    # 1: -> FLOCK ADVISORY WRITE pid major:minor:inode start end
    entries = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "-> FLOCK" in line]
    return sum(int(entry[5]) == pid and int(entry[6].split(":")[2]) == inode for entry in entries)


def is_blocked_on(pid: int, path: Path) -> bool:
    """Whether the kernel has `pid` in its queue for a flock on the file at `path`."""
    return blocked_count(pid, path) > 0

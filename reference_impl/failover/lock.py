"""The failover lock: at most one engine of a worker is awake, and the next one is woken by the kernel.

`flock` is given up by the kernel when its holder dies, however it dies (KVC-LOCK-002), once the holder's memory has
been torn down. Waiting is one daemon thread blocked in `flock`, so nothing polls. Each holder gets an epoch above every
earlier one; services check it to fence a late predecessor (KVC-LOCK-004, `rules.fencing`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from reference_impl.failover.lock_file import (
    LockCorrupt,
    LockError,
    LockFile,
    LockMisuse,
    LockReplaced,
    LockUnusable,
    read_epoch,
    read_owner,
    take,
)

__all__ = [
    "FlockFailoverLock",
    "LockCorrupt",
    "LockError",
    "LockMisuse",
    "LockReplaced",
    "LockUnusable",
    "read_epoch",
    "read_owner",
]

ENGINE_ID_CHARACTERS_MAX = 200

_Grant = asyncio.Future[LockFile]


class FlockFailoverLock:
    """The lock at `path`, for one engine process and one event loop.

    The directory must exist; the file is made with mode 0600, and never unlinked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = os.getpid()
        self._file: LockFile | None = None
        self._waiter: _Waiter | None = None
        self._acquiring = False
        self._epoch = 0

    @property
    def held(self) -> bool:
        """Whether this process holds the lock; never true in a forked child."""
        return self._file is not None and self._file.is_open

    @property
    def epoch(self) -> int | None:
        """The epoch of the current hold; None while not held."""
        return self._epoch if self.held else None

    async def acquire(self, engine_id: str) -> int:
        """Wait until this process holds the lock, and return its epoch, one above the last holder's.

        May be cancelled: a grant that comes later is given back at once and raises no epoch.

        Raises:
            ValueError: `engine_id` is empty, too long or not printable.
            LockMisuse: this object holds the lock, or is waiting for it.
            LockUnusable, LockReplaced, LockCorrupt: see `lock_file`; the lock is not held then.

        """
        if not engine_id.isprintable() or not 0 < len(engine_id) <= ENGINE_ID_CHARACTERS_MAX:
            raise ValueError(f"engine_id: 1 to {ENGINE_ID_CHARACTERS_MAX} printable characters, got {engine_id!r}")
        self._forget_parent()
        if self.held or self._acquiring:
            state = "holds" if self.held else "is waiting for"
            raise LockMisuse(f"lock file {self.path}: {engine_id} {state} it already; release or cancel first")
        self._acquiring = True
        try:
            file = await self._granted()
        finally:
            self._acquiring = False
        try:
            # A few bytes in the page cache: quicker than handing them to a thread.
            self._epoch = file.raise_epoch(f"{engine_id} pid {os.getpid()}")
        except BaseException:
            file.close()
            raise
        self._file = file
        return self._epoch

    def release(self) -> None:
        """Give the lock up; the kernel wakes the next waiter. Raises LockMisuse if this process does not hold it."""
        if self._file is None or not self._file.is_open:
            raise LockMisuse(f"lock file {self.path}: released by process {os.getpid()}, which does not hold it")
        self._file.close()
        self._file = None

    def is_intact(self) -> bool:
        """Whether the lock is held on the file that `path` leads to now.

        False for a holder whose file was removed or replaced: another engine may hold the new one, and fencing by
        epoch is all that is left. Raises LockUnusable if the path cannot be looked up.
        """
        return self._file is not None and self._file.is_open and self._file.is_current()

    @asynccontextmanager
    async def hold(self, engine_id: str) -> AsyncIterator[int]:
        """`async with lock.hold(engine_id) as epoch`: `acquire`, and `release` at the end if still held."""
        epoch = await self.acquire(engine_id)
        try:
            yield epoch
        finally:
            if self.held:
                self.release()

    async def _granted(self) -> LockFile:
        loop = asyncio.get_running_loop()
        grant: _Grant = loop.create_future()
        # A wait that was cancelled left its thread in the kernel's queue. Taking it over keeps its place there, and
        # keeps the threads to one a lock however often a caller times out and tries again.
        waiter = self._waiter
        if waiter is None or not waiter.serve(loop, grant):
            waiter = self._waiter = _Waiter(self.path, loop, grant)
        try:
            file = await grant
        except BaseException:  # cancelled, or the whole loop is coming down
            waiter.abandon()
            raise
        waiter.taken()
        return file

    def _forget_parent(self) -> None:
        """In a forked child, drop what the parent was doing: neither its thread nor its descriptors came along."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._file = self._waiter = None
            self._acquiring = False


class _Waiter:
    """One daemon thread that waits for the lock at `path` on behalf of whoever is served when the grant comes."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop, grant: _Grant) -> None:
        self._path = path
        self._mutex = threading.Lock()
        self._served: tuple[asyncio.AbstractEventLoop, _Grant] | None = (loop, grant)
        self._file: LockFile | None = None
        self._done = False
        threading.Thread(target=self._wait, name=f"flock {path.name}", daemon=True).start()

    def serve(self, loop: asyncio.AbstractEventLoop, grant: _Grant) -> bool:
        """Hand the lock to `grant` when it comes. False if the thread has ended and a new one is needed."""
        with self._mutex:
            if self._done:
                return False
            self._served = (loop, grant)
            return True

    def abandon(self) -> None:
        """Nobody wants the lock any more: give it back now if it is here, else as soon as it comes."""
        with self._mutex:
            self._served = None
            if self._file is not None:
                self._file.close()
                self._file = None

    def taken(self) -> None:
        """The file has found its owner, who closes it from here on."""
        self._file = None

    def _wait(self) -> None:
        outcome: LockFile | Exception
        try:
            outcome = take(self._path)
        except Exception as error:  # whatever it is, the one who waits must hear of it
            outcome = error
        with self._mutex:
            self._done = True
            if not self._deliver(outcome) and isinstance(outcome, LockFile):
                outcome.close()

    def _deliver(self, outcome: LockFile | Exception) -> bool:
        if self._served is None:
            return False
        loop, grant = self._served
        if isinstance(outcome, LockFile):
            self._file = outcome
        try:
            loop.call_soon_threadsafe(_settle, grant, outcome)
        except RuntimeError:  # the loop was closed while we waited
            self._file = None
            return False
        return True


def _settle(grant: _Grant, outcome: LockFile | Exception) -> None:
    if grant.done():  # cancelled in the meantime: `abandon` sees to the file
        return
    if isinstance(outcome, LockFile):
        grant.set_result(outcome)
    else:
        grant.set_exception(outcome)

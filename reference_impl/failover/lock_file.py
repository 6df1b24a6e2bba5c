"""The file under a failover lock: opening, locking, its epoch, and keeping it out of forked children.

The file's first line is the epoch, 20 decimal digits and a newline, rewritten in place by its holder only. The second
line names the last holder and is advice for people: nothing decides by it. The file is never unlinked, since whoever
waits on an unlinked file waits for nothing.

The epoch is not synced to the disk. It outlives every death of a process, because the page cache does; a host that
loses power loses with it every process that could remember an epoch.

Rules: KVC-LOCK-002, KVC-LOCK-003.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from pathlib import Path

from reference_impl.realclock import now_ns

DIGITS = 20
EPOCH_LINE_BYTES = DIGITS + 1
EPOCH_MAX = 2**63 - 1
OWNER_BYTES_MAX = 512
TRIES_MAX = 16
"""How often a path that keeps changing under us is opened again."""


class LockError(Exception):
    """Base of the lock's errors. Each is one line: what, where, what to do."""


class LockUnusable(LockError):
    """The operating system refuses the path: no directory, no permission, disk full, no such operation."""


class LockCorrupt(LockError):
    """The file does not start with an epoch. Going on could repeat an epoch, so nobody does."""


class LockReplaced(LockError):
    """The path was replaced or removed at each of `TRIES_MAX` tries."""


class LockMisuse(LockError):
    """The caller's mistake: acquired twice, or released without being held."""


_ADVICE = {
    errno.ENOENT: "create its directory first",
    errno.ENOTDIR: "a part of the path is not a directory: name another path",
    errno.EISDIR: "it is a directory: name a file in it",
    errno.ENXIO: "it is not a regular file: name another path",
    errno.EACCES: "give this user read and write access to the file and its directory",
    errno.EROFS: "put the lock on a writable file system",
    errno.ENOSPC: "free some space on its file system",
    errno.EDQUOT: "free some of this user's quota",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def _unusable(path: Path, error: OSError) -> LockUnusable:
    """Return `error` as one line with advice."""
    advice = _ADVICE.get(error.errno or 0, "put the lock on a local file system that supports flock")
    return LockUnusable(f"lock file {path}: {error.strerror or error}; {advice}")


# A flock belongs to the open file description, which fork() shares: a child that kept its copy of the descriptor would
# keep the lock past its parent's death. So every copy is closed in the child, and none is opened or closed while a fork
# is under way. An RLock, because a signal handler may fork while its own thread is in here. O_CLOEXEC sees to exec().
_forking = threading.RLock()
_open_files: set[LockFile] = set()


def _close_in_child() -> None:
    for file in _open_files:
        file.disown()
    _open_files.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child)


class LockFile:
    """An open lock file at `path`, made if missing (0600), that belongs to this process alone.

    It stays open until `close`, even if nobody refers to it any more: a lock must not be lost to garbage collection.

    Raises:
        LockUnusable: the path cannot be opened or made.
        LockReplaced: the path came and went `TRIES_MAX` times.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _forking:
            self._fd = _open(path)
            _open_files.add(self)

    @property
    def is_open(self) -> bool:
        """Whether this process still has it; false after `close`, and in a forked child."""
        return self._fd >= 0

    def lock(self) -> None:
        """Block, without the GIL, until the kernel grants the exclusive lock. Raises LockUnusable."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except OSError as error:
            raise _unusable(self.path, error) from error

    def is_current(self) -> bool:
        """Whether `path` still leads to this very file. Raises LockUnusable if the path cannot be looked up."""
        try:
            there = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _unusable(self.path, error) from error
        here = os.fstat(self._fd)
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def raise_epoch(self, owner: str) -> int:
        """Raise the stored epoch by one and return it. Call it with the lock held only.

        One small `pwrite` inside one page: a SIGKILL leaves the old epoch or the new one, never half of each.

        Raises:
            LockCorrupt: the first line is not an epoch.
            LockUnusable: it cannot be written.

        """
        try:
            epoch = _parse_epoch(self.path, os.pread(self._fd, EPOCH_LINE_BYTES, 0)) + 1
            if epoch > EPOCH_MAX:
                raise LockCorrupt(
                    f"lock file {self.path}: its epochs are used up; stop every user of it, then remove it"
                )
            line = _epoch_line(epoch)
            if os.pwrite(self._fd, line, 0) != len(line):
                raise OSError(errno.EIO, "the epoch was written in part")
        except OSError as error:
            raise _unusable(self.path, error) from error
        with contextlib.suppress(OSError):  # advice only: not worth losing the lock for
            os.ftruncate(self._fd, EPOCH_LINE_BYTES)
            os.pwrite(self._fd, owner.encode()[:OWNER_BYTES_MAX] + b"\n", EPOCH_LINE_BYTES)
        return epoch

    def close(self) -> None:
        """Unlock and close. Closing twice is harmless."""
        with _forking:
            if self._fd < 0:
                return
            fd, self._fd = self._fd, -1
            _open_files.discard(self)
            try:
                # Closing alone would leave the lock to a copy that a fork in native code made behind our back.
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)

    def disown(self) -> None:
        """In a forked child: close this copy without unlocking, which would take the lock from the parent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def take(path: Path) -> LockFile:
    """Block until this process holds the lock on the file that `path` leads to, and return that file.

    A waiter may be granted a file that was renamed or unlinked in the meantime. It locks nobody out, so it is dropped
    and the path opened anew (KVC-LOCK-003).

    Raises:
        LockUnusable: the path cannot be opened or locked.
        LockReplaced: it was another file after each of `TRIES_MAX` grants.

    """
    for _ in range(TRIES_MAX):
        file = LockFile(path)
        try:
            file.lock()
            if file.is_current():
                return file
        except BaseException:
            file.close()
            raise
        file.close()
    raise _replaced(path)


def read_epoch(path: Path) -> int:
    """Return the epoch that the last holder of the lock at `path` was given; 0 if there never was one, or no file.

    Needs no lock. It reads until two readings agree, since a reader may overlap the holder's write.

    Raises:
        LockCorrupt: the first line is not an epoch.
        LockUnusable: the file is there and cannot be read.

    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        before = os.pread(fd, EPOCH_LINE_BYTES, 0)
        for _ in range(TRIES_MAX):
            data = os.pread(fd, EPOCH_LINE_BYTES, 0)
            if data == before:
                break
            before = data
        return _parse_epoch(path, before)
    except OSError as error:
        raise _unusable(path, error) from error
    finally:
        os.close(fd)


def read_owner(path: Path) -> str | None:
    """Return what the last holder wrote about itself, for messages only; None if nothing can be read."""
    try:
        lines = path.read_bytes()[: EPOCH_LINE_BYTES + OWNER_BYTES_MAX].split(b"\n")
    except OSError:
        return None
    return (lines[1].decode(errors="replace") or None) if len(lines) > 1 else None


def _open(path: Path) -> int:
    for _ in range(TRIES_MAX):
        try:
            # O_NONBLOCK changes nothing for a regular file and keeps us from hanging on another kind.
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            _create(path)
            continue
        except OSError as error:
            raise _unusable(path, error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise _unusable(path, OSError(errno.ENXIO, "not a regular file"))
        return fd
    raise _replaced(path)


def _create(path: Path) -> None:
    """Make the file with epoch 0 in it, all at once: so an empty file is damage, and never mistaken for a new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{now_ns()}.new")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, _epoch_line(0))
        finally:
            os.close(fd)
        try:
            with contextlib.suppress(FileExistsError):  # somebody else was first: theirs counts
                os.link(draft, path)
        finally:
            draft.unlink()
    except OSError as error:
        raise _unusable(path, error) from error


def _replaced(path: Path) -> LockReplaced:
    return LockReplaced(f"lock file {path}: replaced or removed at each of {TRIES_MAX} tries; stop whatever does that")


def _epoch_line(epoch: int) -> bytes:
    return b"%0*d\n" % (DIGITS, epoch)


def _parse_epoch(path: Path, data: bytes) -> int:
    digits, end = data[:DIGITS], data[DIGITS:]
    if len(digits) != DIGITS or end != b"\n" or not digits.isdigit():
        raise LockCorrupt(
            f"lock file {path}: expected a first line of {DIGITS} digits (the epoch), found {data!r}; "
            "stop every process that uses it, then remove it"
        )
    return int(digits)

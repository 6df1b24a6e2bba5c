"""How long the failover lock takes to pass on: SIGKILL of its holder until a waiting process has acquired it.

    python -m benchmarks.lock --out FILE [--quick]

The kernel gives the lock up only after it has torn down the dead process's memory, so the time depends on what the
holder had mapped and touched: 1 GiB here, of several kinds. A memfd's pages outlive the holder, as with the memory
service; private pages are freed on the way. Prints a table and writes {name: {unit, median, min, max, p99, n}} as JSON.
Whole processes, on this machine's clock. Target: p99 under 50 ms at 1 GiB resident.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import select
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figures import figure, show, write
from reference_impl.failover.lock import FlockFailoverLock
from reference_impl.memory_service.backend import Access, Reservation
from reference_impl.memory_service.host import HostBackend
from reference_impl.realclock import now_ns

GIB = 1 << 30
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; the module mmap has no names for them yet
WAITING_LIMIT_NS = 10_000_000_000

Memory = Callable[[int], mmap.mmap | Reservation | None]


def nothing(_memfd: int) -> None:
    """No memory beside the interpreter's."""


def shared(memfd: int) -> mmap.mmap:
    """The memfd, mapped and touched in pages of 4 KiB."""
    memory = mmap.mmap(memfd, GIB, flags=mmap.MAP_SHARED)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory.madvise(MADV_POPULATE_WRITE)
    return memory


def shared_read_only(memfd: int) -> mmap.mmap:
    """The memfd, mapped read-only and touched in pages of 4 KiB, as a reader of weights does."""
    memory = mmap.mmap(memfd, GIB, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory.madvise(MADV_POPULATE_READ)
    return memory


def shared_huge(memfd: int) -> mmap.mmap:
    """The memfd with MADV_HUGEPAGE, which the kernel may ignore (shmem_enabled)."""
    memory = mmap.mmap(memfd, GIB, flags=mmap.MAP_SHARED)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(MADV_POPULATE_WRITE)
    return memory


def shared_collapsed(_memfd: int) -> Reservation:
    """A memfd as the memory service's clients map it: huge pages, whatever the kernel's setting."""
    backend = HostBackend()
    memory, place = backend.create(GIB, "lock-benchmark"), backend.reserve(GIB)
    backend.map(place.address, memory, Access.WRITE, populate=True)
    return place


def private(_memfd: int) -> mmap.mmap:
    """Anonymous private memory in pages of 4 KiB."""
    memory = mmap.mmap(-1, GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory.madvise(MADV_POPULATE_WRITE)
    return memory


def private_huge(_memfd: int) -> mmap.mmap:
    """Anonymous private memory in huge pages."""
    memory = mmap.mmap(-1, GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(MADV_POPULATE_WRITE)
    return memory


CASES: dict[str, Memory] = {
    "kill_to_lock_won.small": nothing,
    "kill_to_lock_won.memfd_1gib": shared,
    "kill_to_lock_won.memfd_1gib_read_only": shared_read_only,
    "kill_to_lock_won.memfd_1gib_huge_advised": shared_huge,
    "kill_to_lock_won.memfd_1gib_huge_collapsed": shared_collapsed,
    "kill_to_lock_won.private_1gib": private,
    "kill_to_lock_won.private_1gib_huge": private_huge,
}


@contextmanager
def child(body: Callable[[], None]) -> Iterator[int]:
    """Fork a process that runs `body`; kill and reap it at the end."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def acquire_and_tell(path: Path, name: str, pipe: int) -> None:
    """Take the lock, write the moment to `pipe`, and keep it until killed."""

    async def main() -> None:
        await FlockFailoverLock(path).acquire(name)
        os.write(pipe, b"%d\n" % now_ns())
        signal.pause()

    asyncio.run(main())


def wait_until_blocked(pid: int) -> None:
    """Return once the kernel has `pid` in a queue for a flock."""
    deadline_ns = now_ns() + WAITING_LIMIT_NS
    while now_ns() < deadline_ns:
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        if any(line[1:3] == ["->", "FLOCK"] and int(line[5]) == pid for line in lines):
            return
        os.sched_yield()
    raise SystemExit(f"process {pid} did not come to wait for the lock")


def hear(pipe: int) -> int:
    """Return the moment that a child has written to `pipe`."""
    if not select.select([pipe], [], [], WAITING_LIMIT_NS / 1e9)[0]:
        raise SystemExit("a child did not come to hold the lock")
    return int(os.read(pipe, 64))


def once(path: Path, memory: Memory, memfd: int) -> float:
    """Let a holder with `memory` die while a waiter waits; return the milliseconds from SIGKILL to its grant."""
    heard, told = os.pipe()

    def holder() -> None:
        kept = memory(memfd)
        acquire_and_tell(path, "holder", told)
        del kept

    try:
        with child(holder) as dying:
            hear(heard)
            with child(lambda: acquire_and_tell(path, "waiter", told)) as waiting:
                wait_until_blocked(waiting)
                killed_ns = now_ns()
                os.kill(dying, signal.SIGKILL)
                return (hear(heard) - killed_ns) / 1e6
    finally:
        os.close(heard)
        os.close(told)


def main() -> None:
    """Measure every case and write the results."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, help="where to write the figures as JSON")
    options.add_argument("--quick", action="store_true", help="5 repeats a case instead of 25")
    given = options.parse_args()
    repeats = 5 if given.quick else 25
    memfd = os.memfd_create("lock-benchmark", os.MFD_CLOEXEC)
    os.ftruncate(memfd, GIB)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: figure("ms", [once(Path(folder) / f"{name}.lock", memory, memfd) for _ in range(repeats)])
            for name, memory in CASES.items()
        }
    show(found)
    if given.out:
        write(given.out, found)


if __name__ == "__main__":
    main()

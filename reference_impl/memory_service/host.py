"""The backend for host memory: memfds with sealed sizes, mapped at fixed addresses."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from reference_impl.memory_service import libc
from reference_impl.memory_service.backend import Access, Memory, Reservation
from reference_impl.memory_service.errors import BackendError
from reference_impl.memory_service.libc import HUGE_PAGE_BYTES
from reference_impl.rules.sessions import PAGE_BYTES

_F_SEAL_FUTURE_WRITE = 0x10  # not in Python's fcntl before 3.13
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@contextmanager
def _typed(what: str) -> Iterator[None]:
    """Turn the kernel's refusal into ours."""
    try:
        yield
    except OSError as error:
        hint = {
            errno.ENOMEM: "free memory or raise the limit",
            errno.EMFILE: "raise `ulimit -n`",
            errno.ENFILE: "raise fs.file-max",
            errno.EACCES: "the descriptor is read-only: only the writer of an uncommitted layout may write",
            errno.EPERM: "the memory is sealed: it was committed and is immutable",
        }.get(error.errno or 0, "check the kernel and its limits")
        raise BackendError(f"{what} failed: {error.strerror}; {hint}") from error


class HostBackend:
    """Memory of the host in memfds. See `backend.Backend`.

    Large memory is aligned to 2 MiB for the sake of huge pages: a GiB of them is torn down in under a millisecond, a
    GiB of small pages in a hundred, and an engine's death is only seen when that is done. A writer's
    `map(populate=True)` makes them on any kernel since 6.1; otherwise they come on first touch where
    /sys/kernel/mm/transparent_hugepage/shmem_enabled is `advise`, and small ones elsewhere.
    """

    def alignment_bytes(self, size_bytes: int) -> int:
        """Return 2 MiB for what can have a huge page; a page for the rest, whose page tables are then few."""
        return HUGE_PAGE_BYTES if size_bytes >= HUGE_PAGE_BYTES else PAGE_BYTES

    def create(self, size_bytes: int, name: str) -> Memory:
        """Make a memfd that can neither shrink nor grow. The name only shows in /proc."""
        with _typed(f"creating {size_bytes} bytes for {name[:80]!r}"):
            # The kernel takes names of 249 bytes; an allocation's may be longer once encoded.
            label = name.encode(errors="replace")[:200].replace(b"\0", b"?").decode(errors="replace")[:60]
            descriptor = os.memfd_create(f"pdproof:{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, size_bytes)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            except BaseException:
                os.close(descriptor)
                raise
        return Memory(descriptor, size_bytes, created=True)

    def export(self, memory: Memory, access: Access) -> int:
        """Return a descriptor of its own for the peer, read-only for READ.

        Only committed memory is exported for READ, so that is when it is sealed: a reader that re-opens its read-only
        descriptor through /proc gains nothing, and the former writer can map it for writing no more.
        """
        with _typed(f"exporting {memory.size_bytes} bytes"):
            if access is Access.WRITE:
                return fcntl.fcntl(memory.handle, fcntl.F_DUPFD_CLOEXEC, 0)
            seals = fcntl.fcntl(memory.handle, fcntl.F_GET_SEALS)
            if not seals & _F_SEAL_FUTURE_WRITE:
                fcntl.fcntl(memory.handle, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
            return os.open(f"/proc/self/fd/{memory.handle}", os.O_RDONLY | os.O_CLOEXEC)

    def import_(self, descriptor: int, size_bytes: int) -> Memory:
        """Take a received descriptor over, if it is a memfd whose size is sealed and as expected."""
        try:
            with _typed("importing memory"):
                found, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if found != size_bytes or seals & _SIZE_SEALS != _SIZE_SEALS:
                # An unsealed file could shrink under our mapping, and every access would be a SIGBUS.
                raise BackendError(
                    f"expected sealed memory of {size_bytes} bytes, got {found} bytes with seals {seals:#x}; "
                    "the peer is not a memory service"
                )
        except BaseException:
            os.close(descriptor)
            raise
        return Memory(descriptor, size_bytes, created=False)

    def reserve(self, size_bytes: int) -> Reservation:
        """Reserve addresses at a multiple of 2 MiB: one huge page too many is asked for, and the ends are trimmed."""
        size = max(round_up(size_bytes, HUGE_PAGE_BYTES), HUGE_PAGE_BYTES)
        flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
        with _typed(f"reserving {size} bytes of addresses"):
            start = libc.mmap(0, size + HUGE_PAGE_BYTES, libc.PROT_NONE, flags)
            address = round_up(start, HUGE_PAGE_BYTES)
            if address > start:
                libc.munmap(start, address - start)
            tail = start + HUGE_PAGE_BYTES - address
            if tail:
                libc.munmap(address + size, tail)
        return Reservation(address, size)

    def map(self, address: int, memory: Memory, access: Access, *, populate: bool = False) -> None:
        """Map a memfd over the address, shared with everybody who has it."""
        write = access is Access.WRITE
        protection = libc.PROT_READ | libc.PROT_WRITE if write else libc.PROT_READ
        with _typed(f"mapping {memory.size_bytes} bytes for {access.value} at {address:#x}"):
            libc.mmap(address, memory.size_bytes, protection, libc.MAP_SHARED | libc.MAP_FIXED, memory.handle)
            libc.advise_huge(address, memory.size_bytes)
        if populate:
            self.populate(address, memory, access)

    def populate(self, address: int, memory: Memory, access: Access) -> None:
        """Make the pages, a writer's as huge pages. Other threads may use the memory meanwhile."""
        write = access is Access.WRITE
        with _typed(f"populating {memory.size_bytes} bytes at {address:#x}"):
            if write:
                libc.collapse(address, memory.size_bytes)
            libc.populate(address, memory.size_bytes, write=write)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Put inaccessible addresses over the memory, in one step: nothing else can slip into the gap."""
        flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE | libc.MAP_FIXED
        with _typed(f"unmapping {size_bytes} bytes at {address:#x}"):
            libc.mmap(address, size_bytes, libc.PROT_NONE, flags)

    def release(self, held: Memory | Reservation) -> None:
        """Give memory or addresses back. Takes tens of milliseconds a GiB for memory that was created here."""
        if isinstance(held, Reservation):
            with _typed(f"giving back {held.size_bytes} bytes of addresses"):
                libc.munmap(held.address, held.size_bytes)
            return
        try:
            if held.created:
                # Frees the pages whoever else has them open, so that what is counted as free is free. Committed
                # memory is sealed against it; its last reader has gone by now, so that closing frees it.
                with suppress(OSError):
                    libc.punch(held.handle, held.size_bytes)
        finally:
            os.close(held.handle)


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple

"""A backend for engines that others wrote: they read the committed pages, and what they write is their own.

Our engine maps committed memory read-only, so that a stray write kills it. A foreign engine may write to its parameters
by right (to scale, to fuse, to reload); its pages are shared until it does, and then that page is copied for it alone.
"""

from __future__ import annotations

from reference_impl.memory_service import libc
from reference_impl.memory_service.backend import Access, Memory
from reference_impl.memory_service.errors import BackendError
from reference_impl.memory_service.host import HostBackend


class CopyOnWriteBackend(HostBackend):
    """The host's memory, mapped privately by those who read it. A writer's mapping is shared, as everywhere."""

    def map(self, address: int, memory: Memory, access: Access, *, populate: bool = False) -> None:
        """Map a memfd over the address. For READ the mapping can be written to, and nobody else will see it."""
        if access is Access.WRITE:
            super().map(address, memory, access, populate=populate)
            return
        protection = libc.PROT_READ | libc.PROT_WRITE
        flags = libc.MAP_PRIVATE | libc.MAP_FIXED | libc.MAP_NORESERVE  # no copy is expected, so none is reserved
        try:
            libc.mmap(address, memory.size_bytes, protection, flags, memory.handle)
        except OSError as error:
            raise BackendError(f"mapping {memory.size_bytes} bytes copy-on-write failed: {error.strerror}") from error
        if populate:
            self.populate(address, memory, access)

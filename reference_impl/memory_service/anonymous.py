"""A backend of plain private memory: what an engine has that shares nothing, as in a cold start."""

from __future__ import annotations

from reference_impl.memory_service import libc
from reference_impl.memory_service.backend import Access, Memory, Reservation
from reference_impl.memory_service.errors import BackendError
from reference_impl.memory_service.host import HostBackend


class AnonymousBackend(HostBackend):
    """Zeroed private pages at the host backend's addresses. Unmapped memory loses its content; none is exported."""

    def create(self, size_bytes: int, name: str) -> Memory:
        """Note a size; the pages come with `map`."""
        if size_bytes <= 0:
            raise BackendError(f"{name!r} needs a positive size, got {size_bytes} bytes")
        return Memory(-1, size_bytes, created=True)

    def export(self, memory: Memory, access: Access) -> int:
        """Refuse: private memory has no descriptor."""
        raise BackendError(f"private memory of {memory.size_bytes} bytes cannot be exported ({access.value})")

    def map(self, address: int, memory: Memory, access: Access, *, populate: bool = False) -> None:
        """Put fresh zeroed pages at the address."""
        write = access is Access.WRITE
        protection = libc.PROT_READ | libc.PROT_WRITE if write else libc.PROT_READ
        flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_FIXED
        try:
            libc.mmap(address, memory.size_bytes, protection, flags)
            libc.advise_huge(address, memory.size_bytes)
        except OSError as error:
            raise BackendError(f"mapping {memory.size_bytes} private bytes failed: {error.strerror}") from error
        if populate:
            self.populate(address, memory, access)

    def release(self, held: Memory | Reservation) -> None:
        """Give addresses back; the pages go with them."""
        if isinstance(held, Reservation):
            super().release(held)

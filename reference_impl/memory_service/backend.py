"""The seam between the memory service and the device: eight operations, of which each side uses its own.

The service creates, exports and releases; it never imports, reserves or maps, so it holds no device context and is out
of the path of every access (KVC-MEM-003). A client imports, reserves, maps, unmaps and releases.

How the operations fit a device:

| operation | `host` | `cuda` (to come) |
|---|---|---|
| create | memfd_create, sealed size | cuMemCreate, shareable by POSIX descriptor |
| export | dup, or a read-only re-open | cuMemExportToShareableHandle |
| import_ | keeps the descriptor | cuMemImportFromShareableHandle |
| reserve | mmap PROT_NONE, NORESERVE | cuMemAddressReserve |
| map | mmap MAP_FIXED | cuMemMap, then cuMemSetAccess |
| populate | madvise COLLAPSE, POPULATE | nothing: cuMemCreate made the pages |
| unmap | PROT_NONE over it | cuMemUnmap |
| release | close, munmap | cuMemRelease, cuMemAddressFree |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol


class Access(enum.Enum):
    """What a client may do with memory."""

    READ = "read"
    WRITE = "write"  # and read


@dataclass(frozen=True)
class Memory:
    """Physical memory. `handle` is the backend's own: a descriptor (host) or an allocation handle (cuda).

    `created` tells the memory's creator, whose release frees it, from those that imported it.
    """

    handle: int
    size_bytes: int
    created: bool


@dataclass(frozen=True)
class Reservation:
    """A range of addresses that nothing else will use."""

    address: int
    size_bytes: int


class Backend(Protocol):
    """A device's memory. Every operation raises `errors.BackendError` where the device refuses."""

    def alignment_bytes(self, size_bytes: int) -> int:
        """Return the multiple at which memory of a size is placed in a reservation."""
        ...

    def create(self, size_bytes: int, name: str) -> Memory:
        """Make zeroed memory of a size that never changes."""
        ...

    def export(self, memory: Memory, access: Access) -> int:
        """Return a new descriptor of the memory, which the caller closes.

        After the first export for READ the memory can be mapped for writing by nobody any more.
        """
        ...

    def import_(self, descriptor: int, size_bytes: int) -> Memory:
        """Take over an exported descriptor. Raises if it is not memory of that size; it is closed then."""
        ...

    def reserve(self, size_bytes: int) -> Reservation:
        """Reserve addresses, at a multiple of the largest alignment; to touch them is a fault."""
        ...

    def map(self, address: int, memory: Memory, access: Access, *, populate: bool = False) -> None:
        """Map memory at an address inside a reservation, over whatever is there. `populate` makes its pages now."""
        ...

    def populate(self, address: int, memory: Memory, access: Access) -> None:
        """Make the pages of mapped memory now; what is there stays. Nothing, if it has them since `create`."""
        ...

    def unmap(self, address: int, size_bytes: int) -> None:
        """Take memory away from an address; the reservation stays."""
        ...

    def release(self, held: Memory | Reservation) -> None:
        """Give memory or a reservation back. Memory that was created here is gone from the device afterwards."""
        ...

"""One contiguous range of addresses for an engine's memory, mapped, taken away, and mapped again at the same place."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from reference_impl.memory_service.anonymous import AnonymousBackend
from reference_impl.memory_service.backend import Access, Backend, Memory
from reference_impl.memory_service.errors import BackendError, LayoutChanged, NotMapped, UnknownName
from reference_impl.memory_service.host import HostBackend
from reference_impl.rules.sessions import Entry, Layout


class KnowsCurrentLayout(Protocol):
    """What `check_current` asks: a `MemoryClient`."""

    def current_layout(self) -> Layout | None:
        """Return the newest layout of the tag."""
        ...


@dataclass(frozen=True)
class _Part:
    offset: int
    memory: Memory


class MappedRegion:
    """A reserved range of addresses and the memory that belongs there. Made unmapped.

    Arrays and addresses of an unmapped or closed region must not be touched: like freed device memory, that is a
    segmentation fault. Not for use from several threads at once.
    """

    def __init__(
        self, backend: Backend, parts: dict[str, _Part], size_bytes: int, access: Access, layout: Layout | None
    ) -> None:
        self._backend, self._parts = backend, parts
        self._access = access
        self._reservation = backend.reserve(size_bytes)
        self.layout = layout
        self.mapped = False
        self.closed = False

    @classmethod
    def of(
        cls,
        backend: Backend,
        entries: tuple[Entry, ...],
        descriptors: list[int],
        access: Access,
        layout: Layout | None,
    ) -> MappedRegion:
        """Build a region from exported descriptors, which it takes over. Raises `BackendError`; then all are closed."""
        memories: list[Memory] = []
        waiting = list(reversed(descriptors))
        try:
            for entry in entries:
                memories.append(backend.import_(waiting.pop(), entry.size_bytes))
            return cls.place(backend, entries, memories, access, layout)
        except BaseException:
            for descriptor in waiting:
                backend.release(Memory(descriptor, 0, created=False))
            for memory in memories:
                backend.release(memory)
            raise

    @classmethod
    def place(
        cls, backend: Backend, entries: tuple[Entry, ...], memories: list[Memory], access: Access, layout: Layout | None
    ) -> MappedRegion:
        """Lay memories out one after the other, each at the backend's alignment."""
        if not entries:
            raise BackendError("a region needs at least one allocation; allocate first")
        parts, offset = {}, 0
        for entry, memory in zip(entries, memories, strict=True):
            alignment = backend.alignment_bytes(entry.size_bytes)
            offset = -(-offset // alignment) * alignment
            parts[entry.name] = _Part(offset, memory)
            offset += entry.size_bytes
        return cls(backend, parts, offset, access, layout)

    @property
    def names(self) -> tuple[str, ...]:
        """The allocations' names, in the order of their addresses."""
        return tuple(self._parts)

    @property
    def size_bytes(self) -> int:
        """The sum of the allocations' sizes."""
        return sum(part.memory.size_bytes for part in self._parts.values())

    @property
    def writable(self) -> bool:
        """Whether this region may be written to."""
        return self._access is Access.WRITE

    def map(self, populate: bool = False) -> None:
        """Map everything at its address. Harmless if mapped.

        `populate` makes the pages now and not on first touch, and a writer's as huge pages, which are many times faster
        to map, to share and to tear down.

        Raises `NotMapped` for a closed region, `BackendError`; then nothing is mapped.
        """
        self._must_be_open()
        if self.mapped:
            return
        self.mapped = True
        try:
            self._map_parts(populate)
        except BackendError:
            self.unmap()
            raise

    def _map_parts(self, populate: bool) -> None:
        for part in self._parts.values():
            self._backend.map(self._at(part), part.memory, self._access, populate=populate)

    def populate(self) -> None:
        """Make the pages of a mapped region now, as `map(populate=True)` does; other threads may use it meanwhile.

        Raises `NotMapped`, `BackendError`.
        """
        if not self.mapped:
            raise NotMapped("nothing is mapped; call map() first")
        for part in self._parts.values():
            self._backend.populate(self._at(part), part.memory, self._access)

    def unmap(self) -> None:
        """Take the memory away from this process; the addresses stay reserved. Harmless if not mapped."""
        self._must_be_open()
        if self.mapped:
            self._backend.unmap(self._reservation.address, self._reservation.size_bytes)
            self.mapped = False

    def freeze(self, layout: Layout) -> None:
        """Turn read-only where it stands: `layout` was published from it. Older arrays must not be written to."""
        self._access, self.layout = Access.READ, layout
        if self.mapped:
            self._map_parts(populate=False)

    def check_current(self, client: KnowsCurrentLayout) -> None:
        """Refuse a layout that changed while this region was asleep (KVC-MEM-008). Raises `LayoutChanged`."""
        current = client.current_layout()
        if self.layout is not None and current == self.layout:
            return
        mine, now = (
            f"generation {seen.generation} ({seen.hash[:8]}) of service {seen.service}" if seen else "nothing committed"
            for seen in (self.layout, current)
        )
        raise LayoutChanged(f"this region maps {mine}, but the service has {now}; open a new session and region")

    def address(self, name: str) -> int:
        """Return where an allocation stands, mapped or not; it never changes. Raises `UnknownName`."""
        return self._at(self._part(name))

    def array(self, name: str, dtype: str = "uint64") -> NDArray[Any]:
        """Return a view over a mapped allocation, read-only for a reader. Its length is the whole items that fit.

        Raises `NotMapped`, `UnknownName`.
        """
        if not self.mapped:
            raise NotMapped(f"{name!r} is not mapped; call map() first")
        part = self._part(name)
        raw = (ctypes.c_ubyte * part.memory.size_bytes).from_address(self._at(part))
        kind = np.dtype(dtype)
        view: NDArray[Any] = np.frombuffer(memoryview(raw), dtype=kind, count=part.memory.size_bytes // kind.itemsize)
        view.flags.writeable = self.writable
        return view

    def descriptor(self, name: str) -> int:
        """Return an allocation's descriptor, which stays the region's; -1 if its memory has none."""
        return self._part(name).memory.handle

    def close(self) -> None:
        """Give memory, addresses and descriptors back. Closing twice is harmless."""
        if self.closed:
            return
        self.mapped, self.closed = False, True
        self._backend.release(self._reservation)
        for part in self._parts.values():
            self._backend.release(part.memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _part(self, name: str) -> _Part:
        try:
            return self._parts[name]
        except KeyError:
            raise UnknownName(f"{name!r} is not in this region, which has {sorted(self._parts)[:8]}") from None

    def _at(self, part: _Part) -> int:
        return self._reservation.address + part.offset

    def _must_be_open(self) -> None:
        if self.closed:
            raise NotMapped("the region is closed; make a new one from an open client")


def private_region(sizes_bytes: dict[str, int], *, shareable: bool = False) -> MappedRegion:
    """Return a writable region without a service: what it holds dies with this process.

    `unmap` loses its content, unless it is `shareable`: then it has descriptors for this process's own children. Raises
    `BackendError`.
    """
    backend: Backend = HostBackend() if shareable else AnonymousBackend()
    entries = tuple(Entry(name, size) for name, size in sizes_bytes.items())
    memories = [backend.create(entry.size_bytes, entry.name) for entry in entries]
    return MappedRegion.place(backend, entries, memories, Access.WRITE, None)

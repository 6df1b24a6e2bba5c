"""Weights that a foreign engine shares through the memory service: attach to them, or be their writer.

The same road as our own engine's (`engine.memory`), but the writer brings its weights ready, and the pages are mapped
copy-on-write, because what a foreign engine does to its parameters later is not ours to know.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reference_impl.memory_service.backend import Access
from reference_impl.memory_service.client import MemoryClient
from reference_impl.memory_service.copy_on_write import CopyOnWriteBackend
from reference_impl.memory_service.errors import NothingCommitted
from reference_impl.memory_service.mapping import MappedRegion
from reference_impl.memory_service.weights_table import WeightsRefused, WeightsTable, decode
from reference_impl.rules.sessions import Entry, Layout, Mode, Tag

ALLOCATION: Final = "weights"
_WAIT_S: Final = 600.0  # for another engine that is loading the same weights


class Role(enum.StrEnum):
    """What an engine was to the weights."""

    WRITER = "writer"
    READER = "reader"


@dataclass(frozen=True)
class SharedWeights:
    """Committed weights, mapped copy-on-write at an address that stays. Keep it as long as anything uses the memory."""

    client: MemoryClient
    region: MappedRegion
    table: WeightsTable
    layout: Layout
    role: Role

    @property
    def address(self) -> int:
        """Where the allocation begins."""
        return self.region.address(ALLOCATION)

    def check_current(self) -> None:
        """Refuse to go on with weights that somebody has replaced meanwhile. Raises `LayoutChanged`."""
        self.region.check_current(self.client)

    def close(self) -> None:
        """Give up mapping and session; no tensor over the memory may be touched any more."""
        self.region.close()
        self.client.close()


def attach_or_write(
    socket: Path, engine_id: str, load: Callable[[], WeightsTable], fill: Callable[[int, WeightsTable], None]
) -> SharedWeights:
    """Attach to the committed weights; if there are none, `load` them, `fill` the allocation's address, and commit.

    Of engines that start together one writes and the others wait for it; if it dies, the next one writes. Raises
    `WeightsRefused`, or any `MemoryServiceError`.
    """
    try:
        return _attach(socket, engine_id)
    except NothingCommitted:
        writer = MemoryClient(socket, tag=Tag.WEIGHTS, mode=Mode.WRITER, engine_id=engine_id, wait_s=_WAIT_S)
    try:
        if writer.current_layout() is None:
            return _write(writer, load(), fill)
    except BaseException:
        writer.close()
        raise
    writer.close()  # committed while we waited
    return _attach(socket, engine_id)


def _attach(socket: Path, engine_id: str) -> SharedWeights:
    client = MemoryClient(socket, tag=Tag.WEIGHTS, mode=Mode.READER, engine_id=engine_id)
    try:
        layout = client.layout()
        held_by = f"the memory service at {socket}"
        table = decode(layout.metadata, held_by)
        if layout.entries != (Entry(ALLOCATION, table.size_bytes),):
            raise WeightsRefused(f"{held_by} holds weights that are not as their own table says; start it anew")
        region = _region(client, layout.entries, Access.READ, layout)
        try:
            region.map(populate=True)
        except BaseException:
            region.close()
            raise
    except BaseException:
        client.close()
        raise
    return SharedWeights(client, region, table, layout, Role.READER)


def _write(writer: MemoryClient, table: WeightsTable, fill: Callable[[int, WeightsTable], None]) -> SharedWeights:
    metadata = table.encode()
    writer.allocate(ALLOCATION, table.size_bytes)
    region = _region(writer, (Entry(ALLOCATION, table.size_bytes),), Access.WRITE, None)
    try:
        region.map()
        fill(region.address(ALLOCATION), table)
        region.populate()  # in huge pages, where the kernel has them: cheap to map, and to tear down at a death
        layout = writer.commit(metadata)
        region.freeze(layout)
        region.populate()
    except BaseException:
        region.close()
        raise
    return SharedWeights(writer, region, table, layout, Role.WRITER)


def _region(client: MemoryClient, entries: tuple[Entry, ...], access: Access, layout: Layout | None) -> MappedRegion:
    descriptors = client.export_many(tuple(entry.name for entry in entries))
    return MappedRegion.of(CopyOnWriteBackend(), entries, descriptors, access, layout)

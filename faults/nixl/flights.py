"""A transfer as the engine holds it, and the memory that it reads into."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from faults.nixl.orders import Order


class Piece(NamedTuple):
    """Bytes in a row."""

    address: int
    size_bytes: int


class NotStruck(Exception):
    """An order cannot be carried out on this transfer."""


class State(enum.Enum):
    """How far a transfer is, as far as faults go."""

    MADE = enum.auto()
    POSTED = enum.auto()
    KEPT_BACK = enum.auto()
    """The engine has posted it, and NIXL does not know."""
    FAILED = enum.auto()
    ENDED = enum.auto()


@dataclass(eq=False)
class Flight:
    """The handle that an engine gets instead of NIXL's. `pieces` tells the local memory; raises NotStruck."""

    real: Any
    operation: str
    peer: str
    requests: tuple[str, ...]
    pieces: Callable[[], list[Piece]]
    notification: bytes = b""
    """What its end is to tell the peer, where it was taken off NIXL's own."""
    state: State = State.MADE
    order: Order | None = None
    due_ns: int | None = None

    def release(self) -> None:
        """Give NIXL's handle back."""
        self.real.release()

    @property
    def _released(self) -> bool:
        """NIXL's own mark, which the reference sets where a release failed."""
        return bool(self.real._released)

    @_released.setter
    def _released(self, released: bool) -> None:
        self.real._released = released


def pieces_of(descriptors: Any, indices: Sequence[int] | None = None) -> list[Piece]:
    """Return the memory of a descriptor list of NIXL, or of those of its entries. Raises NotStruck if it is no DRAM."""
    if not str(descriptors.getType()).endswith("DRAM_SEG"):
        raise NotStruck(f"the memory is {descriptors.getType()}: only DRAM can be overwritten from here")
    wanted = range(descriptors.descCount()) if indices is None else indices
    return [Piece(*descriptors[int(index)][:2]) for index in wanted]


def block_of(pieces: list[Piece], block: int, block_bytes: int) -> list[Piece]:
    """Return where a block lies (see `Order.block`, `Order.block_bytes`). Raises NotStruck if there is none such."""
    blocks = [[piece] for piece in pieces] if block_bytes == 0 else list(_cut(pieces, block_bytes))
    if not -len(blocks) <= block < len(blocks):
        raise NotStruck(f"there is no block {block}: the transfer has {len(blocks)}")
    return blocks[block]


def _cut(pieces: list[Piece], block_bytes: int) -> Iterator[list[Piece]]:
    """Cut memory into blocks; the last may be shorter."""
    block: list[Piece] = []
    room = block_bytes
    for address, size_bytes in pieces:
        done = 0
        while done < size_bytes:
            part = min(room, size_bytes - done)
            block.append(Piece(address + done, part))
            done += part
            room -= part
            if room == 0:
                yield block
                block, room = [], block_bytes
    if block:
        yield block


def overwrite(pieces: list[Piece]) -> None:
    """Fill memory of this process with zeros."""
    for address, size_bytes in pieces:
        ctypes.memset(address, 0, size_bytes)

"""What the connector asks of a transport. `memory` keeps it in process, on a manual clock; `nixl` for real."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from reference_impl.rules.agreement import RANKS, RankAddress

__all__ = [
    "RANKS",
    "BlockNumbers",
    "DataPlane",
    "Ended",
    "Notifier",
    "PeerRefused",
    "RankAddress",
    "ReadResult",
    "Transport",
]

BlockNumbers: TypeAlias = Sequence[int] | NDArray[np.int64]
"""Blocks of a read. An array is taken over ten times as fast as a list."""


class ReadResult(enum.StrEnum):
    """How a read of KV ended."""

    DONE = "done"
    TORN = "torn"
    """A block was given to somebody else while it was read: what arrived must not be used (S2)."""
    FAILED = "failed"


class Ended(msgspec.Struct, frozen=True):
    """A read that has ended: from now on nothing of it can land any more (S6)."""

    read_id: int
    result: ReadResult
    reason: str = ""


class Notifier(Protocol):
    """Short messages between engines. Never blocks (KVC-HB-009)."""

    strangers: int
    """Messages that came from nobody known, and were dropped (O2)."""

    def send(self, engine_id: str, message: bytes) -> bool:
        """Send to an engine added before; False if it demonstrably did not leave."""
        ...

    def receive(self) -> list[tuple[str, bytes]]:
        """Return what has arrived: the sender's engine id and the message."""
        ...


class DataPlane(Protocol):
    """One-sided reads of whole blocks. Never blocks."""

    def read(self, read_id: int, engine_id: str, remote_blocks: BlockNumbers, local_blocks: BlockNumbers) -> None:
        """Start reading `remote_blocks` of a peer into `local_blocks` of our pool, every rank its part.

        Whatever goes wrong, also at once, is told by `poll`, once.
        """
        ...

    def cancel(self, read_id: int) -> None:
        """Ask a read to end early; `poll` tells when it has. Harmless when it has ended."""
        ...

    def poll(self) -> list[Ended]:
        """Return the reads that have ended since the last call."""
        ...


class Transport(Notifier, DataPlane, Protocol):
    """Both, with the peers they reach."""

    def addresses(self) -> list[RankAddress]:
        """Return what a peer needs to reach each of our ranks, head rank first."""
        ...

    def add_peer(self, engine_id: str, addresses: list[RankAddress]) -> None:
        """Make a peer reachable. Raises `PeerRefused` if its addresses cannot be used."""
        ...

    def remove_peer(self, engine_id: str) -> None:
        """Forget a peer; its running reads fail. Harmless if it is unknown."""
        ...

    def close(self) -> None:
        """End everything."""
        ...


class PeerRefused(Exception):
    """A peer cannot be reached as it says; the message says why, in one line."""

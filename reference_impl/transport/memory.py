"""The transport in process, on a clock turned by hand: what tests and simulations of the protocol run on.

Nothing happens between two calls of `MemoryNetwork.deliver`. Bytes are copied for each pair of ranks, one pair after
the other over a read's duration, so that a block given away in the middle tears the read as it would a real one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from reference_impl.content import BLOCK_WORDS
from reference_impl.transport.base import RANKS, BlockNumbers, Ended, PeerRefused, RankAddress, ReadResult
from reference_impl.transport.plan import BlockList, Piece, block_list, pieces

LinkPolicy: TypeAlias = Callable[[str, str, bytes], list[int]]
"""(sender, receiver, message) to the delays in ns after which it arrives: [] is lost, two entries are repeated."""


class ReadPlan(msgspec.Struct, frozen=True):
    """How a read shall go: how long it takes, and what it ends with unless it really went worse."""

    takes_ns: int = 0
    result: ReadResult = ReadResult.DONE


ReadPolicy: TypeAlias = Callable[[str, str], ReadPlan]
"""(reader, holder) to the plan of the read that begins."""


def at_once(_sender: str, _receiver: str, _message: bytes) -> list[int]:
    """Deliver every message at once."""
    return [0]


def well(_reader: str, _holder: str) -> ReadPlan:
    """Let every read end well and at once."""
    return ReadPlan()


class MemoryNetwork:
    """Where `MemoryTransport`s meet. Links and reads follow `link_policy` and `read_policy`, which may be changed."""

    def __init__(self, link_policy: LinkPolicy = at_once, read_policy: ReadPolicy = well) -> None:
        self.link_policy = link_policy
        self.read_policy = read_policy
        self.now_ns = 0
        self.transports: dict[str, MemoryTransport] = {}
        self._links: dict[tuple[str, str], LinkPolicy] = {}
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def join(
        self, engine_id: str, kv: NDArray[np.uint64], generations: NDArray[np.uint64], ranks: int = 1
    ) -> MemoryTransport:
        """Return the transport of an engine. Raises ValueError for an id that was used before, or wrong shapes."""
        if engine_id in self.transports:
            raise ValueError(f"engine id {engine_id!r} was used before")
        transport = self.transports[engine_id] = MemoryTransport(self, engine_id, kv, generations, ranks)
        return transport

    def set_link(self, sender: str, receiver: str, policy: LinkPolicy | None) -> None:
        """Give the link from one engine to another its own policy; None takes it away."""
        if policy is None:
            self._links.pop((sender, receiver), None)
        else:
            self._links[sender, receiver] = policy

    def kill(self, engine_id: str) -> None:
        """Let an engine die: nothing of it is sent, received, read or written any more."""
        self.transports[engine_id].alive = False

    def alive(self, engine_id: str) -> bool:
        """Whether an engine is there."""
        transport = self.transports.get(engine_id)
        return transport is not None and transport.alive

    def deliver(self, now_ns: int) -> None:
        """Let time pass until `now_ns`, and what is due by then happen in its order. Raises ValueError backwards."""
        if now_ns < self.now_ns:
            raise ValueError(f"time goes from {self.now_ns} back to {now_ns}")
        while self._due and self._due[0][0] <= now_ns:
            self.now_ns, _, act = heapq.heappop(self._due)
            act()
        self.now_ns = now_ns

    def next_ns(self) -> int | None:
        """Return when something is due next, None if nothing is."""
        return self._due[0][0] if self._due else None

    def after(self, delay_ns: int, act: Callable[[], None]) -> None:
        """Have something happen `delay_ns` from now."""
        heapq.heappush(self._due, (self.now_ns + max(0, delay_ns), next(self._count), act))

    def send(self, sender: str, receiver: str, message: bytes) -> bool:
        """Send a message by the link's policy; False if the receiver is dead."""
        if not self.alive(sender) or not self.alive(receiver):
            return False
        policy = self._links.get((sender, receiver), self.link_policy)
        for delay_ns in policy(sender, receiver, message):
            self.after(delay_ns, lambda: self.transports[receiver].arrived(sender, message))
        return True


@dataclass
class _Reading:
    """A read between its start and its end."""

    read_id: int
    holder: str
    blocks: BlockList
    plan: ReadPlan
    before: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    error: str = ""


class MemoryTransport:
    """`Transport` in process. Made by `MemoryNetwork.join`. `strangers` counts messages from engines not added."""

    def __init__(
        self,
        network: MemoryNetwork,
        engine_id: str,
        kv: NDArray[np.uint64],
        generations: NDArray[np.uint64],
        ranks: int,
    ) -> None:
        if ranks not in RANKS:
            raise ValueError(f"ranks must be one of {RANKS}, got {ranks}")
        if kv.ndim != 2 or kv.shape[1] != BLOCK_WORDS or generations.shape != kv.shape[:1]:
            raise ValueError(f"kv must be [blocks, {BLOCK_WORDS}] and generations [blocks], got {kv.shape}")
        self.engine_id = engine_id
        self.kv, self.generations = kv, generations
        self.ranks = ranks
        self.alive = True
        self.broken = ""
        self.strangers = 0
        self._network = network
        self._peers: dict[str, list[RankAddress]] = {}
        self._inbox: list[tuple[str, bytes]] = []
        self._reads: dict[int, _Reading] = {}
        self._ended: list[Ended] = []

    def addresses(self) -> list[RankAddress]:
        """Return what a peer needs to reach each of our ranks, head rank first."""
        metadata = self.engine_id.encode()
        return [RankAddress(metadata, rank + 1, 0 if rank else 1, len(self.kv)) for rank in range(self.ranks)]

    def add_peer(self, engine_id: str, addresses: list[RankAddress]) -> None:
        """Make a peer reachable. Raises `PeerRefused` if its addresses are not those of a live engine of that id."""
        if not self._network.alive(engine_id):
            raise PeerRefused(f"{engine_id} cannot be reached")
        if addresses != self._network.transports[engine_id].addresses():
            raise PeerRefused(f"these are not the addresses of {engine_id}")
        self._peers[engine_id] = addresses

    def remove_peer(self, engine_id: str) -> None:
        """Forget a peer; its running reads fail, each when nothing of it can land. Harmless if it is unknown."""
        if self._peers.pop(engine_id, None) is not None:
            for reading in self._reads.values():
                if reading.holder == engine_id:
                    reading.error = reading.error or "the peer was removed"

    def send(self, engine_id: str, message: bytes) -> bool:
        """Send to an engine added before; False if it demonstrably did not leave."""
        return engine_id in self._peers and self._network.send(self.engine_id, engine_id, message)

    def receive(self) -> list[tuple[str, bytes]]:
        """Return what has arrived."""
        arrived, self._inbox = self._inbox, []
        return arrived if self.alive else []

    def arrived(self, sender: str, message: bytes) -> None:
        """Take a message in; the network calls it."""
        if sender in self._peers:
            self._inbox.append((sender, message))
        else:
            self.strangers += 1

    def read(self, read_id: int, engine_id: str, remote_blocks: BlockNumbers, local_blocks: BlockNumbers) -> None:
        """Start reading a peer's blocks into ours."""
        if read_id in self._reads:
            raise ValueError(f"read {read_id} is running already")
        try:
            if engine_id not in self._peers:
                raise PeerRefused(f"{engine_id} is no peer of ours")
            there = self._peers[engine_id][0].blocks
            blocks = block_list(remote_blocks, local_blocks, there, len(self.kv))
        except (PeerRefused, ValueError) as reason:
            self._ended.append(Ended(read_id, ReadResult.FAILED, str(reason)))
            return
        plan = self._network.read_policy(self.engine_id, engine_id)
        reading = self._reads[read_id] = _Reading(read_id, engine_id, blocks, plan)
        if self._holder(reading) is not None:
            reading.before = self._network.transports[engine_id].generations[blocks.remote].copy()
        parts = pieces(self.ranks, len(self._peers[engine_id]))
        for number, piece in enumerate(parts, start=1):
            self._network.after(plan.takes_ns * number // (len(parts) + 1), partial(self._copy, reading, piece))
        self._network.after(plan.takes_ns, lambda: self._end(reading))

    def cancel(self, read_id: int) -> None:
        """Start no further part of a read. As with NIXL, it ends when it would have ended."""
        if read_id in self._reads:
            self._reads[read_id].error = self._reads[read_id].error or "cancelled"

    def poll(self) -> list[Ended]:
        """Return the reads that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended if self.alive else []

    def close(self) -> None:
        """End everything."""
        self.alive = False

    def _holder(self, reading: _Reading) -> MemoryTransport | None:
        """Return the holder of a read while it goes well, and note its death."""
        if not self._network.alive(reading.holder):
            reading.error = reading.error or f"{reading.holder} is gone"
        return None if reading.error else self._network.transports[reading.holder]

    def _copy(self, reading: _Reading, piece: Piece) -> None:
        holder = self._holder(reading)
        if holder is not None and self.alive and reading.plan.result is not ReadResult.FAILED:
            words = slice(piece.first, piece.first + piece.words)
            self.kv[reading.blocks.local, words] = holder.kv[reading.blocks.remote, words]

    def _end(self, reading: _Reading) -> None:
        holder = self._holder(reading)
        result, reason = reading.plan.result, ""
        if holder is None:
            result, reason = ReadResult.FAILED, reading.error
        elif result is ReadResult.FAILED:
            reason = "the network failed"
        elif (holder.generations[reading.blocks.remote] != reading.before).any() or result is ReadResult.TORN:
            result, reason = ReadResult.TORN, "blocks were given away while they were read"
        del self._reads[reading.read_id]
        self._ended.append(Ended(reading.read_id, result, reason))

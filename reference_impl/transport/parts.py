"""What one rank reads: its words of each block, from those ranks of a peer that hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reference_impl.transport.agent import Get, NixlAgent, agent_name
from reference_impl.transport.base import PeerRefused, RankAddress
from reference_impl.transport.plan import BlockList, Piece, descriptors, pieces


@dataclass
class _Peer:
    addresses: list[RankAddress]
    pieces: list[Piece]
    reached: list[int]
    refused: str = ""


@dataclass
class PartRead:
    """One rank's part of a read: one list of descriptors for each rank of the peer that it needs."""

    done: Callable[[str], None]
    gets: list[Get]
    open: int
    error: str = ""

    def one_ended(self, error: str) -> None:
        """Note the end of one list; the part ends with the last, and with the first error."""
        self.open -= 1
        self.error = self.error or error
        if not self.open:
            self.done(self.error)

    def stop(self) -> None:
        """Start no further part of it."""
        for get in self.gets:
            get.stopped = True


class Parts:
    """The peers and reads of rank `rank` of `ranks`, through its agent."""

    def __init__(self, agent: NixlAgent, rank: int, ranks: int) -> None:
        self._agent, self._rank, self._ranks = agent, rank, ranks
        self._kv_address = 0
        self._peers: dict[str, _Peer] = {}

    def offer(self, kv_address: int) -> None:
        """Say where our pool is mapped."""
        self._kv_address = kv_address

    def add(self, engine_id: str, addresses: list[RankAddress]) -> str:
        """Know the ranks of a peer that we read from; return why they cannot be used, or "". Nothing if they are.

        An incarnation's addresses never change: others under a known id are somebody else's, and change nothing. The
        same ones are tried anew if they could not be used, or the peer was lost.
        """
        known = self._peers.get(engine_id)
        if known is not None and known.addresses != addresses:
            return f"{engine_id} is known by other addresses, and an engine's never change"
        if self.usable(engine_id, addresses):
            return ""
        self.remove(engine_id)
        ours = [piece for piece in pieces(self._ranks, len(addresses)) if piece.local_rank == self._rank]
        reached = {piece.remote_rank for piece in ours} | ({0} if self._rank == 0 else set())  # heads send messages
        peer = self._peers[engine_id] = _Peer(addresses, ours, sorted(reached))
        try:
            for rank in peer.reached:
                self._agent.load(agent_name(engine_id, rank), addresses[rank].metadata)
        except PeerRefused as reason:
            peer.refused = str(reason)
            self._forget(engine_id, peer)
        return peer.refused

    def knows(self, engine_id: str) -> bool:
        """Whether a peer is known, usable or not."""
        return engine_id in self._peers

    def usable(self, engine_id: str, addresses: list[RankAddress]) -> bool:
        """Whether a peer is known by these addresses, and was not lost."""
        peer = self._peers.get(engine_id)
        if peer is None or peer.refused or peer.addresses != addresses:
            return False
        return not any(self._agent.lost(agent_name(engine_id, rank)) for rank in peer.reached)

    def remove(self, engine_id: str) -> None:
        """Forget a peer; what is in flight lands, and no more is started."""
        peer = self._peers.pop(engine_id, None)
        if peer is not None:
            self._forget(engine_id, peer)

    def addresses(self, engine_id: str) -> list[RankAddress]:
        """Return a peer's addresses. Raises `PeerRefused` for one that cannot be used."""
        peer = self._peers.get(engine_id)
        if peer is None:
            raise PeerRefused(f"{engine_id} is no peer of ours")
        if peer.refused:
            raise PeerRefused(peer.refused)
        return peer.addresses

    def read(self, engine_id: str, blocks: BlockList, done: Callable[[str], None]) -> PartRead:
        """Read our words of `blocks` from a usable peer; `done` is called with "" or what went wrong."""
        peer = self._peers[engine_id]
        part = PartRead(done, [], len(peer.pieces))
        for piece in peer.pieces:
            remote, local = descriptors(blocks, piece, peer.addresses[piece.remote_rank].kv_address, self._kv_address)
            name = agent_name(engine_id, piece.remote_rank)
            part.gets.append(self._agent.start(name, remote, local, part.one_ended))
        return part

    def _forget(self, engine_id: str, peer: _Peer) -> None:
        for rank in peer.reached:
            self._agent.forget(agent_name(engine_id, rank))

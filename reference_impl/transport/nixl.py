"""The transport over NIXL: notifications between head ranks, one-sided reads between every pair of ranks.

Only `receive` and `poll` make progress, also for what peers ask of us: call both every few milliseconds, idle or not.
A read takes three steps: the blocks' generations, the data on every rank, the generations again. A block that was given
to somebody else in between has another generation, and the read is torn.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reference_impl.content import BLOCK_WORDS
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_MS, s_to_ns
from reference_impl.transport.agent import Get, NixlAgent, Scratch, agent_name
from reference_impl.transport.base import RANKS, BlockNumbers, Ended, PeerRefused, RankAddress, ReadResult
from reference_impl.transport.channel import (
    AddPeer,
    Cancel,
    Channel,
    ChannelBroken,
    PartEnded,
    Read,
    Ready,
    RemovePeer,
    Start,
    ToParent,
    ToRank,
)
from reference_impl.transport.parts import PartRead, Parts
from reference_impl.transport.plan import WORD_BYTES, BlockList, Windows, block_list, rows, windows

RANKS_START_S: Final = 30.0
RANK_END_S: Final = 5.0


class RankProcess:
    """The process of rank `rank`, seen from its parent."""

    def __init__(self, engine_id: str, rank: int, ranks: int) -> None:
        ours, theirs = socket.socketpair()
        self.rank = rank
        self.channel: Channel[ToParent] = Channel(ours, ToParent)
        try:
            command = [sys.executable, "-m", "reference_impl.transport.rank", engine_id, str(rank), str(ranks)]
            command += [str(os.getpid()), str(theirs.fileno())]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        finally:
            theirs.close()

    def end(self) -> None:
        """End the process."""
        self.channel.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(RANK_END_S)


class Agents:
    """What a transport needs and can have before memory is mapped: the head's agent and the other ranks' processes.

    Takes half a second (UCX's start), so that a parked engine has it behind it. Raises ImportError without NIXL,
    RuntimeError, ValueError for ranks that do not divide a block.
    """

    def __init__(self, engine_id: str, ranks: int = 1) -> None:
        if ranks not in RANKS:
            raise ValueError(f"ranks must be one of {RANKS}, got {ranks}")
        self.engine_id = engine_id
        self.ranks = ranks
        self.others = [RankProcess(engine_id, rank, ranks) for rank in range(1, ranks)]
        try:
            self.head = NixlAgent(agent_name(engine_id, 0))
        except BaseException:
            self.end_ranks()
            raise

    def end_ranks(self) -> None:
        """End the other ranks' processes."""
        for other in self.others:
            other.end()

    def close(self) -> None:
        """End everything."""
        self.end_ranks()
        self.head.close()


@dataclass
class _Reading:
    """A read between its start and its end."""

    read_id: int
    engine_id: str
    blocks: BlockList
    windows: Windows
    scratch: Scratch
    generations: Get | None = None
    before: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    part: PartRead | None = None
    waiting: set[int] = field(default_factory=set)
    """Ranks whose words have not ended."""
    error: str = ""
    cancelled: bool = False


class NixlTransport:
    """`Transport` over NIXL. `kv` is [blocks, 512] words and `generations` [blocks], both staying where they are.

    With several ranks `kv_fd` is the pool's shared memory, from its first block on; the caller keeps it. `agents` may
    be made beforehand. Making one blocks until every rank's process is ready (`RANKS_START_S` at most) and raises
    RuntimeError if one does not get so far; ImportError without NIXL.

    `broken` says why, once a rank's process has ended: then every read fails, and the engine had better end too.
    `strangers` counts notifications from agents that are no peers.
    """

    def __init__(
        self,
        engine_id: str,
        kv: NDArray[np.uint64],
        generations: NDArray[np.uint64],
        ranks: int = 1,
        kv_fd: int = -1,
        agents: Agents | None = None,
    ) -> None:
        if kv.ndim != 2 or kv.shape[1] != BLOCK_WORDS or not kv.flags.c_contiguous:
            raise ValueError(f"kv must be contiguous, of shape [blocks, {BLOCK_WORDS}], got {kv.shape}")
        if generations.shape != kv.shape[:1] or not generations.flags.c_contiguous:
            raise ValueError(f"generations must be contiguous, of shape [{kv.shape[0]}], got {generations.shape}")
        if ranks > 1 and kv_fd < 0:
            raise ValueError(f"{ranks} ranks need the descriptor of the pool's shared memory")
        self.broken = ""
        self.strangers = 0
        self._kv, self._generations = kv, generations  # kept alive
        self._blocks = len(kv)
        self._agents = agents or Agents(engine_id, ranks)
        if (self._agents.engine_id, self._agents.ranks) != (engine_id, ranks):
            raise ValueError(f"agents are of {self._agents.engine_id} with {self._agents.ranks} ranks")
        self._head = self._agents.head
        self._parts = Parts(self._head, 0, ranks)
        self._peer_of: dict[str, str] = {}
        self._reads: dict[int, _Reading] = {}
        self._ended: list[Ended] = []
        self._closed = False
        try:
            self._addresses = [self._offer(), *self._start_ranks(kv_fd)]
        except BaseException:
            self._agents.close()
            raise

    def addresses(self) -> list[RankAddress]:
        """Return what a peer needs to reach each of our ranks, head rank first."""
        return self._addresses

    def add_peer(self, engine_id: str, addresses: list[RankAddress]) -> None:
        """Make a peer reachable; about 12 ms, nothing if it is. Raises `PeerRefused` if its addresses cannot be used.

        Other addresses than those it is known by are refused as well, and change nothing (see `Parts.add`). Our other
        ranks try theirs meanwhile: what they find wrong fails the reads.
        """
        if len(addresses) not in RANKS or len({address.blocks for address in addresses}) != 1:
            raise PeerRefused(f"{engine_id} has {len(addresses)} ranks; {RANKS} can be reached, all of one pool")
        if self.broken:
            raise PeerRefused(self.broken)
        if self._parts.usable(engine_id, addresses):
            return
        known = self._parts.knows(engine_id)
        refused = self._parts.add(engine_id, addresses)
        if refused:
            if not known:
                self._parts.remove(engine_id)
            raise PeerRefused(refused)
        self._peer_of[agent_name(engine_id, 0)] = engine_id
        self._tell(AddPeer(engine_id, addresses))

    def remove_peer(self, engine_id: str) -> None:
        """Forget a peer; its running reads fail, each once nothing of it can land. Harmless if it is unknown."""
        if self._peer_of.pop(agent_name(engine_id, 0), None) is None:
            return
        for reading in self._reads.values():
            if reading.engine_id == engine_id:
                reading.error = reading.error or "the peer was removed"
        self._parts.remove(engine_id)
        self._tell(RemovePeer(engine_id))

    def send(self, engine_id: str, message: bytes) -> bool:
        """Send to a peer's head; False if it demonstrably did not leave."""
        return not self._closed and self._head.send(agent_name(engine_id, 0), message)

    def receive(self) -> list[tuple[str, bytes]]:
        """Return what peers have sent. Also lets connections progress."""
        if self._closed:
            return []
        found = []
        for sender, message in self._head.receive():
            engine_id = self._peer_of.get(sender)
            if engine_id is None:
                self.strangers += 1
            else:
                found.append((engine_id, message))
        return found

    def read(self, read_id: int, engine_id: str, remote_blocks: BlockNumbers, local_blocks: BlockNumbers) -> None:
        """Start reading a peer's blocks into ours; `poll` does the work and tells the end."""
        if read_id in self._reads:
            raise ValueError(f"read {read_id} is running already")
        try:
            if self.broken or self._closed:
                raise PeerRefused(self.broken or "the transport is closed")
            peer = self._parts.addresses(engine_id)
            blocks = block_list(remote_blocks, local_blocks, peer[0].blocks, self._blocks)
            wanted = windows(blocks)
            scratch = self._head.scratch(wanted.words)
        except (PeerRefused, ValueError, RuntimeError) as reason:
            self._ended.append(Ended(read_id, ReadResult.FAILED, str(reason)))
            return
        reading = self._reads[read_id] = _Reading(read_id, engine_id, blocks, wanted, scratch)
        self._read_generations(reading, peer[0].generations_address)

    def cancel(self, read_id: int) -> None:
        """Start no further part of a read. NIXL cannot recall what is in flight: the read ends when that has landed."""
        reading = self._reads.get(read_id)
        if reading is None:
            return
        reading.cancelled = True
        reading.error = reading.error or "cancelled"
        if reading.part is not None:
            reading.part.stop()
        for other in self._agents.others:
            if other.rank in reading.waiting:
                self._tell_one(other, Cancel(read_id))

    def poll(self) -> list[Ended]:
        """Take every read further, for 2 ms or so, and return those that have ended."""
        if not self._closed:
            for other in self._agents.others:
                self._hear(other)
            self._head.advance()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End everything, running reads too, without telling. Closing twice is harmless."""
        if not self._closed:
            self._closed = True
            self._agents.close()

    def _offer(self) -> RankAddress:
        self._head.register(self._kv)
        self._head.register(self._generations)
        self._parts.offer(self._kv.ctypes.data)
        return RankAddress(self._head.metadata(), self._kv.ctypes.data, self._generations.ctypes.data, self._blocks)

    def _start_ranks(self, kv_fd: int) -> list[RankAddress]:
        """Hand the pool to the other ranks and wait until they offer it."""
        deadline_ns = now_ns() + s_to_ns(RANKS_START_S)
        ready: list[RankAddress] = []
        for other in self._agents.others:
            self._tell_one(other, Start(self._blocks), [kv_fd])
        for other in self._agents.others:
            while len(ready) < other.rank:
                left_ms = (deadline_ns - now_ns()) // NS_PER_MS
                poller = select.poll()
                poller.register(other.channel.fileno(), select.POLLIN)
                if left_ms <= 0 or not poller.poll(left_ms):
                    raise RuntimeError(f"rank {other.rank} was not ready within {RANKS_START_S:g} s")
                try:
                    messages, _ = other.channel.receive()
                except ChannelBroken as reason:
                    raise RuntimeError(f"rank {other.rank} did not start: {reason}") from None
                ready += [message.address for message in messages if isinstance(message, Ready)]
        return ready

    def _read_generations(self, reading: _Reading, base: int) -> None:
        """Read the blocks' generations into the read's scratch, by a transfer that is kept and posted again later."""
        found = reading.windows
        sizes = found.counts * WORD_BYTES
        remote = rows(base, found.firsts, WORD_BYTES, sizes)
        local = rows(reading.scratch.address, np.cumsum(found.counts) - found.counts, WORD_BYTES, sizes)
        done = partial(self._read_data, reading)
        reading.generations = self._head.start(agent_name(reading.engine_id, 0), remote, local, done, keep=True)

    def _read_data(self, reading: _Reading, error: str) -> None:
        """The generations are here: let every rank read its words."""
        reading.error = reading.error or error or self.broken
        if reading.error:
            self._end(reading)
            return
        reading.before = reading.scratch.words[: reading.windows.words].copy()
        reading.waiting = set(range(self._agents.ranks))
        blocks = reading.blocks
        if self._agents.others:
            asked = Read(reading.read_id, reading.engine_id, blocks.remote.tolist(), blocks.local.tolist())
            self._tell(asked)
        reading.part = self._parts.read(reading.engine_id, blocks, partial(self._part_ended, reading, 0))

    def _part_ended(self, reading: _Reading, rank: int, error: str) -> None:
        """A rank's words have ended; after the last, read the generations again."""
        reading.waiting.discard(rank)
        if error:
            reading.error = reading.error or (f"rank {rank}: {error}" if self._agents.ranks > 1 else error)
        if reading.waiting:
            return
        if reading.error or reading.generations is None:
            self._end(reading)
        else:
            self._head.again(reading.generations, partial(self._compare, reading))

    def _compare(self, reading: _Reading, error: str) -> None:
        """Both readings of the generations are here."""
        reading.error = reading.error or error
        after = reading.scratch.words[: reading.windows.words]
        torn = ""
        if not reading.error and not np.array_equal(after, reading.before):
            places = reading.windows.places(reading.blocks.remote)
            changed = reading.blocks.remote[after[places] != reading.before[places]]
            if len(changed):
                torn = f"{len(changed)} blocks were given away while they were read, the first is {changed[0]}"
        self._end(reading, torn)

    def _end(self, reading: _Reading, torn: str = "") -> None:
        if reading.generations is not None:
            self._head.leave(reading.generations)
        reading.scratch.in_use = False
        self._reads.pop(reading.read_id, None)
        if reading.error:
            self._ended.append(Ended(reading.read_id, ReadResult.FAILED, reading.error))
        else:
            self._ended.append(Ended(reading.read_id, ReadResult.TORN if torn else ReadResult.DONE, torn))

    def _tell(self, message: ToRank) -> None:
        for other in self._agents.others:
            self._tell_one(other, message)

    def _tell_one(self, other: RankProcess, message: ToRank, descriptors: list[int] | None = None) -> None:
        try:
            other.channel.send(message, descriptors)
        except ChannelBroken as reason:
            self._break(other, reason)

    def _hear(self, other: RankProcess) -> None:
        """Take what a rank has to say."""
        if self.broken:
            return
        try:
            other.channel.flush()
            messages, _ = other.channel.receive()
        except ChannelBroken as reason:
            self._break(other, reason)
            return
        for message in messages:
            if isinstance(message, PartEnded) and (reading := self._reads.get(message.read_id)) is not None:
                self._part_ended(reading, other.rank, message.error)

    def _break(self, other: RankProcess, reason: ChannelBroken) -> None:
        """A rank is gone: end them all, so that nothing of theirs lands any more, and fail what they were reading."""
        self.broken = self.broken or f"rank {other.rank} (process {other.process.pid}) is gone: {reason}"
        self._agents.end_ranks()
        for reading in list(self._reads.values()):
            reading.error = reading.error or self.broken
            for rank in list(reading.waiting - {0}):
                self._part_ended(reading, rank, self.broken)

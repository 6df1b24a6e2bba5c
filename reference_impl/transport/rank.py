"""A rank's process: its own NIXL agent over the pool that all ranks of an engine share.

    python -m reference_impl.transport.rank ENGINE_ID RANK RANKS PARENT_PID SOCKET_FD

Ends with its parent, and when the socket pair closes.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import sys
from functools import partial
from typing import Final

import numpy as np

from reference_impl.content import BLOCK_BYTES
from reference_impl.processes import die_with_parent
from reference_impl.transport.agent import NixlAgent, agent_name
from reference_impl.transport.base import PeerRefused, RankAddress
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
    ToRank,
)
from reference_impl.transport.parts import PartRead, Parts
from reference_impl.transport.plan import block_list

IDLE_MS: Final = 5
"""How often an idle rank lets its connections progress."""
WAITING_MS: Final = 1
"""How often one looks for the end of reads in flight."""


class Rank:
    """The process's state: one agent, one pool, the peers that the parent named."""

    def __init__(self, engine_id: str, rank: int, ranks: int, channel: Channel[ToRank]) -> None:
        self._rank = rank
        self._agent = NixlAgent(agent_name(engine_id, rank))
        self._parts = Parts(self._agent, rank, ranks)
        self._channel = channel
        self._blocks = 0
        self._kv = np.zeros(0, dtype=np.uint64)
        self._reads: dict[int, PartRead] = {}

    def run(self) -> None:
        """Work until the parent closes its end (`ChannelBroken`)."""
        poller = select.poll()
        moved = False
        while True:
            poller.register(self._channel.fileno(), select.POLLIN | (select.POLLOUT if self._channel.sending else 0))
            poller.poll(0 if moved else IDLE_MS if self._agent.idle else WAITING_MS)
            self._channel.flush()
            messages, descriptors = self._channel.receive()
            for message in messages:
                self._take(message, descriptors)
            self._agent.receive()
            moved = self._agent.advance()

    def _take(self, message: ToRank, descriptors: list[int]) -> None:
        match message:
            case Start(blocks):
                self._start(blocks, descriptors.pop())
            case AddPeer(engine_id, addresses):
                self._parts.add(engine_id, addresses)
            case RemovePeer(engine_id):
                self._parts.remove(engine_id)
            case Read():
                self._read(message)
            case Cancel(read_id) if read_id in self._reads:
                self._reads[read_id].stop()

    def _read(self, asked: Read) -> None:
        try:
            there = self._parts.addresses(asked.engine_id)[0].blocks
            blocks = block_list(asked.remote_blocks, asked.local_blocks, there, self._blocks)
        except (PeerRefused, ValueError) as error:
            self._channel.send(PartEnded(asked.read_id, str(error)))
        else:
            done = partial(self._ended, asked.read_id)
            self._reads[asked.read_id] = self._parts.read(asked.engine_id, blocks, done)

    def _ended(self, read_id: int, error: str) -> None:
        self._reads.pop(read_id, None)
        self._channel.send(PartEnded(read_id, error))

    def _start(self, blocks: int, descriptor: int) -> None:
        pool = mmap.mmap(descriptor, blocks * BLOCK_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(descriptor)
        kv = self._kv = np.frombuffer(pool, dtype=np.uint64)  # kept, and with it the mapping
        self._agent.register(kv)
        self._blocks = blocks
        self._parts.offer(kv.ctypes.data)
        self._channel.send(Ready(RankAddress(self._agent.metadata(), kv.ctypes.data, 0, blocks)))


def main() -> None:
    """Be a rank until the parent ends."""
    engine_id, rank, ranks, parent, descriptor = sys.argv[1:]
    die_with_parent(int(parent))
    channel: Channel[ToRank] = Channel(socket.socket(fileno=int(descriptor)), ToRank)
    try:
        Rank(engine_id, int(rank), int(ranks), channel).run()
    except ChannelBroken as reason:
        raise SystemExit(f"rank {rank} of {engine_id} ends: its parent: {reason}") from None


if __name__ == "__main__":
    main()

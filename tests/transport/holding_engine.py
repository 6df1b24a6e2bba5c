"""An engine that only holds blocks: a process for the tests of the NIXL transport.

    python -m tests.transport.holding_engine ENGINE_ID BLOCKS RANKS

Prints its addresses (base64 of msgpack) as one line, then obeys lines on its stdin: `raise BLOCK` gives the block
another generation and other words, `peer ENGINE_ID ADDRESSES`, `send ENGINE_ID TEXT`. Prints what it receives.
"""

from __future__ import annotations

import base64
import hashlib
import mmap
import os
import select
import sys

import msgspec
import numpy as np
from numpy.typing import NDArray

from reference_impl.content import BLOCK_BYTES, BLOCK_WORDS
from reference_impl.transport.base import RankAddress
from reference_impl.transport.nixl import NixlTransport

POLL_MS = 1


def shared_pool(blocks: int) -> tuple[int, NDArray[np.uint64]]:
    """Return a memfd and the pool mapped from it, all zero."""
    descriptor = os.memfd_create("kv")
    os.ftruncate(descriptor, blocks * BLOCK_BYTES)
    pool = mmap.mmap(descriptor, blocks * BLOCK_BYTES)
    return descriptor, np.frombuffer(pool, dtype=np.uint64).reshape(blocks, BLOCK_WORDS)


def words_held(blocks: int) -> NDArray[np.uint64]:
    """Return what a holding engine's pool contains: every word another, none of them zero."""
    return np.arange(1, blocks * BLOCK_WORDS + 1, dtype=np.uint64).reshape(blocks, BLOCK_WORDS)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def packed(addresses: list[RankAddress]) -> str:
    return base64.b64encode(msgspec.msgpack.encode(addresses)).decode()


def unpacked(text: str) -> list[RankAddress]:
    return msgspec.msgpack.decode(base64.b64decode(text), type=list[RankAddress])


def main() -> None:
    engine_id, blocks, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    descriptor, kv = shared_pool(blocks)
    kv[:] = words_held(blocks)
    generations = np.ones(blocks, dtype=np.uint64)
    transport = NixlTransport(engine_id, kv, generations, ranks, descriptor)
    say(packed(transport.addresses()))
    poller = select.poll()
    poller.register(sys.stdin.fileno(), select.POLLIN)
    rest = b""
    while True:
        if poller.poll(POLL_MS):
            data = os.read(sys.stdin.fileno(), 65536)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                obey(line.decode().split(" "), transport, kv, generations)
        transport.poll()
        for sender, message in transport.receive():
            say("received", sender, len(message), hashlib.sha256(message).hexdigest())


def obey(words: list[str], transport: NixlTransport, kv: NDArray[np.uint64], generations: NDArray[np.uint64]) -> None:
    match words:
        case ["raise", block]:
            generations[int(block)] += np.uint64(1)
            kv[int(block)] = 0
            say("raised", block)
        case ["peer", engine_id, addresses]:
            transport.add_peer(engine_id, unpacked(addresses))
            say("added", engine_id)
        case ["send", engine_id, text]:
            say("sent", transport.send(engine_id, text.encode()))


if __name__ == "__main__":
    main()

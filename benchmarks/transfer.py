"""What NIXL moves, and what the transport adds: a 32k request's KV from one process to another.

    python -m benchmarks.transfer --out FILE [--quick]

2,000 blocks of 4 KiB, read through `NixlTransport` (generations before and after included), with the block lists that
engines give: of fresh pools (one run), and of pools of 65,536 blocks through which requests of 2,060 blocks have come
and gone, 31 at a time (`BlockPool` itself hands them out); and, as the worst there is, scattered. Beside it two bare
NIXL agents that move the same bytes as one buffer. Every kind goes through the pools at twenty places in turn, each at
another one at a time, so that no cache holds for one what it does not for the others. All in the same two processes,
one after the other in each round, so that the machine's mood is shared. Prints a table and writes {name: {unit, median,
min, max, p99, n}} as JSON. Target: at least 70 % of bare, by fresh pools and by used ones.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import importlib.util
import random
import select
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Figure, Figures, figure, show, write
from reference_impl.content import BLOCK_BYTES, BLOCK_WORDS
from reference_impl.memory_service.backend import Access
from reference_impl.memory_service.host import HostBackend
from reference_impl.realclock import now_ns
from reference_impl.rules.blocks import BlockPool
from reference_impl.rules.clock import s_to_ns
from reference_impl.transport.agent import NixlAgent
from reference_impl.transport.base import BlockNumbers, RankAddress, ReadResult
from reference_impl.transport.nixl import NixlTransport
from reference_impl.transport.plan import block_list

BLOCKS: Final = 2000
POOL_BLOCKS: Final = 65_536
"""As in the profiles `default` and `pd`."""
SIZE_BYTES: Final = BLOCKS * BLOCK_BYTES
REQUEST_BLOCKS: Final = 2060
"""Of 32,000 tokens in and 960 out."""
REQUESTS: Final = 31
"""So many fit into a pool."""
USED_REQUESTS: Final = 300
"""Requests that have come and gone in a used pool: every block has been handed out nine times."""
PLACES: Final = range(0, 20 * REQUEST_BLOCKS, REQUEST_BLOCKS)
"""First blocks of as many requests of fresh pools; as many requests of used ones are read in turn."""
WARM_UP: Final = 5
LIMIT_S: Final = 30.0
POLL_MS: Final = 1


class Offer(msgspec.Struct, frozen=True):
    """What the holding process tells the reading one."""

    addresses: list[RankAddress]
    bare_metadata: bytes
    bare_address: int


def pool(fill: bool) -> NDArray[np.uint64]:
    """Return a pool as an engine has it: shared memory, all pages there, in huge pages where the kernel has them."""
    backend, size_bytes = HostBackend(), POOL_BLOCKS * BLOCK_BYTES
    memory, place = backend.create(size_bytes, "kv"), backend.reserve(size_bytes)
    backend.map(place.address, memory, Access.WRITE, populate=True)
    raw = (ctypes.c_ubyte * size_bytes).from_address(place.address)
    kv = np.frombuffer(memoryview(raw), dtype=np.uint64).reshape(POOL_BLOCKS, BLOCK_WORDS)
    kv[:] = np.arange(1, kv.size + 1, dtype=np.uint64).reshape(kv.shape) if fill else 0
    return kv


def hold() -> None:
    """Be the holding process: offer, and answer until stdin closes."""
    kv = pool(fill=True)
    transport = NixlTransport("holder", kv, np.ones(POOL_BLOCKS, dtype=np.uint64))
    bare = NixlAgent("bare-holder")
    bare.register(kv)
    offer = Offer(transport.addresses(), bare.metadata(), kv.ctypes.data)
    print(base64.b64encode(msgspec.msgpack.encode(offer)).decode(), flush=True)
    poller = select.poll()
    poller.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while not poller.poll(POLL_MS):
        transport.receive()
        bare.receive()


@contextmanager
def holding() -> Iterator[Offer]:
    """Run the holding process."""
    command = [sys.executable, "-m", "benchmarks.transfer", "--hold"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield msgspec.msgpack.decode(base64.b64decode(process.stdout.readline()), type=Offer)
        process.kill()


class Lists(NamedTuple):
    """Remote and local blocks of a read."""

    remote: list[int]
    local: list[int]


def used_pool(rng: random.Random) -> list[list[int]]:
    """Return the blocks of the last requests of a pool in steady state: full blocks indexed, released as engines do."""
    pool, running, handed_out, digest = BlockPool(POOL_BLOCKS), deque[list[int]](), [], 0
    for _ in range(USED_REQUESTS + len(PLACES)):
        if len(running) == REQUESTS:
            at = rng.randrange(REQUESTS // 4)  # they end about in the order in which they came
            pool.release(reversed(running[at]))
            del running[at]
        blocks = pool.allocate(REQUEST_BLOCKS)
        for block in blocks[:-1]:
            digest += 1
            pool.seal(block, digest.to_bytes(8, "big"))
        running.append(blocks)
        handed_out.append(blocks)
    return handed_out[-len(PLACES) :]


def block_lists() -> dict[str, list[Lists]]:
    """Return the reads of each kind, to be taken in turn."""
    rng = random.Random(1)
    used = [Lists(p[:BLOCKS], d[:BLOCKS]) for p, d in zip(used_pool(rng), used_pool(rng), strict=True)]
    every = range(POOL_BLOCKS)
    return {
        "fresh_pool": [Lists([*range(at, at + BLOCKS)], [*range(at, at + BLOCKS)]) for at in PLACES],
        "used_pool": used,
        "scattered": [Lists(rng.sample(every, BLOCKS), rng.sample(every, BLOCKS)) for _ in PLACES],
    }


def runs(lists: Lists) -> int:
    """Return how many descriptors a read takes."""
    return len(block_list(lists.remote, lists.local, POOL_BLOCKS, POOL_BLOCKS).starts)


class Reading:
    """The reading side: a transport and a bare agent over the same pool."""

    def __init__(self, offer: Offer) -> None:
        self.kv = pool(fill=False)
        self.transport = NixlTransport("reader", self.kv, np.ones(POOL_BLOCKS, dtype=np.uint64))
        self.transport.add_peer("holder", offer.addresses)
        agent = NixlAgent("bare-reader")
        agent.register(self.kv)
        agent.load("bare-holder", offer.bare_metadata)
        self.bare: Any = agent._nixl
        self.offer = offer
        self._count = 0

    def through_transport(self, remote: BlockNumbers, local: BlockNumbers) -> None:
        """Read blocks as an engine does. Raises SystemExit if that fails."""
        self._count += 1
        deadline_ns = now_ns() + s_to_ns(LIMIT_S)
        self.transport.read(self._count, "holder", remote, local)
        while not (ended := self.transport.poll()):
            if now_ns() > deadline_ns:
                raise SystemExit("a read did not end")
        if ended[0].result is not ReadResult.DONE:
            raise SystemExit(f"a read ended as {ended[0]}")

    def through_bare_agent(self, first_block: int) -> None:
        """Read the same bytes as one buffer, from that block on. Raises SystemExit if that fails."""
        offset = first_block * BLOCK_BYTES
        handle = self.bare.initialize_xfer(
            "READ",
            self.bare.get_xfer_descs([(self.kv.ctypes.data + offset, SIZE_BYTES, 0)], "DRAM"),
            self.bare.get_xfer_descs([(self.offer.bare_address + offset, SIZE_BYTES, 0)], "DRAM"),
            "bare-holder",
        )
        deadline_ns = now_ns() + s_to_ns(LIMIT_S)
        state = self.bare.transfer(handle)
        while state == "PROC" and now_ns() < deadline_ns:
            state = self.bare.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit(f"a bare transfer ended as {state}")
        handle.release()


def timed(act: Callable[[], None]) -> float:
    """Return how many ms something takes."""
    start_ns = now_ns()
    act()
    return (now_ns() - start_ns) / 1e6


def measure(quick: bool) -> Figures:
    """Measure everything: rounds of one bare transfer and one read of each kind."""
    kinds = block_lists()
    arrays = {kind: [[np.array(side) for side in one] for one in found] for kind, found in kinds.items()}
    with holding() as offer:
        start_ns = now_ns()
        reading = Reading(offer)
        made_ms = (now_ns() - start_ns) / 1e6
        first = timed(lambda: reading.through_transport(*kinds["fresh_pool"][0]))
        reading.through_bare_agent(0)
        taken: dict[str, list[float]] = {"bare": []}

        def take(name: str, act: Callable[[], None]) -> None:
            taken.setdefault(name, []).append(timed(act))

        for number in range(WARM_UP + (20 if quick else 300)):
            if number == WARM_UP:
                taken.clear()
            take("bare", partial(reading.through_bare_agent, PLACES[number % len(PLACES)]))
            for step, (kind, found) in enumerate(kinds.items()):
                if kind == "scattered" and number % 10:
                    continue  # it takes as long as all others together
                at = number + 3 + 6 * step
                take(kind, partial(reading.through_transport, *found[at % len(found)]))
                take(f"{kind}_as_arrays", partial(reading.through_transport, *arrays[kind][(at + 3) % len(found)]))
        reading.transport.close()
    return {
        "two_agents_and_transport_made": figure("ms", [made_ms]),
        "first_read": figure("ms", [first]),
        **{f"descriptors.{kind}": figure("", [float(runs(one)) for one in found]) for kind, found in kinds.items()},
        **{f"read_8MB.{name}": figure("ms", times) for name, times in taken.items()},
        **{
            f"bandwidth.{name}": figure("GB/s", [SIZE_BYTES / ms / 1e6 for ms in times])
            for name, times in taken.items()
        },
        **{f"share_of_bare_bandwidth.{name}": shares(taken["bare"], taken[name]) for name in taken if name != "bare"},
    }


def shares(bare: list[float], ours: list[float]) -> Figure:
    """Return what bare transfers take in percent of ours: medians of ten rounds that followed each other.

    A single pair says little on a machine that others use as well.
    """
    groups = max(1, len(ours) // 10)
    each, each_bare = len(ours) // groups, len(bare) // groups
    return figure(
        "%",
        [
            100
            * statistics.median(bare[each_bare * n : each_bare * (n + 1)])
            / statistics.median(ours[each * n : each * (n + 1)])
            for n in range(groups)
        ],
    )


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that it runs")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        hold()
        return 0
    if importlib.util.find_spec("nixl") is None:
        print("skipped: it needs the package nixl", file=sys.stderr)
        return 0
    found = measure(options.quick)
    show(found)
    if options.out:
        write(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What NIXL moves, and what the transport adds: a 32k request's KV from one process to another.

    python -m benchmarks.transfer --out FILE [--quick]

2,000 blocks of 4 KiB, read through `NixlTransport` (generations before and after included) as one run of blocks, in
runs as a pool under load gives them, and scattered; against two bare NIXL agents that move the same bytes as one
buffer. All in the same two processes, one after the other in each round, so that the machine's mood is shared.
Prints a table and writes {name: {unit, median, min, max, p99, n}} as JSON. Target: one run, as a fresh pool gives it,
reaches 70 % of bare.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Figures, figure, show, write
from reference_impl.content import BLOCK_BYTES, BLOCK_WORDS
from reference_impl.memory_service.backend import Access
from reference_impl.memory_service.host import HostBackend
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import s_to_ns
from reference_impl.transport.agent import NixlAgent
from reference_impl.transport.base import RankAddress, ReadResult
from reference_impl.transport.nixl import NixlTransport

BLOCKS: Final = 2000
POOL_BLOCKS: Final = 8192
SIZE_BYTES: Final = BLOCKS * BLOCK_BYTES
RUN_BLOCKS: Final = 125
"""Blocks in a run of the pool under load: a 2,000-token request's."""
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


def block_lists(kind: str, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Return the remote and local blocks of a request."""
    if kind == "one run":
        return [*range(BLOCKS)], [*range(100, 100 + BLOCKS)]
    if kind == "scattered":
        return rng.permutation(POOL_BLOCKS)[:BLOCKS].tolist(), rng.permutation(POOL_BLOCKS)[:BLOCKS].tolist()
    remote, local = (rng.permutation(POOL_BLOCKS // RUN_BLOCKS)[: BLOCKS // RUN_BLOCKS] for _ in range(2))
    return [block for at in (remote * RUN_BLOCKS).tolist() for block in range(at, at + RUN_BLOCKS)], [
        block for at in (local * RUN_BLOCKS).tolist() for block in range(at, at + RUN_BLOCKS)
    ]


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

    def through_transport(self, remote: list[int], local: list[int]) -> None:
        """Read blocks as an engine does. Raises SystemExit if that fails."""
        self._count += 1
        deadline_ns = now_ns() + s_to_ns(LIMIT_S)
        self.transport.read(self._count, "holder", remote, local)
        while not (ended := self.transport.poll()):
            if now_ns() > deadline_ns:
                raise SystemExit("a read did not end")
        if ended[0].result is not ReadResult.DONE:
            raise SystemExit(f"a read ended as {ended[0]}")

    def through_bare_agent(self) -> None:
        """Read the same bytes as one buffer. Raises SystemExit if that fails."""
        handle = self.bare.initialize_xfer(
            "READ",
            self.bare.get_xfer_descs([(self.kv.ctypes.data, SIZE_BYTES, 0)], "DRAM"),
            self.bare.get_xfer_descs([(self.offer.bare_address, SIZE_BYTES, 0)], "DRAM"),
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
    rng = np.random.Generator(np.random.PCG64(1))
    kinds = {kind: block_lists(kind, rng) for kind in ("one run", f"runs of {RUN_BLOCKS}", "scattered")}
    with holding() as offer:
        start_ns = now_ns()
        reading = Reading(offer)
        made_ms = (now_ns() - start_ns) / 1e6
        first = timed(lambda: reading.through_transport(*kinds["one run"]))
        reading.through_bare_agent()
        taken: dict[str, list[float]] = {name: [] for name in ("bare", *kinds)}
        for _ in range(10 if quick else 200):
            taken["bare"].append(timed(reading.through_bare_agent))
            for kind, (remote, local) in kinds.items():
                taken[kind].append(timed(lambda r=remote, b=local: reading.through_transport(r, b)))  # type: ignore[misc]
        reading.transport.close()
    found = {"two_agents_and_transport_made": figure("ms", [made_ms]), "first_read": figure("ms", [first])}
    for name, times in taken.items():
        found[f"read_8MB.{name}"] = figure("ms", times)
        found[f"bandwidth.{name}"] = figure("GB/s", [SIZE_BYTES / ms / 1e6 for ms in times])
    for kind in kinds:
        ratios = [100 * bare / mine for bare, mine in zip(taken["bare"], taken[kind], strict=True)]
        found[f"share_of_bare_bandwidth.{kind}"] = figure("%", ratios)
    return found


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
    found = measure(options.quick)
    show(found)
    if options.out:
        write(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

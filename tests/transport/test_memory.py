"""The transport in process: links that delay, lose, repeat and reorder, reads that fail and tear, deaths, ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reference_impl.content import BLOCK_WORDS
from reference_impl.transport import plan
from reference_impl.transport.base import Ended, PeerRefused, ReadResult, Transport
from reference_impl.transport.memory import MemoryNetwork, MemoryTransport, ReadPlan
from reference_impl.transport.plan import block_list, descriptors, pieces, windows

BLOCKS = 32
RANK_PAIRS = list(itertools.product((1, 2, 4, 8), repeat=2))


def joined(network: MemoryNetwork, engine_id: str, ranks: int = 1) -> MemoryTransport:
    """An engine whose every word differs from every other engine's."""
    seed = sum(engine_id.encode()) << 32
    kv = np.arange(seed, seed + BLOCKS * BLOCK_WORDS, dtype=np.uint64).reshape(BLOCKS, BLOCK_WORDS)
    return network.join(engine_id, kv, np.ones(BLOCKS, dtype=np.uint64), ranks)


def pair(network: MemoryNetwork, readers: int = 1, holders: int = 1) -> tuple[MemoryTransport, MemoryTransport]:
    """A reader D and a holder P that know each other."""
    reader, holder = joined(network, "D", readers), joined(network, "P", holders)
    reader.add_peer("P", holder.addresses())
    holder.add_peer("D", reader.addresses())
    return reader, holder


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


def test_it_is_a_transport(network: MemoryNetwork) -> None:
    transport: Transport = joined(network, "D")
    assert transport.addresses()


def test_a_message_arrives_when_it_is_delivered(network: MemoryNetwork) -> None:
    reader, holder = pair(network)
    assert reader.send("P", b"hello")
    assert holder.receive() == []
    network.deliver(0)
    assert holder.receive() == [("D", b"hello")]
    assert holder.receive() == []


def test_a_link_delays_loses_repeats_and_reorders(network: MemoryNetwork) -> None:
    plans = {b"late": [30], b"lost": [], b"twice": [10, 20], b"soon": [5]}
    network.set_link("D", "P", lambda _s, _r, message: plans[message])
    reader, holder = pair(network)
    assert all(reader.send("P", message) for message in plans)
    arrived = []
    for now_ns in range(0, 40, 5):
        network.deliver(now_ns)
        arrived += [(now_ns, message) for _, message in holder.receive()]
    assert arrived == [(5, b"soon"), (10, b"twice"), (20, b"twice"), (30, b"late")]
    holder.send("D", b"anything")  # the other direction has its own policy
    network.deliver(40)
    assert reader.receive() == [("P", b"anything")]


def test_chance_comes_from_the_caller() -> None:
    def run(seed: int) -> list[tuple[str, bytes]]:
        rng = random.Random(seed)
        network = MemoryNetwork(lambda _s, _r, _m: [rng.randrange(100) for _ in range(rng.randrange(3))])
        reader, holder = pair(network)
        for number in range(50):
            reader.send("P", b"%d" % number)
        network.deliver(100)
        return holder.receive()

    assert run(1) == run(1) != run(2)


def test_time_goes_forward(network: MemoryNetwork) -> None:
    network.deliver(10)
    with pytest.raises(ValueError, match="from 10 back to 9"):
        network.deliver(9)


def test_messages_of_strangers_are_dropped_and_counted(network: MemoryNetwork) -> None:
    stranger, holder = joined(network, "X"), joined(network, "P")
    stranger.add_peer("P", holder.addresses())
    assert stranger.send("P", b"hello")
    assert not holder.send("X", b"hello")
    network.deliver(0)
    assert (holder.receive(), holder.strangers) == ([], 1)


@pytest.mark.rule("KVC-XFER-001")
@pytest.mark.parametrize(("readers", "holders"), RANK_PAIRS)
def test_every_pair_of_rank_counts_reads_whole_blocks(network: MemoryNetwork, readers: int, holders: int) -> None:
    reader, holder = pair(network, readers, holders)
    remote, local = [5, 6, 7, 20], [1, 2, 9, 0]
    before = reader.kv.copy()
    reader.read(1, "P", remote, local)
    network.deliver(0)
    assert reader.poll() == [Ended(1, ReadResult.DONE)]
    before[local] = holder.kv[remote]
    assert (reader.kv == before).all()


def test_a_read_takes_its_time(network: MemoryNetwork) -> None:
    network.read_policy = lambda _r, _h: ReadPlan(takes_ns=100)
    reader, _ = pair(network)
    reader.read(1, "P", [1], [1])
    network.deliver(99)
    assert reader.poll() == []
    assert network.next_ns() == 100
    network.deliver(100)
    assert reader.poll() == [Ended(1, ReadResult.DONE)]


@pytest.mark.rule("KVC-XFER-002")
def test_a_block_given_away_under_a_read_tears_it(network: MemoryNetwork) -> None:
    network.read_policy = lambda _r, _h: ReadPlan(takes_ns=100)
    reader, holder = pair(network, holders=2)
    reader.read(1, "P", [3, 4], [3, 4])
    reader.read(2, "P", [5], [5])
    network.deliver(50)
    holder.generations[4] += np.uint64(1)
    holder.kv[4] = 0
    network.deliver(100)
    assert [(e.read_id, e.result) for e in reader.poll()] == [(1, ReadResult.TORN), (2, ReadResult.DONE)]
    assert reader.kv[4, 0] != 0  # half of it came before
    assert reader.kv[4, -1] == 0


@pytest.mark.rule("KVC-XFER-002")
@pytest.mark.parametrize("result", [ReadResult.TORN, ReadResult.FAILED])
def test_a_read_ends_as_planned(network: MemoryNetwork, result: ReadResult) -> None:
    network.read_policy = lambda _r, _h: ReadPlan(result=result)
    reader, _ = pair(network)
    reader.read(1, "P", [1], [1])
    network.deliver(0)
    (ended,) = reader.poll()
    assert (ended.result, bool(ended.reason)) == (result, True)


@pytest.mark.rule("KVC-XFER-002")
def test_a_dead_engine_neither_answers_nor_writes(network: MemoryNetwork) -> None:
    network.read_policy = lambda _r, _h: ReadPlan(takes_ns=100)
    reader, holder = pair(network)
    before = reader.kv.copy()
    reader.read(1, "P", [1], [1])
    assert holder.send("D", b"under way")
    network.kill("P")
    assert not reader.send("P", b"x")
    reader.read(2, "P", [1], [1])
    network.deliver(100)
    assert [(e.read_id, e.result, e.reason) for e in reader.poll()] == [
        (1, ReadResult.FAILED, "P is gone"),
        (2, ReadResult.FAILED, "P is gone"),
    ]
    assert (reader.kv == before).all()
    assert reader.receive() == [("P", b"under way")]
    with pytest.raises(PeerRefused):
        reader.add_peer("P", holder.addresses())


def test_a_dead_readers_pool_is_written_no_more(network: MemoryNetwork) -> None:
    network.read_policy = lambda _r, _h: ReadPlan(takes_ns=100)
    reader, _ = pair(network)
    before = reader.kv.copy()
    reader.read(1, "P", [1], [2])
    network.kill("D")
    network.deliver(100)
    assert (reader.kv == before).all()
    assert reader.poll() == []


@pytest.mark.rule("KVC-XFER-003")
def test_a_cancelled_read_ends_when_its_transfer_does(network: MemoryNetwork) -> None:
    network.read_policy = lambda _r, _h: ReadPlan(takes_ns=100)
    reader, _ = pair(network)
    reader.read(1, "P", [1], [1])
    reader.read(2, "P", [2], [2])
    reader.cancel(1)
    reader.remove_peer("P")
    network.deliver(99)
    assert reader.poll() == []
    network.deliver(100)
    assert [(e.read_id, e.reason) for e in reader.poll()] == [(1, "cancelled"), (2, "the peer was removed")]
    reader.cancel(1)


@pytest.mark.rule("KVC-XFER-005")
@pytest.mark.parametrize(("remote", "local"), [([BLOCKS], [0]), ([-1], [0]), ([0], [BLOCKS]), ([], []), ([0, 1], [0])])
def test_blocks_that_do_not_exist_are_not_read(network: MemoryNetwork, remote: list[int], local: list[int]) -> None:
    reader, _ = pair(network)
    before = reader.kv.copy()
    reader.read(1, "P", remote, local)
    (ended,) = reader.poll()
    assert ended.result is ReadResult.FAILED
    assert (reader.kv == before).all()


def test_what_is_misused_is_refused(network: MemoryNetwork) -> None:
    reader, holder = pair(network)
    with pytest.raises(ValueError, match="used before"):
        joined(network, "D")
    with pytest.raises(ValueError, match="ranks"):
        joined(network, "E", ranks=3)
    with pytest.raises(PeerRefused):
        reader.add_peer("P", reader.addresses())
    with pytest.raises(PeerRefused):
        holder.add_peer("nobody", reader.addresses())
    reader.read(1, "nobody", [1], [1])
    assert reader.poll()[0].result is ReadResult.FAILED


@pytest.mark.parametrize(("ours", "theirs"), RANK_PAIRS)
def test_pieces_cover_a_block_once(ours: int, theirs: int) -> None:
    found = pieces(ours, theirs)
    assert len(found) == max(ours, theirs)
    assert [word for p in found for word in range(p.first, p.first + p.words)] == list(range(BLOCK_WORDS))
    for piece in found:
        for rank, ranks in ((piece.local_rank, ours), (piece.remote_rank, theirs)):
            width = BLOCK_WORDS // ranks
            assert rank * width <= piece.first
            assert piece.first + piece.words <= (rank + 1) * width


def test_neighbouring_blocks_become_one_descriptor() -> None:
    blocks = block_list(
        [9, 1, 2, 3, 20, 5000, *range(6000, 11000)], [8, 5, 6, 7, 21, 4, *range(100, 5100)], 20000, 20000
    )
    (whole,) = pieces(1, 1)
    remote, local = descriptors(blocks, whole, 1 << 20, 1 << 30)
    assert remote[:, 1].tolist() == local[:, 1].tolist()
    assert (remote[:, 1] // 4096).tolist() == [3, 1, 1, 1, 4096, 904]
    assert ((remote[:, 0] - (1 << 20)) // 4096).tolist() == [1, 9, 20, 5000, 6000, 10096]
    assert ((local[:, 0] - (1 << 30)) // 4096).tolist() == [5, 8, 21, 4, 100, 4196]
    part = pieces(1, 4)[2]
    remote, _ = descriptors(blocks, part, 0, 0)
    assert len(remote) == len(blocks.remote)
    assert (remote[:, 0] % 4096 == 2048).all()
    assert (remote[:, 1] == 1024).all()


@pytest.mark.parametrize("as_given", [list, np.array], ids=["lists", "arrays"])
def test_blocks_may_be_lists_or_arrays(as_given: Callable[[list[int]], Any]) -> None:
    blocks = block_list(as_given([7, 3, 4, 9]), as_given([1, 5, 6, 2]), 10, 10)
    assert blocks.remote.tolist() == [3, 4, 7, 9]
    assert blocks.local.tolist() == [5, 6, 1, 2]
    assert (blocks.starts.tolist(), blocks.counts.tolist()) == ([0, 2, 3], [2, 1, 1])


def test_an_array_may_be_changed_once_it_is_given(network: MemoryNetwork) -> None:
    network.read_policy = lambda _r, _h: ReadPlan(takes_ns=100)
    reader, holder = pair(network)
    local = np.array([5, 6])
    reader.read(1, "P", np.array([1, 2]), local)
    local[:] = 9
    network.deliver(100)
    assert (reader.kv[5:7] == holder.kv[1:3]).all()
    assert (reader.kv[9] != holder.kv[1]).all()


@pytest.mark.rule("KVC-XFER-005")
@pytest.mark.parametrize(
    "blocks",
    [
        np.array([2**63 - 1]),
        np.array([2**63 - 2, 2**63 - 1, -(2**63)]),  # neighbours, if sums wrap
        np.array([-1, 0, 1]),
        np.array([3.0, 4.0]),
        np.array([[3, 4]]),
        np.array([3, 4], dtype=np.uint64),
        [1.5],
        ["3"],
        [2**63],
    ],
    ids=repr,
)
def test_what_are_no_block_numbers_is_refused(blocks: Any) -> None:
    for sides in ((blocks, [*range(len(blocks))]), ([*range(len(blocks))], blocks)):
        with pytest.raises(ValueError, match="blocks"):
            block_list(*sides, 10, 10)


def test_windows_hold_every_blocks_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "GAP_BLOCKS_MAX", 3)
    generations = np.arange(1000, dtype=np.int64) * 7
    rng = random.Random(1)
    for number in range(200):
        remote = sorted(rng.sample(range(1000), rng.randint(1, 60)))
        remote += remote[-1:] * (number % 2)  # one twice
        blocks = block_list(remote, rng.sample(range(1000), len(remote)), 1000, 1000)
        found = windows(blocks)
        assert (found.firsts[1:] - (found.firsts + found.counts)[:-1] > 3).all()
        read = np.concatenate(
            [generations[first : first + count] for first, count in zip(found.firsts, found.counts, strict=True)]
        )
        assert len(read) == found.words
        assert (read[found.places(blocks.remote)] == generations[remote]).all()
    assert windows(block_list([5, 6, 9, 100], [1, 2, 3, 4], 1000, 1000)).counts.tolist() == [5, 1]

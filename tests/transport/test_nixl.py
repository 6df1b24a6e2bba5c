"""The transport over real NIXL, between processes: content, ranks, deaths, and what peers may get wrong."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from reference_impl.realclock import now_ns
from reference_impl.rules.clock import s_to_ns
from reference_impl.transport import plan
from reference_impl.transport.base import BlockNumbers, Ended, PeerRefused, RankAddress, ReadResult
from tests.memory_service.running import end, read_line
from tests.transport.holding_engine import packed, shared_pool, unpacked, words_held
from tests.waiting import until

pytestmark = pytest.mark.nixl

BLOCKS = 600
LIMIT_S = 20.0
HOLDER = "P#1"
READER = "D#1"


class Holder:
    """A holding engine in a process of its own."""

    def __init__(self, engine_id: str, ranks: int, variables: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "tests.transport.holding_engine", engine_id, str(BLOCKS), str(ranks)]
        self.engine_id = engine_id
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | (variables or {})
        )
        self.addresses: list[RankAddress] = []

    def wait_ready(self) -> None:
        self.addresses = unpacked(read_line(self.process, LIMIT_S))

    def say(self, line: str) -> str:
        """Give an order and return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return read_line(self.process)

    def has_spoken(self) -> bool:
        return bool(select.select([self.process.stdout or 0], [], [], 0)[0])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)


class Reader:
    """Our side: a transport and its pool."""

    def __init__(self, engine_id: str = READER, ranks: int = 1, blocks: int = BLOCKS) -> None:
        from reference_impl.transport.nixl import NixlTransport

        self.descriptor, self.kv = shared_pool(blocks)
        self.generations = np.ones(blocks, dtype=np.uint64)
        self.transport = NixlTransport(engine_id, self.kv, self.generations, ranks, self.descriptor)
        self.received: list[tuple[str, bytes]] = []
        self._ids = itertools.count()

    def step(self) -> list[Ended]:
        self.received += self.transport.receive()
        return self.transport.poll()

    def read(self, engine_id: str, remote: BlockNumbers, local: BlockNumbers) -> Ended:
        """Read, and return how it ended."""
        read_id = next(self._ids)
        self.transport.read(read_id, engine_id, remote, local)
        return self.end_of(read_id)

    def end_of(self, read_id: int) -> Ended:
        ended = until(self.step, LIMIT_S, f"read {read_id} ends")
        assert [e.read_id for e in ended] == [read_id]
        return ended[0]

    def close(self) -> None:
        self.transport.close()
        os.close(self.descriptor)


@contextlib.contextmanager
def holding(engine_id: str = HOLDER, ranks: int = 1, variables: dict[str, str] | None = None) -> Iterator[Holder]:
    holder = Holder(engine_id, ranks, variables)
    try:
        holder.wait_ready()
        yield holder
    finally:
        end(holder.process)


@contextlib.contextmanager
def reading(engine_id: str = READER, ranks: int = 1) -> Iterator[Reader]:
    with contextlib.closing(Reader(engine_id, ranks)) as reader:
        yield reader


@pytest.fixture(scope="module")
def holder() -> Iterator[Holder]:
    with holding() as found:
        yield found


@pytest.fixture
def reader(holder: Holder) -> Iterator[Reader]:
    # Over one holder an engine id is used once, as in a deployment.
    with reading(f"D#{next(_numbers)}") as found:
        found.transport.add_peer(holder.engine_id, holder.addresses)
        yield found


_numbers = itertools.count(100)


def lists(kind: str) -> tuple[list[int], list[int]]:
    """Return remote and local blocks of a read."""
    rng = random.Random(kind)
    fixed = {
        "one": ([7], [3]),
        "run": ([*range(20, 420)], [*range(100, 500)]),
        "runs": ([*range(300, 400), *range(10, 60), 599, 0], [*range(100), *range(200, 250), 120, 599]),
        "backwards": ([*range(99, -1, -1)], [*range(199, 99, -1)]),
        "crossed": ([*range(100)], [*range(199, 99, -1)]),
        "remote twice": ([5, 5, 6], [1, 2, 3]),
    }
    return fixed.get(kind) or (rng.sample(range(BLOCKS), 250), rng.sample(range(BLOCKS), 250))


KINDS = ["one", "run", "runs", "backwards", "crossed", "remote twice", "random 1", "random 2", "random 3"]


def assert_read(reader: Reader, remote: list[int], local: list[int]) -> None:
    """Exactly the blocks read are there, and nothing else was touched."""
    expected = np.zeros_like(reader.kv)
    expected[local] = words_held(BLOCKS)[remote]
    assert (reader.kv == expected).all()


@pytest.mark.rule("KVC-XFER-001")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_is_held(reader: Reader, kind: str) -> None:
    remote, local = lists(kind)
    assert reader.read(HOLDER, remote, local) == Ended(0, ReadResult.DONE)
    assert_read(reader, remote, local)


@pytest.mark.slow
@pytest.mark.rule("KVC-XFER-001")
@pytest.mark.parametrize("holders", [1, 2, 4])
def test_every_pair_of_rank_counts_reads_whole_blocks(holders: int) -> None:
    with holding(ranks=holders) as holder:
        for readers in (1, 2, 4):
            with reading(f"D#{readers}", readers) as reader:
                reader.transport.add_peer(HOLDER, holder.addresses)
                for kind in ("random 1", "runs"):
                    remote, local = lists(kind)
                    reader.kv[:] = 0
                    assert reader.read(HOLDER, remote, local).result is ReadResult.DONE, (holders, readers)
                    assert_read(reader, remote, local)


def test_reads_run_side_by_side(reader: Reader) -> None:
    for read_id in range(8):
        reader.transport.read(read_id, HOLDER, [read_id, 8 + read_id], [2 * read_id, 2 * read_id + 1])
    ended: list[Ended] = []

    def all_ended() -> bool:
        ended.extend(reader.step())
        return len(ended) == 8

    until(all_ended, LIMIT_S, "eight reads end")
    assert {e.result for e in ended} == {ReadResult.DONE}
    assert (reader.kv[:16:2] == words_held(BLOCKS)[:8]).all()
    assert (reader.kv[1:16:2] == words_held(BLOCKS)[8:16]).all()


@pytest.mark.rule("KVC-XFER-002")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_given_away_under_a_read_tears_it(ranks: int) -> None:
    with holding() as holder, reading(ranks=ranks) as reader:
        reader.transport.add_peer(HOLDER, holder.addresses)
        assert reader.read(HOLDER, [1], [1]).result is ReadResult.DONE  # connected
        before_data(reader, lambda: holder.say("raise 30"))
        torn = reader.read(HOLDER, list(range(20, 40)), list(range(20)))
        assert torn.result is ReadResult.TORN
        assert "the first is 30" in torn.reason
        before_data(reader, lambda: holder.say("raise 50"))  # not one of those read
        assert reader.read(HOLDER, [49, 51], [0, 1]).result is ReadResult.DONE


@pytest.mark.rule("KVC-XFER-002")
def test_a_torn_block_is_found_in_any_window_of_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "GAP_BLOCKS_MAX", 4)
    remote, local = [*range(10, 20), 22, 100, 300, 301], [*range(14)]
    with holding() as holder, reading() as reader:
        reader.transport.add_peer(HOLDER, holder.addresses)
        assert reader.read(HOLDER, np.array(remote), np.array(local)).result is ReadResult.DONE
        assert_read(reader, remote, local)
        for block in (10, 22, 100, 301):
            before_data(reader, lambda b=block: holder.say(f"raise {b}"))
            torn = reader.read(HOLDER, np.array(remote), np.array(local))
            assert (torn.result, f"the first is {block}" in torn.reason) == (ReadResult.TORN, True)
        for block in (21, 99, 302):  # read along, or not at all
            before_data(reader, lambda b=block: holder.say(f"raise {b}"))
            assert reader.read(HOLDER, remote, local).result is ReadResult.DONE


def before_data(reader: Reader, act: Callable[[], object]) -> None:
    """Have `act` done once, between the first reading of generations and the data."""
    transport: Any = reader.transport
    original = transport._read_data

    def read_data(*given: object) -> None:
        transport._read_data = original
        act()
        original(*given)

    transport._read_data = read_data


@pytest.mark.rule("KVC-XFER-002")
def test_a_peer_killed_before_a_read_fails_it() -> None:
    with holding() as holder, reading() as reader:
        reader.transport.add_peer(HOLDER, holder.addresses)
        assert reader.read(HOLDER, [1], [1]).result is ReadResult.DONE
        holder.kill()
        assert reader.read(HOLDER, [2], [2]).result is ReadResult.FAILED
        until(
            lambda: not reader.transport.send(HOLDER, b"are you there"), LIMIT_S, "a send tells that the peer is gone"
        )
        assert reader.read(HOLDER, [2], [2]).result is ReadResult.FAILED
        assert not reader.kv[2].any()


@pytest.mark.rule("KVC-XFER-002")
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "never connected"])
@pytest.mark.parametrize("tls", ["all", "tcp,self"], ids=["shared memory", "tcp"])
def test_a_peer_killed_during_a_read_fails_it(monkeypatch: pytest.MonkeyPatch, tls: str, connected: bool) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    with holding() as holder, reading() as reader:
        reader.transport.add_peer(HOLDER, holder.addresses)
        if connected:
            assert reader.read(HOLDER, [1], [1]).result is ReadResult.DONE
        holder.process.send_signal(signal.SIGSTOP)
        reader.transport.read(77, HOLDER, list(range(500)), list(range(500)))
        ended = reader.step()
        holder.kill()
        ended = ended or [reader.end_of(77)]
        # Over shared memory a stopped process's memory can be read all the same.
        possible = [ReadResult.FAILED, ReadResult.DONE] if connected and tls == "all" else [ReadResult.FAILED]
        assert ended[0].result in possible
        reader.transport.send(HOLDER, b"x")
        reader.transport.remove_peer(HOLDER)
        assert not reader.transport.send(HOLDER, b"x")
        assert reader.read(HOLDER, [2], [2]).result is ReadResult.FAILED
        with pytest.raises(PeerRefused):
            reader.transport.add_peer(HOLDER, holder.addresses)


@pytest.mark.rule("KVC-XFER-003", "KVC-HB-009")
def test_a_stopped_peer_holds_nobody_up_and_a_cancelled_read_ends_when_it_has_landed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # over shared memory there is no hanging
    with holding() as holder, reading() as reader:
        reader.transport.add_peer(HOLDER, holder.addresses)
        assert reader.read(HOLDER, [1], [1]).result is ReadResult.DONE
        reader.kv[:] = 0
        before_data(reader, lambda: holder.process.send_signal(signal.SIGSTOP))
        reader.transport.read(77, HOLDER, list(range(500)), list(range(500)))
        reading_77: Any = reader.transport._reads[77]
        until(lambda: reader.step() or reading_77.part, LIMIT_S, "the data are being read")
        started_ns = now_ns()
        for _ in range(100):
            assert reader.transport.send(HOLDER, b"wake up")
            assert reader.step() == []
        reader.transport.cancel(77)
        reader.transport.remove_peer(HOLDER)
        for _ in range(100):
            assert reader.step() == []
        reader.transport.add_peer(HOLDER, holder.addresses)  # known again, while its read is in flight
        assert now_ns() - started_ns < s_to_ns(2.0)
        holder.process.send_signal(signal.SIGCONT)
        assert reader.end_of(77) == Ended(77, ReadResult.FAILED, "cancelled")
        landed = reader.kv.copy()
        for _ in range(100):
            reader.step()
        assert (reader.kv == landed).all()
        assert reader.read(HOLDER, [1], [1]).result is ReadResult.DONE


@pytest.mark.rule("KVC-XFER-005")
@pytest.mark.parametrize(
    ("remote", "local"),
    [
        ([BLOCKS], [0]),
        ([-1], [0]),
        ([1 << 60], [0]),
        ([1 << 80], [0]),
        ([0], [BLOCKS]),
        ([0], [-1]),
        ([0, 1], [0]),
        ([], []),
        ([0, 1], [2, 2]),
    ],
)
def test_blocks_that_do_not_exist_are_not_read(reader: Reader, remote: list[int], local: list[int]) -> None:
    ended = reader.read(HOLDER, remote, local)
    assert ended.result is ReadResult.FAILED
    assert ended.reason
    assert not reader.kv.any()
    assert reader.read(HOLDER, [0], [0]).result is ReadResult.DONE


def test_a_read_of_a_stranger_fails(reader: Reader) -> None:
    assert reader.read("nobody", [0], [0]) == Ended(0, ReadResult.FAILED, "nobody is no peer of ours")
    assert not reader.transport.send("nobody", b"x")
    reader.transport.remove_peer("nobody")
    reader.transport.cancel(12345)


@pytest.mark.rule("KVC-HSK-001")
def test_bad_metadata_is_refused(reader: Reader, holder: Holder) -> None:
    good = holder.addresses[0]
    rng = random.Random(3)
    bad = [b"", b"x", good.metadata[:40], good.metadata[:-3], good.metadata + b"\0", rng.randbytes(500)]
    for _ in range(50):
        damaged = bytearray(good.metadata)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        bad.append(bytes(damaged))
    for metadata in bad:
        with pytest.raises(PeerRefused):
            reader.transport.add_peer("other", [msgspec.structs.replace(good, metadata=metadata)])
    with pytest.raises(PeerRefused, match="is that of 'P#1/0'"):
        reader.transport.add_peer("other", [good])
    with pytest.raises(PeerRefused, match="3 ranks"):
        reader.transport.add_peer("other", [good] * 3)
    assert reader.read(HOLDER, [0], [0]).result is ReadResult.DONE


@pytest.mark.rule("KVC-REL-006")
def test_notifications_go_both_ways_and_only_between_peers() -> None:
    rng = random.Random(5)
    with holding() as holder, reading() as reader:
        reader.transport.add_peer(HOLDER, holder.addresses)
        assert holder.say(f"peer {READER} {packed(reader.transport.addresses())}") == f"added {READER}"
        for message in [b"\0", b"\xff" * 9, *(rng.randbytes(n) for n in (1, 100, 4096, 9000, 65536))]:
            assert reader.transport.send(HOLDER, message)
            until(lambda: reader.step() or holder.has_spoken(), LIMIT_S, "a notification arrives")
            digest = hashlib.sha256(message).hexdigest()
            assert read_line(holder.process) == f"received {READER} {len(message)} {digest}"
        assert holder.say(f"send {READER} hello") == "sent True"
        until(lambda: reader.step() or reader.received, LIMIT_S, "a notification arrives")
        assert reader.received == [(HOLDER, b"hello")]
        reader.transport.remove_peer(HOLDER)
        holder.say(f"send {READER} again")
        until(lambda: reader.step() or reader.transport.strangers, LIMIT_S, "a stranger's message is counted")
        assert reader.received == [(HOLDER, b"hello")]


def test_a_peer_can_be_forgotten_and_met_again(reader: Reader, holder: Holder) -> None:
    for block in range(3):
        assert reader.read(HOLDER, [block], [block]).result is ReadResult.DONE
        reader.transport.remove_peer(HOLDER)
        assert reader.read(HOLDER, [9], [9]).result is ReadResult.FAILED
        reader.transport.add_peer(HOLDER, holder.addresses)


@pytest.mark.rule("KVC-HSK-001")
@pytest.mark.parametrize("ranks", [1, 2])
def test_other_addresses_under_a_known_id_change_nothing(holder: Holder, ranks: int) -> None:
    """An incarnation's addresses never change, so whoever says others is not it."""
    with reading(f"D#{next(_numbers)}", ranks) as reader:
        reader.transport.add_peer(HOLDER, holder.addresses)
        assert reader.read(HOLDER, [1], [1]).result is ReadResult.DONE
        good = holder.addresses[0]
        for changes in ({"kv_address": good.kv_address + 4096}, {"metadata": b"x" * 40}, {"blocks": 1}):
            with pytest.raises(PeerRefused, match="other addresses"):
                reader.transport.add_peer(HOLDER, [msgspec.structs.replace(good, **changes)])
            assert reader.transport.send(HOLDER, b"still there")
            reader.kv[:] = 0
            assert reader.read(HOLDER, [2, 3], [2, 3]).result is ReadResult.DONE
            assert_read(reader, [2, 3], [2, 3])


def test_a_rank_that_dies_fails_reads_and_says_so(holder: Holder) -> None:
    with reading(f"D#{next(_numbers)}", ranks=2) as reader:
        reader.transport.add_peer(HOLDER, holder.addresses)
        assert reader.read(HOLDER, [1], [1]).result is ReadResult.DONE
        assert reader.transport.broken == ""
        other: Any = reader.transport._agents.others[0]
        other.process.kill()
        reader.transport.read(50, HOLDER, [2], [2])
        assert reader.end_of(50).result is ReadResult.FAILED
        until(lambda: reader.step() or reader.transport.broken, LIMIT_S, "the rank's death is noticed")
        assert reader.transport.broken.startswith("rank 1 (process ")
        assert reader.read(HOLDER, [2], [2]).reason == reader.transport.broken


def test_ranks_end_with_their_engine() -> None:
    with holding(ranks=2) as holder:
        children = [int(p) for p in _children(holder.process.pid)]
        assert len(children) == 1
        holder.kill()
        until(lambda: _gone(children[0]), LIMIT_S, "its rank ends")


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True

"""Known-bad twins: each is a small change of the rules that looks harmless, and each is caught by a broken invariant.

The twin's history is run again without the twin, and must be clean: so the invariant notices the twin and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from reference_impl.engine.connector import Connector
from reference_impl.rules import clocksync, consumer
from reference_impl.rules.clocksync import Estimate
from reference_impl.rules.consumer import Consumer
from reference_impl.rules.handoff import HandOff
from reference_impl.rules.heartbeat import HeartbeatTracker
from reference_impl.rules.leases import Lease, LeaseTable
from reference_impl.rules.messages import Claim
from reference_impl.rules.producer import Producer
from reference_impl.rules.terms import KvTerms
from reference_impl.transport.base import RankAddress
from reference_impl.transport.memory import MemoryTransport, _Reading
from reference_impl.transport.plan import block_list, pieces
from tests.protocol import histories
from tests.protocol.histories import ALL, BAD_DATA, LOSSY
from tests.protocol.world import NO_FAULTS, Faults, World

SEEDS = 60
"""So many histories a twin may survive. Most fall in the first five."""
Patch = pytest.MonkeyPatch
SLOW = Faults(slow_reads=0.5, reused=0.3)
HELD = Faults(held=0.8)
REUSED = Faults(reused=0.9, held=0.3, evictions=1.0)
STOPS = Faults(frozen=0.2, slow_reads=0.7, evictions=1.0)


def caught(
    twin: Callable[[Patch], None], rules: tuple[str, ...], *, ranks: tuple[int, int] = (1, 1),
    faults: Faults | None = None, run: Callable[..., World] = histories.run,
) -> None:  # fmt: skip
    """Assert that one of the first histories breaks one of `rules` with the twin, and nothing without."""
    for seed in range(SEEDS):
        with pytest.MonkeyPatch.context() as patch:
            twin(patch)
            broken = run(seed, ranks, faults).broken
        if broken:
            assert broken[0].split(":")[0] in rules, broken[0]
            clean = run(seed, ranks, faults)
            assert clean.broken == [], clean.history()
            return
    pytest.fail(f"{SEEDS} histories did not notice the twin")


def test_expiry_that_looks_at_the_first_lease_only() -> None:
    """KVC-LEASE-006."""

    def expire(self: LeaseTable, now_ns: int) -> list[Lease]:
        first = next(iter(self._leases.values()), None)
        if first is None or first.deadline_ns > now_ns:
            return []
        self.end(first.request_id)
        return [first]

    caught(lambda patch: patch.setattr(LeaseTable, "expire", expire), ("L1",), faults=HELD, run=histories.run_samples)


def test_a_deadline_that_is_not_rebased() -> None:
    """KVC-LEASE-012: a length that is taken for a moment on the receiver's clock."""

    claim = Producer._claim

    def moment(self: Producer, engine_id: str, message: Claim, now_ns: int) -> None:
        claim(self, engine_id, message, 0)  # so that the lease is kept until 0 + `within_ns`

    caught(lambda patch: patch.setattr(Producer, "_claim", moment), ("S1",), faults=SLOW, run=histories.run_sessions)


def test_the_readers_own_id_in_messages() -> None:
    """C1."""
    arrive = Consumer.arrive

    def own(self: Consumer, request_id: str, handoff: HandOff, content: str, now_ns: int) -> None:
        arrive(self, request_id, msgspec.structs.replace(handoff, request_id=request_id), content, now_ns)

    caught(lambda patch: patch.setattr(Consumer, "arrive", own), ("C1",), faults=NO_FAULTS)


def test_the_readers_own_id_in_heartbeats_alone() -> None:
    """C1."""

    def own(self: Consumer, request_id: str, handoff: HandOff, content: str, now_ns: int) -> None:
        arrive(self, request_id, handoff, content, now_ns)
        self.heartbeats.track(handoff.engine_id, request_id)

    arrive = Consumer.arrive
    caught(lambda patch: patch.setattr(Consumer, "arrive", own), ("C1",), faults=NO_FAULTS)


def test_a_set_where_a_count_belongs() -> None:
    """KVC-HB-004: of two samples of one prompt, the first to be read stops the renewal for both."""

    def track(self: HeartbeatTracker, engine_id: str, request_id: str) -> None:
        self._readers[engine_id][request_id] = 1

    def twin(patch: Patch) -> None:
        patch.setattr(HeartbeatTracker, "track", track)

    caught(twin, ("L2",), faults=NO_FAULTS, run=histories.run_samples)


def test_min_for_max_on_extend() -> None:
    """KVC-LEASE-003."""

    def extend(self: LeaseTable, request_id: str, until_ns: int, _heard_from: str = "") -> bool:
        lease = self.get(request_id)
        if lease is None:
            return False
        lease.deadline_ns = min(lease.deadline_ns, until_ns)
        return True

    caught(lambda patch: patch.setattr(LeaseTable, "extend", extend), ("L2", "L4", "S1"), faults=NO_FAULTS)


def test_counting_messages_for_counting_readers() -> None:
    """KVC-REL-004, -005."""
    report = LeaseTable.report

    def count(self: LeaseTable, request_id: str, reader: str, slot: int) -> Lease | None:
        lease = self.get(request_id)
        if lease is not None:
            lease.reported.add(f"{reader} {len(lease.reported)}")
        return report(self, request_id, reader, slot)

    caught(lambda patch: patch.setattr(LeaseTable, "report", count), ("S3", "S1"), faults=LOSSY)


@pytest.mark.parametrize("ranks", [(4, 1), (1, 4), (2, 2)])
def test_done_when_the_head_ranks_part_is_done(ranks: tuple[int, int]) -> None:
    """KVC-XFER-001: each rank reads its own words of every block."""

    def read(self: MemoryTransport, read_id: int, engine_id: str, remote: list[int], local: list[int]) -> None:
        addresses: list[RankAddress] = self._peers[engine_id]
        blocks = block_list(remote, local, addresses[0].blocks, len(self.kv))
        plan = self._network.read_policy(self.engine_id, engine_id)
        reading = self._reads[read_id] = _Reading(read_id, engine_id, blocks, plan)
        holder = self._holder(reading)
        if holder is not None:
            reading.before = holder.generations[blocks.remote].copy()
        parts = pieces(self.ranks, len(addresses))
        times = [plan.takes_ns * number // (len(parts) + 1) for number in range(1, len(parts) + 1)]
        for piece, at in zip(parts, times, strict=True):
            self._network.after(at, partial(self._copy, reading, piece))
        self._network.after(times[0], partial(self._end, reading))

    caught(lambda patch: patch.setattr(MemoryTransport, "read", read), ("XFER-001", "S6"), ranks=ranks)


def test_an_offset_with_the_wrong_sign() -> None:
    """KVC-CLK-002."""
    estimate = clocksync._estimate

    def wrong(*of: Any) -> Estimate:
        right = estimate(*of)
        return Estimate(-right.offset_ns, right.error_ns)

    caught(
        lambda patch: patch.setattr(clocksync, "_estimate", wrong),
        ("C2",),
        run=histories.run_sessions,
        faults=NO_FAULTS,
    )


def test_no_clock_correction() -> None:
    """KVC-CLK-002: the terms can switch it off, to show what it is for."""

    def wrong(terms: KvTerms, **changes: Any) -> KvTerms:
        return (
            replace(terms, clock_correction=False, **changes)
            if isinstance(terms, KvTerms)
            else replace(terms, **changes)
        )

    replace = msgspec.structs.replace
    caught(
        lambda patch: patch.setattr(msgspec.structs, "replace", wrong), ("C2",), faults=NO_FAULTS,
        run=histories.run_sessions,
    )  # fmt: skip


def test_a_margin_of_nothing_and_an_error_that_is_not_taken_off() -> None:
    """KVC-CLK-003: not seen in every trip, but in one whose ways take unequally long."""

    def twin(patch: Patch) -> None:
        patch.setattr(consumer, "TURN_MARGIN_NS", -(10**12))

    caught(twin, ("C2",), run=histories.run_sessions, faults=NO_FAULTS)


def test_release_at_expiry_while_a_read_runs() -> None:
    """S1: a claim that is granted and does not extend."""

    def claim(self: LeaseTable, request_id: str, reader: str, _until_ns: int, **_: object) -> bool:
        lease = self.get(request_id)
        if lease is None:
            return False
        lease.reading.add(reader)
        return True

    caught(lambda patch: patch.setattr(LeaseTable, "claim", claim), ("S1",), faults=SLOW, run=histories.run_sessions)


def test_forgetting_who_reads() -> None:
    """S1: the expected readers have reported, and one that nobody expected still reads."""

    def done(self: Lease) -> bool:
        return len(self.reported) >= self.readers

    caught(lambda patch: patch.setattr(Lease, "done", property(done)), ("S1",), faults=REUSED)


def test_expiry_that_is_judged_before_the_inbox_is_read() -> None:
    """KVC-LEASE-008: after a stop of the holder, renewals wait in its inbox."""
    step = Producer.step

    def hasty(self: Producer, inbox: list[tuple[str, bytes]], now_ns: int) -> Any:
        step(self, [], now_ns)
        return step(self, inbox, now_ns)

    caught(lambda patch: patch.setattr(Producer, "step", hasty), ("L2",), faults=STOPS, run=histories.run_samples)


def test_a_read_that_ends_after_its_limit_counts_as_done() -> None:
    """S2: the reader was stopped meanwhile, and the holder has waited no longer than it was asked to."""

    ended = Consumer.ended

    def careless(self: Consumer, read_id: int, problem: str, now_ns: int, *, torn: bool = False) -> None:
        load = self._reads.get(read_id)
        ended(self, read_id, problem, load.claimed_ns if load and not problem else now_ns, torn=torn)

    caught(lambda patch: patch.setattr(Consumer, "ended", careless), ("S2",), run=histories.run_stopped_reader)


def test_a_destination_that_is_free_at_the_abort() -> None:
    """S6, KVC-XFER-003."""
    abort = Consumer.abort

    def free(self: Consumer, request_id: str) -> bool:
        abort(self, request_id)
        return True

    caught(lambda patch: patch.setattr(Consumer, "abort", free), ("S6",), faults=BAD_DATA)


def test_a_hit_that_tells_nobody() -> None:
    """L4, KVC-REL-003."""

    def silent(self: Consumer, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        if load is not None:
            self._untrack(load)

    caught(lambda patch: patch.setattr(Consumer, "spare", silent), ("L4",), faults=NO_FAULTS)


def test_a_load_without_an_end() -> None:
    """L3, KVC-XFER-004."""

    def never(self: Consumer, load: Any, now_ns: int) -> None:
        return None

    caught(lambda patch: patch.setattr(Consumer, "_watch", never), ("L3",), faults=ALL)


def test_a_torn_read_that_counts_as_done() -> None:
    """KVC-XFER-002."""
    ended = Consumer.ended

    def careless(self: Consumer, read_id: int, problem: str, now_ns: int, *, torn: bool = False) -> None:
        ended(self, read_id, "", now_ns, torn=torn)

    caught(lambda patch: patch.setattr(Consumer, "ended", careless), ("XFER-001",), faults=BAD_DATA)


def test_blocks_that_are_kept_after_a_lease() -> None:
    """K1."""

    def forgetful(self: Connector, freed: Any, now_ns: int) -> None:
        freed.lease.blocks.pop()
        whole(self, freed, now_ns)

    whole = Connector._freed
    caught(lambda patch: patch.setattr(Connector, "_freed", forgetful), ("K1", "L3"), faults=NO_FAULTS)

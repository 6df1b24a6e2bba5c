"""The lease table: granted once, extended never back, ended once, and none hidden behind another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.rules.leases import LeaseTable
from reference_impl.rules.messages import Heartbeat, How
from reference_impl.rules.producer import Extended, Freed
from tests.rules.parties import TERMS, S, holder, only, report, tell


def granted(**length_s: float) -> LeaseTable:
    """A table with one lease for each keyword, in that order, granted at 0."""
    table = LeaseTable()
    for order, (name, seconds) in enumerate(length_s.items()):
        table.grant(name, [order], readers=1, now_ns=0, length_ns=round(seconds * S))
    return table


def ended(table: LeaseTable, now_s: float) -> list[str]:
    return [lease.request_id for lease in table.expire(round(now_s * S))]


@pytest.mark.rule("KVC-LEASE-001")
def test_a_lease_lasts_its_duration_from_the_end_of_the_prefill() -> None:
    producer = holder()
    lease = producer.leases.get("p-req")
    assert lease is not None
    assert (lease.granted_ns, lease.deadline_ns, lease.blocks) == (0, 30 * S, [10, 11, 12])
    tell(producer, 30 * S - 1)
    assert producer.take() == []
    tell(producer, 30 * S)
    assert only(Freed, producer.take())[0].how is None


def test_a_second_lease_of_one_request_is_refused() -> None:
    table = granted(a=1)
    with pytest.raises(ValueError, match="holds a lease already"):
        table.grant("a", [9], readers=1, now_ns=0, length_ns=S)
    with pytest.raises(ValueError, match="readers must be at least 1, got 0"):
        table.grant("b", [9], readers=0, now_ns=0, length_ns=S)
    assert len(table) == 1


@pytest.mark.rule("KVC-LEASE-003")
def test_a_heartbeat_moves_the_deadline_on_and_never_back() -> None:
    producer = holder()
    tell(producer, 5 * S, Heartbeat(["p-req"]))
    lease = producer.leases.get("p-req")
    assert lease is not None
    assert lease.deadline_ns == 30 * S, "5 s + 20 s lies before the old deadline"
    tell(producer, 25 * S, Heartbeat(["p-req"]))
    assert lease.deadline_ns == 25 * S + TERMS.extension_ns == 45 * S
    assert [a.leases for a in only(Extended, producer.take())] == [1, 1]


@pytest.mark.rule("KVC-LEASE-004")
def test_a_heartbeat_for_an_unknown_request_makes_no_lease() -> None:
    producer = holder()
    tell(producer, S, Heartbeat(["other", "p-req", "another"]))
    assert producer.take() == [Extended("d-1", 1, 2)]
    assert len(producer.leases) == 1
    assert producer.counts.extended == 1


@pytest.mark.rule("KVC-LEASE-005")
def test_an_expired_lease_is_ended_and_counted_once() -> None:
    producer = holder()
    for second in (30, 30, 31, 100):
        tell(producer, second * S, report("late"), Heartbeat(["p-req"])) if second > 30 else tell(producer, second * S)
    assert [f.how for f in only(Freed, producer.take())] == [None]
    assert (producer.counts.expired, producer.counts.released) == (1, 0)


@pytest.mark.rule("KVC-LEASE-006")
def test_no_lease_in_front_hides_an_expired_one() -> None:
    table = granted(long=100, short=1, middle=50)
    assert ended(table, 1) == ["short"]
    table = granted(renewed=1, behind=2)
    assert table.extend("renewed", 90 * S)
    assert ended(table, 2) == ["behind"]
    assert ended(table, 89.9) == []
    assert ended(table, 90) == ["renewed"]


@pytest.mark.rule("KVC-LEASE-006")
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    moves=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 80), st.integers(0, 5)), max_size=30),
)
def test_exactly_those_past_their_deadline_end_whatever_the_order(
    lengths: list[int], moves: list[tuple[int, int, int]]
) -> None:
    table, deadline, now = LeaseTable(), {}, 0
    for order, length in enumerate(lengths):
        table.grant(str(order), [order], readers=1, now_ns=0, length_ns=length)
        deadline[str(order)] = length
    for which, until, passed in moves:
        known = str(which) in deadline
        assert table.extend(str(which), until) == known
        if known:
            deadline[str(which)] = max(deadline[str(which)], until)
        now += passed
        due = {name for name, at in deadline.items() if at <= now}
        assert {lease.request_id for lease in table.expire(now)} == due
        for name in due:
            del deadline[name]
    assert len(table) == len(deadline)


@pytest.mark.rule("KVC-LEASE-008")
def test_a_heartbeat_that_waits_in_the_inbox_is_read_before_expiry_is_judged() -> None:
    producer = holder()
    tell(producer, 40 * S, Heartbeat(["p-req"]))
    assert only(Freed, producer.take()) == []
    assert producer.leases.get("p-req") is not None


@pytest.mark.rule("KVC-LEASE-010")
def test_a_reader_that_is_queued_for_ten_lease_lengths_keeps_its_lease() -> None:
    producer = holder()
    for now_ns in range(0, 10 * TERMS.first_ns, TERMS.interval_ns):
        tell(producer, now_ns, Heartbeat(["p-req"]))
    assert only(Freed, producer.take()) == []


@pytest.mark.rule("KVC-LEASE-012")
def test_a_late_message_only_lengthens_a_lease() -> None:
    in_time, late = holder(), holder()
    tell(in_time, 28 * S, Heartbeat(["p-req"]))
    tell(late, 29 * S, Heartbeat(["p-req"]))
    ends = [producer.leases.get("p-req").deadline_ns for producer in (in_time, late)]  # type: ignore[union-attr]
    assert ends == [48 * S, 49 * S]


def test_a_lease_is_ended_once_by_whatever_comes_first() -> None:
    producer = holder()
    tell(producer, S, report("r"), report("r"), report("s"))
    producer.abort("p-req")
    tell(producer, 100 * S)
    assert [f.how for f in only(Freed, producer.take())] == [How.READ]
    assert (producer.counts.released, producer.counts.expired) == (1, 0)


def test_ended_leases_leave_the_heap_when_their_time_comes() -> None:
    table = granted(a=1, b=2)
    table.end("a")
    assert ended(table, 5) == ["b"]
    assert table._due == []


@pytest.mark.rule("KVC-REL-005")
def test_a_retry_takes_its_own_place_and_not_another_readers() -> None:
    """S3: A aborts, its client tries again as A2, and B is still to come."""
    table = LeaseTable()
    table.grant("r", [1], readers=2, now_ns=0, length_ns=10)
    assert table.report("r", "A", 0) is None
    assert table.claim("r", "A2", 20, slot=0)
    assert table.report("r", "A2", 0) is None
    assert table.claim("r", "B", 20, slot=1)
    lease = table.report("r", "B", 1)
    assert lease is not None
    assert lease.reported == {"place 0", "place 1"}


@pytest.mark.rule("KVC-REL-004")
def test_a_report_for_a_place_that_there_is_not_counts_for_nothing() -> None:
    table = LeaseTable()
    table.grant("r", [1], readers=1, now_ns=0, length_ns=10)
    assert table.report("r", "x", 5) is None
    assert table.report("r", "y", 0) is not None


def test_a_lease_knows_who_was_heard_last() -> None:
    table = LeaseTable()
    lease = table.grant("r", [1], readers=1, now_ns=0, length_ns=10)
    assert lease.heard_from == ""
    table.extend("r", 20, "d0")
    table.claim("r", "x", 30, heard_from="d1")
    table.extend("r", 40)
    assert lease.heard_from == "d1"

"""The side that holds blocks: who may end a lease, and when a read may begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.rules.messages import Answer, Claim, Heartbeat, How, Message
from reference_impl.rules.producer import Freed, Producer, Refused
from reference_impl.rules.terms import KvTerms, LeaseDesign
from tests.rules.parties import TERMS, TWO_TURNS, D, S, holder, messages, only, report, tell

WITHIN = 10 * S


def claim(reader: str, within_ns: int = WITHIN, content: str = "text", request: str = "p-req") -> Claim:
    return Claim(request, reader, within_ns, content)


def freed(producer: Producer) -> list[How | None]:
    return [action.how for action in only(Freed, producer.take())]


def granted(producer: Producer) -> list[bool]:
    return [answer.granted for answer in messages(Answer, producer.take())]


@pytest.mark.rule("KVC-REL-001")
@pytest.mark.parametrize("how", How)
def test_the_last_report_frees_the_blocks_in_the_step_that_reads_it(how: How) -> None:
    producer = holder()
    tell(producer, S, report("r", how))
    assert freed(producer) == [how]
    assert len(producer.leases) == 0


@pytest.mark.rule("KVC-REL-005")
@given(reports=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(How)), max_size=20))
def test_release_waits_for_all_readers_in_any_order_whatever_is_repeated(reports: list[tuple[str, How]]) -> None:
    producer = holder(readers=4)
    told: set[str] = set()
    for reader, how in [*reports, *((r, How.READ) for r in "abcd")]:
        tell(producer, S, report(reader, how))
        last = len(told) == 3 and reader not in told
        told.add(reader)
        assert freed(producer) == ([how] if last else [])
    assert len(producer.leases) == 0


@pytest.mark.rule("KVC-REL-004")
def test_completions_that_are_repeated_late_early_or_unknown_change_nothing() -> None:
    producer = Producer(TERMS)
    tell(producer, 0, report("r"))  # before the grant
    producer.grant("p-req", [1], readers=2, content="text", now_ns=S)
    tell(producer, S, report("r"), report("r"), report("r", request="unknown"))
    assert freed(producer) == []
    tell(producer, S, report("s"))
    assert freed(producer) == [How.READ]
    tell(producer, 2 * S, report("r"), report("s"), report("t"))
    producer.grant("p-req", [2], readers=1, content="text", now_ns=3 * S)
    assert freed(producer) == []
    assert producer.counts.released == 1


@pytest.mark.rule("KVC-REL-005")
def test_a_lease_waits_for_a_reader_that_nobody_expected_and_that_reads_now() -> None:
    producer = holder()
    tell(producer, 0, claim("r"), claim("retry"), report("r"))
    assert freed(producer) == []
    tell(producer, 0, report("retry"))
    assert freed(producer) == [How.READ]


def test_a_granted_claim_keeps_the_lease_to_the_end_of_the_read() -> None:
    """S1: the fence."""
    producer = holder()
    tell(producer, 29 * S, claim("r"))
    assert granted(producer) == [True]
    tell(producer, 39 * S - 1)
    assert freed(producer) == []
    tell(producer, 39 * S)
    assert freed(producer) == [None]


@pytest.mark.rule("KVC-LEASE-012")
def test_a_claim_counts_from_its_arrival_whatever_the_readers_clock_shows() -> None:
    producer = holder()
    tell(producer, 25 * S, claim("r", 7 * S))
    lease = producer.leases.get("p-req")
    assert lease is not None
    assert lease.deadline_ns == 32 * S


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (claim("r", request="gone"), "no lease"),
        (claim("done"), "reported already"),
        (claim("r", content="other"), "another text"),
        (claim("r", within_ns=WITHIN + 1), "a read may take 10 s"),
    ],
)
def test_a_claim_is_refused_with_a_reason(message: Claim, reason: str) -> None:
    """S2, C3."""
    producer = holder(readers=2)
    tell(producer, 0, report("done"))
    tell(producer, 0, message)
    actions = producer.take()
    answer = messages(Answer, actions)[0]
    assert (answer.granted, answer.reader) == (False, message.reader)
    assert reason in answer.reason
    assert reason in only(Refused, actions)[0].reason
    assert producer.counts.claims_refused == 1
    assert producer.counts.late_claims == (message.request == "gone")


def test_a_claim_that_arrives_after_the_end_is_refused_and_makes_no_lease() -> None:
    producer = holder()
    tell(producer, 30 * S)
    tell(producer, 30 * S, claim("r"))
    assert granted(producer) == [False]
    assert len(producer.leases) == 0


@pytest.mark.rule("KVC-REL-002")
def test_an_abort_on_the_holders_side_frees_at_once_unless_somebody_reads() -> None:
    producer = holder()
    producer.abort("p-req")
    producer.abort("p-req")
    producer.abort("unknown")
    assert freed(producer) == [How.ABORT]
    producer = holder()
    tell(producer, 0, claim("r"))
    producer.abort("p-req")
    assert freed(producer) == []
    tell(producer, 0, report("r"))
    assert freed(producer) == [How.READ]


def test_answers_are_for_the_readers_side() -> None:
    answer = Answer("x", "r", True)
    assert tell(holder(), 0, answer) == [(D, answer)]


@pytest.mark.rule("KVC-LEASE-013")
def test_the_old_design_ignores_heartbeats() -> None:
    producer = holder(KvTerms(design=LeaseDesign.SINGLE_TIMEOUT))
    tell(producer, 479 * S, Heartbeat(["p-req"]))
    assert freed(producer) == []
    tell(producer, 480 * S)
    assert freed(producer) == [None]


@pytest.mark.rule("KVC-CLK-001")
def test_a_turns_blocks_live_their_whole_time_unrenewed() -> None:
    producer = Producer(TWO_TURNS)
    lease = producer.grant_turn("d-req", [1, 2], content="text", now_ns=100 * S)
    assert (lease.deadline_ns, lease.turn) == (580 * S, True)
    tell(producer, 580 * S - 1)
    assert freed(producer) == []
    tell(producer, 580 * S)
    assert freed(producer) == [None]


@pytest.mark.rule("KVC-CLK-007")
def test_a_session_that_is_kept_alive_keeps_its_blocks_and_a_lease_of_the_other_kind_is_not_renewed() -> None:
    producer = Producer(TWO_TURNS)
    producer.grant_turn("d-req", [1, 2], content="text", now_ns=0)
    for now in range(0, 2000 * S, 400 * S):
        tell(producer, now)
        lease = producer.renew("d-req", now)
        assert lease is not None
        assert lease.deadline_ns == now + 480 * S
    tell(producer, 5000 * S)
    assert freed(producer) == [None]
    assert producer.renew("d-req", 5000 * S) is None
    assert holder().renew("p-req", 0) is None


inputs = st.one_of(
    st.builds(report, st.sampled_from("abc"), st.sampled_from(How)),
    st.builds(claim, st.sampled_from("abc"), st.integers(0, WITHIN)),
    st.just(Heartbeat(["p-req"])),
)


@given(readers=st.integers(1, 3), history=st.lists(st.tuples(st.integers(0, 12), inputs), max_size=25))
def test_no_lease_ends_under_a_granted_read_and_each_ends_once(
    readers: int, history: list[tuple[int, Message]]
) -> None:
    producer = holder(readers=readers)
    now, reading, ends = 0, dict[str, int](), 0
    for passed, message in history:
        now += passed * S
        tell(producer, now, message)
        actions = producer.take()
        for answer in messages(Answer, actions):
            assert isinstance(message, Claim)
            if answer.granted:
                reading[answer.reader] = max(reading.get(answer.reader, 0), now + message.within_ns)
        if not isinstance(message, Heartbeat | Claim):
            reading.pop(message.reader, None)  # type: ignore[union-attr]
        ended = only(Freed, actions)
        ends += len(ended)
        if ended:
            assert all(until <= now for until in reading.values()), "a lease ended under a read (S1)"
    tell(producer, 1000 * S)
    assert ends + len(freed(producer)) == 1, "a lease ends exactly once (S4)"

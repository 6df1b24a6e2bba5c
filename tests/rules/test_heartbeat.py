"""What a reader renews, at whom and when."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.rules.consumer import Connect, Consumer, Forget
from reference_impl.rules.heartbeat import HeartbeatTracker
from reference_impl.rules.messages import HEARTBEAT_IDS_MAX, ID_CHARS_MAX, Heartbeat, Report, decode, encode
from reference_impl.rules.peers import FORGET_AFTER_FAILURES, LONGEST_PAUSE_NS
from reference_impl.rules.producer import Send
from tests.rules.parties import TERMS, P, S, connected, handoff, holder, messages, only, reading, tell

INTERVAL = TERMS.interval_ns


def beats(consumer: Consumer, now_ns: int) -> list[list[str]]:
    consumer.tick(now_ns)
    return [sorted(beat.requests) for beat in messages(Heartbeat, consumer.take())]


@pytest.mark.rule("KVC-HB-001")
def test_a_request_is_renewed_from_its_arrival_long_before_it_is_admitted() -> None:
    consumer = connected()
    consumer.arrive("r", handoff(), "text", 0)
    assert beats(consumer, 0) == [["p-req"]]
    assert beats(consumer, 10 * INTERVAL) == [["p-req"]], "it still waits for its admission"


@pytest.mark.rule("KVC-HB-002")
def test_one_message_an_engine_and_interval_renews_all_requests() -> None:
    consumer = connected()
    for number in range(40):
        consumer.arrive(f"r{number}", handoff(f"p{number}"), "text", 0)
    consumer.arrive("x", handoff("q", "p-2"), "text", 0)
    consumer.connected("p-2", INTERVAL, [], 0)
    assert sorted(map(len, beats(consumer, 0))) == [1, 40]


def test_more_requests_than_one_notification_holds_take_several() -> None:
    tracker = HeartbeatTracker()
    for number in range(HEARTBEAT_IDS_MAX + 1):
        tracker.track(P, f"{number:0{ID_CHARS_MAX}d}")
    due = tracker.due(P, 0, INTERVAL)
    assert [len(beat.requests) for beat in due] == [HEARTBEAT_IDS_MAX, 1]
    assert all(decode(encode(Heartbeat(beat.requests))) for beat in due)


@pytest.mark.rule("KVC-HB-003")
@given(st.lists(st.integers(0, 3 * INTERVAL), min_size=1, max_size=40))
def test_messages_are_an_interval_apart(pauses: list[int]) -> None:
    tracker = HeartbeatTracker()
    tracker.track(P, "a")
    now, sent = 0, []
    for pause in pauses:
        now += pause
        if tracker.due(P, now, INTERVAL):
            sent.append(now)
    assert sent[0] == pauses[0], "the first one at once"
    assert all(b - a >= INTERVAL for a, b in itertools.pairwise(sent))


@pytest.mark.rule("KVC-HB-004")
@pytest.mark.parametrize("end", ["read", "abort", "failed", "spare"])
def test_renewal_stops_when_the_receive_is_over(end: str) -> None:
    consumer = connected()
    if end == "read":
        consumer.ended(reading(consumer), "", 0)
    elif end == "failed":
        consumer.ended(reading(consumer), "broken", 0)
    else:
        consumer.arrive("r", handoff(), "text", 0)
        (consumer.spare if end == "spare" else consumer.abort)("r")
    consumer.take()
    assert beats(consumer, 10 * INTERVAL) == []
    assert consumer.heartbeats.engines == []


@pytest.mark.rule("KVC-HB-004")
def test_readers_that_share_a_lease_are_counted() -> None:
    consumer = connected()
    consumer.arrive("r1", handoff(), "text", 0)
    consumer.arrive("r2", handoff(), "text", 0)
    consumer.abort("r1")
    consumer.take()
    assert beats(consumer, INTERVAL) == [["p-req"]], "the other one still needs it"
    consumer.abort("r2")
    consumer.take()
    assert beats(consumer, 2 * INTERVAL) == []


@pytest.mark.rule("KVC-HB-005")
@pytest.mark.rule("KVC-HB-006")
def test_without_a_connection_a_handshake_starts_and_the_heartbeat_follows_it() -> None:
    consumer = Consumer(TERMS)
    consumer.arrive("r", handoff(), "text", 0)
    consumer.tick(0)
    assert consumer.take() == [Connect(P, "127.0.0.1", 7000)]
    assert beats(consumer, S) == [], "it is tried once, and nothing is sent meanwhile"
    consumer.connected(P, INTERVAL, [], 2 * S)
    assert beats(consumer, 2 * S) == [["p-req"]]


@pytest.mark.rule("KVC-HB-007")
def test_one_table_serves_all_ranks_and_a_repeated_heartbeat_is_harmless() -> None:
    """Heartbeats go between head ranks; the lease is of the request, so no rank can be missed."""
    producer = holder()
    for _ in range(8):
        tell(producer, 29 * S, Heartbeat(["p-req"]))
    lease = producer.leases.get("p-req")
    assert lease is not None
    assert lease.deadline_ns == 29 * S + TERMS.extension_ns


@pytest.mark.rule("KVC-HB-008")
def test_a_heartbeat_that_does_not_leave_is_counted_and_the_peer_is_connected_anew() -> None:
    consumer = connected()
    consumer.arrive("r", handoff(), "text", 0)
    consumer.tick(0)
    for send in only(Send, consumer.take()):
        consumer.sent(send, 0, ok=False)
    assert (consumer.counts.heartbeats_failed, consumer.counts.notifications_failed) == (1, 1)
    consumer.tick(S)
    assert [a.engine_id for a in only(Connect, consumer.take())] == [P]


@pytest.mark.rule("KVC-HB-008")
def test_a_peer_that_stays_unreachable_is_dropped_with_all_that_is_tracked_at_it() -> None:
    consumer = Consumer(TERMS)
    consumer.arrive("r", handoff(), "text", 0)
    now, tries, forgotten = 0, [], []
    while not forgotten and now < 1000 * S:
        consumer.tick(now)
        actions = consumer.take()
        if only(Connect, actions):
            tries.append(now)
            consumer.connect_failed(P, "refused", now)
        forgotten = only(Forget, [*actions, *consumer.take()])
        now += S // 20
    assert len(tries) == FORGET_AFTER_FAILURES
    pauses = [b - a for a, b in itertools.pairwise(tries)]
    assert pauses == sorted(pauses), "each pause is at least as long as the one before"
    assert pauses[-1] <= LONGEST_PAUSE_NS + S // 20
    assert (consumer.heartbeats.engines, consumer.peers) == ([], {})


@pytest.mark.rule("KVC-HB-009")
def test_sending_is_an_action_for_the_rim_and_a_peer_that_is_tried_holds_nothing_up() -> None:
    consumer = connected()
    consumer.arrive("x", handoff("q", "dead"), "text", 0)
    consumer.arrive("r", handoff(), "text", 0)
    for now in range(0, 10 * INTERVAL, INTERVAL):
        consumer.tick(now)
        sent = only(Send, consumer.take())
        assert [(s.engine_id, s.message) for s in sent] == [(P, Heartbeat(["p-req"]))]


def test_what_could_not_be_told_waits_for_the_connection() -> None:
    consumer = Consumer(TERMS)
    consumer.arrive("r", handoff(), "text", 0)
    consumer.abort("r")
    assert not consumer.idle
    consumer.tick(0)
    consumer.take()
    consumer.connected(P, INTERVAL, [], S)
    assert [r.reader for r in messages(Report, consumer.take())] == ["r"]
    assert consumer.idle


def test_untracking_what_is_not_tracked_is_harmless() -> None:
    tracker = HeartbeatTracker()
    tracker.untrack(P, "a")
    tracker.track(P, "a")
    tracker.untrack(P, "b")
    tracker.untrack(P, "a")
    tracker.untrack(P, "a")
    tracker.track(P, "a")
    assert tracker.tracked(P) == ["a"]
    tracker.drop(P)
    assert tracker.engines == []

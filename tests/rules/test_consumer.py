"""The side that reads: every load ends once, in time, and lets go of both sides' blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.rules.clocksync import Sample
from reference_impl.rules.consumer import (
    CANCEL_GRACE_NS,
    CLAIM_AGAIN_NS,
    TURN_MARGIN_NS,
    Abandoned,
    Cancel,
    Connect,
    Consumer,
    Drained,
    Failed,
    Forget,
    Judged,
    Loaded,
    Measure,
    Read,
    Stage,
)
from reference_impl.rules.messages import Answer, Claim, Heartbeat, How, Report
from reference_impl.rules.peers import FORGET_IDLE_NS, MEASURE_PAUSE_NS, OUTBOX_MAX, Peer
from reference_impl.rules.producer import Send
from reference_impl.rules.terms import KvTerms
from tests.rules.parties import TERMS, TWO_TURNS, P, S, claimed, connected, handoff, messages, only, reading

YES = Answer("p-req", "r", True)
NO = Answer("p-req", "r", False, "no lease")


def hows(actions: list[object]) -> list[How]:
    return [report.how for report in messages(Report, actions)]


def test_a_load_goes_claim_read_report() -> None:
    consumer = connected()
    claimed(consumer)
    assert messages(Claim, consumer.take()) == [Claim("p-req", "r", 10 * S, "text")]
    consumer.answered(P, YES, S)
    read = only(Read, consumer.take())[0]
    assert (read.remote_blocks, read.local_blocks) == ([10, 11, 12], [1, 2, 3])
    consumer.ended(read.read_id, "", 3 * S)
    actions = consumer.take()
    assert only(Loaded, actions) == [Loaded("r", S, 2 * S, 3)]
    assert hows(actions) == [How.READ]
    assert consumer.idle
    assert len(consumer) == 0


@pytest.mark.rule("KVC-REL-003")
def test_a_full_local_hit_reports_without_reading() -> None:
    consumer = connected()
    consumer.arrive("r", handoff(), "text", 0)
    consumer.spare("r")
    actions = consumer.take()
    assert hows(actions) == [How.HIT]
    assert only(Read, actions) == []
    assert consumer.idle


@pytest.mark.rule("KVC-REL-002")
def test_an_abort_before_scheduling_reports_at_once_or_as_soon_as_it_can() -> None:
    consumer = connected()
    consumer.arrive("r", handoff(), "text", 0)
    assert consumer.abort("r")
    assert hows(consumer.take()) == [How.ABORT]
    unconnected = Consumer(TERMS)
    unconnected.arrive("r", handoff(), "text", 0)
    assert unconnected.abort("r")
    assert hows(unconnected.take()) == []
    unconnected.connected(P, 0, [], S)
    assert hows(unconnected.take()) == [How.ABORT]


@pytest.mark.rule("KVC-XFER-003")
def test_after_an_abort_the_destination_is_free_only_when_the_read_has_ended() -> None:
    consumer = connected()
    read_id = reading(consumer)
    assert not consumer.abort("r")
    assert not consumer.abort("r"), "an abort may be repeated"
    actions = consumer.take()
    assert only(Cancel, actions) == [Cancel(read_id)]
    assert only(Drained, actions) == []
    for now in range(0, 100 * S, S):
        consumer.tick(now)
    assert only(Drained, consumer.take()) == [], "the read has still not ended"
    consumer.ended(read_id, "cancelled", 100 * S)
    actions = consumer.take()
    assert only(Drained, actions) == [Drained("r")]
    assert hows(actions) == [How.ABORT]
    assert only(Loaded, actions) == only(Failed, actions) == []


@pytest.mark.rule("KVC-XFER-004")
def test_a_read_that_never_completes_is_cancelled_at_its_deadline_and_then_left_behind() -> None:
    consumer = connected()
    read_id = reading(consumer)
    consumer.tick(9 * S)
    assert only(Cancel, consumer.take()) == []
    consumer.tick(10 * S)
    assert only(Cancel, consumer.take()) == [Cancel(read_id)]
    consumer.tick(10 * S + CANCEL_GRACE_NS)
    assert [a.request_id for a in only(Abandoned, consumer.take())] == ["r"]
    assert consumer.stage("r") is Stage.ABANDONED
    assert not consumer.idle
    consumer.ended(read_id, "", 500 * S)
    actions = consumer.take()
    assert only(Drained, actions) == [Drained("r")]
    assert only(Loaded, actions) == [], "too late to be used"
    assert consumer.idle


@pytest.mark.rule("KVC-XFER-004")
def test_a_read_ends_before_the_holder_stops_waiting_for_it() -> None:
    """The holder counts `within_ns` from a later moment; the reader stops a thousandth earlier, whatever the drift."""
    consumer = connected()
    read_id = reading(consumer)
    last_ns = TERMS.read_limit * S * (1 - 401e-6)
    consumer.tick(round(last_ns))
    assert only(Cancel, consumer.take()) == [Cancel(read_id)]


@pytest.mark.rule("KVC-XFER-002")
@pytest.mark.parametrize("torn", [False, True])
def test_a_failed_or_torn_read_fails_the_load_and_is_counted(torn: bool) -> None:
    consumer = connected()
    consumer.ended(reading(consumer), "broken", S, torn=torn)
    actions = consumer.take()
    assert only(Failed, actions) == [Failed("r", "broken")]
    assert hows(actions) == [How.FAILED]
    counts = consumer.counts
    assert (counts.failed_transfers, counts.torn, counts.failed, counts.loaded) == (1, int(torn), 1, 0)


def test_a_refused_claim_fails_the_load_and_never_reads() -> None:
    """S2, KVC-REL-007."""
    consumer = connected()
    claimed(consumer)
    consumer.answered(P, NO, 0)
    actions = consumer.take()
    assert only(Read, actions) == []
    assert [f.reason for f in only(Failed, actions)] == ["the holder refuses: no lease"]
    assert consumer.idle


def test_a_claim_is_repeated_and_still_ends_at_the_first_ones_deadline() -> None:
    consumer = connected()
    claimed(consumer)
    consumer.take()
    consumer.tick(CLAIM_AGAIN_NS)
    assert [c.within_ns for c in messages(Claim, consumer.take())] == [10 * S - CLAIM_AGAIN_NS]
    consumer.tick(10 * S)
    actions = consumer.take()
    assert [f.reason for f in only(Failed, actions)] == ["the holder does not answer"]


@pytest.mark.parametrize(
    ("engine", "answer"),
    [("other", YES), (P, Answer("other", "r", True)), (P, Answer("p-req", "other", True))],
)
def test_a_foreign_answer_starts_nothing(engine: str, answer: Answer) -> None:
    """S5."""
    consumer = connected()
    claimed(consumer)
    consumer.take()
    consumer.answered(engine, answer, 0)
    assert consumer.take() == []


def test_a_repeated_answer_starts_one_read() -> None:
    consumer = connected()
    claimed(consumer)
    consumer.answered(P, YES, 0)
    consumer.answered(P, YES, 0)
    consumer.answered(P, NO, 0)
    actions = consumer.take()
    assert len(only(Read, actions)) == 1
    assert only(Failed, actions) == []


@pytest.mark.rule("KVC-HSK-002")
def test_a_failed_handshake_fails_what_waits_for_it_once_and_is_tried_again_later() -> None:
    consumer = Consumer(TERMS)
    claimed(consumer)
    consumer.arrive("queued", handoff("q"), "text", 0)
    consumer.arrive("healthy", handoff("h", "p-2"), "text", 0)
    consumer.admit("healthy", [1], [4], 0)
    consumer.tick(0)
    assert {c.engine_id for c in only(Connect, consumer.take())} == {P, "p-2"}
    consumer.connect_failed(P, "refused", 0)
    assert [f.request_id for f in only(Failed, consumer.take())] == ["r"], (
        "neither who still queues, nor another peer's"
    )
    consumer.tick(0)
    assert only(Connect, consumer.take()) == [], "not at once"
    consumer.tick(S)
    assert len(only(Connect, consumer.take())) == 1, "for the one that queues"
    consumer.connected(P, 0, [], S)
    consumer.admit("queued", [1], [2], S)
    assert [c.reader for c in messages(Claim, consumer.take())] == ["queued"]


def test_no_connection_at_all_ends_at_the_loads_limit() -> None:
    """L3."""
    consumer = Consumer(TERMS)
    claimed(consumer)
    consumer.tick(0)
    consumer.tick(59 * S)
    assert only(Failed, consumer.take()) == []
    consumer.tick(60 * S)
    assert len(only(Failed, consumer.take())) == 1


def test_a_lost_peer_fails_its_loads_and_nobody_elses() -> None:
    """L6."""
    consumer = connected()
    consumer.arrive("x", handoff("q", "p-2"), "text", 0)
    claimed(consumer)
    consumer.arrive("later", handoff("l"), "text", 0)
    consumer.take()
    consumer.lost(P, "gone")
    actions = consumer.take()
    assert [f.request_id for f in only(Failed, actions)] == ["r"]
    assert only(Forget, actions) == [Forget(P, "gone")]
    consumer.admit("later", [1], [2], 0)
    assert [f.request_id for f in only(Failed, consumer.take())] == ["later"]
    assert consumer.stage("x") is Stage.ARRIVED


def test_a_report_that_does_not_leave_is_kept_and_too_many_are_not() -> None:
    """O2."""
    consumer = connected()
    consumer.arrive("r", handoff(), "text", 0)
    consumer.abort("r")
    for send in only(Send, consumer.take()):
        consumer.sent(send, 0, ok=False)
    assert consumer.counts.notifications_failed == 1
    consumer.connected(P, 0, [], S)
    assert [r.reader for r in messages(Report, consumer.take())] == ["r"]
    peer = Peer(P, "h", 1)
    for number in range(OUTBOX_MAX + 5):
        peer.keep(Report("q", str(number), How.READ))
    assert [len(peer.outbox), peer.outbox[0].reader] == [OUTBOX_MAX, "5"]


def expiring(left_ns: int, samples: tuple[Sample, ...], now_ns: int, terms: KvTerms = TWO_TURNS) -> list[object]:
    """What happens to a turn with so much left on the holder's clock, which shows our time + 5,000 s."""
    consumer = connected(terms, samples=samples, now_ns=now_ns)
    consumer.arrive("r", handoff(expiry_ns=now_ns + 5000 * S + left_ns), "text", now_ns)
    consumer.admit("r", [10], [1], now_ns)
    actions: list[object] = consumer.take()
    assert consumer.counts.expired_turns == len(only(Failed, actions))
    return actions


AHEAD = (Sample(10_000 * S, 15_000 * S, 10_000 * S),)


@pytest.mark.rule("KVC-CLK-002")
@pytest.mark.rule("KVC-CLK-003")
@pytest.mark.parametrize(("left_ns", "live"), [(TURN_MARGIN_NS + 2, True), (TURN_MARGIN_NS, False), (-480 * S, False)])
def test_a_turn_is_judged_by_the_corrected_expiry(left_ns: int, live: bool) -> None:
    actions = expiring(left_ns, AHEAD, 10_000 * S)
    judged = only(Judged, actions)[0]
    assert judged.live == live
    assert judged.left_ns + judged.error_ns == left_ns
    assert bool(messages(Claim, actions)) == live


@pytest.mark.rule("KVC-CLK-004")
def test_an_expired_turn_is_no_failure() -> None:
    failed = only(Failed, expiring(-S, AHEAD, 10_000 * S))[0]
    assert failed.expired
    consumer = connected(TWO_TURNS, samples=AHEAD, now_ns=10_000 * S)
    consumer.arrive("r", handoff(expiry_ns=15_400 * S), "text", 10_000 * S)
    consumer.admit("r", [10], [1], 10_000 * S)
    consumer.answered(P, NO, 10_000 * S)
    refused = only(Failed, consumer.take())[0]
    assert refused.expired, "it expired while the claim was under way"
    assert (consumer.counts.failed, consumer.counts.expired_turns) == (0, 1)


@pytest.mark.rule("KVC-CLK-002")
def test_without_any_sample_a_turn_is_not_used() -> None:
    assert only(Failed, expiring(400 * S, (), 10_000 * S))[0].expired


@pytest.mark.rule("KVC-CLK-001")
def test_a_turn_is_not_renewed_by_heartbeats() -> None:
    consumer = connected(TWO_TURNS, samples=AHEAD, now_ns=10_000 * S)
    consumer.arrive("r", handoff(expiry_ns=15_400 * S), "text", 10_000 * S)
    assert consumer.heartbeats.engines == []


@pytest.mark.rule("KVC-CLK-006")
def test_a_clock_is_measured_again_as_it_ages() -> None:
    consumer = connected(TWO_TURNS, samples=AHEAD, now_ns=10_000 * S)
    now = 10_031 * S
    consumer.tick(now)
    assert len(only(Measure, consumer.take())) == 1
    consumer.tick(now + MEASURE_PAUSE_NS)  # while one is under way
    assert only(Measure, consumer.take()) == []
    consumer.measured(P, [Sample(now, now + 5000 * S, now)], now)
    consumer.tick(now + 2 * S)
    assert only(Measure, consumer.take()) == []


@pytest.mark.rule("KVC-HSK-002")
def test_a_peer_whose_clock_cannot_be_measured_is_connected_anew_once_it_is_wanted() -> None:
    consumer = connected(TWO_TURNS, samples=AHEAD, now_ns=10_000 * S)
    now = 10_031 * S
    consumer.tick(now)
    consumer.take()
    consumer.measured(P, [], now)
    consumer.tick(now + 5 * S)
    assert consumer.take() == []  # nobody wants anything of it
    consumer.arrive("r", handoff(expiry_ns=15_400 * S), "text", now + 6 * S)
    consumer.tick(now + 6 * S)
    assert len(only(Connect, consumer.take())) == 1


def test_a_peer_of_which_nothing_is_wanted_for_long_is_forgotten() -> None:
    consumer = connected()
    claimed(consumer)
    consumer.answered(P, YES, S)
    consumer.ended(only(Read, consumer.take())[0].read_id, "", 2 * S)
    consumer.take()
    consumer.tick(2 * S)
    consumer.tick(2 * S + FORGET_IDLE_NS // 2)
    assert only(Forget, consumer.take()) == []
    consumer.tick(3 * S + FORGET_IDLE_NS)
    assert [forget.engine_id for forget in only(Forget, consumer.take())] == [P]
    assert consumer.peers == {}


@pytest.mark.rule("KVC-REL-005")
def test_a_refused_reader_reports_nothing_that_could_end_another_readers_lease() -> None:
    consumer = connected()
    claimed(consumer)
    consumer.answered(P, NO, S)
    actions = consumer.take()
    assert len(only(Failed, actions)) == 1
    assert hows(actions) == []
    assert consumer.heartbeats.engines == []


@pytest.mark.rule("KVC-CLK-008")
def test_the_rules_see_no_wall_clock() -> None:
    """Time is an argument, and one clock's difference from another's is measured, so a step changes nothing.

    `tests/repository` sees to it that no module but `realclock` reads a clock.
    """
    actions = expiring(400 * S, AHEAD, 10_000 * S)
    assert only(Judged, actions)[0].live


steps = st.lists(
    st.tuples(
        st.sampled_from(["tick", "yes", "no", "end", "break", "abort", "fail", "connect", "lost", "admit", "unsent"]),
        st.sampled_from(["a", "b", "c"]), st.integers(0, 15),
    ),
    max_size=40,
)  # fmt: skip


@pytest.mark.rule("KVC-XFER-003")
@given(steps)
def test_every_load_ends_once_and_in_time_whatever_happens(history: list[tuple[str, str, int]]) -> None:  # noqa: PLR0912
    """L3, S6: reads end when the history says so, or at the very end."""
    consumer, now = Consumer(TERMS), 0
    ends: dict[str, list[object]] = {name: [] for name in "abc"}
    admitted: dict[str, int] = {}
    aborted: set[str] = set()
    running: dict[str, int] = {}
    connecting = 0

    def settle() -> None:
        nonlocal connecting
        for action in consumer.take():
            match action:
                case Read():
                    running[names[action.local_blocks[0]]] = action.read_id
                case Loaded() | Failed() | Abandoned():
                    ends[action.request_id].append(action)
                case Drained():
                    assert action.request_id not in running, "a destination is free, and its read runs (S6)"
                    ends[action.request_id].append(action)
                case Connect():
                    connecting += 1
                case _:
                    pass

    names = dict(enumerate("abc"))
    for name in names.values():
        consumer.arrive(name, handoff(f"p-{name}"), "text", 0)
    for what, name, passed in history:
        now += passed * S
        match what:
            case "admit" if consumer.stage(name) is Stage.ARRIVED:
                consumer.admit(name, [7], [ord(name) - ord("a")], now)
                admitted[name] = now
            case "yes" | "no":
                consumer.answered(P, Answer(f"p-{name}", name, what == "yes"), now)
            case "end" | "break" if name in running:
                consumer.ended(running.pop(name), "" if what == "end" else "broken", now)
            case "abort":
                free = consumer.abort(name)
                aborted.add(name)
                assert free == (name not in running or any(isinstance(e, Abandoned) for e in ends[name]))
            case "connect" if connecting:
                connecting = 0
                consumer.connected(P, TERMS.interval_ns, [], now)
            case "fail" if connecting:
                connecting = 0
                consumer.connect_failed(P, "refused", now)
            case "lost":
                consumer.lost(P, "gone")
                connecting = 0
            case "unsent":
                consumer.sent(Send(P, Report("q", "x", How.READ)), now, ok=False)
            case _:
                pass
        settle()
        consumer.tick(now)
        settle()
    now += 200 * S
    for _ in range(3):  # deadlines: the load's, the read's, the cancel's
        consumer.tick(now)
        now += 200 * S
        settle()
    for name in "abc":
        kinds = [type(end) for end in ends[name]]
        if name in running:
            over = name in aborted or kinds == [Abandoned]
            assert over, f"{name} is still read, and neither aborted nor abandoned (L3)"
            consumer.ended(running.pop(name), "", now)
            settle()
            assert type(ends[name][-1]) is Drained
        elif name in admitted and name not in aborted:
            assert len([k for k in kinds if k is not Drained]) == 1, f"{name} ended {kinds}"
    for name in "abc":
        if name not in admitted:
            consumer.abort(name)
    consumer.lost(P, "the end")
    settle()
    assert consumer.idle, "nothing is left (K1)"
    assert consumer.heartbeats.engines == []


@pytest.mark.rule("KVC-LEASE-010", "KVC-HB-001")
def test_a_reader_that_its_peers_loss_left_behind_is_kept_alive_again_when_the_peer_is_back() -> None:
    consumer = connected()
    consumer.arrive("queued", handoff("one"), "text", 0)
    consumer.lost(P, "unreachable")
    consumer.arrive("new", handoff("two"), "text", S)
    consumer.tick(S)
    consumer.connected(P, 5 * S, [], 2 * S)
    consumer.take()
    consumer.tick(2 * S)
    [beat] = messages(Heartbeat, consumer.take())
    assert sorted(beat.requests) == ["one", "two"]


@pytest.mark.rule("KVC-HSK-002")
def test_a_claim_that_does_not_leave_ends_with_the_handshake_that_fails_then() -> None:
    consumer = connected()
    claimed(consumer)
    [send] = only(Send, consumer.take())
    consumer.sent(send, S, ok=False)
    consumer.connect_failed(P, "refused", 2 * S)
    assert [failed.request_id for failed in only(Failed, consumer.take())] == ["r"]


def test_a_claim_that_did_not_leave_is_made_again_on_the_next_connection() -> None:
    consumer = connected()
    claimed(consumer)
    [send] = only(Send, consumer.take())
    consumer.sent(send, S, ok=False)
    consumer.connected(P, 0, [], 2 * S)
    assert len(messages(Claim, consumer.take())) == 1
    consumer.answered(P, YES, 3 * S)
    assert len(only(Read, consumer.take())) == 1

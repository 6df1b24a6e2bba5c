import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.rules import operations
from reference_impl.rules.blockgroups import Answer, Evict, Outcome, Pin, Refusal, Reserve, Unpin
from reference_impl.rules.operations import NOT_KEPT, Denied, Record, Replay, Retention, canonical, judge

NOW_MS = 1_800_000_000_000
KEEP = Retention(window_ms=100, skew_ms=10)
RESERVE = Reserve(block_group_id="bg_1", epoch=7, slots=1)
ANSWER = Answer(outcome=Outcome.APPLIED, epoch=7, reserved=1)
RECORD = Record(canonical(RESERVE), ANSWER, NOW_MS)


def refusal(judgement):
    assert isinstance(judgement, Denied)
    assert judgement.answer.outcome is Outcome.REFUSED
    return judgement.answer.refusal, judgement.answer.field


@pytest.mark.rule("KVC-IDEM-001")
@pytest.mark.parametrize("late_ms", [-(10**9), 0, 10**9])
def test_a_record_is_replayed_whatever_the_time(late_ms):
    assert judge(RECORD, RESERVE, NOW_MS, NOW_MS + late_ms, NOW_MS + 1, KEEP) == Replay(ANSWER)


@pytest.mark.rule("KVC-IDEM-001")
def test_a_refusal_is_replayed_as_well():
    refused = Answer(outcome=Outcome.REFUSED, refusal=Refusal.PINNED)
    request = Evict(block_group_id="bg_1", epoch=7)
    assert judge(Record(canonical(request), refused, NOW_MS), request, NOW_MS, NOW_MS, 0, KEEP) == Replay(refused)


@pytest.mark.rule("KVC-IDEM-004")
@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(RESERVE, slots=2),
        msgspec.structs.replace(RESERVE, epoch=8),
        msgspec.structs.replace(RESERVE, block_group_id="bg_2"),
        Evict(block_group_id="bg_1", epoch=7),
    ],
)
def test_the_same_id_with_other_parameters_is_refused(other):
    assert refusal(judge(RECORD, other, NOW_MS, NOW_MS, 0, KEEP)) == (Refusal.ID_REUSED, "operation_id")


@pytest.mark.rule("KVC-IDEM-004")
@pytest.mark.parametrize("late_ms", [-1, 1, 50, 99])
def test_the_same_id_with_another_moment_is_refused(late_ms):
    judgement = judge(RECORD, RESERVE, NOW_MS + late_ms, NOW_MS + 50, 0, KEEP)
    assert refusal(judgement) == (Refusal.ID_REUSED, "issued_ms")
    assert f"issued {-late_ms:+} ms from this one: a retry repeats issued_ms as well" in judgement.answer.message


def test_what_is_not_kept_are_the_refusals_of_a_judgement():
    other = msgspec.structs.replace(RESERVE, slots=2)
    asked = [(RECORD, other, NOW_MS), (None, RESERVE, NOW_MS - 100), (None, RESERVE, NOW_MS + 11)]
    found = [refusal(judge(record, request, ms, NOW_MS, 0, KEEP))[0] for record, request, ms in asked]
    assert len(found) == len(NOT_KEPT)
    assert set(found) == NOT_KEPT


def test_requests_that_differ_in_their_kind_alone_have_other_parameters():
    pin, unpin = (kind(block_group_id="bg_1", epoch=7, request_id="r") for kind in (Pin, Unpin))
    assert canonical(pin) != canonical(unpin)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_parameters_are_equal_exactly_if_their_canonical_forms_are(epoch, slots, other_epoch, other_slots):
    one = Reserve(block_group_id="bg_1", epoch=epoch, slots=slots)
    other = Reserve(block_group_id="bg_1", epoch=other_epoch, slots=other_slots)
    assert (canonical(one) == canonical(other)) is (one == other)
    assert msgspec.json.decode(canonical(one), type=Reserve) == one


@pytest.mark.rule("KVC-IDEM-008")
@pytest.mark.parametrize(
    ("issued_ms", "purged_ms", "expected"),
    [
        (NOW_MS, 0, None),
        (NOW_MS - 99, 0, None),
        (NOW_MS - 100, 0, Refusal.ID_EXPIRED),
        (NOW_MS, NOW_MS, Refusal.ID_EXPIRED),
        (NOW_MS, NOW_MS - 1, None),
        (NOW_MS + 10, 0, None),
        (NOW_MS + 11, 0, Refusal.FROM_THE_FUTURE),
        (NOW_MS + 11, NOW_MS + 11, Refusal.ID_EXPIRED),
        (-1, 0, Refusal.ID_EXPIRED),
    ],
)
def test_an_id_without_a_record_runs_within_its_window_only(issued_ms, purged_ms, expected):
    judgement = judge(None, RESERVE, issued_ms, NOW_MS, purged_ms, KEEP)
    if expected is None:
        assert judgement is None
    else:
        assert refusal(judgement) == (expected, "issued_ms")


@pytest.mark.parametrize(
    ("issued_ms", "message"), [(NOW_MS - 100, "more than 0.1 s ago"), (NOW_MS - 99, "before anything that this node")]
)
def test_why_an_id_has_expired_is_said(issued_ms, message):
    assert message in judge(None, RESERVE, issued_ms, NOW_MS, NOW_MS - 1, KEEP).answer.message


@pytest.mark.parametrize("name", ["window_ms", "skew_ms"])
def test_a_retention_that_makes_no_sense_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Retention(**{name: 0})


@pytest.mark.rule("KVC-IDEM-008")
def test_what_is_purged_is_older_than_any_retry_that_would_be_run():
    before_ms = KEEP.purge_before_ms(NOW_MS)
    assert refusal(judge(None, RESERVE, before_ms, NOW_MS, 0, KEEP))[0] is Refusal.ID_EXPIRED


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["call", "call", "anew"]), st.integers(0, 5)),
        st.tuples(st.just("purge"), st.just(0)),
        st.tuples(st.just("clock"), st.integers(-300, 300)),
    ),
    max_size=60,
)


def runs_twice(history, judging=judge, raising=max):
    """Return which operations run though they were answered before: ids, each with the moment that its caller named.

    In a history of calls, purges and a wall clock that steps. A call repeats its operation's moment, which may be ahead
    of the clock; one that is made "anew" takes another under the same id.
    """
    now_ms, purged_ms = NOW_MS, 0
    records, issued, twice, answered = {}, {}, set(), set()
    for kind, value in history:
        if kind == "clock":
            now_ms += value
        elif kind == "purge":
            old = [name for name, record in records.items() if record.issued_ms < KEEP.purge_before_ms(now_ms)]
            purged_ms = raising([purged_ms, *(records[name].issued_ms for name in old)])
            records = {name: record for name, record in records.items() if name not in old}
        else:
            issued_ms = issued[value] = now_ms + value if kind == "anew" else issued.get(value, now_ms + value)
            judgement = judging(records.get(value), RESERVE, issued_ms, now_ms, purged_ms, KEEP)
            if judgement is None:
                twice |= {(value, issued_ms)} & answered
                records[value] = msgspec.structs.replace(RECORD, issued_ms=issued_ms)
            if not isinstance(judgement, Denied):
                answered.add((value, issued_ms))
    return twice


@pytest.mark.rule("KVC-IDEM-008")
@given(steps)
def test_no_operation_that_was_answered_ever_runs_again_whatever_the_wall_clock_does(history):
    assert not runs_twice(history)


PURGED_THEN_BACK = [("call", 0), ("clock", 200), ("purge", 0), ("clock", -200), ("call", 0)]


def _forgets_the_purge(record, request, issued_ms, now_ms, purged_ms, retention):
    return judge(record, request, issued_ms, now_ms, 0, retention)


def _runs_old_ids(record, request, issued_ms, now_ms, purged_ms, retention):
    return judge(record, request, now_ms, now_ms, 0, retention)


def _answers_any_moment(record, request, issued_ms, now_ms, purged_ms, retention):
    known = record and msgspec.structs.replace(record, issued_ms=issued_ms)
    return judge(known, request, issued_ms, now_ms, purged_ms, retention)


@pytest.mark.rule("KVC-IDEM-004", "KVC-IDEM-008")
def test_a_twin_that_answers_a_retry_under_another_moment_runs_it_again_after_a_purge():
    history = [("call", 0), ("clock", 90), ("anew", 0), ("clock", 30), ("purge", 0), ("call", 0)]
    assert not runs_twice(history)
    assert runs_twice(history, judging=_answers_any_moment) == {(0, NOW_MS + 90)}


@pytest.mark.rule("KVC-IDEM-008")
@pytest.mark.parametrize("twin", [_forgets_the_purge, _runs_old_ids])
def test_a_twin_that_forgets_what_was_purged_is_caught(twin):
    assert not runs_twice(PURGED_THEN_BACK)
    assert runs_twice(PURGED_THEN_BACK, judging=twin)


def test_the_window_is_longer_than_any_deadline_and_the_skew():
    assert operations.WINDOW_MS > 2 * operations.SKEW_MS

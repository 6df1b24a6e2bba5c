"""The checker of operation histories accepts what the rules do, and catches every mistake, in bounded time."""

from __future__ import annotations

import functools
import gc
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from harness.group_timeline import Breach, Engines, Timeline
from harness.operation_history import (
    A_WHOLE_MIGRATION,
    WANTED,
    HistoryVerdict,
    judge_history,
    judge_owners,
    judge_ownership,
    not_tried,
)
from harness.operation_moves import judge_moves
from reference_impl.rules.blockgroups import Answer, GroupState, Outcome, Pin, PinState, Refusal
from reference_impl.rules.operations import canonical
from tests.harness.operation_histories import (
    MS,
    WALL_MS,
    Flaw,
    PinRow,
    history,
    history_of_stores,
    history_with_engines,
)
from workloads.operation_rows import (
    ControlRows,
    EffectRow,
    FinalRow,
    Invocation,
    RecordRow,
    joined,
    read_rows,
    write_rows,
)

SEEDS = range(2)
MINUTES_MS = 60_000
NONE_CAME: Engines = {}
"""No other engine came to any node."""


@functools.cache
def _sound(seed: int, invocations: int) -> ControlRows:
    return history(seed, invocations=invocations)


def sound(seed: int, invocations: int = 400) -> ControlRows:
    """Return a history without a flaw, whose lists may be changed."""
    return joined([_sound(seed, invocations)])


def breaches(rows: ControlRows, engines: Engines | None = NONE_CAME) -> list[Breach]:
    return judge_history(rows, engines=engines).breaches + judge_ownership(rows, engines=engines)


def rules(rows: ControlRows) -> set[str]:
    return {breach.rule for breach in breaches(rows)}


@pytest.mark.parametrize("seed", range(15))
def test_what_the_rules_do_is_accepted(seed: int) -> None:
    assert breaches(history(seed, invocations=240)) == []


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.rule("KVC-IDEM-001", "KVC-IDEM-002", "KVC-IDEM-003", "KVC-IDEM-004", "KVC-IDEM-005", "KVC-IDEM-007")
@pytest.mark.rule("KVC-IDEM-008", "KVC-IDEM-009", "KVC-IDEM-010", "KVC-IDEM-011", "KVC-IDEM-019")
def test_what_the_store_does_is_accepted(tmp_path: Path, seed: int) -> None:
    rows = history_of_stores(tmp_path, seed)
    verdict = judge_history(rows, engines=NONE_CAME)
    assert breaches(rows) == []
    counts = verdict.counts
    assert min(counts.applied, counts.retried, counts.replayed, counts.refused, counts.effects) > 10
    assert counts.double_effects == 0


CAUGHT_BY: dict[Flaw, str] = {
    Flaw.TWO_TRANSACTIONS: "KVC-IDEM-001",
    Flaw.RECORD_FIRST: "KVC-IDEM-007",
    Flaw.RESULT_NOT_STORED: "KVC-IDEM-003",
    Flaw.PARAMETERS_NOT_COMPARED: "KVC-IDEM-004",
    Flaw.EPOCH_NOT_CHECKED: "KVC-IDEM-005",
    Flaw.PINS_COUNTED: "KVC-IDEM-009",
    Flaw.UNPIN_FORGETS: "KVC-IDEM-009",
    Flaw.DEDUP_LOST_ON_RESTART: "KVC-IDEM-001",
    Flaw.IDS_OF_ALL_TENANTS: "KVC-IDEM-008",
    Flaw.ANSWERS_ANEW: "KVC-IDEM-003",
    Flaw.REFUSALS_NOT_KEPT: "KVC-IDEM-003",
    Flaw.WORKS_AFTER_FAILURE: "KVC-IDEM-001",
    Flaw.ANSWERS_BEFORE_EFFECT: "KVC-IDEM-001",
    Flaw.NOBODY_ASKED: "KVC-IDEM-001",
    Flaw.EVICTS_PINNED: "KVC-IDEM-010",
    Flaw.EVICTS_LENT: "KVC-IDEM-010",
    Flaw.RUNS_EXPIRED: "KVC-IDEM-008",
    Flaw.FORGETS_RESERVE: "KVC-IDEM-007",
    Flaw.TIMEOUT_CANCELS: "KVC-IDEM-011",
    Flaw.MOVES_NOTHING: "KVC-IDEM-007",
    Flaw.TWO_OWNERS: "KVC-IDEM-011",
    Flaw.LOSES_GROUP: "KVC-IDEM-011",
    Flaw.NEVER_SETTLES: "KVC-IDEM-011",
    Flaw.STALE_UNPIN: "KVC-IDEM-005",
    Flaw.REPIN_COUNTED: "KVC-IDEM-009",
    Flaw.HOLDS_NOTHING: "KVC-IDEM-010",
    Flaw.COPIES_NOTHING: "KVC-IDEM-011",
    Flaw.SOURCE_EVICTS: "KVC-IDEM-011",
    Flaw.COPIES_OTHER_BYTES: "KVC-IDEM-011",
    Flaw.KNOWS_NO_OPERATION: "KVC-IDEM-019",
    Flaw.TELLS_ANOTHER_ANSWER: "KVC-IDEM-019",
    Flaw.FINDS_NO_GROUP: "KVC-IDEM-007",
    Flaw.TELLS_FIRST_EPOCH: "KVC-IDEM-007",
    Flaw.TELLS_NO_PINS: "KVC-IDEM-007",
    Flaw.TELLS_PENDING: "KVC-IDEM-011",
    Flaw.FINDS_NO_MIGRATION: "KVC-IDEM-011",
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("flaw", "rule"), CAUGHT_BY.items())
def test_a_flawed_service_is_caught_by_its_rule(flaw: Flaw, rule: str, seed: int) -> None:
    assert breaches(sound(seed)) == [], "its sound twin is accepted"
    found = breaches(history(seed, flaw))
    assert rule in {b.rule for b in found}, [b.text for b in found]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_lost_with_an_engine_is_no_breach(seed: int) -> None:
    rows, engines = history_with_engines(seed)
    assert breaches(rows, engines) == []
    assert breaches(rows, None) == [], "nobody knows whether an engine came"
    assert {"KVC-IDEM-010", "KVC-IDEM-011"} <= {b.rule for b in breaches(rows, NONE_CAME)}, "none came"


def test_every_flaw_is_tried() -> None:
    assert set(CAUGHT_BY) == set(Flaw)


# A sound history, changed in one place.

T = TypeVar("T", bound=msgspec.Struct)
Mutation = Callable[[ControlRows], None]


def first(rows: list[T], wanted: Callable[[T], bool]) -> T:
    return next(row for row in rows if wanted(row))


def change(rows: list[T], old: T, **fields: object) -> T:
    new = msgspec.structs.replace(old, **fields)
    rows[rows.index(old)] = new
    return new


def sole(rows: ControlRows, method: str, outcome: str = "ok", refusal: str = "") -> Invocation:
    """Return an invocation that had its answer at once, of an operation that nobody invoked again."""
    keys = Counter((i.node, i.tenant, i.operation_id) for i in rows.invocations)
    return first(
        rows.invocations,
        lambda i: (
            (i.method, i.outcome, i.refusal, i.replayed) == (method, outcome, refusal, False) and bool(i.answer)
            and keys[i.node, i.tenant, i.operation_id] == 1
        ),
    )  # fmt: skip


def effect_of(rows: ControlRows, i: Invocation) -> EffectRow:
    key = (i.node, i.tenant, i.operation_id, "client")
    return first(rows.effects, lambda e: (e.node, e.tenant, e.operation_id, e.cause) == key)


def record_of(rows: ControlRows, i: Invocation) -> RecordRow:
    key = (i.node, i.tenant, i.operation_id)
    return first(rows.records, lambda r: (r.node, r.tenant, r.operation_id) == key)


def change_answer(rows: ControlRows, i: Invocation, **fields: object) -> None:
    """Change an answer for everybody who knows it."""
    answer = msgspec.structs.replace(msgspec.json.decode(i.answer, type=Answer), **fields)
    text = msgspec.json.encode(answer).decode()
    change(rows.records, record_of(rows, i), answer=text)
    change(rows.invocations, i, answer=text)


def again(rows: ControlRows, i: Invocation, **fields: object) -> None:
    later = msgspec.structs.replace(i, client="again", start_ns=i.end_ns + MS, end_ns=i.end_ns + 2 * MS, **fields)
    rows.invocations.append(later)


def denied(refusal: Refusal) -> dict[str, object]:
    answer = msgspec.json.encode(Answer(outcome=Outcome.REFUSED, refusal=refusal)).decode()
    return {"outcome": "fail", "refusal": refusal, "answer": answer}


def effect_before_its_request(h: ControlRows) -> None:
    i = sole(h, "reserve")
    change(h.invocations, i, start_ns=effect_of(h, i).at_ns + 1)


def effect_after_its_answer(h: ControlRows) -> None:
    i = sole(h, "pin")
    change(h.invocations, i, end_ns=effect_of(h, i).at_ns - 1)


def effect_twice(h: ControlRows) -> None:
    effect = effect_of(h, sole(h, "reserve"))
    h.effects.append(msgspec.structs.replace(effect, seq=len(h.effects) + 1))


def effect_missing(h: ControlRows) -> None:
    h.effects.remove(effect_of(h, sole(h, "prepare_get")))


def effect_half(h: ControlRows) -> None:
    i = sole(h, "start_migrate")
    h.effects.remove(
        first(h.effects, lambda e: e.kind == "migration" and e.cause == "client" and e.operation_id == i.operation_id)
    )


def effect_elsewhere(h: ControlRows) -> None:
    change(h.effects, effect_of(h, sole(h, "prepare_get")), block_group_id="p0-g0-other")


def another_effect(h: ControlRows) -> None:
    row = PinRow(request_id="other", state=PinState.PINNED)
    change(h.effects, effect_of(h, sole(h, "pin")), key="other", after=msgspec.json.encode(row).decode())


def engine_effect_missing(h: ControlRows) -> None:
    h.effects.remove(first(h.effects, lambda e: e.cause == "engine" and e.kind == "group" and bool(e.before)))


def engine_reserves(h: ControlRows) -> None:
    effect = first(h.effects, lambda e: e.cause == "engine" and e.kind == "group" and not e.before)
    change(h.effects, effect, after=effect.after.replace('"reserved":0', '"reserved":5'))


def epoch_falls(h: ControlRows) -> None:
    effect = first(h.effects, lambda e: e.kind == "group" and '"EVICTED"' in e.before and '"RESIDENT"' in e.after)
    group = msgspec.json.decode(effect.after) | {"epoch": 1}
    change(h.effects, effect, after=msgspec.json.encode(group).decode())


def migration_ends_twice(h: ControlRows) -> None:
    effect = first(h.effects, lambda e: e.kind == "migration" and '"told":true' in e.after and "SUCCEEDED" in e.after)
    change(h.effects, effect, after=effect.after.replace("SUCCEEDED", "FAILED"))


def nobody_asked(h: ControlRows) -> None:
    h.invocations.remove(sole(h, "reserve"))


def told_that_it_failed(h: ControlRows) -> None:
    change(h.invocations, sole(h, "unpin"), outcome="fail", answer="", error_code="INVALID_ARGUMENT")


def ok_without_an_answer(h: ControlRows) -> None:
    change(h.invocations, sole(h, "reserve"), answer="")


def fail_with_an_answer_that_says_ok(h: ControlRows) -> None:
    change(h.invocations, sole(h, "reserve"), outcome="fail")


def client_was_told_otherwise(h: ControlRows) -> None:
    i = sole(h, "reserve")
    change(h.invocations, i, answer=i.answer.replace('"reserved":', '"reserved":1'))


def later_told_otherwise(h: ControlRows) -> None:
    i = sole(h, "reserve")
    again(h, i, replayed=True, answer=i.answer.replace('"reserved":', '"reserved":1'))


def answered_as_new_twice(h: ControlRows) -> None:
    again(h, sole(h, "reserve"))


def taken_back_as_reused(h: ControlRows) -> None:
    again(h, sole(h, "reserve"), **denied(Refusal.ID_REUSED))


def taken_back_as_expired(h: ControlRows) -> None:
    again(h, sole(h, "reserve"), **denied(Refusal.ID_EXPIRED))


def reused_by_nobody(h: ControlRows) -> None:
    again(h, sole(h, "reserve"), operation_id="never", **denied(Refusal.ID_REUSED))


def other_parameters_answered(h: ControlRows) -> None:
    i = sole(h, "pin")
    again(h, i, replayed=True, params=i.params.replace('"epoch":', '"epoch":1'))


def other_parameters_kept(h: ControlRows) -> None:
    i = sole(h, "reserve")
    change(h.records, record_of(h, i), params=i.params.replace('"slots":', '"slots":1'))


def not_kept(h: ControlRows) -> None:
    h.records.remove(record_of(h, sole(h, "reserve")))


def kept_twice(h: ControlRows) -> None:
    h.records.append(record_of(h, sole(h, "reserve")))


def kept_for_nobody(h: ControlRows) -> None:
    h.records.append(msgspec.structs.replace(h.records[0], operation_id="never"))


def ran_when_too_old(h: ControlRows) -> None:
    record = record_of(h, sole(h, "reserve"))
    change(h.records, record, issued_ms=record.done_ms - 10 * MINUTES_MS)


def parameters_of_no_request(h: ControlRows) -> None:
    i = sole(h, "reserve")
    change(h.records, record_of(h, i), params="{}")
    change(h.invocations, i, params="{}")


def stale_without_reason(h: ControlRows) -> None:
    i = sole(h, "pin", "fail", "STALE_EPOCH")
    change_answer(h, i, epoch=i.epoch)


def refused_in_a_state_that_never_was(h: ControlRows) -> None:
    change_answer(h, sole(h, "evict", "fail", "PINNED"), pins=99)


def refused_as_pinned_without_a_pin(h: ControlRows) -> None:
    change_answer(h, sole(h, "start_migrate", "fail", "PINNED"), pins=0)


def ends_otherwise(h: ControlRows) -> None:
    change(h.groups, h.groups[0], reserved=h.groups[0].reserved + 1)


def ends_pinned_by_another(h: ControlRows) -> None:
    change(h.groups, h.groups[0], pins='["another"]')


def ends_unknown(h: ControlRows) -> None:
    h.groups.pop(0)


def ends_with_one_more(h: ControlRows) -> None:
    h.groups.append(msgspec.structs.replace(h.groups[0], block_group_id="another"))


MUTATIONS: list[tuple[Mutation, str]] = [
    (effect_before_its_request, "KVC-IDEM-001"),
    (effect_after_its_answer, "KVC-IDEM-001"),
    (effect_twice, "KVC-IDEM-001"),
    (effect_missing, "KVC-IDEM-007"),
    (effect_half, "KVC-IDEM-007"),
    (effect_elsewhere, "KVC-IDEM-001"),
    (another_effect, "KVC-IDEM-009"),
    (engine_effect_missing, "KVC-IDEM-007"),
    (engine_reserves, "KVC-IDEM-010"),
    (epoch_falls, "KVC-IDEM-005"),
    (migration_ends_twice, "KVC-IDEM-011"),
    (nobody_asked, "KVC-IDEM-001"),
    (told_that_it_failed, "KVC-IDEM-001"),
    (ok_without_an_answer, "KVC-IDEM-001"),
    (fail_with_an_answer_that_says_ok, "KVC-IDEM-001"),
    (client_was_told_otherwise, "KVC-IDEM-003"),
    (later_told_otherwise, "KVC-IDEM-003"),
    (answered_as_new_twice, "KVC-IDEM-001"),
    (taken_back_as_reused, "KVC-IDEM-004"),
    (taken_back_as_expired, "KVC-IDEM-008"),
    (reused_by_nobody, "KVC-IDEM-008"),
    (other_parameters_answered, "KVC-IDEM-004"),
    (other_parameters_kept, "KVC-IDEM-004"),
    (not_kept, "KVC-IDEM-003"),
    (kept_twice, "KVC-IDEM-007"),
    (kept_for_nobody, "KVC-IDEM-001"),
    (ran_when_too_old, "KVC-IDEM-008"),
    (parameters_of_no_request, "KVC-IDEM-001"),
    (stale_without_reason, "KVC-IDEM-005"),
    (refused_in_a_state_that_never_was, "KVC-IDEM-010"),
    (refused_as_pinned_without_a_pin, "KVC-IDEM-010"),
    (ends_otherwise, "KVC-IDEM-007"),
    (ends_pinned_by_another, "KVC-IDEM-009"),
    (ends_unknown, "KVC-IDEM-007"),
    (ends_with_one_more, "KVC-IDEM-007"),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("mutation", "rule"), MUTATIONS, ids=lambda v: getattr(v, "__name__", v))
def test_one_changed_row_is_caught_by_its_rule(mutation: Mutation, rule: str, seed: int) -> None:
    rows = sound(seed, invocations=800)
    mutation(rows)
    found = judge_history(rows).breaches
    assert rule in {b.rule for b in found}, [b.text for b in found]


# What is no breach.


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_answer_says_nothing(seed: int) -> None:
    rows = sound(seed)
    for method in ("reserve", "pin", "unpin", "start_migrate"):
        change(rows.invocations, sole(rows, method), outcome="unknown", answer="")
    never_ran = sole(rows, "pin", "fail", "NOT_RESIDENT")
    if not any(e.operation_id == never_ran.operation_id for e in rows.effects):
        rows.records.remove(record_of(rows, never_ran))
        change(rows.invocations, never_ran, outcome="unknown", answer="", refusal="")
    assert breaches(rows) == []


def test_an_answer_may_lack_what_is_not_sent_to_clients() -> None:
    rows = sound(1)
    i = sole(rows, "start_migrate")
    record = record_of(rows, i)
    change(rows.records, record, answer=record.answer.replace('"told":false', '"told":true'))
    assert breaches(rows) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_older_than_the_window_may_be_forgotten(seed: int) -> None:
    rows = sound(seed)
    end_ns = max(i.end_ns for i in rows.invocations)
    window_ms = (end_ns - min(i.start_ns for i in rows.invocations)) // MS // 2
    old_ns = end_ns - window_ms * MS
    old = {(i.node, i.tenant, i.operation_id) for i in rows.invocations if i.start_ns < old_ns - 100 * MS}
    effects = [e for e in rows.effects if e.at_ns >= old_ns - 100 * MS]
    records = [r for r in rows.records if (r.node, r.tenant, r.operation_id) not in old]
    assert len(effects) < len(rows.effects)
    assert len(records) < len(rows.records)
    forgotten = msgspec.structs.replace(rows, effects=effects, records=records)
    assert judge_history(forgotten, window_ms=window_ms).breaches == []
    assert judge_history(forgotten).breaches, "with a longer window it must be there"


def test_what_is_younger_than_the_window_may_not() -> None:
    rows = sound(0)
    rows.invocations.sort(key=lambda i: -i.start_ns)
    span_ms = (rows.invocations[0].end_ns - rows.invocations[-1].start_ns) // MS
    rows.effects.remove(effect_of(rows, sole(rows, "reserve")))
    assert "KVC-IDEM-007" in {b.rule for b in judge_history(rows, window_ms=span_ms // 2).breaches}


def test_a_group_is_looked_for_in_the_states_of_a_span_of_time() -> None:
    timeline = Timeline("g")
    assert timeline.was((None, "", 0, 0, 0), 5, 6)
    effect = EffectRow(
        node="n", seq=7, at_ns=10, tenant="t", block_group_id="g", operation_id="o", cause="client", kind="pin"
    )  # fmt: skip
    timeline = Timeline("g")
    for pins, state in ((1, PinState.PINNED), (0, PinState.UNPINNED)):
        number = timeline.add(msgspec.structs.replace(effect, seq=7 + pins, at_ns=30 - 10 * pins), None, pins)
        timeline.add_pin(number, "r", state)
    pinned = (None, "", 0, 0, 1)
    assert timeline.was(pinned, 0, 20)
    assert timeline.was(pinned, 30, 90)
    assert not timeline.was(pinned, 0, 19)
    assert not timeline.was(pinned, 31, 90)
    assert timeline.was(pinned, 25, 26, ("r", PinState.PINNED))
    assert not timeline.was(pinned, 25, 26, ("r", PinState.UNPINNED))
    assert not timeline.was(pinned, 25, 26, ("other", PinState.PINNED))


# Owners.


def final(node: str, state: GroupState, location: str, epoch: int = 2) -> FinalRow:
    return FinalRow(
        node=node, tenant="blue", block_group_id="g", state=state, location=location, epoch=epoch, migration="m"
    )  # fmt: skip


MOVED, RESIDENT, EVICTED = GroupState.MOVED, GroupState.RESIDENT, GroupState.EVICTED
LEAVING, COMING = GroupState.MIGRATING_OUT, GroupState.MIGRATING_IN


@pytest.mark.rule("KVC-IDEM-011")
@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([final("p0", RESIDENT, "p0"), final("d0", RESIDENT, "d0")], "2 owners at the end: d0, p0"),
        ([final("p0", MOVED, "d0")], "knows nothing of that: it is lost"),
        ([final("p0", MOVED, "d0"), final("d0", COMING, "p0")], "it is lost"),
        ([final("p0", MOVED, "d0", 3), final("d0", RESIDENT, "d0", 2)], "known there with epoch 2 only"),
        ([final("p0", LEAVING, "p0")], "still MIGRATING_OUT at p0"),
        ([final("p0", RESIDENT, "d0")], "says that it is d0's"),
    ],
)
def test_a_group_with_two_owners_or_none_is_told(groups: list[FinalRow], words: str) -> None:
    assert any(words in breach.text for breach in judge_owners(groups)), judge_owners(groups)


@pytest.mark.rule("KVC-IDEM-011")
@pytest.mark.parametrize(
    "groups",
    [
        [final("p0", MOVED, "d0"), final("d0", RESIDENT, "d0")],
        [final("p0", MOVED, "d0"), final("d0", EVICTED, "d0", 3)],
        [final("p0", MOVED, "d0"), final("d0", MOVED, "d1", 3), final("d1", RESIDENT, "d1", 3)],
        [final("p0", EVICTED, "p0")],
        [],
    ],
)
def test_a_group_that_moved_on_or_was_evicted_is_not_lost(groups: list[FinalRow]) -> None:
    assert judge_owners(groups) == []


# Moves.


def moved_effects(left: GroupState, settled: GroupState | None, cause: str = "migration") -> list[EffectRow]:
    """Return the effects of a migration m of group g from p0 to d0 that SUCCEEDED; seconds 1 to 5."""

    def effect(node: str, second: int, kind: str, before: str, after: str, cause: str = "migration") -> EffectRow:
        return EffectRow(
            node=node, seq=second, at_ns=second * 1000 * MS, tenant="blue", block_group_id="g", operation_id="",
            cause=cause, kind=kind, key="m", before=before, after=after,
        )  # fmt: skip

    def group(state: GroupState, location: str) -> str:
        return json({"state": state, "location": location, "epoch": 1, "migration": "m"})

    def json(row: dict[str, object]) -> str:
        return msgspec.json.encode(row).decode()

    out, arriving = group(LEAVING, "p0"), group(COMING, "p0")
    location = "d0" if left is MOVED else "p0"
    effects = [
        effect("p0", 1, "group", group(RESIDENT, "p0"), out),
        effect("d0", 2, "group", "", arriving),
        effect("p0", 3, "migration", json({"status": "RUNNING", "dst": "d0"}),
               json({"status": "SUCCEEDED", "dst": "d0"})),
        effect("p0", 4, "group", out, group(left, location), "engine" if left is EVICTED else "migration"),
    ]  # fmt: skip
    if settled is not None:
        effects.append(effect("d0", 5, "group", arriving, group(settled, "d0"), cause))
    return effects


@pytest.mark.rule("KVC-IDEM-011")
def test_a_group_that_moved_is_at_its_target_or_was_lost_with_the_engine_there() -> None:
    assert judge_moves(moved_effects(MOVED, RESIDENT), {}) == []
    lost = moved_effects(MOVED, EVICTED)
    assert ["it is lost" in breach.text for breach in judge_moves(lost, {})] == [True]
    for came_s, excused in ((1.5, False), (2.5, True), (5.5, False)):
        assert (judge_moves(lost, {"d0": [int(came_s * 1000) * MS]}) == []) is excused, came_s
    assert judge_moves(lost, {"p0": [2500 * MS]}), "that came to another node"
    assert judge_moves(lost) == [], "nobody knows whether one came"
    assert judge_moves(moved_effects(MOVED, RESIDENT, "engine"), {})
    assert judge_moves([e for e in lost if e.node == "p0"], {}), "its target never took it in"


@pytest.mark.rule("KVC-IDEM-011")
def test_a_migration_that_succeeded_leaves_word_of_it_at_its_source() -> None:
    found = judge_moves(moved_effects(RESIDENT, RESIDENT), {})
    assert ["left its group RESIDENT at p0 at its source" in breach.text for breach in found] == [True]


@pytest.mark.rule("KVC-IDEM-010")
def test_an_engine_keeps_what_moves_until_the_move_has_ended() -> None:
    running = moved_effects(EVICTED, None)
    running[2] = msgspec.structs.replace(running[2], after=running[2].before)
    assert ["while it moved" in breach.text for breach in judge_moves(running, {})] == [True]
    assert judge_moves(running, {"p0": [4500 * MS]}) == []
    early = [msgspec.structs.replace(e, at_ns=10_000 * MS) if e.node == "d0" else e for e in running]
    assert judge_moves(early, {}) == [], "it had not been lent yet"


# What was tried.


def test_a_history_without_an_effect_of_each_method_says_so() -> None:
    rows = sound(0)
    assert not_tried(rows) == []
    assert not_tried(ControlRows()) == [*WANTED, A_WHOLE_MIGRATION]
    kept = [e for e in rows.effects if not (e.cause == "client" and e.kind == "transfer")]
    assert not_tried(msgspec.structs.replace(rows, effects=kept)) == ["prepare_get"]
    kept = [e for e in rows.effects if "SUCCEEDED" not in e.after]
    assert not_tried(msgspec.structs.replace(rows, effects=kept)) == [A_WHOLE_MIGRATION]


# Size.


def tiled(rows: ControlRows, times: int) -> ControlRows:
    """Return a history of so many deployments' groups, one after the other in the same nodes' order."""
    whole = ControlRows()
    for number in range(times):
        seq = len(whole.effects)
        whole.invocations.extend(msgspec.structs.replace(i, tenant=f"{i.tenant}{number}") for i in rows.invocations)
        whole.effects.extend(
            msgspec.structs.replace(e, tenant=f"{e.tenant}{number}", seq=e.seq + seq) for e in rows.effects
        )  # fmt: skip
        whole.records.extend(msgspec.structs.replace(r, tenant=f"{r.tenant}{number}") for r in rows.records)
        whole.groups.extend(msgspec.structs.replace(g, tenant=f"{g.tenant}{number}") for g in rows.groups)
        whole.looks.extend(msgspec.structs.replace(k, tenant=f"{k.tenant}{number}") for k in rows.looks)
    return whole


def one_hot_group(operations: int) -> ControlRows:
    """Return a history of one group that everybody pins anew all the time, all at once, so that any order may be."""
    rows = ControlRows()
    group = {"state": "RESIDENT", "location": "p0", "epoch": 1}
    place: dict[str, str] = {"node": "p0", "tenant": "blue", "block_group_id": "g"}
    rows.effects.append(
        EffectRow(**place, seq=1, at_ns=1, operation_id="", cause="engine", kind="group", key="g",
                  after=msgspec.json.encode(group).decode())
    )  # fmt: skip
    end_ns = 10 * operations
    for number in range(operations):
        request = Pin(block_group_id="g", epoch=1, request_id=f"r{number // 2}")
        answer = msgspec.json.encode(
            Answer(outcome=Outcome.APPLIED, epoch=1, state=RESIDENT, location="p0", pins=number // 2 + 1)
        ).decode()
        params, name = canonical(request).decode(), f"op{number}"
        rows.invocations.append(
            Invocation(**place, client="c", operation_id=name, method="pin", epoch=1, params=params, start_ns=2,
                       end_ns=end_ns, outcome="ok", answer=answer)
        )  # fmt: skip
        rows.records.append(
            RecordRow(node="p0", tenant="blue", operation_id=name, method="pin", params=params, outcome="APPLIED",
                      answer=answer, issued_ms=WALL_MS, done_ms=WALL_MS)
        )  # fmt: skip
        if number % 2 == 0:
            row = PinRow(request_id=request.request_id, state=PinState.PINNED)
            rows.effects.append(
                EffectRow(**place, seq=number + 2, at_ns=10 * number + 5, operation_id=name, cause="client", kind="pin",
                          key=request.request_id, after=msgspec.json.encode(row).decode())
            )  # fmt: skip
    pins = msgspec.json.encode(sorted(f"r{n}" for n in range(operations // 2))).decode()
    rows.groups.append(FinalRow(**place, state="RESIDENT", location="p0", epoch=1, pins=pins))
    return rows


def judged(rows: ControlRows) -> tuple[HistoryVerdict, float]:
    """Judge with the garbage collector off: what it looks through is whatever the tests before have left."""
    gc.collect()
    gc.disable()
    try:
        began = time.process_time()
        verdict = judge_history(rows, engines=NONE_CAME)
        return verdict, time.process_time() - began
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["many groups", "one hot group"])
def test_time_grows_nearly_linearly_with_the_operations(kind: str) -> None:
    if kind == "many groups":
        small = tiled(history(3), 4)
        large = tiled(small, 8)
    else:
        small, large = one_hot_group(1_500), one_hot_group(12_000)
    small_s = min(judged(small)[1] for _ in range(3))
    verdict, large_s = judged(large)
    assert verdict.breaches == []
    assert verdict.counts.invocations == 8 * len(small.invocations) >= 12_000
    assert large_s / small_s < 20, "it would be 64 by the square"


def test_memory_grows_with_the_operations() -> None:
    peaks = []
    small = history(4)
    for rows in (small, tiled(small, 6)):
        tracemalloc.start()
        judge_history(rows)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] / peaks[0] < 8


def test_rows_are_read_as_they_were_written_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    rows = sound(0)
    path = tmp_path / "operations-0.jsonl"
    write_rows(path, rows.invocations)
    assert list(read_rows(path, Invocation)) == rows.invocations
    path.write_bytes(path.read_bytes()[:-5])
    assert list(read_rows(path, Invocation)) == rows.invocations[:-1]

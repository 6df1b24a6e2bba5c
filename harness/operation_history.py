"""Whether a history of operations is one that an idempotent control plane may leave behind. Pure.

In: what clients asked and were told, what they read, what the nodes' databases saw change, what is kept, and what is
left. Out: breaches, and counts. An outcome of `unknown` may have happened or not, and is no breach by itself;
everything else is derived from the changes, never guessed. Time and memory grow nearly linearly with the rows.

Who is asked for which group is known, so an operation is judged by the node that it was sent to. What is older than the
retention window at the history's end may have been forgotten: of that, nothing missing is a breach.

Source: KVC-IDEM-001 to -011, -019.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

import msgspec

from harness.group_timeline import NS_PER_MS, Breach, Engines, Replay, Timeline, migration_status
from harness.operation_case import Case, Place, World
from harness.operation_looks import judge_looks
from harness.operation_moves import judge_moves
from harness.operation_rules import breaches_of
from reference_impl.rules.blockgroups import GroupState, MigrationStatus
from reference_impl.rules.operations import WINDOW_MS
from workloads.operation_rows import OF_CLIENT, ControlRows, EffectRow, FinalRow, Invocation, RecordRow

AT_HOME: Final = (GroupState.RESIDENT, GroupState.MIGRATING_OUT)
WANTED: Final = ("reserve", "pin", "unpin", "evict", "prepare_get", "start_migrate")
"""Methods that every history is to have tried; a cancellation may always come too late."""
A_WHOLE_MIGRATION: Final = "a migration that succeeded"
MOVING: Final = (GroupState.MIGRATING_OUT, GroupState.MIGRATING_IN)


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What a history came to."""

    invocations: int
    ok: int
    fail: int
    unknown: int
    """Invocations of which the caller did not learn what became of them."""
    unresolved: int
    """Operations of which nobody ever learned it."""
    operations: int
    """Distinct ids, by node and tenant."""
    applied: int
    """Operations of which somebody was told, or their node kept, that they are applied."""
    retried: int
    """Invocations with more than one attempt, or of an id that had been invoked before."""
    replayed: int
    """Answers that had been given before."""
    refused: int
    effects: int
    """Changes that operations made."""
    double_effects: int
    """Changes beyond the first of their kind by one operation."""


class HistoryVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Every breach found, those of operations first, and the counts."""

    breaches: list[Breach]
    counts: Counts


def judge_history(
    rows: ControlRows, *, window_ms: int = WINDOW_MS, engines: Engines | None = None
) -> HistoryVerdict:  # fmt: skip
    """Return what is wrong with a history.

    `window_ms`: how long its nodes had to keep what they knew. `engines`: when another engine came to a node, with
    which goes what the one before held; None: nobody knows, and any loss may be due to that.
    """
    world, replays = _replayed(rows, window_ms, engines)
    cases = _cases(rows)
    breaches = [breach for case in cases.values() for breach in breaches_of(case, world)]
    breaches += [breach for replay in replays.values() for breach in replay.breaches]
    breaches += _ends(rows.groups, replays, whole=world.whole)
    breaches += judge_looks(rows.looks, cases, world, rows.effects)
    return HistoryVerdict(breaches=breaches, counts=_counts(rows.invocations, list(cases.values())))


def counts_of(rows: ControlRows) -> Counts:
    """Return what a history came to, without judging it."""
    return _counts(rows.invocations, list(_cases(rows).values()))


def not_tried(rows: ControlRows) -> list[str]:
    """Return the methods, by their tags, of which no operation had an effect, and what else did not happen once.

    Without them a history says nothing of the rules that they are under: a service that refuses everything breaks none.
    """
    tried = {method for case in _cases(rows).values() if case.is_applied and case.effects for method in case.methods}
    succeeded = any(
        e.kind == "migration" and migration_status(e.after) is MigrationStatus.SUCCEEDED for e in rows.effects
    )  # fmt: skip
    return [method for method in WANTED if method not in tried] + ([] if succeeded else [A_WHOLE_MIGRATION])


def judge_ownership(rows: ControlRows, *, window_ms: int = WINDOW_MS, engines: Engines | None = None) -> list[Breach]:
    """Return what is wrong with who has which group, at the end and on the way there; as for `judge_history`."""
    whole = _starts_ns(rows) >= _ends_ns(rows) - window_ms * NS_PER_MS
    return judge_owners(rows.groups) + judge_moves(rows.effects, engines, whole=whole)


def judge_owners(groups: Sequence[FinalRow]) -> list[Breach]:
    """Return what is wrong with who has which group after a run that came to rest (KVC-IDEM-011).

    At most one node owns a group; one that moved is known where it went; none is on its way any more.
    """
    known: dict[tuple[str, str], dict[str, FinalRow]] = defaultdict(dict)
    for row in groups:
        known[row.tenant, row.block_group_id][row.node] = row
    texts = [text for (tenant, name), at in known.items() for text in _of_owners(f"group {name} of {tenant}", at)]
    return [Breach("KVC-IDEM-011", text) for text in texts]


def _of_owners(name: str, at: dict[str, FinalRow]) -> Iterator[str]:
    owners = sorted(node for node, row in at.items() if row.state in AT_HOME and row.location == node)
    if len(owners) > 1:
        yield f"{name} has {len(owners)} owners at the end: {', '.join(owners)}"
    for node, row in sorted(at.items()):
        if row.state in MOVING:
            yield f"{name} is still {row.state} at {node}, epoch {row.epoch}, by migration {row.migration}"
        if row.state in AT_HOME and row.location != node:
            yield f"{name} is {row.state} at {node}, which says that it is {row.location}'s"
        if row.state == GroupState.MOVED:
            yield from _of_move(name, row, at.get(row.location))


def _of_move(name: str, row: FinalRow, there: FinalRow | None) -> Iterator[str]:
    moved = f"{name} was moved from {row.node} to {row.location} by migration {row.migration}"
    if there is None or there.state == GroupState.MIGRATING_IN:
        yield f"{moved}, which knows nothing of that: it is lost"
    elif there.epoch < row.epoch:
        yield f"{moved} with epoch {row.epoch}, and is known there with epoch {there.epoch} only"


def _starts_ns(rows: ControlRows) -> int:
    return min(chain((i.start_ns for i in rows.invocations), (e.at_ns for e in rows.effects)), default=0)


def _ends_ns(rows: ControlRows) -> int:
    seen = chain((i.end_ns for i in rows.invocations), (look.end_ns for look in rows.looks))
    return max(chain(seen, (e.at_ns for e in rows.effects)), default=0)


def _replayed(
    rows: ControlRows, window_ms: int, engines: Engines | None
) -> tuple[World, dict[Place, Replay]]:  # fmt: skip
    """Replay every group; the world is what operations are judged against."""
    window_ns = window_ms * NS_PER_MS
    old_ns = _ends_ns(rows) - window_ns
    whole = _starts_ns(rows) >= old_ns
    of_group: dict[Place, list[EffectRow]] = defaultdict(list)
    for effect in rows.effects:
        of_group[effect.node, effect.tenant, effect.block_group_id].append(effect)
    replays = {}
    for place, effects in of_group.items():
        effects.sort(key=lambda e: e.seq)
        came = None if engines is None else engines.get(place[0], ())
        replays[place] = Replay(_where(place), effects, window_ns=window_ns, whole=whole, engines=came)
    timelines: dict[Place, Timeline] = {place: replay.timeline for place, replay in replays.items()}
    cancelled: dict[Place, int] = {}
    for e in rows.effects:
        if e.kind == "migration" and migration_status(e.after) is MigrationStatus.CANCELLED:
            place = (e.node, e.tenant, e.key)
            cancelled[place] = min(e.at_ns, cancelled.get(place, e.at_ns))
    kept: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for record in rows.records:
        kept[record.node, record.operation_id][record.tenant] = record.answer
    world = World(
        timelines=timelines, cancelled=cancelled, kept=dict(kept), window_ms=window_ms, old_ns=old_ns,
        whole=whole,
    )  # fmt: skip
    return world, replays


def _where(place: Place) -> str:
    node, tenant, name = place
    return f"group {name} of {tenant} at {node}"


def _cases(rows: ControlRows) -> dict[Place, Case]:
    """Gather what there is of each operation, everything in its order of time."""
    cases: dict[Place, Case] = {}

    def of(row: Invocation | EffectRow | RecordRow) -> Case:
        key = (row.node, row.tenant, row.operation_id)
        if key not in cases:
            cases[key] = Case(*key)
        return cases[key]

    for invocation in sorted(rows.invocations, key=lambda i: i.end_ns):
        of(invocation).invocations.append(invocation)
    for effect in sorted(rows.effects, key=lambda e: e.seq):
        if effect.cause == OF_CLIENT:
            case = of(effect)
            (case.consequences if _follows(effect) else case.effects).append(effect)
    for record in rows.records:
        of(record).records.append(record)
    return cases


def _follows(effect: EffectRow) -> bool:
    """Whether a change is no effect of its own: what was pinned or lent ends with its group."""
    return (effect.kind == "pin" and not effect.after) or (effect.kind == "transfer" and bool(effect.before))


def _ends(groups: Iterable[FinalRow], replays: dict[Place, Replay], *, whole: bool) -> Iterator[Breach]:
    finals = {(row.node, row.tenant, row.block_group_id): row for row in groups}
    for place, replay in replays.items():
        yield from replay.final(finals.get(place))
    if whole:
        for place in finals.keys() - replays.keys():
            yield Breach("KVC-IDEM-007", f"{_where(place)} is there at the end, and no effect made it")


def _counts(invocations: Sequence[Invocation], cases: Sequence[Case]) -> Counts:
    outcomes = [i.outcome for i in invocations]
    return Counts(
        invocations=len(invocations), ok=outcomes.count("ok"), fail=outcomes.count("fail"),
        unknown=outcomes.count("unknown"), operations=len(cases),
        unresolved=sum(bool(c.invocations) and all(i.outcome == "unknown" for i in c.invocations) for c in cases),
        applied=sum(case.is_applied for case in cases),
        retried=sum(case.retried for case in cases),
        replayed=sum(i.replayed for i in invocations),
        refused=sum(bool(i.refusal) for i in invocations),
        effects=sum(len(case.effects) for case in cases),
        double_effects=sum(len(case.effects) - len({e.kind for e in case.effects}) for case in cases),
    )  # fmt: skip

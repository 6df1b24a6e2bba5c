"""What must hold of one operation: everybody is told the same, it is kept, and it happens once, when it is asked for.

Source: KVC-IDEM-001 to -011.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from harness.group_timeline import Breach, told
from harness.operation_case import DENIED, Case, World, answer_of
from harness.operation_changes import explained
from reference_impl.rules.blockgroups import Answer, Refusal
from workloads.operation_rows import EffectRow, Invocation


def breaches_of(case: Case, world: World) -> Iterator[Breach]:
    """Yield everything that is wrong with an operation."""
    if not case.invocations:
        rows = [told(e) for e in case.effects] + ["a record" for _ in case.records]
        yield Breach("KVC-IDEM-001", f"{case}: nobody asked for it, and there is {'; '.join(rows)}")
        return
    yield from _told_well(case)
    yield from _told_the_same(case)
    yield from _kept(case, world)
    yield from _denials(case, world)
    yield from _counted(case)
    yield from _asked_for(case)
    yield from _in_time(case)
    yield from explained(case, world)


def _asked(invocation: Invocation) -> str:
    span = f"{invocation.start_ns / 1e9:.6f} to {invocation.end_ns / 1e9:.6f} s"
    return f"{invocation.client} ({span}, {invocation.outcome})"


def _told_well(case: Case) -> Iterator[Breach]:
    """Each outcome fits its answer."""
    for i in case.invocations:
        answer = answer_of(i.answer) if i.answer else None
        if i.outcome == "ok" and (answer is None or not answer.applied):
            yield Breach("KVC-IDEM-001", f"{case}: {_asked(i)} is ok without an answer that says so")
        if i.outcome == "fail" and answer is not None and answer.applied:
            yield Breach("KVC-IDEM-001", f"{case}: {_asked(i)} failed, and its answer says that it is applied")


def _told_the_same(case: Case) -> Iterator[Breach]:
    """Whoever asks, whenever: one set of parameters, one answer, only once as a new one (KVC-IDEM-001, -003, -004)."""
    if not case.decided:
        return
    first = case.decided[0]
    for later in case.decided[1:]:
        if later.params != first.params:
            text = f"{_asked(first)} with {first.params}, then {_asked(later)} with {later.params}: both were answered"
            yield Breach("KVC-IDEM-004", f"{case}: {text}")
        elif not same(first.answer, later.answer):
            text = f"{_asked(first)} was answered {first.answer}, then {_asked(later)} {later.answer}"
            yield Breach("KVC-IDEM-003", f"{case}: {text}")
    new = [i for i in case.decided if not i.replayed]
    if len(new) > 1:
        text = f"{_asked(new[0])} and {_asked(new[1])} were both answered as if nobody had been before"
        yield Breach("KVC-IDEM-001", f"{case}: {text}")


def _kept(case: Case, world: World) -> Iterator[Breach]:
    """What clients were told is what is kept; it may be forgotten once it is old (KVC-IDEM-003, -007, -008)."""
    if len(case.records) > 1:
        yield Breach("KVC-IDEM-007", f"{case}: {len(case.records)} records are kept of it")
    record, first = case.record, case.decided[0] if case.decided else None
    if record is not None and first is not None:
        if record.params != first.params:
            text = f"{_asked(first)} with {first.params} was answered; kept is {record.params}"
            yield Breach("KVC-IDEM-004", f"{case}: {text}")
        elif not same(record.answer, first.answer):
            text = f"{_asked(first)} was answered {first.answer}; kept is {record.answer}"
            yield Breach("KVC-IDEM-003", f"{case}: {text}")
    if record is None and first is not None and case.start_ns >= world.old_ns:
        kept = world.kept.get((case.node, case.operation_id), {})
        others = sorted(tenant for tenant, answer in kept.items() if same(answer, first.answer))
        if others:
            text = f"{_asked(first)} was answered what is kept of {', '.join(others)} under that id, and of nobody else"
            yield Breach("KVC-IDEM-008", f"{case}: {text}")
        else:
            yield Breach("KVC-IDEM-003", f"{case}: {_asked(first)} was answered, and nothing is kept")
    if record is not None and record.done_ms - record.issued_ms >= world.window_ms:
        text = f"it ran {(record.done_ms - record.issued_ms) / 1000:.3f} s after it was issued: too old to run at all"
        yield Breach("KVC-IDEM-008", f"{case}: {text}")
    if record is not None and not any(_may_have_run(i, record.params) for i in case.invocations):
        text = f"it is kept with {record.params}, yet nobody who asked for that can have been served"
        yield Breach("KVC-IDEM-004" if _reused(case) else "KVC-IDEM-001", f"{case}: {text}")


def _may_have_run(invocation: Invocation, params: str | None) -> bool:
    if params is not None and invocation.params != params:
        return False
    return invocation.outcome != "fail" or (bool(invocation.answer) and invocation.refusal not in DENIED)


def _reused(case: Case) -> bool:
    return any(i.refusal == Refusal.ID_REUSED for i in case.invocations)


def _denials(case: Case, world: World) -> Iterator[Breach]:
    """An attempt is turned away only for a reason, and no answer that was given is taken back (KVC-IDEM-004, -008)."""
    first_ns = min(i.start_ns for i in case.invocations)
    for i in case.invocations:
        if i.refusal not in DENIED or not i.answer:
            continue
        if i.refusal == Refusal.ID_REUSED:
            if i.params == case.params and answer_of(i.answer).field != "issued_ms":  # its moment is part of its name
                yield Breach("KVC-IDEM-004", f"{case}: {_asked(i)} is ID_REUSED, and with these parameters it ran")
            elif case.record is None and first_ns >= world.old_ns:
                text = "is ID_REUSED, and nothing is kept of this tenant under that id"
                yield Breach("KVC-IDEM-008", f"{case}: {_asked(i)} {text}")
        elif i.params == case.params and i.start_ns > case.end_ns and case.start_ns >= world.old_ns:
            text = f"{_asked(case.decided[0])} was answered, then {_asked(i)} is {i.refusal}"
            yield Breach("KVC-IDEM-008", f"{case}: {text}")


def _counted(case: Case) -> Iterator[Breach]:
    """Nothing happens twice."""
    first: dict[str, EffectRow] = {}
    for effect in case.effects:
        if effect.kind in first:
            text = f"it had its effect twice: {told(first[effect.kind])}, then {told(effect)}"
            yield Breach("KVC-IDEM-001", f"{case}: {text}")
        first.setdefault(effect.kind, effect)


def _asked_for(case: Case) -> Iterator[Breach]:
    """What happened was asked for by somebody who was not told that it cannot have happened."""
    for effect in case.effects:
        if any(_may_have_run(i, case.params) and i.block_group_id == effect.block_group_id for i in case.invocations):
            continue
        refusals = {i.refusal for i in case.invocations}
        rule = "KVC-IDEM-001"
        if Refusal.ID_REUSED in refusals:
            rule = "KVC-IDEM-004"
        elif Refusal.ID_EXPIRED in refusals:
            rule = "KVC-IDEM-008"
        asked = "; ".join(_asked(i) for i in case.invocations)
        yield Breach(rule, f"{case}: {told(effect)}, though all who asked for it were told that it failed: {asked}")


def _in_time(case: Case) -> Iterator[Breach]:
    """Nothing happens before it is asked for, nor after it was answered."""
    for effect in case.effects:
        if effect.at_ns < case.start_ns:
            text = f"{told(effect)}, before anybody asked for it at {case.start_ns / 1e9:.6f} s"
            yield Breach("KVC-IDEM-001", f"{case}: {text}")
        if effect.at_ns > case.end_ns:
            yield Breach("KVC-IDEM-001", f"{case}: {told(effect)}, after {_asked(case.decided[0])} had been answered")


def same(one: str, other: str) -> bool:
    """Whether two answers are the same. Whether a migration's target has been told is not sent to clients."""
    return one == other or _public(answer_of(one)) == _public(answer_of(other))


def _public(answer: Answer) -> Answer:
    migration = answer.migration
    return answer if migration is None else msgspec.structs.replace(
        answer, migration=msgspec.structs.replace(migration, told=False)
    )  # fmt: skip

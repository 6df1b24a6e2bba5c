"""What must hold of one operation: its invocations, its effects and its record, beside the states of its group.

Source: KVC-IDEM-001 to -011.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Final, TypeAlias

import msgspec

from harness.group_timeline import Breach, Snapshot, Timeline, known, migration_status, pin_state, told
from reference_impl.rules.blockgroups import (
    Answer,
    CancelMigrate,
    Evict,
    GroupState,
    MigrationStatus,
    Outcome,
    Pin,
    PinState,
    PrepareGet,
    Refusal,
    Request,
    Reserve,
    StartMigrate,
    Unpin,
)
from workloads.operation_rows import EffectRow, Invocation, RecordRow

Place: TypeAlias = tuple[str, str, str]
DENIED: Final = frozenset({Refusal.ID_REUSED, Refusal.ID_EXPIRED, Refusal.FROM_THE_FUTURE})
"""Refusals of one attempt: nothing is kept of them."""
KINDS: Final[dict[type, frozenset[str]]] = {
    Reserve: frozenset({"group"}), Pin: frozenset({"pin"}), Unpin: frozenset({"pin"}), Evict: frozenset({"group"}),
    PrepareGet: frozenset({"transfer"}), StartMigrate: frozenset({"group", "migration"}),
    CancelMigrate: frozenset({"group", "migration"}),
}  # fmt: skip
"""The kinds of rows that a request changes if it changes anything, each once."""
RULE_OF: Final[dict[type, str]] = {
    Reserve: "KVC-IDEM-001", Pin: "KVC-IDEM-009", Unpin: "KVC-IDEM-009", Evict: "KVC-IDEM-010",
    PrepareGet: "KVC-IDEM-001", StartMigrate: "KVC-IDEM-011", CancelMigrate: "KVC-IDEM-011",
}  # fmt: skip
MOVING: Final = (GroupState.MIGRATING_OUT, GroupState.MIGRATING_IN)

_request = msgspec.json.Decoder(Request).decode
_answer = msgspec.json.Decoder(Answer).decode


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What operations are judged against."""

    timelines: dict[Place, Timeline]
    """By node, tenant and group."""
    cancelled: dict[Place, int]
    """When each migration was first seen CANCELLED, by node, tenant and operation."""
    tenants: dict[tuple[str, str], set[str]]
    """Whose operations are kept under an id, by node and id."""
    window_ms: int
    """How long after it was issued an operation may run."""
    old_ns: int
    """Of what began before this, anything may have been forgotten."""
    whole: bool
    """Whether nothing may have been forgotten: no row is as old as that."""

    def timeline(self, case: Case, block_group_id: str) -> Timeline:
        """Return the states of a group at an operation's node; of one that nothing changed, that it never was."""
        place = (case.node, case.tenant, block_group_id)
        return self.timelines.get(place) or Timeline(f"group {block_group_id}")


@dataclasses.dataclass
class Case:
    """What there is of one operation at one node: `invocations` by their ends, `effects` by their order."""

    node: str
    tenant: str
    operation_id: str
    invocations: list[Invocation] = dataclasses.field(default_factory=list)
    effects: list[EffectRow] = dataclasses.field(default_factory=list)
    consequences: list[EffectRow] = dataclasses.field(default_factory=list)
    """Pins forgotten and transfers ended with what it did."""
    records: list[RecordRow] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return f"operation {self.operation_id} of {self.tenant} at {self.node}"

    @functools.cached_property
    def decided(self) -> list[Invocation]:
        """Invocations that were told how the operation itself ended: the same must be told to everybody, for good."""
        return [i for i in self.invocations if i.outcome != "unknown" and i.answer and i.refusal not in DENIED]

    @property
    def record(self) -> RecordRow | None:
        """What its node keeps of it."""
        return self.records[0] if self.records else None

    @functools.cached_property
    def params(self) -> str | None:
        """The parameters with which it ran, None if nobody can tell."""
        if self.records:
            return self.records[0].params
        return self.decided[0].params if self.decided else None

    @functools.cached_property
    def answer(self) -> Answer | None:
        """What it came to; None: it has not run, or its answer was lost and forgotten."""
        text = self.records[0].answer if self.records else self.decided[0].answer if self.decided else ""
        return _answer(text) if text else None

    @property
    def is_applied(self) -> bool:
        """Whether somebody was told, or its node kept, that it is applied."""
        return self.answer is not None and self.answer.applied

    @property
    def retried(self) -> int:
        """How many of its invocations took several attempts, or repeat an earlier one."""
        first = min(self.invocations, key=lambda i: i.start_ns, default=None)
        return sum(i.attempts > 1 or i is not first for i in self.invocations)

    @functools.cached_property
    def start_ns(self) -> int:
        """When somebody first asked for what ran (by parameters, if they are known)."""
        asked = [i for i in self.invocations if self.params in (None, i.params)] or self.invocations
        return min((i.start_ns for i in asked), default=0)

    @property
    def end_ns(self) -> float:
        """When somebody was first told how it ended; infinity: nobody was."""
        return self.decided[0].end_ns if self.decided else math.inf


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
    yield from _explained(case, world)


def _asked(invocation: Invocation) -> str:
    span = f"{invocation.start_ns / 1e9:.6f} to {invocation.end_ns / 1e9:.6f} s"
    return f"{invocation.client} ({span}, {invocation.outcome})"


def _told_well(case: Case) -> Iterator[Breach]:
    """Each outcome fits its answer."""
    for i in case.invocations:
        answer = _answer(i.answer) if i.answer else None
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
        elif not _same(first.answer, later.answer):
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
        elif not _same(record.answer, first.answer):
            text = f"{_asked(first)} was answered {first.answer}; kept is {record.answer}"
            yield Breach("KVC-IDEM-003", f"{case}: {text}")
    if record is None and first is not None and case.start_ns >= world.old_ns:
        others = world.tenants.get((case.node, case.operation_id), set()) - {case.tenant}
        if others:
            text = f"{_asked(first)} was answered, and the id is kept of {', '.join(sorted(others))} only"
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
    for i in case.invocations:
        if i.refusal not in DENIED or not i.answer:
            continue
        if i.refusal == Refusal.ID_REUSED:
            if i.params == case.params:
                yield Breach("KVC-IDEM-004", f"{case}: {_asked(i)} is ID_REUSED, and with these parameters it ran")
            elif case.record is None and i.start_ns >= world.old_ns:
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


def _explained(case: Case, world: World) -> Iterator[Breach]:
    """What was answered is what the group's states show (KVC-IDEM-005, -007, -009 to -011)."""
    answer, params = case.answer, case.params
    if answer is None or params is None:
        if case.effects and case.start_ns >= world.old_ns:
            text = f"{told(case.effects[0])}, and no answer is kept with it"
            yield Breach("KVC-IDEM-007", f"{case}: {text}")
        return
    request = _decoded(params)
    if request is None:
        yield Breach("KVC-IDEM-001", f"{case}: it was answered with parameters that no request has: {params}")
        return
    timeline = world.timeline(case, request.block_group_id)
    by_kind = {effect.kind: effect for effect in reversed(case.effects)}
    if answer.outcome is Outcome.REFUSED and by_kind and not _engine_lost_it(answer, by_kind):
        text = f"it was refused ({answer.refusal}), and there is {told(case.effects[0])}"
        rule = "KVC-IDEM-005" if answer.refusal is Refusal.STALE_EPOCH else RULE_OF[type(request)]
        yield Breach(rule, f"{case}: {text}")
    elif by_kind and answer.applied:
        problems = _of_change(case, request, answer, by_kind, timeline, world)
        yield from (Breach(rule, f"{case}: {text}") for rule, text in problems)
    elif not by_kind and case.start_ns >= world.old_ns:
        problems = _of_no_change(case, request, answer, timeline, world)
        yield from (Breach(rule, f"{case}: {text}") for rule, text in problems)


Problems: TypeAlias = Iterator[tuple[str, str]]
"""Rule and sentence."""


def _engine_lost_it(answer: Answer, by_kind: dict[str, EffectRow]) -> bool:
    """Whether a refusal wrote down what the engine said while it was asked: that the blocks are gone."""
    lost = known(by_kind["group"].after) if set(by_kind) == {"group"} else None
    return (
        lost is not None and lost.state is GroupState.EVICTED and answer.refusal is Refusal.NOT_RESIDENT
        and (answer.state, answer.epoch) == (lost.state, lost.epoch)
    )  # fmt: skip


def _of_change(
    case: Case, request: Request, answer: Answer, by_kind: dict[str, EffectRow], timeline: Timeline, world: World
) -> Problems:  # fmt: skip
    """Judge an operation that is applied and changed something."""
    wanted, rule = KINDS[type(request)], RULE_OF[type(request)]
    if set(by_kind) != wanted:
        yield "KVC-IDEM-007", f"it changed {', '.join(sorted(by_kind))}; whole it would be {', '.join(sorted(wanted))}"
        return
    main = by_kind["group" if "group" in wanted else min(wanted)]
    if any(effect.block_group_id != request.block_group_id for effect in by_kind.values()):
        yield rule, f"{told(main)} is on group {main.block_group_id}; asked for was {request.block_group_id}"
        return
    if not _as_asked(case, request, answer, by_kind):
        yield rule, f"{told(main)} made {main.before or 'nothing'} {main.after}; asked for was {case.params}"
    number = timeline.after(main)
    yield from _by_its_state(case, request, main, timeline, number)
    if world.whole and _snapshot(answer) != timeline.snapshot(number):
        text = f"it was answered {_snapshot(answer)}; {told(main)} left {timeline.snapshot(number)}"
        yield rule if rule == "KVC-IDEM-009" else "KVC-IDEM-007", text


def _by_its_state(
    case: Case, request: Request, main: EffectRow, timeline: Timeline, number: int
) -> Problems:  # fmt: skip
    """Judge whether it might be applied to the state that its group was in."""
    group = timeline.groups[number - 1]
    if group is None:
        yield "KVC-IDEM-007", f"{told(main)} when there was no such group"
        return
    if request.epoch > group.epoch or (
        request.epoch != group.epoch and not isinstance(request, Unpin | CancelMigrate)
    ):  # fmt: skip
        yield "KVC-IDEM-005", f"{told(main)} with epoch {request.epoch}, when it was {group.epoch}"
    elif group.state is not GroupState.RESIDENT and not isinstance(request, Unpin | CancelMigrate):
        yield "KVC-IDEM-010", f"{told(main)} when the group was {group.state}"
    if isinstance(request, Evict | StartMigrate):
        if isinstance(request, Evict) and timeline.standing[number]:
            yield "KVC-IDEM-010", f"{told(main)} while {timeline.standing[number]} requests pinned it"
        if case.record is not None and timeline.lent_until_ms[number] > case.record.done_ms:
            yield "KVC-IDEM-010", f"{told(main)} while a transfer stood"


def _as_asked(case: Case, request: Request, answer: Answer, by_kind: dict[str, EffectRow]) -> bool:
    """Whether what changed is what was asked for."""
    group = by_kind.get("group")
    before, after = (known(group.before), known(group.after)) if group else (None, None)
    moved = _moved(by_kind)
    match request:
        case Reserve():
            return before is not None and after is not None and after.reserved - before.reserved == request.slots
        case Evict():
            return before is not None and after is not None and _evicts(before.epoch, after.epoch, after.state)
        case Pin() | Unpin():
            pin = by_kind["pin"]
            wanted = PinState.PINNED if isinstance(request, Pin) else PinState.UNPINNED
            return pin.key == request.request_id and pin_state(pin.after) is wanted
        case PrepareGet():
            return answer.place is not None and by_kind["transfer"].key == answer.place.transfer_token
        case StartMigrate():
            return moved == (GroupState.MIGRATING_OUT, case.operation_id, MigrationStatus.PENDING)
        case CancelMigrate():
            return moved == (GroupState.RESIDENT, request.migration_id, MigrationStatus.CANCELLED)


def _evicts(before: int, after: int, state: GroupState) -> bool:
    return state is GroupState.EVICTED and after == before + 1


def _moved(by_kind: dict[str, EffectRow]) -> tuple[GroupState, str, MigrationStatus | None] | None:
    """Return the group's state, the migration's name and its status, after a change of both."""
    group, migration = by_kind.get("group"), by_kind.get("migration")
    after = known(group.after) if group else None
    if after is None or migration is None:
        return None
    return after.state, migration.key, migration_status(migration.after)


def _of_no_change(
    case: Case, request: Request, answer: Answer, timeline: Timeline, world: World
) -> Problems:  # fmt: skip
    """Judge an operation that changed nothing: its answer tells of a moment at which nothing was to be changed."""
    snapshot, rule = _snapshot(answer), RULE_OF[type(request)]

    def was(pin: tuple[str, PinState] | None = None) -> bool:
        return not world.whole or timeline.was(snapshot, case.start_ns, case.end_ns, pin)

    if answer.outcome is Outcome.REFUSED:
        broken = _broken_reason(request, answer)
        if broken is not None:
            yield broken, f"it was refused ({answer.refusal}) with epoch {request.epoch} when it was {snapshot}"
        late = isinstance(request, Pin) and answer.refusal is Refusal.UNPINNED_BEFORE
        if not was((request.request_id, PinState.UNPINNED) if isinstance(request, Pin) and late else None):
            yield rule, f"it was refused ({answer.refusal}) with {snapshot}, which {timeline.where} never was then"
        return
    match request:
        case Pin():
            so = request.epoch == answer.epoch and was((request.request_id, PinState.PINNED))
        case Unpin():
            so = was((request.request_id, PinState.UNPINNED))
        case Evict():
            so = answer.state is GroupState.EVICTED and was()
        case CancelMigrate():
            at_ns = world.cancelled.get((case.node, case.tenant, request.migration_id), math.inf)
            so = was() and (at_ns <= case.end_ns or not world.whole)
        case _:
            so, rule = False, "KVC-IDEM-007"
    if not so:
        yield rule, f"it was applied ({snapshot}) and changed nothing, though it was not so already"


def _broken_reason(request: Request, answer: Answer) -> str | None:
    """Return the rule that a refusal breaks because its answer shows that there was no reason; None: it breaks none."""
    match answer.refusal:
        case Refusal.STALE_EPOCH:
            return None if request.epoch < answer.epoch else "KVC-IDEM-005"
        case Refusal.FUTURE_EPOCH:
            return None if request.epoch > answer.epoch else "KVC-IDEM-005"
        case Refusal.PINNED:
            return None if answer.pins else "KVC-IDEM-010"
        case Refusal.MIGRATING:
            return None if answer.state in MOVING else "KVC-IDEM-010"
        case Refusal.UNKNOWN_GROUP:
            return None if answer.state is None else "KVC-IDEM-005"
        case _:
            return None


def _snapshot(answer: Answer) -> Snapshot:
    return answer.state, answer.location, answer.epoch, answer.reserved, answer.pins


def _same(one: str, other: str) -> bool:
    """Whether two answers are the same. Whether a migration's target has been told is not sent to clients."""
    return one == other or _public(_answer(one)) == _public(_answer(other))


def _public(answer: Answer) -> Answer:
    migration = answer.migration
    return answer if migration is None else msgspec.structs.replace(
        answer, migration=msgspec.structs.replace(migration, told=False)
    )  # fmt: skip


def _decoded(params: str) -> Request | None:
    try:
        return _request(params)
    except msgspec.DecodeError:  # of which ValidationError is one
        return None

"""Whether an operation's answer, what it changed and the states of its group fit together.

Source: KVC-IDEM-005, -007, -009 to -011.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, TypeAlias

import msgspec

from harness.group_timeline import Breach, Snapshot, Timeline, known, migration_status, pin_state, told
from harness.operation_case import Case, World
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
from workloads.operation_rows import EffectRow

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


def explained(case: Case, world: World) -> Iterator[Breach]:
    """Yield where an answer, what changed and the states of the group do not fit together."""
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
    if timeline.groups[number - 1] is not None or world.whole:
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
    if request.epoch > group.epoch or (request.epoch != group.epoch and not isinstance(request, CancelMigrate)):
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
            so = request.epoch == answer.epoch and was((request.request_id, PinState.UNPINNED))
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


def _decoded(params: str) -> Request | None:
    try:
        return _request(params)
    except msgspec.DecodeError:  # of which ValidationError is one
        return None

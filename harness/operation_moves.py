"""Whether every group that moved is where its migration says: told to have moved at its source, and here at its target.

`judge_owners` looks at the end; this looks at every migration on the way, for a group that was lost by one looks like
an evicted one at the end. Time and memory grow linearly with the effects. Pure.

Source: KVC-IDEM-010, -011.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from harness.group_timeline import (
    LINK_NS,
    Breach,
    Engines,
    Known,
    came_between,
    known,
    migration_status,
    migration_target,
    told,
)
from harness.operation_case import Place
from reference_impl.rules.blockgroups import GroupState, MigrationStatus
from workloads.operation_rows import OF_ENGINE, OF_MIGRATION, EffectRow

_SIGNS: Final = (GroupState.MIGRATING_OUT.value, GroupState.MIGRATING_IN.value)


@dataclasses.dataclass
class _Move:
    """What a migration changed: of itself, and of its group at both ends."""

    dst: str = ""
    succeeded: EffectRow | None = None
    left: EffectRow | None = None
    """How its group ceased to be MIGRATING_OUT at its source."""


@dataclasses.dataclass
class _Arrival:
    """What a migration changed at a node that it goes to."""

    began: EffectRow | None = None
    settled: EffectRow | None = None


def judge_moves(effects: Sequence[EffectRow], engines: Engines | None = None, *, whole: bool = True) -> list[Breach]:
    """Return what is wrong with how groups moved.

    `engines`: when another engine than before came to a node, with which all is lost that it held; None: nobody knows,
    and any loss may be due to that. `whole`: no effect has been forgotten.
    """
    moves, arrivals = _moves(effects)
    breaches: list[Breach] = []
    for (node, tenant, operation_id), move in moves.items():
        name = f"migration {operation_id} of {tenant} from {node} to {move.dst}"
        arrival = arrivals.get((move.dst, tenant, operation_id), _Arrival())
        if move.succeeded is not None:
            breaches += _of_source(name, move, whole=whole)
            breaches += _of_target(name, move, arrival, engines, whole=whole)
        breaches += _of_loss(name, node, move, arrival, engines)
    return breaches


def _moves(effects: Sequence[EffectRow]) -> tuple[dict[Place, _Move], dict[Place, _Arrival]]:
    """Gather the changes by migration: at its source, and at whoever was its target."""
    moves: dict[Place, _Move] = {}
    arrivals: dict[Place, _Arrival] = {}
    for effect in sorted(effects, key=lambda e: e.seq):
        if effect.kind == "migration":
            move = moves.setdefault((effect.node, effect.tenant, effect.key), _Move())
            move.dst = move.dst or migration_target(effect.after)
            if migration_status(effect.after) is MigrationStatus.SUCCEEDED and move.succeeded is None:
                move.succeeded = effect
        elif effect.kind == "group" and any(sign in effect.before or sign in effect.after for sign in _SIGNS):
            _note(effect, moves, arrivals)
    return moves, arrivals


def _note(effect: EffectRow, moves: dict[Place, _Move], arrivals: dict[Place, _Arrival]) -> None:
    """Note a change of a group that leaves or arrives."""
    before, after = known(effect.before), known(effect.after)
    if before is not None and not _goes_on(before, after):
        place = (effect.node, effect.tenant, before.migration)
        if before.state is GroupState.MIGRATING_OUT:
            moves.setdefault(place, _Move()).left = effect
        if before.state is GroupState.MIGRATING_IN:
            arrivals.setdefault(place, _Arrival()).settled = effect
    if after is not None and after.state is GroupState.MIGRATING_IN and not (before and _goes_on(before, after)):
        arrivals.setdefault((effect.node, effect.tenant, after.migration), _Arrival()).began = effect


def _goes_on(before: Known, after: Known | None) -> bool:
    return after is not None and (after.state, after.migration) == (before.state, before.migration)


def _of_source(name: str, move: _Move, *, whole: bool) -> Iterator[Breach]:
    """Whoever asks for a group that has moved must be told where it went."""
    after = known(move.left.after) if move.left else None
    if move.left is None:
        if whole:
            yield Breach("KVC-IDEM-011", f"{name} SUCCEEDED, and its group never left")
    elif after is None or (after.state, after.location) != (GroupState.MOVED, move.dst):
        at = f"{after.state} at {after.location}" if after else "unknown"
        yield Breach("KVC-IDEM-011", f"{name} SUCCEEDED, and {told(move.left)} left its group {at} at its source")


def _of_target(name: str, move: _Move, arrival: _Arrival, engines: Engines | None, *, whole: bool) -> Iterator[Breach]:
    """A group that has moved is at its target, the same one, unless the engine that had it is gone.

    One whose arrival is not settled by the end of the history is told of by what is left at the end.
    """
    began, settled = arrival.began, arrival.settled
    if began is None:
        if whole:
            yield Breach("KVC-IDEM-011", f"{name} SUCCEEDED, and its target never took its group in: it is lost")
        return
    after = known(settled.after) if settled else None
    if settled is None or _lost_with_engine(began, settled, after, engines):
        return
    if after is None or after.state is not GroupState.RESIDENT or settled.cause != OF_MIGRATION:
        at = after.state if after else "unknown"
        yield Breach("KVC-IDEM-011", f"{name} SUCCEEDED, and {told(settled)} left its group {at} there: it is lost")
        return
    gone = known(move.left.before) if move.left else None
    if gone is not None and _content(gone) != _content(after):
        text = f"{name}: what left was {_content(gone)}, what arrived is {_content(after)}"
        yield Breach("KVC-IDEM-011", text)


def _lost_with_engine(began: EffectRow, settled: EffectRow, after: Known | None, engines: Engines | None) -> bool:
    """Whether a copy may have been lost with the engine that had made it: another came between its two moments."""
    if after is None or after.state is not GroupState.EVICTED:
        return False
    return engines is None or came_between(engines.get(began.node, ()), began.at_ns, settled.at_ns)


def _of_loss(name: str, node: str, move: _Move, arrival: _Arrival, engines: Engines | None) -> Iterator[Breach]:
    """What is on loan to a migration's target is not used for something else: by then, it is held until the end."""
    left, began = move.left, arrival.began
    if engines is None or left is None or began is None or left.cause != OF_ENGINE or left.at_ns <= began.at_ns:
        return
    if not came_between(engines.get(node, ()), left.at_ns, left.at_ns + LINK_NS):
        yield Breach("KVC-IDEM-010", f"{name}: {told(left)}, its engine used its blocks while it moved")


def _content(group: Known) -> tuple[int, int, int, str]:
    return group.size_bytes, group.token_start, group.token_end, group.checksum

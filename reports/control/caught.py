"""What became of the operations that each kind of fault caught under way.

Caught by a crash: every write under way at the node. By a fault that the process survives: of the writes under way
there, those of the method that passed the fail point, but not one whose row shows that its only attempt was answered
(of a request worked on twice: all). Which of several it was nobody wrote down, so all of them are looked at.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final, TypeAlias

import msgspec

from harness.operation_history import counts_of
from harness.run_folder import RunFolder
from reports.control.strikes import Sort, Strike
from workloads.operation_rows import ControlRows, EffectRow, Invocation, RecordRow

Key: TypeAlias = tuple[str, str, str]
"""Node, tenant, operation id."""
_LOSES: Final = (Sort.LOST, Sort.FULL)


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of fault, and the operations that it caught."""

    title: str
    where: str
    sort: Sort
    injected: int
    proved: int
    struck: int
    """Passages at which it acted."""
    caught: int
    """Distinct operations under way; each stands in one of the four columns that follow."""
    applied_once: int
    refused: int
    nothing: int
    """No effect, no record, and nobody was told otherwise."""
    wrong: int
    """With a second effect, or with an effect of which no record is kept."""
    double_effects: int
    retried: int
    replayed: int
    """Answers to them that had been given before."""


class _Of(msgspec.Struct):
    """Everything that there is of one operation."""

    invocations: list[Invocation]
    effects: list[EffectRow]
    records: list[RecordRow]

    def rows(self) -> ControlRows:
        return ControlRows(invocations=self.invocations, effects=self.effects, records=self.records)


def fates(run: RunFolder, struck: list[Strike]) -> dict[str, Fate]:
    """Return the kinds of faults by their keys, in the order of their first strike."""
    kinds: dict[str, list[Strike]] = defaultdict(list)
    for strike in struck:
        kinds[strike.key].append(strike)
    known = _by_operation(run.control)
    by_node: dict[str, list[Invocation]] = defaultdict(list)
    for invocation in run.control.invocations:
        by_node[invocation.node].append(invocation)
    return {key: _fate(of, known, by_node) for key, of in kinds.items()}


def caught_by(strike: Strike, invocations: list[Invocation]) -> list[Invocation]:
    """Return those of a node's invocations that a fault there caught under way."""
    found: dict[int, Invocation] = {}
    for at_ns, method in zip(strike.moments, strike.methods, strict=True):
        for invocation in invocations:
            if invocation.start_ns <= at_ns <= invocation.end_ns and _is_hit(strike, method, invocation):
                found[id(invocation)] = invocation
    return list(found.values())


def _is_hit(strike: Strike, method: str, invocation: Invocation) -> bool:
    if strike.sort is Sort.CRASH:
        return True
    if method and tag_of(method) != invocation.method:
        return False
    return strike.sort not in _LOSES or invocation.attempts > 1 or invocation.outcome == "unknown"


def tag_of(method: str) -> str:
    """Return the tag of a request for an RPC's name: StartMigrate is start_migrate."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in method).removeprefix("_")


def _by_operation(rows: ControlRows) -> dict[Key, _Of]:
    found: dict[Key, _Of] = defaultdict(lambda: _Of([], [], []))
    for invocation in rows.invocations:
        found[invocation.node, invocation.tenant, invocation.operation_id].invocations.append(invocation)
    for effect in rows.effects:
        if effect.operation_id:
            found[effect.node, effect.tenant, effect.operation_id].effects.append(effect)
    for record in rows.records:
        found[record.node, record.tenant, record.operation_id].records.append(record)
    return found


def _fate(of: list[Strike], known: dict[Key, _Of], by_node: dict[str, list[Invocation]]) -> Fate:
    hit = [i for strike in of for i in caught_by(strike, by_node[strike.node])]
    keys = dict.fromkeys((i.node, i.tenant, i.operation_id) for i in hit)
    ends = [_end(known[key]) for key in keys]
    together = counts_of(_joined([known[key] for key in keys]))
    return Fate(
        title=of[0].title, where=of[0].where, sort=of[0].sort, injected=sum(s.injected_ns is not None for s in of),
        proved=sum(s.proved for s in of), struck=sum(len(s.moments) for s in of), caught=len(keys),
        applied_once=ends.count("once"), refused=ends.count("refused"), nothing=ends.count("nothing"),
        wrong=ends.count("wrong"), double_effects=together.double_effects, retried=together.retried,
        replayed=together.replayed,
    )  # fmt: skip


def _end(of: _Of) -> str:
    counts = counts_of(of.rows())
    if counts.double_effects or (counts.effects and not counts.applied):
        return "wrong"
    if counts.applied:
        return "once"
    refused = any(i.refusal for i in of.invocations) or bool(of.records)
    return "refused" if refused else "nothing"


def _joined(parts: list[_Of]) -> ControlRows:
    whole = ControlRows()
    for part in parts:
        whole.invocations.extend(part.invocations)
        whole.effects.extend(part.effects)
        whole.records.extend(part.records)
    return whole

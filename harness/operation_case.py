"""What there is of one operation: who asked for it, what changed, what is kept; and what it is judged against."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Final, TypeAlias

import msgspec

from harness.group_timeline import Timeline
from reference_impl.rules.blockgroups import Answer, Refusal
from workloads.operation_rows import EffectRow, Invocation, RecordRow

Place: TypeAlias = tuple[str, str, str]
"""Node, tenant, and a group's or an operation's id."""
DENIED: Final = frozenset({Refusal.ID_REUSED, Refusal.ID_EXPIRED, Refusal.FROM_THE_FUTURE})
"""Refusals of one attempt: nothing is kept of them."""

answer_of = msgspec.json.Decoder(Answer).decode


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What operations are judged against."""

    timelines: dict[Place, Timeline]
    """By node, tenant and group."""
    cancelled: dict[Place, int]
    """When each migration was first seen CANCELLED, by node, tenant and operation."""
    kept: dict[tuple[str, str], dict[str, str]]
    """What each tenant's operation of an id was answered, by node and id."""
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
        return answer_of(text) if text else None

    @property
    def methods(self) -> set[str]:
        """The methods, by their tags, of what was answered or is kept: one, as a rule."""
        return {record.method for record in self.records} | {i.method for i in self.decided}

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

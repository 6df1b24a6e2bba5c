"""Whether what reads were told was so: of operations, of groups, of migrations. Pure.

What a read says was so at some moment between its beginning and its end. A change is stamped before its commit, so for
`COMMIT_NS` behind it what was before may still be told. Of what may have been forgotten nothing is demanded.

Source: KVC-IDEM-007, -011, -019.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from harness.group_timeline import BEGINNING_NS, Breach, migration_status, told
from harness.operation_case import Case, Place, World
from harness.operation_rules import same
from reference_impl.rules.blockgroups import Migration, MigrationStatus
from workloads.operation_rows import DONE, EffectRow, Look, LookKind, Seen, Told

COMMIT_NS: Final = 500_000_000
"""How long a commit may take: one sync of a busy disk."""
NOT_FOUND: Final = "NOT_FOUND"
BAD_REPLY: Final = "BAD_REPLY"
RULE_OF: Final[dict[str, str]] = {
    LookKind.OPERATION: "KVC-IDEM-019", LookKind.METADATA: "KVC-IDEM-007", LookKind.MIGRATION: "KVC-IDEM-011",
}  # fmt: skip

_told = msgspec.json.Decoder(Told).decode
_seen = msgspec.json.Decoder(Seen).decode
_migration = msgspec.json.Decoder(Migration).decode


class _Steps(msgspec.Struct):
    """The statuses of a migration; status n stands from moment n on. None: there is no such migration."""

    at_ns: list[int]
    statuses: list[MigrationStatus | None]

    def within(self, start_ns: int, end_ns: int) -> list[MigrationStatus | None]:
        """Return the statuses that stood at some moment of a span of time."""
        first = max(0, bisect_left(self.at_ns, start_ns) - 1)
        return self.statuses[first : bisect_right(self.at_ns, end_ns)]


def judge_looks(
    looks: Sequence[Look], cases: Mapping[Place, Case], world: World, effects: Sequence[EffectRow]
) -> Iterator[Breach]:
    """Yield what reads were told that cannot have been so, or that they should have been told."""
    known_ns = _known_ns(looks, cases)
    steps = _steps(effects) if any(look.kind == LookKind.MIGRATION for look in looks) else {}
    for look in looks:
        if look.error_code == BAD_REPLY:
            problem: str | None = "it was answered what nobody can read"
        elif look.kind == LookKind.OPERATION:
            place = (look.node, look.tenant, look.operation_id)
            problem = _of_operation(look, cases.get(place), known_ns.get(place), world)
        elif not world.whole:
            problem = None
        elif look.kind == LookKind.METADATA:
            problem = _of_group(look, world)
        else:
            problem = _of_migration(look, steps.get((look.node, look.tenant, look.operation_id)))
        if problem is not None:
            yield Breach(RULE_OF[look.kind], f"{_asked(look)}: {problem}")


def _asked(look: Look) -> str:
    of = f"group {look.block_group_id}" if look.kind == LookKind.METADATA else f"{look.kind} {look.operation_id}"
    span = f"{look.start_ns / 1e9:.6f} to {look.end_ns / 1e9:.6f} s"
    return f"{look.client} looked at {of} of {look.tenant} at {look.node} ({span})"


def _known_ns(looks: Sequence[Look], cases: Mapping[Place, Case]) -> dict[Place, int]:
    """Return when somebody was first told how an operation ended, by its answer or by a read."""
    found = {place: case.decided[0].end_ns for place, case in cases.items() if case.decided}
    for look in looks:
        if look.kind == LookKind.OPERATION and look.said and _told(look.said).known == DONE:
            place = (look.node, look.tenant, look.operation_id)
            found[place] = min(look.end_ns, found.get(place, look.end_ns))
    return found


def _of_operation(look: Look, case: Case | None, known_ns: int | None, world: World) -> str | None:
    """Once it has been answered it is DONE, with that answer, for as long as it can be retried (KVC-IDEM-019)."""
    if not look.said:
        return None
    said = _told(look.said)
    if case is None:
        return "it is DONE, and nobody asked for it" if said.known == DONE else None
    if said.known == DONE:
        return _of_answer(look, said, case, world)
    if known_ns is None or known_ns >= look.start_ns or case.start_ns < world.old_ns:
        return None
    return f"it is {said.known}, and its answer had been given at {known_ns / 1e9:.6f} s"


def _of_answer(look: Look, said: Told, case: Case, world: World) -> str | None:
    if said.answer is None:
        return "it is DONE, without an answer"
    if case.answer is None:
        return "it is DONE, and nothing is kept of it" if case.start_ns >= world.old_ns else None
    kept, answer = (msgspec.json.encode(a).decode() for a in (case.answer, said.answer))
    if not same(kept, answer):
        return f"its answer is {answer}; kept is {kept}"
    if case.effects and look.end_ns < case.effects[0].at_ns:
        return f"it is DONE, before {told(case.effects[0])}"
    return None


def _of_group(look: Look, world: World) -> str | None:
    timeline = world.timelines.get((look.node, look.tenant, look.block_group_id))
    start_ns = look.start_ns - COMMIT_NS
    if not look.said:
        if look.error_code != NOT_FOUND or timeline is None or timeline.was((None, "", 0, 0, 0), start_ns, look.end_ns):
            return None
        return f"it was not found, and {timeline.where} was there all the time"
    seen = _seen(look.said)
    group = seen.group
    snapshot = (group.state, group.location, group.epoch, group.reserved, seen.pins)
    if timeline is None:
        return f"it was {snapshot}, and no effect made it"
    return None if timeline.was(snapshot, start_ns, look.end_ns) else f"it was {snapshot}, which it never was then"


def _of_migration(look: Look, steps: _Steps | None) -> str | None:
    within = [None] if steps is None else steps.within(look.start_ns - COMMIT_NS, look.end_ns)
    if look.said:
        status = _migration(look.said).status
        return None if status in within else f"it was {status}; it was {_words(within)} then"
    if look.error_code != NOT_FOUND or None in within:
        return None
    return f"it was not found; it was {_words(within)} then"


def _words(statuses: Sequence[MigrationStatus | None]) -> str:
    return ", ".join(dict.fromkeys(str(status) if status else "unknown" for status in statuses))


def _steps(effects: Sequence[EffectRow]) -> dict[Place, _Steps]:
    found: dict[Place, _Steps] = defaultdict(lambda: _Steps([BEGINNING_NS], [None]))
    for effect in sorted((e for e in effects if e.kind == "migration"), key=lambda e: e.seq):
        steps = found[effect.node, effect.tenant, effect.key]
        steps.at_ns.append(max(effect.at_ns, steps.at_ns[-1]))
        steps.statuses.append(migration_status(effect.after))
    return found

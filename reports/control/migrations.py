"""Every move of a group: how it ended, how long it took, what it carried; and who owns what at the end."""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec
import pandas as pd

from harness.group_timeline import known
from harness.latency import Percentiles, percentiles
from harness.operation_history import AT_HOME, judge_owners
from harness.run_folder import RunFolder
from reference_impl.rules.blockgroups import Migration, MigrationStatus
from reference_impl.rules.events import Event, EventKind
from workloads.operation_rows import EffectRow, FinalRow


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One migration, as its source's database saw it."""

    operation_id: str
    tenant: str
    block_group_id: str
    src: str
    dst: str
    status: MigrationStatus
    reason: str
    started_ns: int
    seconds: float | None
    """Started -> ended; None: it had not."""
    size_bytes: int
    owner: str
    """At the end of the run; "": nobody has it any more."""
    steps: list[str] = []
    """What the nodes said of it, in order."""
    starts: int = 0
    """Attempts to start it, of all calls that asked for it."""


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """All of them together."""

    started: int
    by_status: dict[str, int]
    starts_repeated: int
    """Attempts to start one that had been tried before."""
    bytes_moved: int
    """Of those that succeeded."""
    seconds: Percentiles
    """Of those that succeeded."""
    groups: int
    owned: dict[str, int]
    """By node."""
    evicted: int
    ownerless: int
    """Groups that no node owns and none has evicted: lost or on their way."""
    owner_breaches: int


def moves(run: RunFolder) -> list[Move]:
    """Return every migration that any node's database saw, by their starts."""
    changes: dict[tuple[str, str, str], list[EffectRow]] = defaultdict(list)
    sizes: dict[tuple[str, str], int] = {}
    for effect in run.control.effects:
        if effect.kind == "migration" and effect.after:
            changes[effect.node, effect.tenant, effect.key].append(effect)
        elif effect.kind == "group" and (group := known(effect.after or effect.before)) is not None:
            sizes[effect.tenant, effect.block_group_id] = group.size_bytes
    steps: dict[str, list[str]] = defaultdict(list)
    for event in run.events_of(EventKind.MIGRATION_MOVED):
        steps[event.subject].append(_step(event))
    starts: Counter[tuple[str, str, str]] = Counter()
    for i in run.control.invocations:
        starts[i.node, i.tenant, i.operation_id] += i.attempts
    owners = {(row.tenant, row.block_group_id): row.node for row in run.control.groups if _owns(row)}
    found = [_move(key, sorted(of, key=_seq), sizes, owners) for key, of in changes.items()]
    whole = [
        msgspec.structs.replace(m, steps=steps[m.operation_id], starts=starts[m.src, m.tenant, m.operation_id])
        for m in found
    ]
    return sorted(whole, key=lambda m: m.started_ns)


def _seq(effect: EffectRow) -> int:
    return effect.seq


def _move(
    key: tuple[str, str, str], of: list[EffectRow], sizes: dict[tuple[str, str], int],
    owners: dict[tuple[str, str], str],
) -> Move:  # fmt: skip
    _, tenant, name = key
    states = [(e.at_ns, msgspec.json.decode(e.after, type=Migration)) for e in of]
    last = states[-1][1]
    ended_ns = next((at_ns for at_ns, state in states if state.status.ended), None)
    group = (tenant, last.block_group_id)
    return Move(
        operation_id=name, tenant=tenant, block_group_id=last.block_group_id, src=last.src, dst=last.dst,
        status=last.status, reason=last.reason, started_ns=of[0].at_ns,
        seconds=None if ended_ns is None else (ended_ns - of[0].at_ns) / 1e9, size_bytes=sizes.get(group, 0),
        owner=owners.get(group, ""),
    )  # fmt: skip


def summarise_moves(run: RunFolder, found: list[Move]) -> Moves:
    """Return their figures together, and who owns what."""
    done = [m for m in found if m.status is MigrationStatus.SUCCEEDED]
    groups: dict[tuple[str, str], list[FinalRow]] = defaultdict(list)
    for row in run.control.groups:
        groups[row.tenant, row.block_group_id].append(row)
    owned = Counter(row.node for rows in groups.values() for row in rows if _owns(row))
    without = [rows for rows in groups.values() if not any(_owns(row) for row in rows)]
    evicted = sum(any(row.state == "EVICTED" for row in rows) for rows in without)
    return Moves(
        started=len(found), by_status=dict(Counter(str(m.status) for m in found)),
        starts_repeated=sum(max(0, m.starts - 1) for m in found), bytes_moved=sum(m.size_bytes for m in done),
        seconds=percentiles(pd.Series([m.seconds for m in done if m.seconds is not None], dtype=float)),
        groups=len(groups), owned=dict(sorted(owned.items())), evicted=evicted, ownerless=len(without) - evicted,
        owner_breaches=len(judge_owners(run.control.groups)),
    )  # fmt: skip


def _owns(row: FinalRow) -> bool:
    return row.state in AT_HOME and row.location == row.node


def _step(event: Event) -> str:
    return str(event.detail.get("step") or event.detail.get("status") or "")

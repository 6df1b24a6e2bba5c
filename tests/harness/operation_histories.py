"""Histories of a control plane, made by the real rules on a clock of their own, whole or with one flaw.

`Simulation` has clients that retry, replies that are lost, nodes that crash, engines that lose blocks, migrations, and
readers that look at it all; all by one seed. `Node` keeps everything in memory and writes effects as the store's
triggers do. A `Flaw` is a mistake that such a service could make.
"""

from __future__ import annotations

import enum
import heapq
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol
from unittest import mock

import msgspec

from reference_impl.blockservice.store import Done, Store, Write
from reference_impl.rules import blockgroups
from reference_impl.rules.blockgroups import (
    Answer,
    CancelMigrate,
    Decision,
    EngineSays,
    Evict,
    Group,
    GroupState,
    Migration,
    MigrationStatus,
    Outcome,
    Pin,
    PinState,
    Place,
    PrepareGet,
    Refusal,
    Request,
    Reserve,
    StartMigrate,
    Unpin,
    View,
)
from reference_impl.rules.operations import Denied, Record, Replay, Retention, canonical, judge
from workloads.operation_rows import (
    ControlRows,
    EffectRow,
    FinalRow,
    Invocation,
    Look,
    LookKind,
    RecordRow,
    Seen,
    Told,
    joined,
    rows_of_store,
)

MS = 1_000_000
WALL_MS = 1_700_000_000_000
ATTEMPTS = 4
TENANTS = ("blue", "red")
NODES = ("p0", "d0")
MAY_HAVE_RUN = (Refusal.ID_EXPIRED, Refusal.FROM_THE_FUTURE)


class Flaw(enum.StrEnum):
    """What a service may do wrong."""

    TWO_TRANSACTIONS = enum.auto()
    RECORD_FIRST = enum.auto()
    RESULT_NOT_STORED = enum.auto()
    PARAMETERS_NOT_COMPARED = enum.auto()
    EPOCH_NOT_CHECKED = enum.auto()
    PINS_COUNTED = enum.auto()
    UNPIN_FORGETS = enum.auto()
    DEDUP_LOST_ON_RESTART = enum.auto()
    IDS_OF_ALL_TENANTS = enum.auto()
    ANSWERS_ANEW = enum.auto()
    REFUSALS_NOT_KEPT = enum.auto()
    WORKS_AFTER_FAILURE = enum.auto()
    ANSWERS_BEFORE_EFFECT = enum.auto()
    NOBODY_ASKED = enum.auto()
    EVICTS_PINNED = enum.auto()
    EVICTS_LENT = enum.auto()
    RUNS_EXPIRED = enum.auto()
    FORGETS_RESERVE = enum.auto()
    TIMEOUT_CANCELS = enum.auto()
    MOVES_NOTHING = enum.auto()
    TWO_OWNERS = enum.auto()
    LOSES_GROUP = enum.auto()
    NEVER_SETTLES = enum.auto()
    STALE_UNPIN = enum.auto()
    REPIN_COUNTED = enum.auto()
    HOLDS_NOTHING = enum.auto()
    COPIES_NOTHING = enum.auto()
    SOURCE_EVICTS = enum.auto()
    COPIES_OTHER_BYTES = enum.auto()
    KNOWS_NO_OPERATION = enum.auto()
    TELLS_ANOTHER_ANSWER = enum.auto()
    FINDS_NO_GROUP = enum.auto()
    TELLS_FIRST_EPOCH = enum.auto()
    TELLS_NO_PINS = enum.auto()
    TELLS_PENDING = enum.auto()
    FINDS_NO_MIGRATION = enum.auto()


class Crash(Exception):
    """The process ends here."""


class Service(Protocol):
    """What the simulation needs of a node: methods of the store."""

    def run(self, writes: list[Write]) -> list[Done]: ...
    def look(self, tenant: str, operation_id: str) -> Record | None: ...
    def group(self, tenant: str, block_group_id: str) -> Group | None: ...
    def pins(self, tenant: str, block_group_id: str) -> int: ...
    def publish(self, tenant: str, groups: list[Group]) -> list[Group]: ...
    def lost(self, tenant: str, block_group_ids: list[str]) -> None: ...
    def end_transfers(self, tokens: list[str]) -> None: ...
    def migration(self, tenant: str, operation_id: str) -> Migration | None: ...
    def set_running(self, tenant: str, operation_id: str) -> Migration | None: ...
    def end_migration(
        self, tenant: str, operation_id: str, status: MigrationStatus, reason: str = ""
    ) -> Migration | None: ...
    def set_told(self, tenant: str, operation_id: str) -> None: ...
    def accept(self, tenant: str, operation_id: str, group: Group) -> Group | None: ...
    def settle(self, tenant: str, operation_id: str, *, ours: bool, node_lost_copy: bool = False) -> Group | None: ...


class Node:
    """A node that keeps everything in memory. `now_ns`: the simulation's clock; `reached` may raise `Crash`."""

    def __init__(
        self, name: str, now_ns: Callable[[], int], reached: Callable[[str], None], flaw: Flaw | None = None
    ) -> None:
        self.name = name
        self._now_ns, self._reached, self._flaw = now_ns, reached, flaw
        self._state: dict[tuple[str, str, str, str], msgspec.Struct] = {}
        """Group, pin, transfer and migration rows: tenant, group, kind, key."""
        self._log: dict[tuple[str, str], RecordRow] = {}
        self._before: dict[tuple[str, str], Group | None] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._later: list[Callable[[], None]] = []
        self.effects: list[EffectRow] = []

    def restart(self) -> None:
        if self._flaw is Flaw.DEDUP_LOST_ON_RESTART:
            self._log.clear()

    def work_later(self) -> None:
        """Do what was put off."""
        for work in self._later:
            work()
        self._later.clear()

    # Clients' writes.

    def run(self, writes: list[Write]) -> list[Done]:
        return [self._run(write) for write in writes]

    def _run(self, write: Write) -> Done:
        flaw, scope = self._flaw, "" if self._flaw is Flaw.IDS_OF_ALL_TENANTS else write.tenant
        row = self._log.get((scope, write.operation_id))
        record = None
        if row is not None:
            record = Record(row.params.encode(), msgspec.json.decode(row.answer, type=Answer), row.issued_ms)
        late = flaw is Flaw.RUNS_EXPIRED and record is None
        issued_ms = self._now_ms() if late else write.issued_ms
        if record is not None and flaw is Flaw.PARAMETERS_NOT_COMPARED:
            return Done(record.answer, True)
        match judge(record, write.request, issued_ms, self._now_ms(), 0, Retention()):
            case Replay(answer):
                return Done(self._anew(write, answer) if flaw is Flaw.ANSWERS_ANEW else answer, True)
            case Denied(answer):
                return Done(answer, False)
        decision = self._decide(write)
        steps: list[Callable[[], None]] = [
            lambda: self._apply(write, decision), lambda: self._keep(scope, write, decision.answer),
        ]  # fmt: skip
        if flaw is Flaw.RECORD_FIRST:
            steps.reverse()
        if flaw in (Flaw.TWO_TRANSACTIONS, Flaw.RECORD_FIRST):
            steps.pop(0)()
        self._reached("before_commit")
        for step in steps:
            step()
        self._reached("after_commit")
        return Done(decision.answer, False)

    def _decide(self, write: Write) -> Decision:
        request, view, flaw = write.request, self._view(write), self._flaw
        if flaw is Flaw.EPOCH_NOT_CHECKED and view.group is not None:
            request = msgspec.structs.replace(request, epoch=min(request.epoch, view.group.epoch))
            if request.epoch < view.group.epoch:
                request = msgspec.structs.replace(request, epoch=view.group.epoch)
        if isinstance(request, Unpin) and flaw is Flaw.STALE_UNPIN and view.group is not None:
            request = msgspec.structs.replace(request, epoch=max(request.epoch, view.group.epoch))
        if isinstance(request, Pin) and flaw is Flaw.REPIN_COUNTED and view.pin is PinState.PINNED:
            view = msgspec.structs.replace(view, pins=view.pins + 1)
        if isinstance(request, Evict) and flaw is Flaw.EVICTS_PINNED:
            view = msgspec.structs.replace(view, pins=0)
        if isinstance(request, Evict) and flaw is Flaw.EVICTS_LENT:
            view = msgspec.structs.replace(view, transfers=0)
        if flaw is Flaw.PINS_COUNTED:
            state = {Pin: None, Unpin: PinState.PINNED}.get(type(request))
            view = msgspec.structs.replace(view, pin=state, pins=max(1, view.pins) if state else view.pins)
        return blockgroups.decide(request, write.operation_id, view)

    def _keep(self, scope: str, write: Write, answer: Answer) -> None:
        if self._flaw is Flaw.REFUSALS_NOT_KEPT and not answer.applied:
            return
        if self._flaw is Flaw.RESULT_NOT_STORED:
            answer = Answer(outcome=answer.outcome)
        self._log[scope, write.operation_id] = RecordRow(
            node=self.name, tenant=write.tenant, operation_id=write.operation_id, outcome=answer.outcome,
            method=str(write.request.__struct_config__.tag), params=canonical(write.request).decode(),
            answer=msgspec.json.encode(answer).decode(), issued_ms=write.issued_ms, done_ms=self._now_ms(),
        )  # fmt: skip

    def _anew(self, write: Write, answer: Answer) -> Answer:
        group = self.group(write.tenant, write.request.block_group_id)
        return answer if group is None else msgspec.structs.replace(answer, epoch=group.epoch, state=group.state)

    def _view(self, write: Write) -> View:
        tenant, request = write.tenant, write.request
        name = request.block_group_id
        request_id = request.request_id if isinstance(request, Pin | Unpin) else ""
        pin = self._state.get((tenant, name, "pin", request_id))
        migration = self.migration(tenant, request.migration_id) if isinstance(request, CancelMigrate) else None
        lent = [r for r in self._of(tenant, name, "transfer").values() if isinstance(r, TransferRow) and not r.ended]
        groups = [g for g in self._state.values() if isinstance(g, Group)]
        return View(
            node=self.name, group=self.group(tenant, name), pins=self._pins(tenant, name),
            pin=pin.state if isinstance(pin, PinRow) else None, nodes=frozenset(NODES), engine=write.engine,
            transfers=sum(r.expires_ms > self._now_ms() for r in lent), migration=migration,
            reserved_total=sum(g.reserved for g in groups), slots_max=200,
        )  # fmt: skip

    def _pins(self, tenant: str, name: str) -> int:
        if self._flaw is Flaw.PINS_COUNTED:
            return self._counts.get((tenant, name), 0)
        return len(self.pinned(tenant, name))

    def _apply(self, write: Write, decision: Decision) -> None:
        def work() -> None:
            self._write(write, decision)

        if self._flaw is Flaw.ANSWERS_BEFORE_EFFECT and isinstance(write.request, Unpin):
            self._later.append(work)
        elif self._flaw is not Flaw.FORGETS_RESERVE or not isinstance(write.request, Reserve):
            work()

    def _write(self, write: Write, decision: Decision) -> None:
        tenant, request, answer = write.tenant, write.request, decision.answer
        name, by = request.block_group_id, (write.operation_id, "client")
        if decision.group is not None and not (
            self._flaw is Flaw.MOVES_NOTHING and isinstance(request, StartMigrate)
        ):  # fmt: skip
            self._put(tenant, name, "group", "", decision.group, by)
        if decision.forget_pins:
            self._forget_pins(tenant, name, by)
        if decision.pin is not None:
            assert isinstance(request, Pin | Unpin)
            self._counts[tenant, name] = answer.pins
            gone = decision.pin is PinState.UNPINNED and self._flaw is Flaw.UNPIN_FORGETS
            row = None if gone else PinRow(request_id=request.request_id, state=decision.pin)
            self._put(tenant, name, "pin", request.request_id, row, by)
        if decision.migration is not None:
            self._put(tenant, name, "migration", decision.migration.operation_id, decision.migration, by)
        if decision.transfer:
            assert answer.place is not None
            token = answer.place.transfer_token
            lent = TransferRow(transfer_token=token, expires_ms=answer.place.expires_ms, ended=False)
            self._put(tenant, name, "transfer", token, lent, by)

    # Rows.

    def _now_ms(self) -> int:
        return WALL_MS + self._now_ns() // MS

    def _put(
        self, tenant: str, name: str, kind: str, key: str, row: msgspec.Struct | None, by: tuple[str, str]
    ) -> None:
        """Write a row, or delete it, and an effect if that changes anything."""
        place = (tenant, name, kind, key)
        before = self._state.get(place)
        if before == row:
            return
        texts = ["" if r is None else msgspec.json.encode(r).decode() for r in (before, row)]
        self.effects.append(
            EffectRow(
                node=self.name, seq=len(self.effects) + 1, at_ns=self._now_ns(), tenant=tenant, block_group_id=name,
                operation_id=by[0], cause=by[1], kind=kind, key=key or name, before=texts[0], after=texts[1],
            )
        )  # fmt: skip
        if row is None:
            del self._state[place]
        else:
            self._state[place] = row

    def _of(self, tenant: str, name: str, kind: str) -> dict[str, msgspec.Struct]:
        return {k[3]: row for k, row in self._state.items() if k[:3] == (tenant, name, kind)}

    def _forget_pins(self, tenant: str, name: str, by: tuple[str, str]) -> None:
        for key in sorted(self._of(tenant, name, "pin")):
            self._put(tenant, name, "pin", key, None, by)
        self._counts.pop((tenant, name), None)

    def look(self, tenant: str, operation_id: str) -> Record | None:
        row = self._log.get((tenant, operation_id))
        if row is None:
            return None
        return Record(row.params.encode(), msgspec.json.decode(row.answer, type=Answer), row.issued_ms)

    def pins(self, tenant: str, block_group_id: str) -> int:
        return len(self.pinned(tenant, block_group_id))

    def pinned(self, tenant: str, name: str) -> list[str]:
        rows = self._of(tenant, name, "pin").values()
        return sorted(r.request_id for r in rows if isinstance(r, PinRow) and r.state is PinState.PINNED)

    def group(self, tenant: str, block_group_id: str) -> Group | None:
        row = self._state.get((tenant, block_group_id, "group", ""))
        return row if isinstance(row, Group) else None

    # What the node does by itself.

    def invent(self, tenant: str, name: str) -> None:
        """Reserve a slot that nobody asked for."""
        group = self.group(tenant, name)
        if group is not None and group.state is GroupState.RESIDENT:
            grown = msgspec.structs.replace(group, reserved=group.reserved + 1)
            self._put(tenant, name, "group", "", grown, ("nobody", "client"))

    def publish(self, tenant: str, groups: list[Group]) -> list[Group]:
        for group in groups:
            new = blockgroups.published(self.group(tenant, group.block_group_id), group)
            if new is not None:
                self._put(tenant, group.block_group_id, "group", "", new, ("", "engine"))
        return groups

    def lost(self, tenant: str, block_group_ids: list[str]) -> None:
        for name in block_group_ids:
            group = self.group(tenant, name)
            if group is None or group.state not in (GroupState.RESIDENT, GroupState.MIGRATING_OUT):
                continue
            if group.state is GroupState.MIGRATING_OUT:
                self.end_migration(tenant, group.migration, MigrationStatus.FAILED, cause="engine")
            self._put(tenant, name, "group", "", blockgroups.evicted(group), ("", "engine"))
            self._forget_pins(tenant, name, ("", "engine"))

    def end_transfers(self, tokens: list[str]) -> None:
        for (tenant, name, kind, token), row in list(self._state.items()):
            if kind == "transfer" and token in tokens:
                ended = msgspec.structs.replace(row, ended=True)
                self._put(tenant, name, kind, token, ended, ("", "engine"))

    def migration(self, tenant: str, operation_id: str) -> Migration | None:
        found = [r for (t, _, _, k), r in self._state.items() if (t, k) == (tenant, operation_id)]
        return found[0] if found and isinstance(found[0], Migration) else None

    def set_running(self, tenant: str, operation_id: str) -> Migration | None:
        migration = self.migration(tenant, operation_id)
        if migration is None or migration.status is not MigrationStatus.PENDING:
            return None
        running = msgspec.structs.replace(migration, status=MigrationStatus.RUNNING)
        self._put(tenant, migration.block_group_id, "migration", operation_id, running, ("", "migration"))
        return running

    def end_migration(
        self, tenant: str, operation_id: str, status: MigrationStatus, reason: str = "", cause: str = "migration"
    ) -> Migration | None:
        migration = self.migration(tenant, operation_id)
        group = None if migration is None else self.group(tenant, migration.block_group_id)
        if migration is None or group is None or migration.status.ended:
            return migration if migration is not None and migration.status is status else None
        ended, after = blockgroups.end_migration(migration, group, status, reason)
        if self._flaw is Flaw.TWO_OWNERS:
            after = msgspec.structs.replace(group, state=GroupState.RESIDENT)
        if self._flaw is Flaw.SOURCE_EVICTS and after.state is GroupState.MOVED:
            after = blockgroups.evicted(group)
        self._put(tenant, group.block_group_id, "migration", operation_id, ended, ("", cause))
        self._put(tenant, group.block_group_id, "group", "", after, ("", cause))
        if after.epoch != group.epoch:
            self._forget_pins(tenant, group.block_group_id, ("", cause))
        return ended

    def set_told(self, tenant: str, operation_id: str) -> None:
        migration = self.migration(tenant, operation_id)
        assert migration is not None
        told = msgspec.structs.replace(migration, told=True)
        self._put(tenant, migration.block_group_id, "migration", operation_id, told, ("", "migration"))

    def accept(self, tenant: str, operation_id: str, group: Group) -> Group | None:
        here = self.group(tenant, group.block_group_id)
        if here is not None and here.state not in (GroupState.EVICTED, GroupState.MOVED):
            return here if here.migration == operation_id else None
        self._before[tenant, operation_id] = here
        arriving = msgspec.structs.replace(
            group, state=GroupState.MIGRATING_IN, migration=operation_id, reserved=0,
            epoch=max(group.epoch, here.epoch if here else 0),
        )  # fmt: skip
        self._put(tenant, group.block_group_id, "group", "", arriving, ("", "migration"))
        self._forget_pins(tenant, group.block_group_id, ("", "migration"))
        return arriving

    def settle(
        self, tenant: str, operation_id: str, *, ours: bool, node_lost_copy: bool = False
    ) -> Group | None:  # fmt: skip
        found = [g for g in self._state.values() if isinstance(g, Group) and g.migration == operation_id]
        group = next((g for g in found if g.state is GroupState.MIGRATING_IN), None)
        if group is None or self._flaw is Flaw.NEVER_SETTLES:
            return group
        after = self._before[tenant, operation_id]
        if ours and self._flaw is not Flaw.LOSES_GROUP:
            gone = node_lost_copy or self._flaw is Flaw.COPIES_NOTHING
            after = msgspec.structs.replace(
                group, state=GroupState.EVICTED if gone else GroupState.RESIDENT, location=self.name,
                epoch=group.epoch + 1,
                checksum="0" * 32 if self._flaw is Flaw.COPIES_OTHER_BYTES else group.checksum,
            )  # fmt: skip
        self._forget_pins(tenant, group.block_group_id, ("", "migration"))
        self._put(tenant, group.block_group_id, "group", "", after, ("", "migration"))
        return after

    def rows(self) -> ControlRows:
        groups = [
            FinalRow(
                node=self.name, tenant=tenant, pins=msgspec.json.encode(self.pinned(tenant, name)).decode(),
                **msgspec.structs.asdict(group),
            )
            for (tenant, name, _, _), group in self._state.items() if isinstance(group, Group)
        ]  # fmt: skip
        return ControlRows(effects=self.effects, records=list(self._log.values()), groups=groups)


class PinRow(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    state: PinState


class TransferRow(msgspec.Struct, frozen=True, kw_only=True):
    transfer_token: str
    expires_ms: int
    ended: bool


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants, to be asked for again as it is."""

    tenant: str
    node: str
    operation_id: str
    issued_ms: int
    request: Request


class Fate(enum.Enum):
    """What becomes of one attempt."""

    FINE = enum.auto()
    REQUEST_LOST = enum.auto()
    REPLY_LOST = enum.auto()
    COMES_LATE = enum.auto()
    """It is processed after its client gave it up."""
    COMES_TWICE = enum.auto()
    CRASH_BEFORE_COMMIT = enum.auto()
    CRASH_AFTER_COMMIT = enum.auto()


FATES = [*[Fate.FINE] * 12, *Fate]
LOST = (Fate.REQUEST_LOST, Fate.COMES_LATE)
CRASHES = {Fate.CRASH_BEFORE_COMMIT: "before_commit", Fate.CRASH_AFTER_COMMIT: "after_commit"}


class Simulation:
    """Clients, nodes and engines on one clock. `nodes` is filled in before `run`; `restart` is called after a crash."""

    def __init__(self, seed: int, flaw: Flaw | None = None, *, exchanged: bool = False) -> None:
        self.chance = random.Random(seed)
        self.looking = random.Random(-seed - 1)
        self.flaw = flaw
        self.exchanged = exchanged
        """Whether now and then another engine comes to a node, without a group that the one before held."""
        self.engines: dict[str, list[int]] = {}
        """When another engine came, by node."""
        self.now_ns = 1_000 * MS
        self.invocations: list[Invocation] = []
        self.looks: list[Look] = []
        self.nodes: dict[str, Service] = {}
        self.restart: Callable[[str], None] = lambda _: None
        self._events: list[tuple[int, int, Iterator[int]]] = []
        self._asked: list[Asked] = []
        self._moved: list[tuple[str, str, str]] = []
        self._crash_at = ""
        self._number = 0

    def reached(self, point: str) -> None:
        """End the process here, if that is due."""
        if point == self._crash_at:
            self._crash_at = ""
            raise Crash(point)

    def start(self, life: Iterator[int], after_ns: int = 0) -> None:
        """Let something go on, which yields how long it waits."""
        self._number += 1
        heapq.heappush(self._events, (self.now_ns + after_ns, self._number, life))

    def run(self, invocations: int, *, clients: int = 8, groups: int = 5) -> None:
        """Run to the end of everything."""
        for node in NODES:
            for tenant in TENANTS:
                self.nodes[node].publish(tenant, [self._fresh(node, f"{node}-g{n}") for n in range(groups)])
        names = [f"{node}-g{n}" for node in NODES for n in range(groups)]
        for number in range(clients):
            self.start(self._client(f"c{number}", invocations // clients, names))
        self.start(self._engines(names, invocations // 10))
        self.start(self._reader(names, invocations // 2))
        while self._events:
            at_ns, _, life = heapq.heappop(self._events)
            self.now_ns = max(self.now_ns, at_ns)
            wait_ns = next(life, None)
            if wait_ns is not None:
                self.start(life, wait_ns)

    def _fresh(self, node: str, name: str) -> Group:
        return Group(block_group_id=name, location=node, size_bytes=4096, token_end=16, checksum="c" * 32)

    def _wait(self, ms: int) -> int:
        return self.chance.randint(1, ms * MS)

    def _client(self, name: str, invocations: int, groups: list[str]) -> Iterator[int]:
        for _ in range(invocations):
            yield self._wait(20)
            yield from self._invoke(name, self._choose(groups))

    def _choose(self, groups: list[str]) -> Asked:
        """Something new, or again what somebody asked for, or under his id something else."""
        draw = self.chance.random()
        old = self.chance.choice(self._asked) if self._asked else None
        if old is not None and draw < 0.1:
            return old
        new = self._new(groups)
        if old is not None and draw < 0.14:
            new = msgspec.structs.replace(
                new, tenant=old.tenant, node=old.node, operation_id=old.operation_id, issued_ms=old.issued_ms
            )  # fmt: skip
        elif old is not None and draw < 0.18:
            other = TENANTS[old.tenant == TENANTS[0]]
            new = msgspec.structs.replace(new, tenant=other, operation_id=old.operation_id, node=old.node)
        elif draw < 0.2:
            new = msgspec.structs.replace(new, issued_ms=new.issued_ms - 11 * 60 * 1000)
        self._asked.append(new)
        return new

    def _new(self, groups: list[str]) -> Asked:
        chance = self.chance
        tenant, name = chance.choice(TENANTS), chance.choice(groups)
        homes = [n for n in NODES if (g := self.nodes[n].group(tenant, name)) is not None and g.location == n]
        node = chance.choice(homes or list(NODES)) if chance.random() < 0.95 else chance.choice(NODES)
        group = self.nodes[node].group(tenant, name)
        epoch = (group.epoch if group else 1) + (chance.choice([-1, -1, 1]) if chance.random() < 0.1 else 0)
        self._number += 1
        return Asked(
            tenant=tenant, node=node, operation_id=f"op{self._number}", issued_ms=WALL_MS + self.now_ns // MS,
            request=self._request(tenant, node, name, max(0, epoch)),
        )  # fmt: skip

    def _request(self, tenant: str, node: str, name: str, epoch: int) -> Request:
        chance = self.chance
        request_id = f"r{chance.randint(1, 4)}"
        other = NODES[node == NODES[0]]
        moved = [m for t, n, m in self._moved if (t, n) == (tenant, node)] or ["none"]
        kinds: list[Callable[[], Request]] = [
            lambda: Reserve(block_group_id=name, epoch=epoch, slots=chance.randint(1, 9)),
            lambda: Pin(block_group_id=name, epoch=epoch, request_id=request_id),
            lambda: Unpin(block_group_id=name, epoch=epoch, request_id=request_id),
            lambda: Evict(block_group_id=name, epoch=epoch),
            lambda: PrepareGet(block_group_id=name, epoch=epoch, request_id=request_id),
            lambda: StartMigrate(block_group_id=name, epoch=epoch, src=node, dst=other),
            lambda: self._cancel(tenant, node, chance.choice(moved[-3:]), epoch),
        ]
        return chance.choices(kinds, weights=[3, 4, 4, 2, 2, 3, 1])[0]()

    def _cancel(self, tenant: str, node: str, migration_id: str, epoch: int) -> Request:
        migration = self.nodes[node].migration(tenant, migration_id)
        name = migration.block_group_id if migration else f"{node}-g0"
        group = self.nodes[node].group(tenant, name)
        epoch = group.epoch if group else epoch
        return CancelMigrate(block_group_id=name, epoch=epoch, migration_id=migration_id)

    def _invoke(self, client: str, asked: Asked) -> Iterator[int]:
        """One logical operation, with its retries."""
        start_ns, doubtful, timeouts = self.now_ns, False, 0
        if self.chance.random() < 0.02:
            self._ended(client, asked, start_ns, "fail", None, 0, 0, "CIRCUIT_OPEN")
            if self.flaw is Flaw.WORKS_AFTER_FAILURE:
                self.start(self._late(asked), 5 * MS)
            return
        for attempt in range(1, ATTEMPTS + 1):
            fate = self.chance.choice(FATES)
            yield self._wait(3)
            done = None if fate in LOST else self._arrive(asked, fate)
            if fate is Fate.COMES_LATE:
                self.start(self._late(asked), self._wait(200))
            elif fate is Fate.COMES_TWICE:
                self.start(self._late(asked), self._wait(30))
            if done is not None and fate is not Fate.REPLY_LOST:
                yield self._wait(3)
                refused = done.answer.outcome is Outcome.REFUSED
                unsure = doubtful and done.answer.refusal in MAY_HAVE_RUN
                outcome = "unknown" if unsure else "fail" if refused else "ok"
                self._ended(client, asked, start_ns, outcome, done, attempt, timeouts, done.answer.refusal)
                return
            doubtful, timeouts = True, timeouts + 1
            yield 20 * MS
        self._ended(client, asked, start_ns, "unknown", None, ATTEMPTS, timeouts, "DEADLINE_EXCEEDED")

    def _late(self, asked: Asked) -> Iterator[int]:
        self._arrive(asked, Fate.FINE)
        yield 0

    def _arrive(self, asked: Asked, fate: Fate) -> Done | None:
        """Let a node process a request; None: it did not live to answer."""
        self._crash_at = CRASHES.get(fate, "")
        write = Write(
            tenant=asked.tenant, operation_id=asked.operation_id, issued_ms=asked.issued_ms, request=asked.request,
            engine=self._engine_says(asked),
        )  # fmt: skip
        try:
            done = self.nodes[asked.node].run([write])[0]
        except Crash:
            self.restart(asked.node)
            done = None
        self._crash_at = ""
        self._note(asked, write.engine)
        return done

    def _engine_says(self, asked: Asked) -> EngineSays:
        self._number += 1
        place = Place(
            node=asked.node, handoff="{}", size_bytes=4096, checksum="c" * 32, transfer_token=f"xfer-{self._number}",
            expires_ms=WALL_MS + self.now_ns // MS + 400,
        )  # fmt: skip
        draw = self.chance.random()
        return EngineSays(here=draw > 0.03, leased=draw > 0.95, place=place)

    def _note(self, asked: Asked, says: EngineSays) -> None:
        """What follows a commit, whether its reply arrives or not: a reader that reads, a migration that goes on."""
        moved = (asked.tenant, asked.node, asked.operation_id)
        starts = isinstance(asked.request, StartMigrate) and moved not in self._moved
        if starts and self.nodes[asked.node].migration(asked.tenant, asked.operation_id) is not None:
            self._moved.append(moved)
            self.start(self._migrate(asked), self._wait(10))
        if says.place is not None and isinstance(asked.request, PrepareGet):
            self.start(self._read(asked.node, says.place.transfer_token), self._wait(600))
        if isinstance(node := self.nodes[asked.node], Node) and self.flaw is Flaw.ANSWERS_BEFORE_EFFECT:
            self.start(self._work_later(node), 10 * MS)

    def _work_later(self, node: Node) -> Iterator[int]:
        node.work_later()
        yield 0

    def _read(self, node: str, token: str) -> Iterator[int]:
        self.nodes[node].end_transfers([token])
        yield 0

    def _migrate(self, asked: Asked) -> Iterator[int]:
        assert isinstance(asked.request, StartMigrate)
        tenant, operation_id = asked.tenant, asked.operation_id
        source, target = asked.node, asked.request.dst
        self.nodes[source].set_running(tenant, operation_id)
        group = self.nodes[source].group(tenant, asked.request.block_group_id)
        assert group is not None
        yield self._wait(30)
        migration = self.nodes[source].migration(tenant, operation_id)
        assert migration is not None
        accepted = None if migration.status.ended else self.nodes[target].accept(tenant, operation_id, group)
        yield self._wait(60)
        status = MigrationStatus.FAILED
        if accepted is not None and self.chance.random() < 0.8:
            status = MigrationStatus.CANCELLED if self.flaw is Flaw.TIMEOUT_CANCELS else MigrationStatus.SUCCEEDED
        ended = self.nodes[source].end_migration(tenant, operation_id, status)
        yield self._wait(10)
        if accepted is not None:
            ours = ended is not None and ended.status is MigrationStatus.SUCCEEDED
            lost = ours and self.exchanged and self.chance.random() < 0.3
            if lost:
                self.engines.setdefault(target, []).append(self.now_ns)
            self.nodes[target].settle(tenant, operation_id, ours=ours, node_lost_copy=lost)
        self.nodes[source].set_told(tenant, operation_id)

    def _engines(self, names: list[str], times: int) -> Iterator[int]:
        """Engines lose groups, and hold them again."""
        for _ in range(times):
            yield self._wait(60)
            tenant, name, node = self.chance.choice(TENANTS), self.chance.choice(names), self.chance.choice(NODES)
            service = self.nodes[node]
            group = service.group(tenant, name)
            if group is not None and group.state is GroupState.EVICTED:
                service.publish(tenant, [self._fresh(node, name)])
            elif group is not None and self.chance.random() < 0.3:
                self._lose(tenant, node, group)
            if self.flaw is Flaw.NOBODY_ASKED and isinstance(service, Node):
                service.invent(tenant, name)

    def _lose(self, tenant: str, node: str, group: Group) -> None:
        """Let an engine use a group's blocks for something else, if it does not hold them, or is another now."""
        held = group.state is GroupState.MIGRATING_OUT or self.nodes[node].pins(tenant, group.block_group_id) > 0
        if not held or self.exchanged or self.flaw is Flaw.HOLDS_NOTHING:
            self.nodes[node].lost(tenant, [group.block_group_id])
            if held and self.exchanged:
                self.engines.setdefault(node, []).append(self.now_ns)

    # Readers.

    def _reader(self, groups: list[str], times: int) -> Iterator[int]:
        """Look at operations, groups and migrations, one after the other."""
        for _ in range(times):
            yield self.looking.randint(1, 40 * MS)
            yield from self._look(groups)

    def _look(self, groups: list[str]) -> Iterator[int]:
        looking, start_ns = self.looking, self.now_ns
        tenant, node, name = looking.choice(TENANTS), looking.choice(NODES), looking.choice(groups)
        kind, operation_id = looking.choice(list(LookKind)), "never"
        if kind is LookKind.OPERATION and self._asked:
            asked = looking.choice(self._asked[-40:])
            tenant, node, operation_id = asked.tenant, asked.node, asked.operation_id
        elif kind is LookKind.MIGRATION and self._moved:
            tenant, node, operation_id = looking.choice(self._moved[-10:])
        yield looking.randint(1, 3 * MS)
        said = self._said(kind, tenant, node, operation_id, name)
        yield looking.randint(1, 3 * MS)
        self.looks.append(
            Look(
                client="reader", tenant=tenant, node=node, kind=kind, operation_id=operation_id, block_group_id=name,
                start_ns=start_ns, end_ns=self.now_ns, outcome="fail" if said is None else "ok",
                error_code="NOT_FOUND" if said is None else "",
                said="" if said is None else msgspec.json.encode(said).decode(),
            )
        )  # fmt: skip

    def _said(
        self, kind: LookKind, tenant: str, node: str, operation_id: str, name: str
    ) -> Told | Seen | Migration | None:  # fmt: skip
        service, flaw = self.nodes[node], self.flaw
        if kind is LookKind.OPERATION:
            record = service.look(tenant, operation_id)
            if record is None or flaw is Flaw.KNOWS_NO_OPERATION:
                return Told(known="UNKNOWN")
            other = msgspec.structs.replace(record.answer, epoch=record.answer.epoch + 1)
            return Told(known="DONE", answer=other if flaw is Flaw.TELLS_ANOTHER_ANSWER else record.answer)
        if kind is LookKind.METADATA:
            group = service.group(tenant, name)
            if group is None or flaw is Flaw.FINDS_NO_GROUP:
                return None
            group = msgspec.structs.replace(group, epoch=1) if flaw is Flaw.TELLS_FIRST_EPOCH else group
            return Seen(group=group, pins=0 if flaw is Flaw.TELLS_NO_PINS else service.pins(tenant, name))
        migration = service.migration(tenant, operation_id)
        if migration is None or flaw is Flaw.FINDS_NO_MIGRATION:
            return None
        pending = msgspec.structs.replace(migration, status=MigrationStatus.PENDING)
        return pending if flaw is Flaw.TELLS_PENDING else migration

    def _ended(
        self, client: str, asked: Asked, start_ns: int, outcome: str, done: Done | None, attempts: int,
        timeouts: int, error_code: str,
    ) -> None:  # fmt: skip
        answer = "" if done is None else msgspec.json.encode(done.answer).decode()
        self.invocations.append(
            Invocation(
                client=client, tenant=asked.tenant, node=asked.node, operation_id=asked.operation_id,
                method=str(asked.request.__struct_config__.tag), block_group_id=asked.request.block_group_id,
                epoch=asked.request.epoch, params=canonical(asked.request).decode(), start_ns=start_ns,
                end_ns=self.now_ns, outcome=outcome, replayed=done is not None and done.replayed,
                refusal="" if done is None else done.answer.refusal, error_code=error_code, answer=answer,
                attempts=attempts, timeouts=timeouts, latency_ms=(self.now_ns - start_ns) / MS,
            )
        )  # fmt: skip


def history(seed: int, flaw: Flaw | None = None, *, invocations: int = 400, groups: int = 5) -> ControlRows:
    """Return the history of a simulation with nodes in memory."""
    return _played(Simulation(seed, flaw), invocations, groups)


def history_with_engines(seed: int, *, invocations: int = 400) -> tuple[ControlRows, dict[str, list[int]]]:
    """Return the history of a simulation in which engines are exchanged, and when they were."""
    simulation = Simulation(seed, exchanged=True)
    return _played(simulation, invocations, 5), simulation.engines


def _played(simulation: Simulation, invocations: int, groups: int) -> ControlRows:
    flaw = simulation.flaw
    nodes = {name: Node(name, lambda: simulation.now_ns, simulation.reached, flaw) for name in NODES}
    simulation.nodes.update(nodes)
    simulation.restart = lambda name: nodes[name].restart()
    simulation.run(invocations, groups=groups)
    return joined([_seen(simulation), *(node.rows() for node in nodes.values())])


def _seen(simulation: Simulation) -> ControlRows:
    return ControlRows(invocations=simulation.invocations, looks=simulation.looks)


def history_of_stores(folder: Path, seed: int, *, invocations: int = 150) -> ControlRows:
    """Return the history of a simulation whose nodes are real stores, on its clock."""
    simulation = Simulation(seed)

    def opened(name: str) -> Store:
        return Store(
            folder / f"{name}.db", name, nodes=frozenset(NODES), slots_max=200, reached=simulation.reached,
            now_ms=lambda: WALL_MS + simulation.now_ns // MS,
        )  # fmt: skip

    stores: dict[str, Store] = {}

    def start(name: str) -> None:
        if name in stores:
            stores[name].close()
        simulation.nodes[name] = stores[name] = opened(name)

    simulation.restart = start
    with mock.patch("reference_impl.blockservice.store.host_ns", side_effect=lambda: simulation.now_ns):
        for name in NODES:
            start(name)
        simulation.run(invocations)
    parts = [rows_of_store(name, store) for name, store in stores.items()]
    for store in stores.values():
        store.close()
    return joined([_seen(simulation), *parts])

"""What a node's control plane must not forget: one SQLite file, in which an effect and its answer are written together.

**Once.** A write's record (parameters and answer) is committed in the transaction of its effect, so a crash leaves both
or neither (KVC-IDEM-002, -003, -007); a retry reads the record and changes nothing (KVC-IDEM-001).

**Durable.** `synchronous=FULL`: the log is synced before a commit returns. An answer once given must survive a power
failure, or a retry after it would have its effect again. NORMAL syncs at checkpoints only: enough for SIGKILL, since
the kernel keeps what was written, and not for a power failure. The price is one sync a commit, which `run` shares
among the writes of a batch.

**Locks.** WAL, so that readers need no lock, and `BEGIN IMMEDIATE`, so that nobody decides on what another process is
about to change: concurrent retries stand in a row, and all but the first find the record (KVC-IDEM-006).

The rules decide (`rules.blockgroups`, `rules.operations`); here is only what is kept. One thread at a time.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from reference_impl.blockservice import schema
from reference_impl.realclock import host_ns, wall_ns
from reference_impl.rules import blockgroups
from reference_impl.rules.blockgroups import (
    Answer,
    Decision,
    EngineSays,
    Group,
    GroupState,
    Migration,
    MigrationStatus,
    PinState,
    Request,
    View,
)
from reference_impl.rules.operations import Record, Replay, Retention, canonical, judge

Code: TypeAlias = Literal["locked", "full", "damaged"]
_Row: TypeAlias = tuple[Any, ...]

_CACHE_KIB: Final = 16 * 1024
_LOG_BYTES: Final = 16 << 20
"""What the log's file keeps of its size when it starts anew: one large transaction is no reason to keep the room."""
PURGE_ROWS: Final = 2000
"""Rows that one purge forgets: some tens of milliseconds, in which no write can be run."""
_ADVICE: Final[dict[Code, str]] = {
    "locked": "another process keeps it: end that one, or try again",
    "full": "make room on its disk and try again",
    "damaged": "move it and the files beside it (-wal, -shm) away and restore a copy, or start without: then every id "
    "issued before is refused",
}
_ADVICE_BY_ERROR: Final[dict[int, str]] = {
    sqlite3.SQLITE_IOERR: "look at its disk and at the kernel's log",
    sqlite3.SQLITE_CANTOPEN: "let this user write the file and its folder, or name another",
    sqlite3.SQLITE_READONLY: "let this user write the file and its folder, or name another",
    sqlite3.SQLITE_PERM: "let this user write the file and its folder, or name another",
}
_CODES: Final[dict[int, Code]] = {
    sqlite3.SQLITE_BUSY: "locked",
    sqlite3.SQLITE_LOCKED: "locked",
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_NOMEM: "full",
}
_OURS: Final = frozenset({sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISUSE, sqlite3.SQLITE_CONSTRAINT})
"""Errors that are no fault of the file: they go up as they are."""
_HEADER: Final = ("application_id", "user_version")
_NOT_HERE: Final = frozenset({GroupState.EVICTED, GroupState.MOVED})


class StoreError(Exception):
    """The store could not do what was asked: what, which file, and what to do.

    `code`: "locked" (another process has the file), "full" (no room), or "damaged" (it cannot be used as it is).
    `retry`: whether the same may be tried again. Of a write that failed nothing stays, except that a failed sync leaves
    open whether a power failure would bring it back: its caller does not know, and retries.
    """

    def __init__(self, code: Code, message: str, *, retry: bool | None = None) -> None:
        super().__init__(message)
        self.code: Code = code
        self.retry = code != "damaged" if retry is None else retry


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """One client's operation; `issued_ms` is when its caller made it, ms of the wall clock."""

    tenant: str
    operation_id: str
    issued_ms: int
    request: Request
    engine: EngineSays = EngineSays()


class Done(msgspec.Struct, frozen=True):
    """What came of a write: its answer, and whether that was given before."""

    answer: Answer
    replayed: bool


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One row that changed, as the database itself saw it. `at_ns`: `host_ns` at the statement.

    `cause`: client, engine or migration; only a client's has an operation id. `kind`: group, pin, transfer or
    migration; `key`: the request of a pin, the token of a transfer, the operation of a migration. `before`, `after`:
    the row as JSON, "" for no row.
    """

    seq: int
    at_ns: int
    tenant: str
    block_group_id: str
    operation_id: str
    cause: str
    kind: str
    key: str
    before: str
    after: str


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One operation as it is kept: parameters and answer in JSON, times in ms of the wall clock."""

    tenant: str
    operation_id: str
    method: str
    params: str
    outcome: str
    answer: str
    issued_ms: int
    done_ms: int


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One group as it stands, with the requests that pin it, sorted."""

    tenant: str
    group: Group
    pins: tuple[str, ...]


class _By(msgspec.Struct, frozen=True):
    """Who changes something: what the witnessing triggers write down."""

    operation_id: str
    cause: str


_ENGINE: Final = _By("", "engine")
_MIGRATION: Final = _By("", "migration")


def wall_ms() -> int:
    """Return the wall clock in ms: what callers' issue times are compared with."""
    return wall_ns() // 1_000_000


class Store:
    """The groups, pins, transfers, migrations and operations of one node, in the file `path`, which is made if missing.

    `nodes` are those that a group may move to, this one among them or not; `slots_max` bounds what is reserved in all.
    `busy_timeout_s` is how long another process's transaction is waited for. `now_ms` is a wall clock. `reached` is
    called in `run` at "before_commit" and "after_commit". Raises StoreError if the file cannot be used.
    """

    def __init__(
        self,
        path: Path,
        node: str,
        *,
        nodes: frozenset[str] = frozenset(),
        slots_max: int = 1 << 20,
        retention: Retention = Retention(),  # noqa: B008 - frozen
        busy_timeout_s: float = 2.0,
        now_ms: Callable[[], int] = wall_ms,
        reached: Callable[[str], None] | None = None,
    ) -> None:
        self._path = path
        self._node = node
        self._nodes = nodes
        self._slots_max = slots_max
        self._retention = retention
        self._now_ms = now_ms
        self._reached = reached
        try:
            _make_private(path)
        except OSError as error:
            raise self._unusable(f"cannot make it: {error.strerror}", "name a file in a folder of yours") from error
        with self._explained("open"):
            self._db = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
            try:
                self._set_up()
            except BaseException:
                self._db.close()
                raise

    # Clients' writes.

    def run(self, writes: Sequence[Write]) -> list[Done]:
        """Decide a batch in order and commit it as one; return what came of each.

        Replays and denials alone write nothing. Raises StoreError, and then nothing of the batch stays.
        """
        replays = self._replays(writes)
        if replays is not None:
            return replays
        db = self._db
        with self._explained("write to"):
            db.execute("BEGIN IMMEDIATE")
            try:
                now_ms, changes = self._now_ms(), db.total_changes
                done = [self._replay(write, now_ms) or self._first(write, now_ms) for write in writes]
                if db.total_changes == changes:
                    self._roll_back()
                else:
                    self._commit()
            except BaseException:
                self._roll_back()
                raise
        return done

    def answered(self, write: Write) -> Done | None:
        """Return the answer of a write that would not be run, a replay or a denial; None if it would. Reads only."""
        with self._explained("read"):
            now_ms = self._now_ms()
            return self._replay(write, now_ms) or self._denial(write, now_ms, self._purged_ms())

    def look(self, tenant: str, operation_id: str) -> Record | None:
        """Return what is kept of an operation (KVC-IDEM-019)."""
        with self._explained("read"):
            row = self._db.execute(schema.SELECT_RECORD, (tenant, operation_id)).fetchone()
        return None if row is None else _record(row)

    def purged_ms(self) -> int:
        """Return the latest issue time of which nothing is known: whether anything older has run cannot be told."""
        with self._explained("read"):
            return self._purged_ms()

    def purge(self, now_ms: int | None = None, rows_max: int = PURGE_ROWS) -> int:
        """Forget what no retry may ask for any more (KVC-IDEM-008); return how many rows that were.

        At most `rows_max`, so that writes wait for one slice only: if as many are returned, call again. Groups that
        are evicted or have moved are forgotten too when they have not changed for as long; who asks for one is then
        told that it is unknown.

        What is forgotten leaves a bound behind, in the same transaction: a moment (nothing issued up to then runs any
        more, even if the wall clock steps back) and an epoch (a group that is new here starts above it).
        """
        if rows_max < 1:
            raise ValueError(f"rows_max must be at least 1, got {rows_max}")
        before_ms = self._retention.purge_before_ms(self._now_ms() if now_ms is None else now_ms)
        left = rows_max
        with self._transaction() as db:
            latest_ms = db.execute(schema.LATEST_TO_PURGE, (before_ms, before_ms)).fetchone()[0]
            db.execute(schema.RAISE_PURGED, (latest_ms,))
            for purge in schema.PURGES:
                left -= self._purge(purge, before_ms, left)
        return rows_max - left

    # Reads.

    def group(self, tenant: str, block_group_id: str) -> Group | None:
        """Return a group as this node knows it."""
        with self._explained("read"):
            return self._group(tenant, block_group_id)

    def pins(self, tenant: str, block_group_id: str) -> int:
        """Return how many requests pin a group."""
        with self._explained("read"):
            return int(self._db.execute(schema.COUNT_PINS, (tenant, block_group_id)).fetchone()[0])

    def groups(
        self, tenant: str, *, state: GroupState | None = None, limit: int = 1000, after: str = ""
    ) -> list[Group]:  # fmt: skip
        """Return a tenant's groups in the order of their ids, from the first id after `after`."""
        parameters = (tenant, after, state or "", state or "", limit)
        with self._explained("read"):
            return [_group(row) for row in self._db.execute(schema.SELECT_GROUPS, parameters)]

    def migration(self, tenant: str, operation_id: str) -> Migration | None:
        """Return a migration of which this node is the source."""
        with self._explained("read"):
            return self._migration(tenant, operation_id)

    def wanted(self) -> list[tuple[str, Group, bool]]:
        """Return every group whose bytes are here: tenant, group, and whether an engine has to hold it."""
        with self._explained("read"):
            rows = self._db.execute(schema.SELECT_HERE).fetchall()
        found = []
        for row in rows:
            group = _group(row[1:])
            found.append((row[0], group, bool(row[-1]) or group.state is not GroupState.RESIDENT))
        return found

    def open_migrations(self) -> list[tuple[str, Migration]]:
        """Return the migrations, with their tenants, that have not ended or whose target has not been told."""
        with self._explained("read"):
            return [(row[0], _migration(row[1:])) for row in self._db.execute(schema.SELECT_OPEN)]

    def open_transfers(self) -> list[str]:
        """Return the tokens of the transfers that have not ended; of those some may have expired."""
        with self._explained("read"):
            return [token for (token,) in self._db.execute(schema.SELECT_OPEN_TRANSFERS)]

    def arriving(self, tenant: str, operation_id: str) -> str | None:
        """Return the id of the group that a migration brings here, None if it brings none, or is settled."""
        with self._explained("read"):
            arrival = self._db.execute(schema.SELECT_ARRIVAL, (tenant, operation_id)).fetchone()
        return None if arrival is None or arrival[2] else str(arrival[0])

    def effects(self) -> Iterator[Effect]:
        """Yield every effect that is kept, in the order of their commits."""
        with self._explained("read"):
            for row in self._db.execute(schema.SELECT_EFFECTS):
                yield Effect(**dict(zip(Effect.__struct_fields__, row, strict=True)))

    def records(self) -> Iterator[Kept]:
        """Yield every operation that is kept."""
        with self._explained("read"):
            for row in self._db.execute(schema.SELECT_RECORDS):
                yield Kept(**dict(zip(Kept.__struct_fields__, row, strict=True)))

    def finals(self) -> Iterator[Standing]:
        """Yield every group as it stands, with its pins."""
        with self._explained("read"):
            for row in self._db.execute(schema.SELECT_ALL_GROUPS):
                pins = self._db.execute(schema.SELECT_PINNED, row[:2])
                yield Standing(tenant=row[0], group=_group(row[1:]), pins=tuple(pin for (pin,) in pins))

    def check(self) -> None:
        """Read the whole file. Raises StoreError ("damaged") naming what is broken."""
        with self._explained("check"):
            found = [row[0] for row in self._db.execute("PRAGMA integrity_check(5)")]
        if found != ["ok"]:
            raise self._unusable(f"it is damaged: {'; '.join(found)}", _ADVICE["damaged"])

    # What the node itself does.

    def publish(self, tenant: str, groups: Sequence[Group]) -> list[Group]:
        """Write down groups that an engine says it holds; return each as it stands now.

        One that is returned as MOVED was not written down: another node owns that id, and the engine has to find
        another for its blocks (`rules.blockgroups.published`).
        """
        stand = []
        with self._transaction():
            for group in groups:
                known = self._group(tenant, group.block_group_id)
                new = blockgroups.published(known, group, 0 if known else self._epoch_floor())
                if new is not None:
                    self._put_group(tenant, new, _ENGINE)
                    self._forget_pins(tenant, new.block_group_id, _ENGINE)
                stand.append(new or known or group)
        return stand

    def lost(self, tenant: str, block_group_ids: Sequence[str]) -> None:
        """Write down that an engine has lost these groups: they are evicted, and their migrations have failed."""
        with self._transaction():
            for block_group_id in block_group_ids:
                group = self._group(tenant, block_group_id)
                if group is not None:
                    self._lose(tenant, group, "the engine lost its blocks")

    def new_engine(self, incarnation: str) -> bool:
        """Write down which engine is attached; return whether it is another: then what the one before held is lost.

        A group that was arriving stays for `settle` to end: only its source knows whose it is.
        """
        with self._transaction() as db:
            if db.execute(schema.SELECT_NODE).fetchone()[1] == incarnation:
                return False
            db.execute(schema.SET_INCARNATION, (incarnation,))
            for row in db.execute(schema.SELECT_HERE).fetchall():
                self._lose(row[0], _group(row[1:]), "its engine is gone")
            db.execute(schema.END_ALL_TRANSFERS, (_ENGINE.operation_id, _ENGINE.cause))
        return True

    def end_transfers(self, tokens: Sequence[str]) -> None:
        """Write down that these transfers stand no more."""
        with self._transaction() as db:
            for token in tokens:
                db.execute(schema.END_TRANSFER, (_ENGINE.operation_id, _ENGINE.cause, token))

    def set_running(self, tenant: str, operation_id: str) -> Migration | None:
        """Write down that bytes move; return the migration, None if there is none or it has ended."""
        with self._transaction():
            migration = self._migration(tenant, operation_id)
            if migration is None or migration.status.ended:
                return None
            if migration.status is MigrationStatus.PENDING:
                migration = msgspec.structs.replace(migration, status=MigrationStatus.RUNNING)
                self._put_migration(tenant, migration, _MIGRATION, self._now_ms())
            return migration

    def end_migration(
        self, tenant: str, operation_id: str, status: MigrationStatus, reason: str = ""
    ) -> Migration | None:  # fmt: skip
        """End a migration and settle whose its group is, in one transaction: here and now its owner changes.

        Return the migration as it ended, again if it ended like this before; None if otherwise, or if there is none.
        """
        if not status.ended:
            raise ValueError(f"status must be one that ends a migration, got {status}")
        with self._transaction():
            migration = self._migration(tenant, operation_id)
            if migration is None or migration.status.ended:
                return migration if migration is not None and migration.status is status else None
            return self._end_migration(tenant, migration, status, reason, _MIGRATION)

    def set_told(self, tenant: str, operation_id: str) -> None:
        """Write down that the target knows how a migration ended. Nothing if it has not ended."""
        with self._transaction():
            migration = self._migration(tenant, operation_id)
            if migration is not None and migration.status.ended and not migration.told:
                told = msgspec.structs.replace(migration, told=True)
                self._put_migration(tenant, told, _MIGRATION, self._now_ms())

    def accept(self, tenant: str, operation_id: str, group: Group) -> Group | None:
        """Take in a group that another node moves here: MIGRATING_IN, and that node's until `settle`.

        Return it as it is, to a repeat too. None if a group of that id is here already by other ways, or if this
        migration was settled and left nothing. The epoch is never below one that was known here before, even
        if that is forgotten.
        """
        with self._transaction() as db:
            known = self._group(tenant, group.block_group_id)
            arrival = db.execute(schema.SELECT_ARRIVAL, (tenant, operation_id)).fetchone()
            if arrival is not None:  # a repeat; once it is settled, a late one must not bring the copy back
                return known if known is not None and known.migration == operation_id else None
            if known is not None and known.state not in _NOT_HERE:
                return None
            arriving = msgspec.structs.replace(
                group, state=GroupState.MIGRATING_IN, migration=operation_id, reserved=0,
                epoch=max(group.epoch, known.epoch if known else self._epoch_floor()),
            )  # fmt: skip
            before = msgspec.json.encode(known).decode() if known else ""
            parameters = (tenant, operation_id, group.block_group_id, before, self._now_ms())
            db.execute(schema.INSERT_ARRIVAL, parameters)
            self._put_group(tenant, arriving, _MIGRATION)
            return arriving

    def settle(
        self, tenant: str, operation_id: str, *, ours: bool, node_lost_copy: bool = False
    ) -> Group | None:  # fmt: skip
        """End what `accept` began; return the group as it stands, None if it is unknown here. Asked again: as it is.

        Ours: it is this node's, with the next epoch, and evicted if the copy was lost meanwhile. Not ours: what was
        known before is known again. One that comes before its `accept` is remembered, and that finds nothing to do.
        """
        with self._transaction() as db:
            arrival = db.execute(schema.SELECT_ARRIVAL, (tenant, operation_id)).fetchone()
            if arrival is None:  # it has overtaken its Accept, which must find it settled
                arrival = ("", "", False)
                db.execute(schema.INSERT_ARRIVAL, (tenant, operation_id, *arrival[:2], self._now_ms()))
            block_group_id, before, settled = arrival
            group = self._group(tenant, block_group_id)
            if settled:
                return group
            db.execute(schema.SETTLE_ARRIVAL, (self._now_ms(), tenant, operation_id))
            if group is None:
                return None
            if ours:
                self._forget_pins(tenant, block_group_id, _MIGRATION)  # of the epoch that ends
                state = GroupState.EVICTED if node_lost_copy else GroupState.RESIDENT
                after = msgspec.structs.replace(group, state=state, location=self._node, epoch=group.epoch + 1)
            elif before:
                after = msgspec.json.decode(before, type=Group)
            else:
                db.execute(schema.SIGN_GROUP, (_MIGRATION.operation_id, _MIGRATION.cause, tenant, block_group_id))
                db.execute(schema.DELETE_GROUP, (tenant, block_group_id))
                db.execute(schema.RAISE_FLOOR, (group.epoch,))
                return None
            self._put_group(tenant, after, _MIGRATION)
            return after

    def close(self) -> None:
        """Close the file. What was committed is there anyway."""
        self._db.close()

    # Within a transaction.

    def _replays(self, writes: Sequence[Write]) -> list[Done] | None:
        """Return the answers of a batch that has run before, None as soon as a write has not.

        Reads need neither the lock nor a sync: replays are answered while the file is locked or full, and cost no
        write. Only inside the transaction is it certain that a write is new.
        """
        found: list[Done] = []
        with self._explained("read"):
            now_ms = self._now_ms()
            for write in writes:
                done = self._replay(write, now_ms)
                if done is None:
                    return None
                found.append(done)
        return found

    def _replay(self, write: Write, now_ms: int) -> Done | None:
        """Return what an operation with a record is answered; None if there is no record."""
        row = self._db.execute(schema.SELECT_RECORD, (write.tenant, write.operation_id)).fetchone()
        if row is None:
            return None
        judgement = judge(_record(row), write.request, write.issued_ms, now_ms, 0, self._retention)
        assert judgement is not None
        return Done(judgement.answer, replayed=isinstance(judgement, Replay))

    def _denial(self, write: Write, now_ms: int, purged_ms: int) -> Done | None:
        """Return what an operation without a record is answered if it may not run."""
        judgement = judge(None, write.request, write.issued_ms, now_ms, purged_ms, self._retention)
        return None if judgement is None else Done(judgement.answer, replayed=False)

    def _first(self, write: Write, now_ms: int) -> Done:
        """Run a write without a record, if it may, and write down what comes of it together with its answer."""
        view, purged_ms = self._view(write, now_ms)
        denial = self._denial(write, now_ms, purged_ms)
        if denial is not None:
            return denial
        decision = blockgroups.decide(write.request, write.operation_id, view)
        self._apply(write, decision, now_ms)
        self._keep(write, decision.answer, now_ms)
        return Done(decision.answer, replayed=False)

    def _keep(self, write: Write, answer: Answer, now_ms: int) -> None:
        request = write.request
        self._db.execute(schema.INSERT_RECORD, (
            write.tenant, write.operation_id, request.__struct_config__.tag, canonical(request), answer.outcome,
            msgspec.json.encode(answer), write.issued_ms, now_ms,
        ))  # fmt: skip

    def _apply(self, write: Write, decision: Decision, now_ms: int) -> None:
        tenant, block_group_id = write.tenant, write.request.block_group_id
        by = _By(write.operation_id, "client")
        if decision.group is not None:
            self._put_group(tenant, decision.group, by)
        if decision.forget_pins:
            self._forget_pins(tenant, block_group_id, by)
        if decision.pin is not None:
            assert isinstance(write.request, blockgroups.Pin | blockgroups.Unpin)
            at_ms = max(now_ms, write.issued_ms)  # a tombstone must outlive every pin that was issued before it
            row = (tenant, block_group_id, write.request.request_id, decision.pin, at_ms, by.operation_id, by.cause)
            self._db.execute(schema.PUT_PIN, row)
        if decision.migration is not None:
            self._put_migration(tenant, decision.migration, by, now_ms)
        if decision.transfer:
            place = decision.answer.place
            assert place is not None
            transfer = (place.transfer_token, tenant, block_group_id, place.expires_ms, by.operation_id, by.cause)
            self._db.execute(schema.INSERT_TRANSFER, transfer)

    def _view(self, write: Write, now_ms: int) -> tuple[View, int]:
        """Return what a decision looks at, and the latest issue time of which records were dropped."""
        request = write.request
        request_id = request.request_id if isinstance(request, blockgroups.Pin | blockgroups.Unpin) else ""
        parameters = (request_id, now_ms, write.tenant, request.block_group_id)
        row = self._db.execute(schema.SELECT_VIEW, parameters).fetchone()
        *_, pins, pin, transfers, reserved, purged_ms = row
        if row[0] is None:
            return View(node=self._node, group=None), purged_ms
        migration = None
        if isinstance(request, blockgroups.CancelMigrate):
            migration = self._migration(write.tenant, request.migration_id)
        view = View(
            node=self._node, group=_group(row), pins=pins, pin=None if pin is None else PinState(pin),
            transfers=transfers, migration=migration, reserved_total=reserved, slots_max=self._slots_max,
            nodes=self._nodes, engine=write.engine,
        )  # fmt: skip
        return view, purged_ms

    def _lose(self, tenant: str, group: Group, reason: str) -> None:
        """Evict what an engine has lost. What has gone before, or is only arriving, is left as it is."""
        if group.state not in (GroupState.RESIDENT, GroupState.MIGRATING_OUT):
            return
        if group.state is GroupState.MIGRATING_OUT:
            migration = self._migration(tenant, group.migration)
            if migration is not None and not migration.status.ended:
                self._end_migration(tenant, migration, MigrationStatus.FAILED, reason, _ENGINE)
        self._put_group(tenant, blockgroups.evicted(group), _ENGINE)
        self._forget_pins(tenant, group.block_group_id, _ENGINE)
        parameters = (_ENGINE.operation_id, _ENGINE.cause, tenant, group.block_group_id)
        self._db.execute(schema.END_TRANSFERS_OF, parameters)

    def _end_migration(
        self, tenant: str, migration: Migration, status: MigrationStatus, reason: str, by: _By
    ) -> Migration:  # fmt: skip
        group = self._group(tenant, migration.block_group_id)
        if group is None or group.migration != migration.operation_id:
            raise self._unusable(f"migration {migration.operation_id} is open and moves no group", _ADVICE["damaged"])
        ended, after = blockgroups.end_migration(migration, group, status, reason)
        self._put_migration(tenant, ended, by, self._now_ms())
        self._put_group(tenant, after, by)
        return ended

    def _group(self, tenant: str, block_group_id: str) -> Group | None:
        row = self._db.execute(schema.SELECT_GROUP, (tenant, block_group_id)).fetchone()
        return None if row is None else _group(row)

    def _put_group(self, tenant: str, group: Group, by: _By) -> None:
        row = (tenant, *msgspec.structs.astuple(group), self._now_ms(), by.operation_id, by.cause)
        self._db.execute(schema.PUT_GROUP, row)

    def _forget_pins(self, tenant: str, block_group_id: str, by: _By) -> None:
        """Drop all that is known of a group's pins: they were of an epoch that is over."""
        self._db.execute(schema.SIGN_PINS, (by.operation_id, by.cause, tenant, block_group_id))
        self._db.execute(schema.DELETE_PINS, (tenant, block_group_id))

    def _migration(self, tenant: str, operation_id: str) -> Migration | None:
        row = self._db.execute(schema.SELECT_MIGRATION, (tenant, operation_id)).fetchone()
        return None if row is None else _migration(row)

    def _put_migration(self, tenant: str, migration: Migration, by: _By, now_ms: int) -> None:
        row = (tenant, *msgspec.structs.astuple(migration), now_ms, by.operation_id, by.cause)
        self._db.execute(schema.PUT_MIGRATION, row)

    def _purged_ms(self) -> int:
        return int(self._db.execute(schema.SELECT_NODE).fetchone()[2])

    def _epoch_floor(self) -> int:
        return int(self._db.execute(schema.SELECT_NODE).fetchone()[3])

    def _purge(self, purge: schema.Purge, before_ms: int, rows_max: int) -> int:
        """Forget the oldest rows of one table, at most `rows_max`; return how many went."""
        if not rows_max:
            return 0
        if purge.highest_epoch:
            highest = self._db.execute(purge.highest_epoch, (before_ms, rows_max)).fetchone()
            self._db.execute(schema.RAISE_FLOOR, highest)
        return [self._db.execute(statement, (before_ms, rows_max)).rowcount for statement in purge.statements][-1]

    # The file.

    def _set_up(self) -> None:
        """Make the tables of a new file, and refuse one that is not ours."""
        db = self._db
        db.create_function("host_ns", 0, host_ns)
        db.create_function("wall_ms", 0, self._now_ms)
        if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise self._unusable("its file system has no shared memory, which WAL needs", "use a local disk")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA fullfsync = ON")  # of macOS, where a sync alone does not reach the disk
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        db.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        if self._is_empty():
            with self._transaction():
                if self._is_empty():  # nobody else has made them meanwhile
                    self._make_tables()
        self._check_ours()

    def _is_empty(self) -> bool:
        return not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]

    def _make_tables(self) -> None:
        """Make a new file's tables. Ids issued up to now are refused: they may have run in a file that is gone.

        No slack for callers whose clock is behind: whatever was let in, an old operation could come in with it and run
        again. Such a caller is refused for as long as its clock is behind the file's beginning, and that once in the
        file's life. (A caller whose clock was ahead, by `skew_ms` at most, and who asks the old file and then this one
        is not recognised: to shut that out, nobody could be served in the file's first minute.)
        """
        for statement in _statements(schema.CREATE):
            self._db.execute(statement)
        self._db.execute(schema.INSERT_NODE, (self._node, self._now_ms()))
        self._db.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
        self._db.execute(f"PRAGMA user_version = {schema.SCHEMA}")

    def _check_ours(self) -> None:
        db = self._db
        application_id, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in _HEADER)
        if application_id != schema.APPLICATION_ID:
            raise self._unusable("it is a database of something else", "name another file")
        if version != schema.SCHEMA:
            message = f"its schema is {version}, and this program reads {schema.SCHEMA}"
            raise self._unusable(message, "start the program that wrote it, or move the file away")
        name = db.execute(schema.SELECT_NODE).fetchone()[0]
        if name != self._node:
            raise self._unusable(f"it is the store of {name}, and this node is {self._node}", "name another file")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._explained("write to"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    def _commit(self) -> None:
        if self._reached is None:
            self._db.execute("COMMIT")
            return
        self._reached("before_commit")
        self._db.execute("COMMIT")
        self._reached("after_commit")

    def _roll_back(self) -> None:
        """Undo what a transaction did. SQLite has done so by itself after some errors."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if _primary(error) in _OURS:
                raise
            raise self._explain(what, error) from error

    def _explain(self, what: str, error: sqlite3.Error) -> StoreError:
        primary = _primary(error)
        code = _CODES.get(primary, "damaged")
        advice = _ADVICE_BY_ERROR.get(primary, _ADVICE[code])
        retry = code != "damaged" or primary == sqlite3.SQLITE_IOERR
        return StoreError(code, f"cannot {what} the store {self._path}: {error}: {advice}", retry=retry)

    def _unusable(self, why: str, advice: str) -> StoreError:
        return StoreError("damaged", f"cannot use the store {self._path}: {why}: {advice}")


def _make_private(path: Path) -> None:
    """Make a missing file, for its owner alone (SQLite gives those beside it the same mode), and its name durable."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _primary(error: sqlite3.Error) -> int:
    """Return SQLite's kind of an error; one of the Python module itself has none, and is a fault of its caller."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE)) & 0xFF


def _statements(script: str) -> Iterator[str]:
    """Yield a script's statements: `executescript` would end the transaction that they belong to."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _record(row: _Row) -> Record:
    return Record(row[0], msgspec.json.decode(row[1], type=Answer), row[2])


def _group(row: _Row) -> Group:
    """Return a group from a row that begins with its columns."""
    return Group(
        block_group_id=row[0], state=GroupState(row[1]), location=row[2], epoch=row[3], size_bytes=row[4],
        token_start=row[5], token_end=row[6], checksum=row[7], reserved=row[8], migration=row[9],
    )  # fmt: skip


def _migration(row: _Row) -> Migration:
    return Migration(
        operation_id=row[0], block_group_id=row[1], src=row[2], dst=row[3], epoch=row[4],
        status=MigrationStatus(row[5]), reason=row[6], told=bool(row[7]),
    )  # fmt: skip

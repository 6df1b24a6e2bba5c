"""One node's block groups: the rules, kept in its store, and carried out by its engine.

A write goes: ask the engine (hold, look, lend), decide and commit, tell the engine what came of it. A crash between any
two of these leaves the engine with too much or too little at worst, never the store; the engine learns all of it anew
when the two meet again (`Sync`). Groups belong to a tenant; those of this deployment's engines belong to `TENANT`.
Source: KVC-IDEM-001 to -003, -009 to -011, -016, -019; ARCHITECTURE.md, "the control plane".
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

import msgspec

from reference_impl.blockservice import link
from reference_impl.blockservice.deadline import remaining_s
from reference_impl.blockservice.engine_link import EngineLink, NoEngine
from reference_impl.blockservice.errors import Unavailable
from reference_impl.blockservice.gate import Gate
from reference_impl.blockservice.store import Done, Store, StoreError, Write
from reference_impl.blockservice.wire import AcceptOrder, Copy, Known, SettleOrder
from reference_impl.blockservice.writer import QueueFull, Writer, WriterClosed
from reference_impl.rules.blockgroups import (
    Answer,
    CancelMigrate,
    EngineSays,
    Evict,
    Group,
    GroupState,
    Migration,
    Pin,
    Place,
    PrepareGet,
    Request,
    StartMigrate,
    Unpin,
)
from reference_impl.rules.events import EventKind, Scalar
from reference_impl.rules.operations import Retention, canonical
from reference_impl.rules.transfer_tokens import NONCE_CHARS, issue

TENANT: Final = "default"
"""Whose groups this deployment's engines publish: requests to them carry no tenant."""
LOAN_MS: Final = 30_000
"""What a transfer token is good for, unless the engine's terms say less."""
AGAIN_S: Final = 0.2
"""Between two tries to tell the engine what the store could not say for the moment."""
T = TypeVar("T")
Say = Callable[..., object]


class CallerGone(Unavailable):
    """Nobody waits for the answer any more, and nothing was done (KVC-IDEM-012)."""


class _Caller:
    """Who waits for an operation's answer."""

    def __init__(self) -> None:
        self.hung_up = False

    def check(self) -> None:
        """Raise CallerGone if nobody waits any more: the deadline is over, or he has hung up."""
        if self.hung_up or remaining_s() == 0:
            raise CallerGone("the caller has gone, and nothing was done")


class Migrations(Protocol):
    """What a node leaves to its migrator."""

    def drive(self, tenant: str, operation_id: str) -> None:
        """See a migration to its end: one that has just been started or cancelled."""
        ...

    async def accept(self, order: AcceptOrder) -> tuple[Copy, str]:
        """Fetch a copy, or say how far it is."""
        ...

    async def settle(self, order: SettleOrder) -> Copy:
        """Take in how a migration has ended."""
        ...


class BlockNode:
    """Answers for one node (`server.Node`). `engine` and `migrations` are set before it is asked anything."""

    engine: EngineLink
    migrations: Migrations

    def __init__(
        self, name: str, writer: Writer, key: bytes, say: Say, *, now_ms: Callable[[], int], loan_ms: int = LOAN_MS,
        retention: Retention | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.writer = writer
        self.gate = Gate()
        self._key, self.say, self._now_ms, self._loan_ms = key, say, now_ms, loan_ms
        self._retention = retention or Retention()
        self._running: dict[tuple[str, str], int] = {}
        """Operations that are under way, by tenant and id."""
        self._lending: dict[str, bool] = {}
        """Tokens of loans whose transfer is not written down yet, and whether they have ended already."""
        self._telling: set[tuple[str, str]] = set()
        """Groups of which the engine is told again and again, until that has come to something."""
        self._tasks: set[asyncio.Task[Any]] = set()

    # Writes.

    async def write(self, tenant: str, operation_id: str, issued_ms: int, request: Request) -> Done:
        """Run an operation, or return what it came to before. Raises NoEngine, CallerGone, StoreError, QueueFull.

        If the caller goes before it is queued for its commit, nothing is done; after that it goes on to its end, and a
        retry finds its answer.
        """
        caller = _Caller()
        try:
            return await self._to_the_end(self._run(tenant, operation_id, issued_ms, request, caller))
        except asyncio.CancelledError:
            caller.hung_up = True
            raise

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Have some work done, even if whoever waits for it is cancelled."""
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it; nobody may have

    async def _run(
        self, tenant: str, operation_id: str, issued_ms: int, request: Request, caller: _Caller
    ) -> Done:  # fmt: skip
        key = (tenant, operation_id)
        self._running[key] = self._running.get(key, 0) + 1
        try:
            async with self.gate.operation((tenant, request.block_group_id)):
                done = await self._saved(tenant, operation_id, issued_ms, request)
                if done is None:
                    done = await self._new(tenant, operation_id, issued_ms, request, caller)
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
        self._tell_what(tenant, operation_id, request, done)
        return done

    async def _saved(self, tenant: str, operation_id: str, issued_ms: int, request: Request) -> Done | None:
        """Return what an operation was answered before, so that a retry asks nothing of the engine."""
        record = await self.call(lambda store: store.look(tenant, operation_id))
        if record is None or (record.params, record.issued_ms) != (canonical(request), issued_ms):
            return None
        return Done(record.answer, True)

    async def _new(
        self, tenant: str, operation_id: str, issued_ms: int, request: Request, caller: _Caller
    ) -> Done:  # fmt: skip
        caller.check()
        says = await self._ask_first(tenant, request)
        try:
            caller.check()
            done = await self.writer.run(
                Write(tenant=tenant, operation_id=operation_id, issued_ms=issued_ms, request=request, engine=says)
            )
        except BaseException:
            await self._undo(tenant, request, says)
            raise
        self._drive_on(tenant, request, done)
        try:
            await self._tell_engine(tenant, request, says, done)
        except NoEngine:
            pass  # it will be told everything when it comes back
        except (StoreError, QueueFull):
            self._tell_later(tenant, request.block_group_id)
        finally:
            if says.place is not None:
                self._lending.pop(says.place.transfer_token, None)
        return done

    def _drive_on(self, tenant: str, request: Request, done: Done) -> None:
        """Hand a migration that has been started or cancelled to the migrator, whatever becomes of all else."""
        migration = done.answer.migration
        if isinstance(request, StartMigrate | CancelMigrate) and done.answer.applied and migration is not None:
            self.migrations.drive(tenant, migration.operation_id)

    async def _ask_first(self, tenant: str, request: Request) -> EngineSays:
        """Ask the engine for what the decision needs of it."""
        match request:
            case Pin() if await self._is_here(tenant, request):
                said = await self.ask(link.Hold(request.block_group_id, held=True))
                return EngineSays(here=said.here)
            case Evict() | StartMigrate() if await self._is_here(tenant, request):
                said = await self.ask(link.Look(request.block_group_id))
                return EngineSays(here=said.here, leased=said.in_use)
            case PrepareGet():
                group = await self._is_here(tenant, request)
                return EngineSays() if group is None else await self._lend(group)
            case _:
                return EngineSays()

    async def _is_here(self, tenant: str, request: Request) -> Group | None:
        """Return a request's group if it is resident, at the request's epoch: only then the engine has a say."""
        group = await self.call(lambda store: store.group(tenant, request.block_group_id))
        if group is None or group.state is not GroupState.RESIDENT or group.epoch != request.epoch:
            return None
        return group

    async def _lend(self, group: Group) -> EngineSays:
        place = self.new_place(group)
        self._lending[place.transfer_token] = False
        try:
            said = await self.ask(link.Lend(group.block_group_id, place.transfer_token))
        except BaseException:
            del self._lending[place.transfer_token]
            raise
        if not said.handoff:
            del self._lending[place.transfer_token]
            return EngineSays(here=said.here)
        return EngineSays(place=msgspec.structs.replace(place, handoff=said.handoff))

    def new_place(self, group: Group) -> Place:
        """Return where a group can be read, at its epoch, with a new token: once the engine has lent it."""
        expires_ms = self._now_ms() + self._loan_ms
        token = issue(
            self._key, block_group_id=group.block_group_id, epoch=group.epoch, expires_ms=expires_ms,
            nonce=secrets.token_hex(NONCE_CHARS // 2),
        )  # fmt: skip
        return Place(
            node=self.name, handoff="", size_bytes=group.size_bytes, checksum=group.checksum, transfer_token=token,
            expires_ms=expires_ms,
        )  # fmt: skip

    async def _undo(self, tenant: str, request: Request, says: EngineSays) -> None:
        """Give back what the engine did for a write that came to nothing; the write's own error is what is told."""
        if says.place is not None:
            self._lending.pop(says.place.transfer_token, None)
            with contextlib.suppress(NoEngine):
                await self.ask(link.TakeBack(says.place.transfer_token))
        if isinstance(request, Pin):
            await self.hold_in_the_end(tenant, request.block_group_id)

    def _tell_later(self, tenant: str, block_group_id: str) -> None:
        """Have the engine hold a group, or not, as soon as the store can say which; harmless if that is under way."""
        if (tenant, block_group_id) not in self._telling:
            self._telling.add((tenant, block_group_id))
            self._spawn(self._tell_until(tenant, block_group_id))

    async def _tell_until(self, tenant: str, block_group_id: str) -> None:
        key = (tenant, block_group_id)
        while key in self._telling:
            await asyncio.sleep(AGAIN_S)
            try:
                async with self.gate.operation(key):
                    self._telling.discard(key)  # what comes up from here on comes up again
                    await self.hold(tenant, block_group_id)
            except (NoEngine, WriterClosed):
                return  # it will be told everything when it comes back, or by our successor
            except (StoreError, QueueFull):
                self._telling.add(key)

    async def _tell_engine(self, tenant: str, request: Request, says: EngineSays, done: Done) -> None:
        answer, token = done.answer, says.place.transfer_token if says.place else ""
        match request:
            case PrepareGet() if token and (not answer.applied or answer.place != says.place):
                await self.ask(link.TakeBack(token))
            case PrepareGet() if self._lending.get(token):
                await self.call(lambda store: store.end_transfers([token]))  # it was over before it was written down
            case Evict() if answer.applied:
                await self.ask(link.Drop(request.block_group_id))
            case Pin() if not answer.applied:
                await self.hold(tenant, request.block_group_id)
            case Unpin() if not answer.pins:
                await self.hold(tenant, request.block_group_id)
            case StartMigrate() | CancelMigrate() if answer.applied:
                await self.hold(tenant, request.block_group_id)
            case _:
                pass

    async def hold_in_the_end(self, tenant: str, block_group_id: str) -> None:
        """The same, if not now then as soon as it can be: when the store can say, or the engine is told everything."""
        try:
            await self.hold(tenant, block_group_id)
        except NoEngine:
            return
        except (StoreError, QueueFull):
            self._tell_later(tenant, block_group_id)

    async def hold(self, tenant: str, block_group_id: str) -> None:
        """Have the engine hold a group, or not, as the store says now. Raises NoEngine."""
        group, pins = await self.call(
            lambda store: (store.group(tenant, block_group_id), store.pins(tenant, block_group_id))
        )
        if group is None or group.state in (GroupState.EVICTED, GroupState.MOVED):
            return
        held = bool(pins) or group.state in (GroupState.MIGRATING_OUT, GroupState.MIGRATING_IN)
        said = await self.ask(link.Hold(block_group_id, held))
        if held and not said.here and group.state is not GroupState.MIGRATING_IN:
            await self.call(lambda store: store.lost(tenant, [block_group_id]))

    def _tell_what(self, tenant: str, operation_id: str, request: Request, done: Done) -> None:
        answer = done.answer
        kind = EventKind.OPERATION_APPLIED if answer.applied else EventKind.OPERATION_REFUSED
        if done.replayed:
            kind = EventKind.OPERATION_REPLAYED
        detail: dict[str, Scalar] = {
            "tenant": tenant, "method": type(request).__name__, "block_group_id": request.block_group_id,
            "epoch": answer.epoch, "refusal": answer.refusal,
        }  # fmt: skip
        self.say(kind, operation_id, **detail)

    # Reads.

    async def metadata(self, tenant: str, block_group_id: str) -> tuple[Group, int] | None:
        """Return a group and how many pin it, None if there is none."""

        def read(store: Store) -> tuple[Group, int] | None:
            group = store.group(tenant, block_group_id)
            return None if group is None else (group, store.pins(tenant, block_group_id))

        return await self.call(read)

    async def groups(self, tenant: str, state: GroupState | None, limit: int, after: str) -> list[tuple[Group, int]]:
        """Return groups in the order of their ids, each with how many pin it."""

        def read(store: Store) -> list[tuple[Group, int]]:
            found = store.groups(tenant, state=state, limit=limit, after=after)
            return [(group, store.pins(tenant, group.block_group_id)) for group in found]

        return await self.call(read)

    async def migration(self, tenant: str, operation_id: str) -> Migration | None:
        """Return how far a migration is, None if there is none of that id."""
        return await self.call(lambda store: store.migration(tenant, operation_id))

    async def operation(self, tenant: str, operation_id: str, issued_ms: int) -> tuple[Known, Answer | None]:
        """Return what is known of an operation, and its answer if it is done (KVC-IDEM-019)."""
        running = (tenant, operation_id) in self._running  # before the store is asked: it may be over afterwards
        record, purged_ms = await self.call(lambda store: (store.look(tenant, operation_id), store.purged_ms()))
        if record is not None:
            return Known.DONE, record.answer
        if running or (tenant, operation_id) in self._running:
            return Known.IN_PROGRESS, None
        if issued_ms <= max(self._now_ms() - self._retention.window_ms, purged_ms):
            return Known.EXPIRED, None
        return Known.UNKNOWN, None

    # Other nodes.

    async def accept(self, order: AcceptOrder) -> tuple[Copy, str]:
        """Take a migration's copy in, or say how far that is. Raises as `write` does, and RateLimited."""
        return await self.migrations.accept(order)

    async def settle(self, order: SettleOrder) -> Copy:
        """Hear how a migration ended. Raises Unavailable, StoreError, QueueFull."""
        return await self._to_the_end(self.migrations.settle(order))

    # The engine.

    async def came(self, hello: link.Hello) -> None:
        """Take up an engine, and tell it everything. Raises NoEngine."""
        async with self.gate.alone():
            new = await self.call(lambda store: store.new_engine(hello.incarnation))
            if hello.groups:
                await self.call(lambda store: store.publish(TENANT, hello.groups))
            here = {group.block_group_id for group in hello.groups} | set(hello.known)
            groups, loans = await self.call(lambda store: (store.wanted(), store.open_transfers()))
            missing = [
                (tenant, g.block_group_id) for tenant, g, _ in groups
                if g.block_group_id not in here and g.state is not GroupState.MIGRATING_IN
            ]  # fmt: skip
            for tenant, name in missing:
                await self.call(lambda store, tenant=tenant, name=name: store.lost(tenant, [name]))  # type: ignore[misc]
            lent = set(hello.loans)
            over = [token for token in loans if token not in lent]
            await self.call(lambda store: store.end_transfers(over))
            gone = {name for _, name in missing}
            known = [link.Known(g.block_group_id, held) for _, g, held in groups if g.block_group_id not in gone]
            await self.ask(link.Sync(known, [token for token in loans if token in lent]))
            self.say(
                EventKind.BLOCKS_LINKED, self.name, incarnation=hello.incarnation, new=new, groups=len(known),
                lost=len(missing), loans=len(loans) - len(over),
            )  # fmt: skip

    async def said(self, message: link.Publish | link.Gone | link.Ended) -> None:
        """Take in what the engine says by itself."""
        match message:
            case link.Publish():
                await self._published(message.group)
            case link.Gone():
                for name in message.block_group_ids:
                    await self._gone(name)
            case link.Ended():
                self._lending.update((token, True) for token in message.loans if token in self._lending)
                await self.call(lambda store: store.end_transfers(message.loans))

    async def _published(self, group: Group) -> None:
        name = group.block_group_id
        async with self.gate.operation((TENANT, name)):
            [stands] = await self.call(lambda store: store.publish(TENANT, [group]))
            if stands.state is GroupState.MOVED:
                await self.ask(link.Elsewhere(name))
            elif not (await self.ask(link.Noted(name))).here:  # it has been evicted since, or its blocks were needed
                await self.call(lambda store: store.lost(TENANT, [name]))

    async def _gone(self, name: str) -> None:
        async with self.gate.operation((TENANT, name)):
            if not (await self.ask(link.Look(name))).here:  # else it has come back, and we have heard of that first
                await self.call(lambda store: store.lost(TENANT, [name]))

    async def ask(self, question: link.Question) -> link.Said:
        """Ask the engine. Raises NoEngine."""
        return await self.engine.ask(question)

    async def call(self, method: Callable[[Store], T]) -> T:
        """Do something with the store, in order with the writes."""
        return await self.writer.call(method)

    async def close(self) -> None:
        """Wait for the operations that are under way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)

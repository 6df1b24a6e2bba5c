"""Moving a block group to another node: the source drives, the target fetches the bytes, the source alone decides.

PENDING -> RUNNING: the group is lent to the target, whose engine reads it over the data plane and compares checksums.
Once the target says COPIED, the source writes down SUCCEEDED: from that commit on, and not before, the group is the
target's. Until the target has acknowledged how it ended (`Settle`), the source tells it again, also after a crash.
Every step may be repeated. So a crash of either side at any point ends in one owner, and in no second copy
(KVC-IDEM-011).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Coroutine
from typing import Final, Protocol

import msgspec

from reference_impl.blockservice import link
from reference_impl.blockservice.engine_link import NoEngine
from reference_impl.blockservice.errors import Unavailable
from reference_impl.blockservice.failpoints import FailPoints, Point
from reference_impl.blockservice.node import BlockNode
from reference_impl.blockservice.store import StoreError
from reference_impl.blockservice.wire import AcceptOrder, Copy, SettleOrder
from reference_impl.blockservice.writer import QueueFull
from reference_impl.rules.blockgroups import Group, GroupState, Migration, MigrationStatus
from reference_impl.rules.events import EventKind

LIMIT_S: Final = 30.0
"""Without a copy by then a migration has failed."""
LOANS_MAX: Final = 3
"""How often a copy is tried: a loan may run out while the target is away."""
LOOK_S: Final = 0.05
RETRY_S: Final = 0.2
RETRY_S_MAX: Final = 2.0
OVER_MAX: Final = 4096
"""Migrations to this node of which it is remembered that they are over, beside those that the store knows."""
_LOGGER: Final = logging.getLogger(__name__)


class PeerUnreachable(Exception):
    """The other node's service does not answer, or refuses; it may be asked again."""


class Peer(Protocol):
    """Another node's block service, as this one calls it. Raises PeerUnreachable."""

    async def accept(self, order: AcceptOrder) -> tuple[Copy, str]:
        """Have it fetch a copy, or ask how far that is."""
        ...

    async def settle(self, order: SettleOrder) -> Copy:
        """Tell it how a migration has ended."""
        ...


class _Failed(Exception):
    """A migration cannot go on; the message says why."""


class _CopyFailed(_Failed):
    """The target has no copy; it may get one by another loan."""


class Migrator:
    """All migrations in which a node takes part. `take_bytes` waits for its share of the bucket of a tenant."""

    def __init__(
        self,
        node: BlockNode,
        peer: Callable[[str], Peer],
        take_bytes: Callable[[str, int], Coroutine[None, None, None]],
        points: FailPoints | None = None,
        *,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._node, self._peer, self._take_bytes, self._points = node, peer, take_bytes, points
        self._limit_s = limit_s
        self._driving: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._paying: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Copies that wait for their share of the bucket, or have had it: asked again, they take no more."""
        self._orders: dict[tuple[str, str], AcceptOrder] = {}
        """What targets were told, with the loans that are theirs."""
        self._over: dict[tuple[str, str], None] = {}
        """Migrations to this node that have ended: an order of one may lie in a connection for long, and come late."""
        node.migrations = self

    async def resume(self) -> None:
        """Go on with what a predecessor of this process left."""
        for tenant, migration in await self._node.call(lambda store: store.open_migrations()):
            self.drive(tenant, migration.operation_id)

    def drive(self, tenant: str, operation_id: str) -> None:
        """See a migration to its end; harmless while that is done, or if there is none."""
        key = (tenant, operation_id)
        if key not in self._driving:
            task = self._driving[key] = asyncio.create_task(self._drive_to_the_end(tenant, operation_id))
            task.add_done_callback(lambda _: self._driving.pop(key, None))

    async def close(self) -> None:
        """Stop; a successor goes on."""
        tasks = [*self._driving.values(), *self._paying.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The source's side.

    async def _drive_to_the_end(self, tenant: str, operation_id: str) -> None:
        """Drive, and start again where it stands when the store fails: nobody else would until the next restart."""
        pause_s = RETRY_S
        while True:
            try:
                await self._drive(tenant, operation_id)
                return
            except (StoreError, QueueFull, Unavailable) as error:
                _LOGGER.warning("migration %s waits: %s", operation_id, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def _drive(self, tenant: str, operation_id: str) -> None:
        migration = await self._node.call(lambda store: store.migration(tenant, operation_id))
        if migration is None:
            return
        if not migration.status.ended:
            problem = await self._copy(tenant, migration)
            migration = await self._decide(tenant, migration, problem)
        if migration is not None and not migration.told:
            await self._settle(tenant, migration)

    async def _copy(self, tenant: str, migration: Migration) -> str:
        """Have the target make its copy; return "" once it has one, or why there will be none."""
        try:
            async with asyncio.timeout(self._limit_s):
                await self._node.call(lambda store: store.set_running(tenant, migration.operation_id))
                self._say(migration, "running")
                await self._lend_and_copy(tenant, migration)
        except TimeoutError:
            return f"no copy within {self._limit_s:g} s"
        except _Failed as error:
            return str(error)
        return ""

    async def _lend_and_copy(self, tenant: str, migration: Migration) -> None:
        """Return once the target has its copy; a copy that failed is tried with another loan. Raises _Failed."""
        for left in range(LOANS_MAX - 1, -1, -1):
            order = await self._order(tenant, migration)
            try:
                await self._copied(tenant, migration, order)
                return
            except _CopyFailed:
                if not left:
                    raise
            await self._take_back(tenant, migration.operation_id)

    async def _take_back(self, tenant: str, operation_id: str) -> None:
        """End the target's loan, if nobody reads by it: who reads already ends it himself."""
        order = self._orders.pop((tenant, operation_id), None)
        if order is not None:
            with contextlib.suppress(NoEngine):
                await self._node.ask(link.TakeBack(order.place.transfer_token))

    async def _order(self, tenant: str, migration: Migration) -> AcceptOrder:
        """Lend the group to the target, unless that is done."""
        key = (tenant, migration.operation_id)
        if key in self._orders:
            return self._orders[key]
        while True:
            async with self._node.gate.operation((tenant, migration.block_group_id)):
                group = await self._group(tenant, migration)
                place = self._node.new_place(group)
                with contextlib.suppress(NoEngine):
                    said = await self._node.ask(link.Lend(group.block_group_id, place.transfer_token))
                    if said.handoff:
                        break
                    raise _Failed(said.problem or "its blocks are not here any more")
            await asyncio.sleep(RETRY_S)  # the engine is away: if it died, the group went with it, and we shall be told
        order = self._orders[key] = AcceptOrder(
            operation_id=migration.operation_id, tenant=tenant, group=group, digests=tuple(said.digests),
            place=msgspec.structs.replace(place, handoff=said.handoff),
        )  # fmt: skip
        return order

    async def _copied(self, tenant: str, migration: Migration, order: AcceptOrder) -> None:
        """Return once the target has its copy. Raises _Failed."""
        peer = self._peer(migration.dst)
        first = True
        while True:
            await self._group(tenant, migration)
            copy, reason = Copy.ARRIVING, ""
            with contextlib.suppress(PeerUnreachable):
                copy, reason = await peer.accept(order)
                if first:
                    first = False
                    await self._reach(Point.MIGRATION_ACCEPTED)
            if copy is Copy.COPIED:
                await self._reach(Point.MIGRATION_COPIED)
                return
            if copy is Copy.FAILED:
                raise _CopyFailed(reason or "the target has no copy, and does not say why")
            if copy is Copy.SETTLED:
                raise _Failed("the target has settled it")
            await asyncio.sleep(LOOK_S)

    async def _group(self, tenant: str, migration: Migration) -> Group:
        """Return the group that moves. Raises _Failed if the migration has been ended meanwhile."""
        group = await self._node.call(lambda store: store.group(tenant, migration.block_group_id))
        if group is None or group.state is not GroupState.MIGRATING_OUT or group.migration != migration.operation_id:
            raise _Failed("it has been ended")
        return group

    async def _decide(self, tenant: str, migration: Migration, problem: str) -> Migration | None:
        """Write down how it ended, unless that is written already; return what is written."""
        status = MigrationStatus.FAILED if problem else MigrationStatus.SUCCEEDED
        name, operation_id = migration.block_group_id, migration.operation_id
        async with self._node.gate.operation((tenant, name)):
            await self._take_back(tenant, operation_id)
            ended = await self._node.call(lambda store: store.end_migration(tenant, operation_id, status, problem))
            if ended is not None and ended.status is MigrationStatus.SUCCEEDED:
                await self._reach(Point.MIGRATION_DECIDED)
                with contextlib.suppress(NoEngine):
                    await self._node.ask(link.Drop(name))
            elif ended is not None:
                await self._node.hold_in_the_end(tenant, name)
        if ended is None:
            return await self._node.call(lambda store: store.migration(tenant, operation_id))
        self._say(ended, "ended")
        return ended

    async def _settle(self, tenant: str, migration: Migration) -> None:
        """Tell the target until it has heard: without an end, for the group's owner hangs on it."""
        order = SettleOrder(operation_id=migration.operation_id, tenant=tenant, status=migration.status)
        pause_s = RETRY_S
        while True:
            with contextlib.suppress(PeerUnreachable, StoreError):
                if await self._peer(migration.dst).settle(order) is Copy.SETTLED:
                    break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)
        await self._node.call(lambda store: store.set_told(tenant, migration.operation_id))
        self._say(migration, "settled")

    # The target's side.

    async def accept(self, order: AcceptOrder) -> tuple[Copy, str]:
        """Fetch a copy, or say how far it is. Raises NoEngine, StoreError."""
        tenant, operation_id, name = order.tenant, order.operation_id, order.group.block_group_id
        async with self._node.gate.operation((tenant, name)):
            if (tenant, operation_id) in self._over:
                return Copy.SETTLED, ""
            taken = await self._node.call(lambda store: store.accept(tenant, operation_id, order.group))
            if taken is None:
                return Copy.FAILED, f"{name} is here already, and does not come by this migration"
            if taken.state is not GroupState.MIGRATING_IN:
                return Copy.SETTLED, ""
        if not await self._paid(tenant, operation_id, order.group.size_bytes):
            return Copy.ARRIVING, ""
        return await self._fetched(order)

    async def _fetched(self, order: AcceptOrder) -> tuple[Copy, str]:
        tenant, operation_id = order.tenant, order.operation_id
        async with self._node.gate.operation((tenant, order.group.block_group_id)):
            if await self._node.call(lambda store: store.arriving(tenant, operation_id)) is None:
                self._paying.pop((tenant, operation_id), None)
                return Copy.SETTLED, ""  # meanwhile
            fetch = link.Fetch(_named(tenant, operation_id), order.group, list(order.digests), order.place.handoff)
            said = await self._node.ask(fetch)
        if said.copy is None:
            return Copy.FAILED, said.problem or "the engine says nothing of it"
        return Copy(said.copy.state), said.copy.reason

    async def _paid(self, tenant: str, operation_id: str, size_bytes: int) -> bool:
        """Return whether a copy has had its share of the bucket. Raises what taking it raised."""
        key = (tenant, operation_id)
        paying = self._paying.get(key)
        if paying is None:
            paying = self._paying[key] = asyncio.create_task(self._take_bytes(tenant, size_bytes))
        await asyncio.wait([paying], timeout=LOOK_S)
        if not paying.done():
            return False
        if paying.exception() is not None and self._paying.get(key) is paying:
            del self._paying[key]
        paying.result()
        return True

    async def settle(self, order: SettleOrder) -> Copy:
        """Take in how a migration has ended. Raises NoEngine, StoreError."""
        tenant, operation_id = order.tenant, order.operation_id
        self._over[tenant, operation_id] = None  # first: an order is now turned away, or was queued before we look
        if len(self._over) > OVER_MAX:
            del self._over[next(iter(self._over))]
        name = await self._node.call(lambda store: store.arriving(tenant, operation_id))
        if name is None:  # settled before, or before it was accepted: that is remembered, and an order of it in vain
            await self._node.call(lambda store: store.settle(tenant, operation_id, ours=False))
            return Copy.SETTLED
        ours = order.status is MigrationStatus.SUCCEEDED
        async with self._node.gate.operation((tenant, name)):
            lost = ours and not (await self._node.ask(link.Hold(name, held=True))).here
            group = await self._node.call(
                lambda store: store.settle(tenant, operation_id, ours=ours, node_lost_copy=lost)
            )  # fmt: skip
            if ours and not lost:
                await self._node.hold_in_the_end(tenant, name)
            else:
                with contextlib.suppress(NoEngine):
                    await self._node.ask(link.Drop(name))
        self._paying.pop((tenant, operation_id), None)
        state = group.state if group else "given back"
        self._node.say(EventKind.MIGRATION_MOVED, operation_id, step="taken over" if ours else "given up",
                       status=order.status, block_group_id=name, state=state)  # fmt: skip
        return Copy.SETTLED

    async def _reach(self, point: Point) -> None:
        if self._points is not None:
            await self._points.reach(point)

    def _say(self, migration: Migration, step: str) -> None:
        self._node.say(
            EventKind.MIGRATION_MOVED, migration.operation_id, step=step, status=migration.status, src=migration.src,
            dst=migration.dst, block_group_id=migration.block_group_id, reason=migration.reason,
        )  # fmt: skip


def _named(tenant: str, operation_id: str) -> str:
    """Return what the engine calls a migration: ids are a tenant's own, and may be longer than those of readers."""
    named = msgspec.json.encode([tenant, operation_id])
    return f"move-{hashlib.blake2b(named, digest_size=16).hexdigest()}"

"""Moving groups between nodes: whoever dies, and wherever, there is one owner in the end and nothing is left over."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from reference_impl.blockservice import link, migration, node
from reference_impl.blockservice.buckets import Bucket, RateLimited
from reference_impl.blockservice.failpoints import Action, FailPoints, Order, Point
from reference_impl.blockservice.node import TENANT
from reference_impl.blockservice.store import StoreError
from reference_impl.blockservice.wire import AcceptOrder, Copy, SettleOrder
from reference_impl.rules.blockgroups import (
    CancelMigrate,
    Evict,
    Group,
    GroupState,
    Migration,
    MigrationStatus,
    Pin,
    Place,
    Refusal,
    StartMigrate,
)
from tests.blockservice.node_kit import MOVING, Side, Site, World, ask, disagreements, group_of, world
from tests.blockservice.store_kit import NOW_MS

G: Final = "g"
START = StartMigrate(block_group_id=G, epoch=1, src="a", dst="b")
CANCEL = CancelMigrate(block_group_id=G, epoch=1, migration_id="move")
SUCCEEDED, FAILED, CANCELLED = MigrationStatus.SUCCEEDED, MigrationStatus.FAILED, MigrationStatus.CANCELLED
POINTS_MAX: Final = 150


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "RETRY_S", "RETRY_S_MAX"):
        monkeypatch.setattr(migration, name, 0.001)
    monkeypatch.setattr(node, "AGAIN_S", 0.002)


def standing(site: Site, name: str = G) -> Group | None:
    return site.store.group(TENANT, name)


def status(site: Site, operation_id: str = "move") -> Migration:
    found = site.store.migration(TENANT, operation_id)
    assert found is not None
    return found


def owners(made: World, name: str = G) -> list[str]:
    """The nodes that say of themselves that the group is theirs, and here."""
    found = [(site.name, standing(site, name)) for site in made.sites.values()]
    return [who for who, g in found if g is not None and g.state is GroupState.RESIDENT and g.location == who]


async def settled(made: World) -> None:
    """Wait for rest, and find one owner, or none if its engine died, and nothing left of a migration anywhere."""
    await made.rest()
    for site in made.sites.values():
        assert [g.group for g in site.store.finals() if g.group.state in MOVING] == []
        assert site.store.open_migrations() == []
        assert disagreements(site) == [], site.name
        assert site.life is not None
        assert (site.life.migrator._orders, site.life.migrator._driving) == ({}, {})
        assert site.life.migrator._paying == {}
    groups = {site.name: group for site in made.sites.values() if (group := standing(site)) is not None}
    here = owners(made)
    assert len(here) <= 1
    if not here:
        last = max(groups.values(), key=lambda g: g.epoch)
        assert groups[last.location].state is GroupState.EVICTED
        assert made[last.location].engines_died, "only an engine's death leaves a group without an owner"
    else:
        assert groups[here[0]].epoch == max(g.epoch for g in groups.values())


async def once_more(made: World, operation_id: str = "move") -> Migration:
    """Ask how a migration ended, and start it again: it is the same end, and nothing starts."""
    ended = status(made["a"], operation_id)
    assert ended.status.ended
    begun = [len(site.alive.fetched) for site in made.sites.values()]
    again = await ask(made["a"], operation_id, START)
    assert again.replayed
    assert again.answer.migration is not None
    assert again.answer.migration.operation_id == operation_id
    await made.rest()
    assert status(made["a"], operation_id) == ended
    assert await made["a"].node.migration(TENANT, operation_id) == ended
    assert [len(site.alive.fetched) for site in made.sites.values()] == begun
    return ended


@pytest.mark.rule("KVC-IDEM-011")
async def test_a_group_moves_and_its_pins_and_places_are_its_new_owners(tmp_path: Path) -> None:
    async with world(tmp_path, "a", "b") as made:
        started = await ask(made["a"], "move", START)
        assert started.answer.migration is not None
        assert started.answer.migration.status is MigrationStatus.PENDING, "a start returns at once"
        refused = await ask(made["a"], "pin", Pin(block_group_id=G, epoch=1, request_id="r"))
        assert refused.answer.refusal is Refusal.MIGRATING
        await settled(made)
        there, here = standing(made["b"]), standing(made["a"])
        assert there is not None
        assert here is not None
        assert (there.state, there.location, there.epoch, there.checksum) == (GroupState.RESIDENT, "b", 2, "sum of g")
        assert (here.state, here.location, here.epoch) == (GroupState.MOVED, "b", 2)
        ended = await once_more(made)
        assert (ended.status, ended.told, ended.reason) == (SUCCEEDED, True, "")
        assert made["b"].alive.fetched == [migration._named(TENANT, "move")]
        pinned = await ask(made["b"], "pin", Pin(block_group_id=G, epoch=2, request_id="r"))
        assert pinned.answer.applied
        assert made["b"].alive.held() == {G}
        late = await ask(made["a"], "late", CANCEL)
        assert late.answer.refusal is Refusal.FUTURE_EPOCH or late.answer.refusal is Refusal.TOO_LATE


async def test_a_group_moves_there_and_back_and_on(tmp_path: Path) -> None:
    async with world(tmp_path, "a", "b", "c") as made:
        for number, (src, dst) in enumerate([("a", "b"), ("b", "a"), ("a", "c"), ("c", "b")]):
            start = StartMigrate(block_group_id=G, epoch=number + 1, src=src, dst=dst)
            assert (await ask(made[src], f"move{number}", start)).answer.applied
            await settled(made)
            assert owners(made) == [dst]
        assert (await ask(made["b"], "evict", Evict(block_group_id=G, epoch=5))).answer.applied
        for site in made.sites.values():
            assert disagreements(site) == []
            assert site.alive.groups == {}


async def moved(folder: Path, crash: tuple[int, str, Side] | None = None, loss: int = 0, cancel_after: int = -1) -> Any:
    """Move a group under a fault; return how it ended and whether the fault happened."""
    async with world(folder, "a", "b") as made:
        if crash is not None:
            made.crash_at(*crash)
        if loss:
            made.lose_at(loss)
        first = await ask(made["a"], "move", START)
        cancelled = None
        if cancel_after >= 0:
            for _ in range(cancel_after):
                await asyncio.sleep(0.0004)
            cancelled = await ask(made["a"], "cancel", CANCEL)
        await made.rest()
        made._crash = made._loss = None
        await settled(made)
        if not first.answer.applied:
            assert first.answer.refusal in (Refusal.STALE_EPOCH, Refusal.NOT_RESIDENT)
            assert made["a"].engines_died
            return None, made.crashed, owners(made), cancelled
        ended = await once_more(made)
        return ended, made.crashed, owners(made), cancelled


@pytest.mark.rule("KVC-IDEM-011", "KVC-IDEM-002", "KVC-IDEM-003")
@pytest.mark.parametrize("side", ["service", "engine"])
@pytest.mark.parametrize("site", ["a", "b"])
async def test_whoever_dies_at_whatever_point_one_owner_is_left(site: str, side: Side, tmp_path: Path) -> None:
    ends = set()
    for at in range(1, POINTS_MAX):
        ended, crashed, owner, _ = await moved(tmp_path / str(at), (at, site, side))
        if ended is not None:
            ends.add(ended.status)
            if side == "service":
                assert owner == (["b"] if ended.status is SUCCEEDED else ["a"]), f"at point {at}"
            elif ended.status is SUCCEEDED:
                assert owner == ["b"] or (owner == [] and site == "b"), f"at point {at}"
            else:
                assert owner == ["a"] or (owner == [] and site == "a"), f"at point {at}"
        if not crashed:
            break
    assert not crashed, "every point was tried"
    assert at > 20
    assert SUCCEEDED in ends


@pytest.mark.rule("KVC-IDEM-011")
async def test_whatever_call_between_the_nodes_is_lost_the_group_moves(tmp_path: Path) -> None:
    """A call that was lost may have been carried out: it is made again, and changes nothing the second time."""
    for at in itertools.count(1):
        ended, lost, owner, _ = await moved(tmp_path / str(at), loss=at)
        assert ended is not None
        assert (ended.status, owner) == (SUCCEEDED, ["b"])
        if not lost:
            break
    assert at > 6


@pytest.mark.rule("KVC-IDEM-011")
async def test_a_cancel_comes_in_time_or_too_late_and_never_both(tmp_path: Path) -> None:
    seen = set()
    for wait in range(60):
        ended, _, owner, cancelled = await moved(tmp_path / str(wait), cancel_after=wait)
        assert cancelled is not None
        if cancelled.answer.applied:
            assert (ended.status, owner) == (CANCELLED, ["a"])
            assert cancelled.answer.migration is not None
            assert cancelled.answer.migration.status is CANCELLED
        else:
            assert cancelled.answer.refusal is Refusal.TOO_LATE
            assert (ended.status, owner) == (SUCCEEDED, ["b"])
        seen.add(ended.status)
        if ended.status is SUCCEEDED and wait > 10:
            break
    assert seen == {CANCELLED, SUCCEEDED}


@pytest.mark.rule("KVC-IDEM-011")
async def test_a_cancel_while_its_service_dies_has_one_end(tmp_path: Path) -> None:
    for at in range(1, 60):
        _, crashed, owner, cancelled = await moved(tmp_path / str(at), (at, "a", "service"), cancel_after=0)
        assert cancelled is not None
        assert owner == (["a"] if cancelled.answer.applied else ["b"])
        if not crashed:
            break


@pytest.mark.rule("KVC-IDEM-011")
async def test_a_target_that_never_answers_costs_the_limit_and_no_more(tmp_path: Path) -> None:
    async with world(tmp_path, "a", "b", limit_s=0.1) as made:
        target = made["b"]
        assert target.life is not None
        accept = target.life.node.accept
        entered = asyncio.Event()

        async def silent(_order: AcceptOrder) -> Any:
            entered.set()
            await asyncio.Event().wait()

        target.life.node.accept = silent  # type: ignore[method-assign]
        await ask(made["a"], "move", START)
        await asyncio.wait_for(entered.wait(), 5)
        await settled(made)
        ended = await once_more(made)
        assert (ended.status, ended.reason) == (FAILED, "no copy within 0.1 s")
        assert owners(made) == ["a"]
        assert made["a"].alive.held() == set()
        target.life.node.accept = accept  # type: ignore[method-assign]
        assert (await ask(made["a"], "again", START)).answer.applied
        await settled(made)
        assert owners(made) == ["b"]


async def test_engines_that_are_away_fail_a_migration_by_its_limit(tmp_path: Path) -> None:
    for away in ("a", "b"):
        async with world(tmp_path / away, "a", "b", limit_s=0.1) as made:
            site = made[away]
            await ask(made["b"], "nothing", START)
            engine = site.engine
            if away == "b":
                site.engine = None
            else:
                assert site.life is not None
                drive = site.life.migrator.drive
                site.life.migrator.drive = lambda *_: None  # type: ignore[method-assign]
            await ask(made["a"], "move", START)
            if away == "a":
                site.engine = None
                drive(TENANT, "move")
            async with asyncio.timeout(10):
                while not status(made["a"]).told:
                    await asyncio.sleep(0.005)
            assert status(made["a"]).status is FAILED
            site.engine = engine
            assert site.line is not None
            site.line.linked = False
            await settled(made)
            assert owners(made) == ["a"]


@pytest.mark.rule("KVC-IDEM-011")
async def test_a_target_that_has_the_group_already_makes_the_migration_fail(tmp_path: Path) -> None:
    async with world(tmp_path, "a", "b") as made:
        made["b"].alive.publish(G)  # not the same group, for all that anybody knows
        await made.rest()
        await ask(made["a"], "move", START)
        await made.rest()
        assert status(made["a"]).status is FAILED
        assert "is here already" in status(made["a"]).reason
        group = standing(made["b"])
        assert group is not None
        assert group.state is GroupState.RESIDENT


async def test_a_copy_that_fails_says_why_and_the_source_keeps_its_group(tmp_path: Path) -> None:
    async with world(tmp_path, "a", "b") as made:
        made["b"].alive._read = lambda _fetch: link.Copy("FAILED", "its bytes' checksum is other")  # type: ignore[method-assign]
        await ask(made["a"], "move", START)
        await settled(made)
        assert (await once_more(made)).reason == "its bytes' checksum is other"
        assert owners(made) == ["a"]
        assert (await ask(made["a"], "evict", Evict(block_group_id=G, epoch=1))).answer.applied, "no loan is left"


async def test_many_groups_move_at_once_in_both_directions(tmp_path: Path) -> None:
    names = tuple(f"g{n}" for n in range(12))
    async with world(tmp_path, "a", "b", groups=names[:6]) as made:
        for name in names[6:]:
            made["b"].alive.publish(name)
        await made.rest()
        for number, name in enumerate(names):
            src, dst = ("a", "b") if number < 6 else ("b", "a")
            start = StartMigrate(block_group_id=name, epoch=1, src=src, dst=dst)
            assert (await ask(made[src], f"move{number}", start)).answer.applied
        await made.rest()
        for number, name in enumerate(names):
            assert owners(made, name) == (["b"] if number < 6 else ["a"])
        for site in made.sites.values():
            assert disagreements(site) == []


# The bucket.


@pytest.mark.rule("KVC-IDEM-015")
async def test_a_copy_waits_for_its_bytes_before_it_is_fetched_and_takes_them_once(tmp_path: Path) -> None:
    async with world(tmp_path, "a", "b") as made:
        source, target = made["a"], made["b"]
        let_go = asyncio.Event()
        made.bucket = let_go.wait  # type: ignore[method-assign, assignment]
        await ask(source, "move", START)
        assert target.life is not None
        async with asyncio.timeout(5):
            while not target.life.taken:
                await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0.002)
        assert target.alive.fetched == []
        assert target.life.taken == [(TENANT, 100)]
        let_go.set()
        await settled(made)
        assert owners(made) == ["b"]
        assert target.life.taken == [(TENANT, 100)]
        assert source.life is not None
        assert source.life.taken == []


@pytest.mark.rule("KVC-IDEM-015")
async def test_a_refused_share_is_asked_for_again(tmp_path: Path) -> None:
    async with world(tmp_path, "a", "b") as made:
        refusals = [RateLimited(Bucket.MIGRATION_BYTES, "not now")] * 3

        async def bucket() -> None:
            if refusals:
                raise refusals.pop()

        made.bucket = bucket  # type: ignore[method-assign]
        await ask(made["a"], "move", START)
        await settled(made)
        assert owners(made) == ["b"]
        assert made["b"].life is not None
        assert len(made["b"].life.taken) == 4


async def test_two_callers_at_once_hear_of_one_refusal(tmp_path: Path) -> None:
    """A source that calls again while its first call still waits."""
    async with world(tmp_path, "a", "b") as made:
        refuse = asyncio.Event()

        async def bucket() -> None:
            await refuse.wait()
            raise RateLimited(Bucket.MIGRATION_BYTES, "not now")

        made.bucket = bucket  # type: ignore[method-assign]
        migration.LOOK_S = 5.0
        order = order_of(made)
        calls = [asyncio.create_task(made["b"].node.accept(order)) for _ in range(3)]
        await asyncio.sleep(0.02)
        refuse.set()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(e) for e in ended] == [RateLimited] * 3
        assert made["b"].life is not None
        assert len(made["b"].life.taken) == 1
        await made["b"].node.settle(SettleOrder(operation_id="move", tenant=TENANT, status=FAILED))


# Calls that come late, twice, or in the wrong order.


def order_of(made: World, name: str = G, token: str = "xfer-t") -> AcceptOrder:
    source = made["a"]
    group = group_of(name)
    source.alive.loans[token] = name
    place = Place(node="a", handoff=token, size_bytes=100, checksum="", transfer_token=token, expires_ms=NOW_MS)
    return AcceptOrder(operation_id="move", tenant=TENANT, group=group, digests=(b"d",), place=place)


def settle_of(ended: MigrationStatus) -> SettleOrder:
    return SettleOrder(operation_id="move", tenant=TENANT, status=ended)


@pytest.mark.rule("KVC-IDEM-011")
@pytest.mark.parametrize("ended", [CANCELLED, FAILED])
async def test_an_order_that_comes_after_its_end_fetches_nothing(ended: MigrationStatus, tmp_path: Path) -> None:
    """The end may overtake an order that waits for its share of the bucket, at whatever place."""
    for turns in range(16):
        async with world(tmp_path / str(turns), "b", "a", groups=()) as made:
            order, target = order_of(made), made["b"]
            assert target.line is not None
            accepting = asyncio.create_task(target.node.accept(order))
            for _ in range(turns):
                await asyncio.sleep(0.0002)
            settling = asyncio.create_task(target.node.settle(settle_of(ended)))
            results = await asyncio.gather(accepting, settling, return_exceptions=True)
            assert results[1] is Copy.SETTLED, results
            late = await target.node.accept(order)
            assert late[0] in (Copy.FAILED, Copy.SETTLED)
            made["a"].alive.loans.clear()
            await made.rest()
            assert standing(target) is None, turns
            assert disagreements(target) == [], turns
            assert target.alive.groups == {}


@pytest.mark.rule("KVC-IDEM-011")
async def test_an_order_that_lay_in_a_connection_until_its_migration_was_over_begins_nothing(tmp_path: Path) -> None:
    """The source died after it had sent it, and its successor has settled what the target had never heard of."""
    async with world(tmp_path, "b", "a", groups=()) as made:
        target, order = made["b"], order_of(made)
        assert await target.node.settle(settle_of(FAILED)) is Copy.SETTLED
        assert (await target.node.accept(order))[0] is Copy.SETTLED
        assert standing(target) is None
        assert target.alive.fetched == []
        made["a"].alive.loans.clear()
        again = msgspec.structs.replace(order_of(made), operation_id="another")
        while (await target.node.accept(again))[0] is not Copy.COPIED:
            pass


async def test_what_is_over_is_remembered_of_so_many_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(migration, "OVER_MAX", 3)
    async with world(tmp_path, "b", groups=()) as made:
        for number in range(5):
            order = msgspec.structs.replace(settle_of(FAILED), operation_id=f"m{number}")
            assert await made["b"].node.settle(order) is Copy.SETTLED
        assert made["b"].life is not None
        assert [key[1] for key in made["b"].life.migrator._over] == ["m2", "m3", "m4"]


async def test_an_end_that_is_told_twice_or_of_nothing_is_settled(tmp_path: Path) -> None:
    async with world(tmp_path, "b", "a", groups=()) as made:
        target = made["b"]
        unheard_of = msgspec.structs.replace(settle_of(SUCCEEDED), operation_id="unheard-of")
        assert await target.node.settle(unheard_of) is Copy.SETTLED
        assert standing(target) is None
        order = order_of(made)
        while (await target.node.accept(order))[0] is not Copy.COPIED:
            pass
        for _ in range(3):
            assert await target.node.settle(settle_of(SUCCEEDED)) is Copy.SETTLED
        group = standing(target)
        assert group is not None
        assert (group.state, group.epoch) == (GroupState.RESIDENT, 2)
        assert (await target.node.accept(order))[0] is Copy.SETTLED
        assert disagreements(target) == []


@pytest.mark.rule("KVC-IDEM-012")
async def test_a_caller_that_hangs_up_while_an_end_is_taken_in_leaves_nothing_half_done(tmp_path: Path) -> None:
    for turns in range(14):
        async with world(tmp_path / str(turns), "b", "a", groups=()) as made:
            target, order = made["b"], order_of(made)
            while (await target.node.accept(order))[0] is not Copy.COPIED:
                pass
            assert target.line is not None
            target.line.delay = lambda: 1
            settling = asyncio.create_task(target.node.settle(settle_of(SUCCEEDED)))
            for _ in range(turns):
                await asyncio.sleep(0.0001)
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)
            await made.rest()
            assert await target.node.settle(settle_of(SUCCEEDED)) is Copy.SETTLED
            assert disagreements(target) == [], turns
            assert target.alive.held() == set()


# Stores that fail, and fail points.


@pytest.mark.rule("KVC-IDEM-011")
@pytest.mark.parametrize("code", ["locked", "full"])
async def test_a_store_that_fails_for_a_while_delays_a_migration_and_does_not_end_it(code: Any, tmp_path: Path) -> None:
    for at in range(1, 40):
        async with world(tmp_path / str(at), "a", "b") as made:
            assert made["a"].life is not None
            await ask(made["b"], "warm", START)
            writer, calls, failed = made["a"].life.writer, 0, 0
            call = writer.call

            async def failing(method: Any, at: int = at, call: Any = call) -> Any:
                nonlocal calls, failed
                calls += 1
                if at <= calls < at + 2:
                    failed += 1
                    raise StoreError(code, code)
                return await call(method)

            drive = made["a"].life.migrator.drive
            made["a"].life.migrator.drive = lambda *_: None  # type: ignore[method-assign]
            await ask(made["a"], "move", START)
            writer.call = failing  # type: ignore[method-assign]
            drive(TENANT, "move")
            async with asyncio.timeout(10):
                while made["a"].life.migrator._driving:
                    await asyncio.sleep(0.001)
            writer.call = call  # type: ignore[method-assign]
            await settled(made)
            assert owners(made) == ["b"]
            if not failed:
                break
    assert not failed
    assert at > 5


async def test_the_places_of_a_migration_are_passed_in_their_order(tmp_path: Path) -> None:
    reached: list[str] = []
    points = FailPoints(lambda point, _action, _method: reached.append(point))
    for point in (Point.MIGRATION_ACCEPTED, Point.MIGRATION_COPIED, Point.MIGRATION_DECIDED):
        points.arm(Order(point=point, action=Action.DELAY, seconds=0.001))
    async with world(tmp_path, "a", "b") as made:
        assert made["a"].life is not None
        made["a"].life.migrator._points = points
        await ask(made["a"], "move", START)
        await settled(made)
    assert reached == ["migration_accepted", "migration_copied", "migration_decided"]


def test_a_migration_has_one_name_at_the_engine_whatever_its_ids() -> None:
    names = {migration._named(t, o) for t, o in (("a", "b,c"), ("a,b", "c"), ('a","b', "c"), ("a", 'b","c'))}
    assert len(names) == 4
    assert msgspec.json.decode(msgspec.json.encode(sorted(names))) == sorted(names)

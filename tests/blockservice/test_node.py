"""A node between its store and its engine: whoever dies, and wherever, a retry brings both to where they would be."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from reference_impl.blockservice import link, node
from reference_impl.blockservice.deadline import within
from reference_impl.blockservice.engine_link import NoEngine
from reference_impl.blockservice.errors import Unavailable
from reference_impl.blockservice.node import TENANT, CallerGone
from reference_impl.blockservice.store import Done, StoreError
from reference_impl.blockservice.wire import Known
from reference_impl.blockservice.writer import QueueFull
from reference_impl.rules.blockgroups import (
    CancelMigrate,
    Evict,
    GroupState,
    Outcome,
    Pin,
    PrepareGet,
    Refusal,
    Request,
    Reserve,
    StartMigrate,
    Unpin,
)
from reference_impl.rules.operations import WINDOW_MS
from reference_impl.rules.transfer_tokens import node_key, why_not
from tests.blockservice.node_kit import (
    SECRET,
    Idle,
    Site,
    World,
    ask,
    delays,
    disagreements,
    picture,
    plain,
    world,
)
from tests.blockservice.store_kit import NOW_MS, Crash

G: Final = "g"
PIN, UNPIN = Pin(block_group_id=G, epoch=1, request_id="r"), Unpin(block_group_id=G, epoch=1, request_id="r")
EVICT, RESERVE = Evict(block_group_id=G, epoch=1), Reserve(block_group_id=G, epoch=1, slots=2)
PREPARE = PrepareGet(block_group_id=G, epoch=1, request_id="r")
START = StartMigrate(block_group_id=G, epoch=1, src="a", dst="b")
CANCEL = CancelMigrate(block_group_id=G, epoch=1, migration_id="before0")
OTHER = msgspec.structs.replace
STALE_EPOCH = OTHER(PIN, epoch=2)


class Case(msgspec.Struct, frozen=True):
    """An operation, what is so before it, and what it is answered."""

    request: Request
    before: tuple[Request, ...] = ()
    refusal: Refusal = Refusal.NONE
    engine: Callable[[Site], None] = lambda _site: None


def leased(site: Site) -> None:
    site.alive.leased.add(G)


def lost(site: Site) -> None:
    """Lose the group, before the service has heard of it."""
    del site.alive.groups[G]


CASES: Final = {
    "reserve": Case(RESERVE),
    "pin": Case(PIN),
    "pin again": Case(PIN, (PIN,)),
    "the last unpin": Case(UNPIN, (PIN,)),
    "not the last unpin": Case(UNPIN, (PIN, OTHER(PIN, request_id="s"))),
    "unpin before pin": Case(UNPIN),
    "evict": Case(EVICT, (RESERVE,)),
    "prepare_get": Case(PREPARE),
    "a second prepare_get": Case(PREPARE, (PREPARE,)),
    "start_migrate": Case(START),
    "cancel_migrate": Case(CANCEL, (START,)),
    "late pin": Case(PIN, (UNPIN,), Refusal.UNPINNED_BEFORE),
    "stale": Case(OTHER(PREPARE, epoch=0), (), Refusal.STALE_EPOCH),
    "pinned": Case(EVICT, (PIN,), Refusal.PINNED),
    "lent": Case(EVICT, (PREPARE,), Refusal.TRANSFERRING),
    "leased": Case(START, (), Refusal.LEASED, leased),
    "pin of what is lost": Case(PIN, (), Refusal.NOT_RESIDENT, lost),
    "prepare_get of what is lost": Case(PREPARE, (), Refusal.NOT_RESIDENT, lost),
    "start_migrate of what is lost": Case(START, (), Refusal.NOT_RESIDENT, lost),
    "evict what is lost": Case(EVICT, (), Refusal.NONE, lost),
    "pin while moving": Case(PIN, (START,), Refusal.MIGRATING),
    "no such group": Case(OTHER(PIN, block_group_id="none"), (), Refusal.UNKNOWN_GROUP),
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "AGAIN_S", 0.002)


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[Site]:
    async with world(tmp_path, "a", "b", still=True) as made:
        yield made["a"]


async def standing(made: World, case: Case) -> Site:
    """Bring a world to where an operation begins."""
    site = made["a"]
    for number, request in enumerate(case.before):
        await ask(site, f"before{number}", request)
    case.engine(site)
    return site


async def run(folder: Path, case: Case, at: int = 0, side: Any = "service") -> tuple[Done, tuple[Any, ...], bool]:
    async with world(folder, "a", "b", still=True) as made:
        site = await standing(made, case)
        if at:
            made.crash_at(at, "a", side)
        done = await ask(site, "op", case.request)
        made._crash = None
        await made.rest()
        assert disagreements(site) == [], f"{side} died at point {at}"
        again = await site.node.write(TENANT, "op", NOW_MS, case.request)
        assert (again.answer, again.replayed) == (done.answer, True)
        return done, picture(site), made.crashed


@pytest.mark.rule("KVC-IDEM-001", "KVC-IDEM-002", "KVC-IDEM-003")
@pytest.mark.parametrize("name", CASES)
async def test_a_service_that_dies_anywhere_leaves_what_a_retry_brings_to_the_same_end(
    name: str, tmp_path: Path
) -> None:  # fmt: skip
    case = CASES[name]
    clean, expected, _ = await run(tmp_path / "clean", case)
    assert clean.answer.refusal is case.refusal
    for at in range(1, 40):
        done, found, crashed = await run(tmp_path / str(at), case, at)
        if case.engine is lost:  # found out when the two meet again, if not before: the group is evicted either way
            assert found[0] == expected[0], f"it died at point {at}"
            assert done.answer.refusal in (case.refusal, Refusal.STALE_EPOCH)
        else:
            assert (plain(done.answer), found) == (plain(clean.answer), expected), f"it died at point {at}"
        if not crashed:
            break
    assert at > 1 + (case.refusal is Refusal.NONE), "some points were passed"
    assert not crashed


@pytest.mark.rule("KVC-IDEM-006")
@pytest.mark.parametrize("name", CASES)
async def test_an_engine_that_dies_anywhere_leaves_a_node_that_knows_what_is_gone(name: str, tmp_path: Path) -> None:
    """What it held is evicted; the operation has one answer and nobody keeps anything of the dead one."""
    case = CASES[name]
    for at in range(1, 40):
        _, (standings, *_), crashed = await run(tmp_path / str(at), case, at, "engine")
        if not crashed:
            break
        assert {standing.group.state for standing in standings} <= {GroupState.EVICTED}
    assert not crashed


@pytest.mark.rule("KVC-IDEM-003")
@pytest.mark.parametrize("side", ["service", "engine"])
@pytest.mark.parametrize("what", ["publish", "gone", "gone and back", "ended"])
async def test_what_an_engine_says_is_taken_in_whoever_dies_meanwhile(what: str, side: Any, tmp_path: Path) -> None:
    for at in range(1, 40):
        async with world(tmp_path / str(at), "a", groups=("g", "h")) as made:
            site = made["a"]
            await ask(site, "pin", OTHER(PIN, block_group_id="h"))
            lent = await ask(site, "lend", OTHER(PREPARE, block_group_id="h"))
            assert lent.answer.place is not None
            made.crash_at(at, "a", side)
            match what:
                case "publish":
                    site.alive.publish("new")
                case "gone":
                    site.alive.lose("g")
                case "gone and back":
                    site.alive.lose("g")
                    site.alive.publish("g")
                case _:
                    site.alive.end_loan(lent.answer.place.transfer_token)
            await made.rest()
            made._crash = None
            await made.rest()
            assert disagreements(site) == []
            if not made.crashed:
                groups = {s.group.block_group_id: s.group for s in site.store.finals()}
                assert groups["h"].state is GroupState.RESIDENT
                epochs = {"gone": 2, "gone and back": 3}.get(what, 1)
                assert groups["g"].epoch == epochs
                assert ("new" in groups) == (what == "publish")
                break
    assert not made.crashed
    assert at > 1


@pytest.mark.rule("KVC-IDEM-009")
async def test_a_pin_that_overtakes_the_news_that_its_group_went_is_refused(one: Site) -> None:
    """The blocks went, and the prompt came back: the engine says both, and answers the pin before that is taken in."""
    assert one.line is not None
    one.alive.lose(G)
    one.alive.publish(G)
    done = await ask(one, "pin", PIN)
    assert done.answer.refusal is Refusal.NOT_RESIDENT
    await one.line.hear()
    assert disagreements(one) == []
    group = one.store.group(TENANT, G)
    assert group is not None
    assert (group.state, group.epoch) == (GroupState.RESIDENT, 3)
    assert (await ask(one, "pin2", OTHER(PIN, epoch=3))).answer.applied
    assert disagreements(one) == []


async def test_news_that_a_group_went_which_has_come_back_since_evicts_nothing(one: Site) -> None:
    assert one.line is not None
    await ask(one, "pin", PIN)
    one.line.heard.append(link.Gone([G, "unheard-of"]))
    await one.line.hear()
    assert one.store.pins(TENANT, G) == 1
    assert disagreements(one) == []


async def test_a_group_that_is_dropped_before_it_is_written_down_is_evicted(one: Site) -> None:
    """Evicting what is evicted succeeds, and drops what the engine has just taken up again."""
    assert one.line is not None
    await ask(one, "evict", EVICT)
    one.alive.publish(G)
    assert (await ask(one, "evict2", EVICT)).answer.applied
    await one.line.hear()
    assert disagreements(one) == []
    group = one.store.group(TENANT, G)
    assert group is not None
    assert group.state is GroupState.EVICTED


@pytest.mark.rule("KVC-IDEM-016")
async def test_a_place_and_its_token_say_the_same(one: Site) -> None:
    one.world.clock = ticking = iter(range(NOW_MS, NOW_MS + 10**6)).__next__  # type: ignore[assignment]
    one.node._now_ms = ticking
    place = (await ask(one, "op", PREPARE)).answer.place
    assert place is not None
    key = node_key(SECRET, "a")
    assert why_not(key, place.transfer_token, place.expires_ms - 1, block_group_id=G, epoch=1) == ""
    assert "expired" in why_not(key, place.transfer_token, place.expires_ms)
    assert (place.node, place.size_bytes, place.checksum) == ("a", 100, "sum of g")
    assert place.handoff == place.transfer_token


@pytest.mark.rule("KVC-IDEM-016")
async def test_a_loan_that_ends_before_it_is_written_down_does_not_stand(one: Site) -> None:
    """Its transfer would keep the group from being evicted until it expires."""
    assert one.life is not None
    run_ = one.life.writer.run

    async def slow(write: Any) -> Any:
        (token,) = one.alive.loans
        one.alive.end_loan(token)
        assert one.line is not None
        await one.line.hear()
        return await run_(write)

    one.life.writer.run = slow  # type: ignore[method-assign]
    assert (await ask(one, "op", PREPARE)).answer.applied
    one.life.writer.run = run_  # type: ignore[method-assign]
    assert disagreements(one) == []
    assert (await ask(one, "evict", EVICT)).answer.applied
    assert one.node._lending == {}


@pytest.mark.rule("KVC-IDEM-012")
@pytest.mark.parametrize("request_", [PIN, PREPARE, EVICT, START, RESERVE])
@pytest.mark.parametrize("when", ["before", "after it has asked"])
async def test_nothing_is_done_for_a_caller_whose_deadline_is_over(one: Site, request_: Request, when: str) -> None:
    before = picture(one)
    assert one.line is not None
    if when == "before":
        with within(0), pytest.raises(CallerGone):
            await one.node.write(TENANT, "op", NOW_MS, request_)
        assert one.line.asked == [q for q in one.line.asked if isinstance(q, link.Sync)]
    else:
        asked = one.line.ask

        async def late(question: link.Question) -> link.Said:
            said = await asked(question)
            await asyncio.sleep(0.06)
            return said

        one.line.ask = late  # type: ignore[method-assign]
        with within(0.05):
            if request_ is RESERVE:
                await one.node.write(TENANT, "op", NOW_MS, request_)  # it asks nothing, and is in time
                return
            with pytest.raises(CallerGone):
                await one.node.write(TENANT, "op", NOW_MS, request_)
    assert picture(one) == before
    assert disagreements(one) == []
    assert one.node._lending == {}
    assert one.store.look(TENANT, "op") is None


@pytest.mark.rule("KVC-IDEM-012")
async def test_a_caller_that_hangs_up_is_not_served_or_is_served_to_the_end(one: Site) -> None:
    """At every turn of the loop: either nothing is done, or a retry finds it done; the engine agrees with either."""
    assert one.line is not None
    one.line.delay = lambda: 1
    ends = set()
    for turns in range(40):
        operation_id, request_id = f"op{turns}", f"r{turns}"
        task = asyncio.create_task(
            one.node.write(TENANT, operation_id, NOW_MS, OTHER(PIN, request_id=request_id))
        )  # fmt: skip
        for _ in range(turns):
            await asyncio.sleep(0.0003)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await one.world.rest()
        ends.add(record := one.store.look(TENANT, operation_id) is not None)
        assert disagreements(one) == [], turns
        again = await ask(one, operation_id, OTHER(PIN, request_id=request_id))
        assert again.replayed == record
        await ask(one, f"un{turns}", OTHER(UNPIN, request_id=request_id))
    assert ends == {True, False}


@pytest.mark.parametrize("request_", [PIN, PREPARE, EVICT, START])
async def test_without_an_engine_what_needs_it_is_unavailable_and_changes_nothing(one: Site, request_: Request) -> None:
    before = picture(one)
    assert one.line is not None
    one.line.linked = False
    with pytest.raises(NoEngine):
        await one.node.write(TENANT, "op", NOW_MS, request_)
    assert issubclass(NoEngine, Unavailable)
    assert picture(one) == before
    assert one.store.look(TENANT, "op") is None
    assert (await one.node.write(TENANT, "reserve", NOW_MS, RESERVE)).answer.applied
    assert (await one.node.write(TENANT, "unpin", NOW_MS, UNPIN)).answer.applied
    await one.line.come()
    assert disagreements(one) == []


async def test_a_migration_is_driven_even_if_the_engine_goes_as_soon_as_it_is_decided(one: Site) -> None:
    idle = one.node.migrations
    assert one.life is not None
    run_ = one.life.writer.run

    async def parting(write: Any) -> Any:
        done = await run_(write)
        assert one.line is not None
        one.line.linked = False
        return done

    one.life.writer.run = parting  # type: ignore[method-assign]
    assert (await one.node.write(TENANT, "move", NOW_MS, START)).answer.applied
    assert isinstance(idle, Idle)
    assert idle.driven == ["move"]
    assert one.line is not None
    await one.line.come()
    assert disagreements(one) == []


@pytest.mark.parametrize("error", [QueueFull("full"), StoreError("locked", "locked")])
@pytest.mark.parametrize("request_", [PIN, PREPARE, UNPIN])
async def test_a_store_that_is_busy_before_or_after_a_write_leaves_an_engine_that_agrees(
    one: Site, request_: Request, error: Exception
) -> None:
    assert one.life is not None
    if request_ is UNPIN:
        await ask(one, "pin", PIN)
    writer, failing = one.life.writer, 0
    run_, call = writer.run, writer.call

    async def run_or_fail(write: Any) -> Any:
        nonlocal failing
        failing = 4
        if request_ is UNPIN:
            return await run_(write)
        raise error

    async def call_or_fail(method: Any) -> Any:
        nonlocal failing
        if failing:
            failing -= 1
            raise error
        return await call(method)

    writer.run, writer.call = run_or_fail, call_or_fail  # type: ignore[method-assign]
    if request_ is UNPIN:
        assert (await one.node.write(TENANT, "op", NOW_MS, request_)).answer.applied
    else:
        with pytest.raises(type(error)):
            await one.node.write(TENANT, "op", NOW_MS, request_)
    writer.run = run_  # type: ignore[method-assign]
    await one.world.rest()
    writer.call = call  # type: ignore[method-assign]
    assert disagreements(one) == []
    assert (one.node._telling, one.node._lending) == (set(), {})


@pytest.mark.rule("KVC-IDEM-001")
async def test_a_retry_asks_nothing_of_the_engine(one: Site) -> None:
    assert one.line is not None
    for number, request in enumerate((PIN, PREPARE, UNPIN, START)):
        first = await ask(one, f"op{number}", request)
        asked = len(one.line.asked)
        again = await ask(one, f"op{number}", request)
        assert (again.answer, again.replayed, len(one.line.asked)) == (first.answer, True, asked)


@pytest.mark.rule("KVC-IDEM-004")
@pytest.mark.parametrize("request_", [PIN, PREPARE, EVICT, START])
async def test_an_id_used_for_something_else_leaves_nothing_at_the_engine(one: Site, request_: Request) -> None:
    await ask(one, "op", RESERVE)
    before = picture(one)
    refused = await ask(one, "op", request_)
    assert refused.answer.refusal is Refusal.ID_REUSED
    assert picture(one) == before
    late = await one.node.write(TENANT, "late", NOW_MS - 2 * WINDOW_MS, request_)
    assert late.answer.refusal is Refusal.ID_EXPIRED
    assert picture(one) == before


@pytest.mark.rule("KVC-IDEM-006")
async def test_concurrent_retries_of_one_operation_have_one_effect_and_one_answer(one: Site) -> None:
    assert one.line is not None
    one.line.delay = delays(1)
    for number, request in enumerate((PIN, PREPARE, UNPIN, START)):
        done = await asyncio.gather(*(one.node.write(TENANT, f"op{number}", NOW_MS, request) for _ in range(20)))
        assert len({msgspec.json.encode(d.answer) for d in done}) == 1
        assert sum(not d.replayed for d in done) == 1
    assert disagreements(one) == []


@pytest.mark.rule("KVC-IDEM-019")
async def test_an_operation_is_in_progress_until_it_is_done_and_never_unknown_between(one: Site) -> None:
    assert one.line is not None
    one.line.delay = lambda: 3
    seen: list[Known] = []
    assert await one.node.operation(TENANT, "op", NOW_MS) == (Known.UNKNOWN, None)
    task = asyncio.create_task(one.node.write(TENANT, "op", NOW_MS, PIN))
    await asyncio.sleep(0)
    while not seen or seen[-1] is not Known.DONE:
        seen.append((await one.node.operation(TENANT, "op", NOW_MS))[0])
    assert set(seen) == {Known.IN_PROGRESS, Known.DONE}
    assert await one.node.operation(TENANT, "op", NOW_MS) == (Known.DONE, (await task).answer)


@pytest.mark.rule("KVC-IDEM-019")
async def test_an_operation_that_ends_while_it_is_asked_for_is_not_unknown(one: Site) -> None:
    """What the store says is old by the time it is heard."""
    call, asker = one.node.call, asyncio.current_task()
    begun = asyncio.Event()

    async def slow(method: Any) -> Any:
        if asyncio.current_task() is not asker:
            await begun.wait()
            return await call(method)
        found = await call(method)
        begun.set()
        await writing
        return found

    one.node.call = slow  # type: ignore[method-assign]
    writing = asyncio.create_task(one.node.write(TENANT, "op", NOW_MS, RESERVE))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await one.node.operation(TENANT, "op", NOW_MS) == (Known.IN_PROGRESS, None)


@pytest.mark.rule("KVC-IDEM-008", "KVC-IDEM-019")
async def test_what_was_purged_is_expired_whatever_the_clock_shows(one: Site) -> None:
    await ask(one, "op", RESERVE)
    one.world.clock.now_ms += 3 * WINDOW_MS
    assert await one.node.call(lambda store: store.purge()) >= 1
    one.world.clock.now_ms -= 3 * WINDOW_MS
    assert await one.node.operation(TENANT, "op", NOW_MS) == (Known.EXPIRED, None)
    assert (await one.node.write(TENANT, "op", NOW_MS, RESERVE)).answer.refusal is Refusal.ID_EXPIRED


async def test_reads_tell_what_is_so(one: Site) -> None:
    await ask(one, "pin", PIN)
    found = await one.node.metadata(TENANT, G)
    assert found is not None
    assert (found[0].block_group_id, found[1]) == (G, 1)
    assert await one.node.metadata(TENANT, "none") is None
    assert await one.node.metadata("stranger", G) is None
    assert [(g.block_group_id, pins) for g, pins in await one.node.groups(TENANT, None, 10, "")] == [(G, 1)]
    assert await one.node.groups(TENANT, GroupState.EVICTED, 10, "") == []
    assert await one.node.migration(TENANT, "none") is None


class Storm:
    """Hundreds of clients on few groups, an engine that is slow, loses groups and is linked anew in between."""

    def __init__(self, made: World, seed: int) -> None:
        self.world, self.site, self.chance = made, made["a"], random.Random(seed)
        self.answers: dict[str, Done] = {}
        self.outcomes: set[tuple[str, str]] = set()

    def request(self) -> Request:
        name = f"g{self.chance.randint(0, 2)}"
        group = self.site.store.group(TENANT, name)
        epoch = group.epoch if group is not None and self.chance.random() < 0.9 else 1
        named: dict[str, Any] = {"block_group_id": name, "epoch": epoch}
        request_id = f"r{self.chance.randint(0, 30)}"
        match self.chance.choice(["pin"] * 4 + ["unpin"] * 4 + ["evict", "get", "reserve"]):
            case "pin":
                return Pin(**named, request_id=request_id)
            case "unpin":
                return Unpin(**named, request_id=request_id)
            case "evict":
                return Evict(**named)
            case "get":
                return PrepareGet(**named, request_id=request_id)
            case _:
                return Reserve(**named, slots=1)

    async def client(self, number: int) -> None:
        for turn in range(3):
            request, operation_id = self.request(), f"op{number}.{turn}"
            tries = self.chance.choice([1, 1, 2])
            done = await asyncio.gather(*(ask(self.site, operation_id, request, tries=500) for _ in range(tries)))
            assert len({msgspec.json.encode(d.answer) for d in done}) == 1
            self.answers[operation_id] = done[0]
            self.outcomes.add((type(request).__name__, done[0].answer.refusal))
            if self.chance.random() < 0.1:
                task = asyncio.create_task(ask(self.site, operation_id + "c", self.request()))
                await asyncio.sleep(self.chance.random() * 0.01)
                task.cancel()

    async def weather(self) -> None:
        """What the engine does by itself, and what happens to the link."""
        while True:
            await asyncio.sleep(0.002)
            line, engine = self.site.line, self.site.alive
            assert line is not None
            name = f"g{self.chance.randint(0, 2)}"
            kind = self.chance.random()
            if kind < 0.3:
                engine.publish(name)
            elif kind < 0.5:
                engine.lose(name)
            elif kind < 0.6 and engine.loans:
                engine.end_loan(self.chance.choice(sorted(engine.loans)))
            elif kind < 0.7:
                line.linked = False
                await line.come()
            await line.hear()


@pytest.mark.rule("KVC-IDEM-006", "KVC-IDEM-009", "KVC-IDEM-010")
@pytest.mark.parametrize("seed", range(6))
async def test_a_storm_of_clients_on_few_groups_loses_nothing_and_locks_nobody_out(seed: int, tmp_path: Path) -> None:
    async with world(tmp_path, "a", groups=("g0", "g1", "g2")) as made:
        storm = Storm(made, seed)
        site = made["a"]
        assert site.line is not None
        site.line.delay = delays(seed)
        weather = asyncio.create_task(storm.weather())
        async with asyncio.timeout(60):
            await asyncio.gather(*(storm.client(number) for number in range(70)))
        weather.cancel()
        await asyncio.gather(weather, return_exceptions=True)
        await made.rest()
        if not site.line.linked:
            await site.line.come()
        await site.line.hear()
        await made.rest()
        assert disagreements(site) == []
        assert len(storm.answers) == 210
        for operation_id, done in storm.answers.items():
            record = site.store.look(TENANT, operation_id)
            assert record is not None
            assert record.answer == done.answer, "an answer once given stands"
        applied = [d for d in storm.answers.values() if d.answer.outcome is Outcome.APPLIED]
        assert len(applied) > 50
        effects: dict[tuple[str, str, str], int] = {}
        for effect in site.store.effects():
            if effect.cause == "client":
                key = (effect.operation_id, effect.kind, effect.key)
                effects[key] = effects.get(key, 0) + 1
        assert set(effects.values()) == {1}, "one effect each"
        assert site.node.gate._operations == 0
        assert site.node._running == {}


async def test_the_kit_itself_notices_an_engine_that_forgets_to_let_go(one: Site) -> None:
    """The broken twin: what the sweeps look for, they would find."""
    await ask(one, "pin", PIN)
    one.alive.groups[G].held = False
    assert disagreements(one)
    one.alive.groups[G].held = True
    one.alive.loans["xfer"] = G
    assert disagreements(one)
    one.world.crash_at(1, "a", "service")
    assert one.life is not None
    with pytest.raises(Crash):
        one.world.reach(one.life)
    await one.world.rest()

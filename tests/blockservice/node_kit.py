"""Nodes in one process, over real stores, beside engines of a few lines; either can die at any point of any call.

A `World` has sites (a, b, ...), each with a store's file, an engine and, one after the other, the lives of a service.
It counts the points that are passed: each question to an engine before and after it was carried out, each commit, each
call of a peer. At the one that was chosen somebody dies, and comes back.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from reference_impl.blockservice import link
from reference_impl.blockservice.buckets import RateLimited
from reference_impl.blockservice.engine_link import NoEngine
from reference_impl.blockservice.errors import Unavailable
from reference_impl.blockservice.failpoints import FailPoints
from reference_impl.blockservice.migration import Migrator, PeerUnreachable
from reference_impl.blockservice.node import TENANT, BlockNode
from reference_impl.blockservice.store import Done, Store, StoreError
from reference_impl.blockservice.wire import AcceptOrder, Copy, SettleOrder
from reference_impl.blockservice.writer import QueueFull, Writer
from reference_impl.rules.blockgroups import Answer, Group, GroupState, Request
from reference_impl.rules.transfer_tokens import node_key
from tests.blockservice.store_kit import NOW_MS, Clock, Crash

SECRET: Final = b"secret"
LIMIT_S: Final = 20.0
Side = Literal["service", "engine"]
MOVING: Final = (GroupState.MIGRATING_OUT, GroupState.MIGRATING_IN)


def group_of(name: str, location: str = "a") -> Group:
    return Group(block_group_id=name, location=location, size_bytes=100, token_end=16, checksum=f"sum of {name}")


class _Kept:
    """A group in an engine's pool."""

    def __init__(self, group: Group, *, held: bool = False, known: bool = False) -> None:
        self.group, self.held, self.known = group, held, known


class Engine:
    """An engine's groups as its service sees them. Reads take `polls` questions."""

    lives = itertools.count(1)

    def __init__(self, site: Site) -> None:
        self.site = site
        self.incarnation = f"{site.name}.{next(self.lives)}"
        self.groups: dict[str, _Kept] = {}
        self.loans: dict[str, str] = {}
        self.leased: set[str] = set()
        """Groups that running requests use."""
        self.copies: dict[str, tuple[link.Fetch, int]] = {}
        """Under way, with the questions that they still take."""
        self.copied: dict[str, link.Copy] = {}
        self.fetched: list[str] = []
        """Every copy that was begun."""

    def has(self, *names: str) -> None:
        """Have groups without a word: they are in the next introduction."""
        for name in names:
            self.groups[name] = _Kept(group_of(name, self.site.name))

    def publish(self, name: str) -> None:
        if name not in self.groups:
            self.has(name)
            self.tell(link.Publish(self.groups[name].group))

    def lose(self, name: str) -> None:
        """Use a group's blocks for something else, if that can be."""
        kept = self.groups.get(name)
        if kept is not None and not kept.held and name not in self.loans.values():
            del self.groups[name]
            self.tell(link.Gone([name]))

    def end_loan(self, token: str) -> None:
        if self.loans.pop(token, None) is not None:
            self.tell(link.Ended([token]))

    def tell(self, message: link.Publish | link.Gone | link.Ended) -> None:
        """Tell it, if somebody hears it; one who is being introduced hears it after that."""
        line = self.site.line
        if line is not None and (line.linked or line.introducing is self):
            line.heard.append(message)

    def hello(self) -> link.Hello:
        return link.Hello(
            self.incarnation, [k.group for k in self.groups.values() if not k.known],
            [name for name, k in self.groups.items() if k.known], sorted(self.loans),
        )  # fmt: skip

    def held(self) -> set[str]:
        return {name for name, kept in self.groups.items() if kept.held}

    def answer(self, question: link.Question) -> link.Said:
        said = link.Said(0)
        match question:
            case link.Hold():
                kept = self._known(question.block_group_id)
                if kept is not None:
                    kept.held = question.held
                said = link.Said(0, here=kept is not None)
            case link.Look():
                name = question.block_group_id
                used = name in self.leased or name in self.loans.values()
                said = link.Said(0, here=self._known(name) is not None, in_use=used)
            case link.Lend() if self._known(question.block_group_id) is not None:
                self.loans[question.token] = question.block_group_id
                said = link.Said(0, here=True, handoff=question.token, digests=[question.block_group_id.encode()])
            case link.TakeBack():
                self.end_loan(question.token)
            case link.Drop():
                self._drop(question.block_group_id)
            case link.Fetch():
                said = link.Said(0, copy=self._fetch(question))
            case link.Noted():
                kept = self.groups.get(question.block_group_id)
                if kept is not None:
                    kept.known = True
                said = link.Said(0, here=kept is not None)
            case link.Sync():
                self._sync(question)
            case _:
                pass
        return said

    def _known(self, name: str) -> _Kept | None:
        kept = self.groups.get(name)
        return kept if kept is not None and kept.known else None

    def _drop(self, name: str) -> None:
        self.groups.pop(name, None)
        self.copies = {m: c for m, c in self.copies.items() if c[0].group.block_group_id != name}

    def _sync(self, sync: link.Sync) -> None:
        wanted = {known.block_group_id: known.held for known in sync.groups}
        for name in self.groups.keys() | {fetch.group.block_group_id for fetch, _ in self.copies.values()}:
            if name not in wanted:
                self._drop(name)
            elif name in self.groups:
                self.groups[name].known, self.groups[name].held = True, wanted[name]
        for token in self.loans.keys() - set(sync.loans):
            self.end_loan(token)

    def _fetch(self, fetch: link.Fetch) -> link.Copy:
        done = self.copied.get(fetch.migration)
        if done is not None and done.state == "COPIED" and fetch.group.block_group_id in self.groups:
            return done
        begun = self.copies.get(fetch.migration)
        if begun is None:
            self.fetched.append(fetch.migration)
            begun = self.copies[fetch.migration] = (fetch, self.site.world.polls)
        fetch, left = begun
        if left:
            self.copies[fetch.migration] = (fetch, left - 1)
            return link.Copy("ARRIVING")
        del self.copies[fetch.migration]
        self.copied[fetch.migration] = copy = self._read(fetch)
        return copy

    def _read(self, fetch: link.Fetch) -> link.Copy:
        source = self.site.world.sites[fetch.group.location].engine
        if source is None or fetch.handoff not in source.loans:
            return link.Copy("FAILED", "no lease: it has ended, or never was")
        source.end_loan(fetch.handoff)
        name = fetch.group.block_group_id
        self.groups[name] = _Kept(fetch.group, held=True, known=True)
        return link.Copy("COPIED")


class Line:
    """The link between a life of a service and its engine (`EngineLink`, as a node sees it)."""

    def __init__(self, life: Life) -> None:
        self._life, self._site = life, life.site
        self.heard: list[link.Publish | link.Gone | link.Ended] = []
        self.linked = False
        self.introducing: Engine | None = None
        self._one_at_a_time = asyncio.Lock()
        self._coming: asyncio.Task[Any] | None = None
        self.delay: Callable[[], int] = lambda: 0
        """Turns of the event loop that a question takes, each way."""
        self.asked: list[link.Question] = []

    async def ask(self, question: link.Question) -> link.Said:
        engine, world = self._site.engine, self._site.world
        self._check(engine)
        self.asked.append(question)
        world.reach(self._life)
        await self._pass()
        self._check(engine)
        assert engine is not None
        said = engine.answer(question)
        await self._pass()
        world.reach(self._life)
        self._check(engine)
        return said

    async def _pass(self) -> None:
        for _ in range(self.delay()):
            await asyncio.sleep(0)

    def _check(self, engine: Engine | None) -> None:
        self._life.check()
        if engine is None or engine is not self._site.engine:
            raise NoEngine("the engine has gone")
        if not self.linked and asyncio.current_task() is not self._coming:
            raise NoEngine("the engine is being told what there is")

    async def come(self) -> None:
        """Have the engine introduce itself, if there is one; harmless while it is linked."""
        async with self._one_at_a_time:
            engine = self._site.engine
            if self.linked or engine is None or self._life.dead:
                return
            self.heard, self.introducing, self._coming = [], engine, asyncio.current_task()
            try:
                await self._life.node.came(engine.hello())
                self.linked = engine is self._site.engine
            except (NoEngine, Crash, StoreError, QueueFull):
                return
            finally:
                self.introducing = None

    async def hear(self) -> None:
        """Take in what the engine has said, in order."""
        while self.heard and self.linked:
            try:
                await self._life.node.said(self.heard.pop(0))
            except (NoEngine, Crash, StoreError, QueueFull):
                self.linked = False  # and it comes again
            except asyncio.CancelledError:
                self.linked = False  # what was heard by half is told anew
                raise


class MortalStore(Store):
    """A store whose process may die at each commit; what a dead one is asked is not done."""

    life: Life | None = None

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        if self.life is not None:
            self.life.check()
        with super()._explained(what):
            yield

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with super()._transaction() as db:
            yield db
            self.reach("before_commit")
        self.reach("after_commit")

    def reach(self, _point: str) -> None:
        if self.life is not None:
            self.life.site.world.reach(self.life)


class Idle:
    """A migrator that writes down what it is told to drive."""

    def __init__(self) -> None:
        self.driven: list[str] = []

    def drive(self, _tenant: str, operation_id: str) -> None:
        self.driven.append(operation_id)


class Life:
    """One life of a service."""

    def __init__(self, site: Site) -> None:
        self.site, self.dead = site, False
        world = site.world
        self.store = MortalStore(
            site.path, site.name, nodes=frozenset(world.sites), now_ms=world.clock, reached=self._reached
        )  # fmt: skip
        self.store._db.execute("PRAGMA synchronous = OFF")  # nobody pulls the plug here
        self.store.life = self
        self._reader: Store | None = None
        self.writer = Writer(self.store)
        self.events: list[tuple[Any, str, dict[str, Any]]] = []
        self.node = BlockNode(
            site.name, self.writer, node_key(SECRET, site.name), self._say, now_ms=world.clock
        )  # fmt: skip
        self.line = Line(self)
        self.node.engine = self.line  # type: ignore[assignment]
        self.migrator = Migrator(
            self.node, lambda name: DirectPeer(world, self, name), self._take_bytes, world.points, limit_s=world.limit_s
        )  # fmt: skip
        self.taken: list[tuple[str, int]] = []
        """Of the bucket of migrations' bytes."""
        if world.still:
            self.node.migrations = Idle()  # type: ignore[assignment]

    def _say(self, kind: Any, subject: str, **detail: Any) -> None:
        self.events.append((kind, subject, detail))

    async def _take_bytes(self, tenant: str, size_bytes: int) -> None:
        self.taken.append((tenant, size_bytes))
        await self.site.world.bucket()

    def _reached(self, point: str) -> None:
        self.store.reach(point)

    @property
    def reader(self) -> Store:
        """The same file, to look at while the writer's thread has the other connection."""
        if self._reader is None:
            self._reader = Store(self.site.path, self.site.name, now_ms=self.site.world.clock)
        return self._reader

    def check(self) -> None:
        """Raise Crash if this life is over."""
        if self.dead:
            raise Crash

    async def end(self) -> None:
        """Leave nothing of it behind but its file."""
        self.dead = True
        tasks = [*self.node._tasks, *self.migrator._driving.values(), *self.migrator._paying.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.writer.close()
        self.store.close()
        if self._reader is not None:
            self._reader.close()


class DirectPeer:
    """Another node's service, as a call in this process; what fails there is not told here."""

    def __init__(self, world: World, caller: Life, name: str) -> None:
        self._world, self._caller, self._name = world, caller, name

    async def accept(self, order: AcceptOrder) -> tuple[Copy, str]:
        result: tuple[Copy, str] = await self._call(lambda node: node.accept(order))
        return result

    async def settle(self, order: SettleOrder) -> Copy:
        result: Copy = await self._call(lambda node: node.settle(order))
        return result

    async def _call(self, method: Callable[[BlockNode], Any]) -> Any:
        self._caller.check()
        self._world.reach(self._caller)
        self._caller.check()
        if self._world.loses():
            raise PeerUnreachable("the call was lost")
        life = self._world.sites[self._name].life
        try:
            if life is None or life.dead:
                raise PeerUnreachable("nobody listens")
            result = await method(life.node)
        except (Unavailable, StoreError, QueueFull, RateLimited, Crash) as error:
            self._caller.check()
            raise PeerUnreachable(repr(error)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise PeerUnreachable("it died meanwhile") from None
        self._world.reach(self._caller)
        self._caller.check()
        if self._world.loses():
            raise PeerUnreachable("the answer was lost")
        return result


class Site:
    """A node: its file, its engine, and the life that its service leads now."""

    def __init__(self, world: World, name: str, folder: Path) -> None:
        self.world, self.name, self.path = world, name, folder / f"{name}.sqlite"
        self.engine: Engine | None = Engine(self)
        self.life: Life | None = None
        self.engines_died = 0

    @property
    def line(self) -> Line | None:
        return self.life.line if self.life is not None and not self.life.dead else None

    @property
    def node(self) -> BlockNode:
        assert self.life is not None
        return self.life.node

    @property
    def store(self) -> Store:
        assert self.life is not None
        return self.life.reader

    @property
    def alive(self) -> Engine:
        assert self.engine is not None
        return self.engine

    async def start(self) -> None:
        """Begin a life of the service, and link it."""
        if self.life is not None:
            await self.life.end()
        self.life = Life(self)
        await self.life.line.come()
        if not self.world.still:
            await self.life.migrator.resume()

    async def restart(self, side: Side) -> None:
        """Come back from a death."""
        if side == "service":
            await self.start()
        else:
            self.engine = Engine(self)
            if self.life is not None and not self.life.dead:
                await self.life.line.come()

    def die(self, side: Side) -> None:
        if side == "service":
            assert self.life is not None
            self.life.dead = True
        else:
            self.engine, self.engines_died = None, self.engines_died + 1
            if self.line is not None:
                self.line.linked = False


class World:
    """Some sites. `crash_at(n, site, side)` chooses who dies at the n-th point from then on.

    `still`: nobody drives migrations.
    """

    def __init__(
        self, folder: Path, *names: str, polls: int = 2, limit_s: float = LIMIT_S, still: bool = False
    ) -> None:  # fmt: skip
        self.still = still
        self.clock = Clock(NOW_MS - 1)  # when the stores are made: nothing issued before that is run
        self.polls, self.limit_s = polls, limit_s
        self.points: FailPoints | None = None
        self.sites: dict[str, Site] = {}
        for name in names or ("a",):
            self.sites[name] = Site(self, name, folder)
        self.passed = 0
        self.crashed = False
        self._crash: tuple[int, str, Side] | None = None
        self._loss: int | None = None
        self._loop = asyncio.get_running_loop()
        self._recovering: list[asyncio.Task[None]] = []

    def __getitem__(self, name: str) -> Site:
        return self.sites[name]

    async def bucket(self) -> None:
        """What taking from a bucket takes."""

    def crash_at(self, number: int, site: str, side: Side) -> None:
        self.passed, self.crashed, self._crash = 0, False, (number, site, side)

    def lose_at(self, number: int) -> None:
        """Lose the n-th of the calls and answers between nodes."""
        self.crashed, self._loss = False, number

    def loses(self) -> bool:
        if self._loss is None:
            return False
        self._loss -= 1
        if self._loss:
            return False
        self._loss, self.crashed = None, True
        return True

    def reach(self, life: Life) -> None:
        """Pass a point, from whichever thread; raises Crash in the life that ends here."""
        self.passed += 1
        if self._crash is not None and self.passed == self._crash[0]:
            _, name, side = self._crash
            self._crash, self.crashed = None, True
            self.sites[name].die(side)
            self._loop.call_soon_threadsafe(self._recover, name, side)
        life.check()

    def _recover(self, name: str, side: Side) -> None:
        self._recovering.append(asyncio.create_task(self.sites[name].restart(side)))

    async def rest(self) -> None:
        """Return when everything has come to an end that will."""
        async with asyncio.timeout(LIMIT_S):
            while not await self._quiet():
                await asyncio.sleep(0.002)

    async def _quiet(self) -> bool:
        for task in self._recovering:
            await task
        busy = False
        for site in self.sites.values():
            assert site.life is not None
            if site.life.dead:
                return False
            await site.life.line.hear()
            if not site.life.line.linked:
                await site.life.line.come()
                busy = True
            busy = busy or bool(site.life.node._tasks or site.life.migrator._driving or site.life.line.heard)
        return not busy

    async def end(self) -> None:
        self._crash = None
        for task in self._recovering:
            await task
        for site in self.sites.values():
            if site.life is not None:
                await site.life.end()


@asynccontextmanager
async def world(folder: Path, *names: str, groups: tuple[str, ...] = ("g",), **options: Any) -> AsyncIterator[World]:
    """Sites of which the first one's engine has some groups."""
    folder.mkdir(parents=True, exist_ok=True)
    made = World(folder, *names, **options)
    next(iter(made.sites.values())).alive.has(*groups)
    for site in made.sites.values():
        await site.start()
    try:
        yield made
    finally:
        await made.end()


async def ask(site: Site, operation_id: str, request: Request, *, tries: int = 50) -> Done:
    """Run an operation as a client does: again, with its id, until there is an answer."""
    for _ in range(tries):
        try:
            return await site.node.write(TENANT, operation_id, NOW_MS, request)
        except (Unavailable, StoreError, QueueFull, Crash, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            await asyncio.sleep(0.001)
            for recovering in site.world._recovering:
                await recovering
            if site.line is not None and not site.line.linked:
                await site.line.come()
    raise AssertionError(f"{operation_id} has no answer")


def plain(answer: Answer) -> Answer:
    """Return an answer without what is drawn anew each time."""
    if answer.place is None:
        return answer
    place = msgspec.structs.replace(answer.place, transfer_token="token", handoff="handoff")
    return msgspec.structs.replace(answer, place=place)


def picture(site: Site) -> tuple[Any, ...]:
    """Return what is so in the end: the groups with their pins, what clients' operations changed, and the engine."""
    effects = [
        (e.operation_id, e.kind, e.key if e.kind != "transfer" else "token", e.before if e.kind != "transfer" else "",
         e.after if e.kind != "transfer" else "")
        for e in site.store.effects() if e.cause == "client"
    ]  # fmt: skip
    engine = site.alive
    return (
        list(site.store.finals()), effects, len(site.store.open_transfers()),
        {name: kept.held for name, kept in engine.groups.items()}, sorted(engine.loans.values()),
    )  # fmt: skip


def disagreements(site: Site) -> list[str]:
    """Return in what a node's store and its engine differ, once everything is at rest."""
    engine, wanted = site.alive, site.store.wanted()
    found = []
    held = {group.block_group_id for _, group, held in wanted if held and group.state is not GroupState.MIGRATING_IN}
    if engine.held() != held:
        found.append(f"the engine holds {engine.held()}, pinned or moving are {held}")
    here = {group.block_group_id for _, group, _ in wanted if group.state is not GroupState.MIGRATING_IN}
    known = {name for name, kept in engine.groups.items() if kept.known}
    if not here <= engine.groups.keys():
        found.append(f"the engine has {engine.groups.keys()}, here are {here}")
    if known - here and not _came_back(site, known - here):
        found.append(f"the engine keeps {known - here} for nobody")
    if set(engine.loans) != set(site.store.open_transfers()):
        found.append(f"loans {engine.loans}, transfers {site.store.open_transfers()}")
    if engine.copies:
        found.append(f"copies {engine.copies} are under way for nobody")
    return found


def _came_back(site: Site, names: set[str]) -> bool:
    """Whether these are groups of another node whose prompt has been computed here again: a cache, no more."""
    groups = [site.store.group(TENANT, name) for name in names]
    return all(group is not None and group.state is GroupState.MOVED for group in groups)


def delays(seed: int) -> Callable[[], int]:
    """Return short random waits."""
    chance = random.Random(seed)
    return lambda: chance.choice([0, 0, 1, 2, 5])

"""The link of a service and its engine, over a real socket: whatever one side does costs its own connection only."""

from __future__ import annotations

import asyncio
import stat
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec
import pytest

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice import blocks_pb2_grpc as rpc
from reference_impl.blockservice import engine_link, link
from reference_impl.blockservice.engine_link import HEARD_MAX, EngineLink, NoEngine
from reference_impl.blockservice.migration import PeerUnreachable
from reference_impl.blockservice.peers import Address, RemoteNode, write_address
from reference_impl.blockservice.store import StoreError
from reference_impl.blockservice.wire import SettleOrder
from reference_impl.engine.block_groups import BlockGroups
from reference_impl.engine.block_link import BlockLink
from reference_impl.rules.blockgroups import MigrationStatus
from tests.blockservice.node_kit import group_of
from tests.engine.cores import make_core, prompt, run

LIMIT_S: Final = 10.0
HELLO: Final = link.Hello("e1", [group_of("g")], ["h"], ["xfer-1"])
LOOK: Final = link.Look("g")
HEADER: Final = struct.Struct("!I")


class Service:
    """The service's side, and what it took in."""

    def __init__(self, path: Path, *, ask_limit_s: float = LIMIT_S, hello_limit_s: float = LIMIT_S) -> None:
        self.path = path
        self.came_with: list[link.Hello] = []
        self.heard: list[Any] = []
        self.coming: Callable[[], Any] = lambda: self.link.ask(link.Sync([], []))
        self.saying: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.link = EngineLink(
            path, self._came, self._said, ask_limit_s=ask_limit_s, hello_limit_s=hello_limit_s
        )  # fmt: skip

    async def _came(self, hello: link.Hello) -> None:
        self.came_with.append(hello)
        await self.coming()

    async def _said(self, message: Any) -> None:
        await self.saying()
        self.heard.append(message)


class Engine:
    """The engine's side, by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.wire: link.Stream[link.Ask] = link.Stream(reader, writer, link.Ask)
        self.asked: list[link.Question] = []
        self._answering: asyncio.Task[None] | None = None

    def answer(self, **fields: Any) -> None:
        """Answer everything from now on."""
        self._answering = asyncio.create_task(self._answer(fields))

    async def _answer(self, fields: dict[str, Any]) -> None:
        while True:
            ask = await self.wire.receive()
            self.asked.append(ask.question)
            self.wire.send(link.Said(ask.number, **fields))

    async def gone(self) -> bool:
        """Wait until the service has let this one go."""
        if self._answering is not None:
            result = await asyncio.wait_for(asyncio.gather(self._answering, return_exceptions=True), LIMIT_S)
            return isinstance(result[0], link.LinkBroken)
        while True:
            try:
                await asyncio.wait_for(self.wire.receive(), LIMIT_S)
            except link.LinkBroken:
                return True

    async def close(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)
        await self.wire.close()


@asynccontextmanager
async def service(folder: Path, **limits: float) -> AsyncIterator[Service]:
    made = Service(folder / "engine.sock", **limits)
    await made.link.listen()
    try:
        yield made
    finally:
        await asyncio.wait_for(made.link.close(), LIMIT_S)
        assert not made.path.exists()
        assert made.link._waiting == {}


@asynccontextmanager
async def engine(served: Service, hello: link.Hello | None = HELLO, **fields: Any) -> AsyncIterator[Engine]:
    made = Engine(*await asyncio.open_unix_connection(served.path))
    try:
        if hello is not None:
            made.wire.send(hello)
            made.answer(**fields)
            await until(lambda: served.link._told and served.link.incarnation == hello.incarnation)
        yield made
    finally:
        await made.close()


async def until(so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not so():
            await asyncio.sleep(0.002)


async def test_an_engine_is_told_everything_and_then_asked(tmp_path: Path) -> None:
    async with service(tmp_path) as served:
        assert stat.S_IMODE(served.path.stat().st_mode) == 0o600
        with pytest.raises(NoEngine, match="no engine is linked"):
            await served.link.ask(LOOK)
        async with engine(served, here=True, in_use=True) as one:
            assert served.came_with == [HELLO]
            said = await served.link.ask(LOOK)
            assert (said.here, said.in_use) == (True, True)
            assert one.asked == [link.Sync([], []), LOOK]
            one.wire.send(link.Publish(group_of("g")))
            one.wire.send(link.Gone(["g"]))
            one.wire.send(link.Ended(["xfer-1"]))
            one.wire.send(HELLO)  # once more: it is not another
            await until(lambda: len(served.heard) == 3)
            assert served.heard == [link.Publish(group_of("g")), link.Gone(["g"]), link.Ended(["xfer-1"])]
        await until(lambda: not served.link.incarnation)
        with pytest.raises(NoEngine):
            await served.link.ask(LOOK)


async def test_the_socket_of_a_dead_predecessor_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    path.write_text("what a crash left")
    path.chmod(0o666)
    async with service(tmp_path) as served:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with engine(served):
            assert (await served.link.ask(LOOK)).number


DAMAGED: Final = {
    "no frame": b"\x00\x00",
    "an empty frame": HEADER.pack(0),
    "a huge frame": HEADER.pack(link.FRAME_BYTES_MAX + 1) + b"x",
    "all bits": b"\xff" * 64,
    "half a frame": HEADER.pack(100) + b"x" * 50,
    "no msgpack": HEADER.pack(3) + b"\xc1\xc1\xc1",
    "another message": HEADER.pack(len(body := msgspec.msgpack.encode({"type": "look", "block_group_id": "g"}))) + body,
    "no text": HEADER.pack(len(bad := b"\x82\xa4type\xa4gone\xafblock_group_ids\x91\xa1\xff")) + bad,
    "deep": HEADER.pack(100_000) + b"\x91" * 100_000,
    "an http request": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
}


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("before", [True, False], ids=["instead of hello", "after hello"])
async def test_damaged_frames_cost_their_own_connection(tmp_path: Path, kind: str, before: bool) -> None:
    async with service(tmp_path) as served, engine(served, here=True):
        assert served.link.incarnation == "e1"
        if before:
            async with engine(served, None) as other:
                other.writer.write(DAMAGED[kind])
                other.writer.write_eof()
                assert await other.gone()
            assert (await served.link.ask(LOOK)).here, "the one that is linked has noticed nothing"
            assert len(served.came_with) == 1
            return
        async with engine(served, link.Hello("e2", [], [], [])) as other:
            other.writer.write(DAMAGED[kind])
            other.writer.write_eof()
            assert await other.gone()
        await until(lambda: not served.link.incarnation)
        async with engine(served, link.Hello("e3", [], [], []), here=True):
            assert (await served.link.ask(LOOK)).here


async def test_a_peer_that_says_something_else_than_hello_or_nothing_at_all_is_let_go(tmp_path: Path) -> None:
    async with service(tmp_path, hello_limit_s=0.1) as served:
        for message in (link.Gone(["g"]), link.Said(1, here=True), None):
            async with engine(served, None) as silent:
                if message is not None:
                    silent.wire.send(message)
                assert await silent.gone()
        assert (served.came_with, served.heard) == ([], [])


async def test_a_new_engine_takes_over_and_the_one_before_is_heard_no_more(tmp_path: Path) -> None:
    async with service(tmp_path) as served, engine(served, here=False) as old:
        async with engine(served, link.Hello("e2", [], [], []), here=True) as new:
            assert (await served.link.ask(LOOK)).here
            old.wire.send(link.Gone(["g"]))
            old.wire.send(link.Said(10**6, here=False))
            new.wire.send(link.Gone(["h"]))
            await until(lambda: bool(served.heard))
            await asyncio.sleep(0.05)
            assert served.heard == [link.Gone(["h"])]
            assert old.asked == [link.Sync([], [])]
            assert [hello.incarnation for hello in served.came_with] == ["e1", "e2"]
        await until(lambda: not served.link.incarnation)
        with pytest.raises(NoEngine):
            await served.link.ask(LOOK)


async def test_an_engine_whose_place_was_taken_may_come_back_when_the_other_has_gone(tmp_path: Path) -> None:
    async with service(tmp_path) as served, engine(served) as old:
        async with engine(served, link.Hello("e2", [], [], [])):
            await until(lambda: served.link.incarnation == "e2")
        assert await old.gone(), "it is parted, so that it connects anew and is told everything"


async def test_a_question_to_an_engine_that_is_replaced_fails_at_once_and_is_not_put_to_the_next(
    tmp_path: Path,
) -> None:
    async with service(tmp_path) as served, engine(served) as old:
        assert old._answering is not None
        old._answering.cancel()
        asking = asyncio.create_task(served.link.ask(LOOK))
        await asyncio.sleep(0.01)
        async with engine(served, link.Hello("e2", [], [], []), here=True) as new:
            with pytest.raises(NoEngine, match="has gone"):
                await asyncio.wait_for(asking, LIMIT_S)
            assert new.asked == [link.Sync([], [])]


async def test_an_introduction_that_is_overtaken_tells_nobody_anything(tmp_path: Path) -> None:
    """The first engine's `came` still runs when the second comes: what it would say is not for the second."""
    async with service(tmp_path) as served:
        slow = asyncio.Event()

        async def coming() -> None:
            if served.came_with[-1].incarnation == "e1":
                try:
                    await slow.wait()
                finally:
                    with pytest.raises(NoEngine):
                        await served.link.ask(link.Sync([], ["of the first"]))
            await served.link.ask(link.Sync([], [served.came_with[-1].incarnation]))

        served.coming = coming
        async with engine(served, None) as first:
            first.wire.send(HELLO)
            await until(lambda: len(served.came_with) == 1)
            async with engine(served, link.Hello("e2", [], [], [])) as second:
                slow.set()
                await asyncio.sleep(0.05)
                assert second.asked == [link.Sync([], ["e2"])]


async def test_while_an_engine_is_told_what_there_is_nobody_else_asks_it(tmp_path: Path) -> None:
    async with service(tmp_path) as served:
        refused: list[str] = []

        async def coming() -> None:
            other = asyncio.create_task(served.link.ask(LOOK))
            await asyncio.gather(other, return_exceptions=True)
            refused.append(str(other.exception()))
            await served.link.ask(link.Sync([], []))

        served.coming = coming
        async with engine(served, here=True) as one:
            assert refused == ["the engine has only just come, and is being told what there is"]
            assert one.asked == [link.Sync([], [])]
            assert (await served.link.ask(LOOK)).here


async def test_an_engine_that_does_not_answer_in_time_is_let_go_and_told_anew(tmp_path: Path) -> None:
    """It may do later what it was asked: only an introduction brings the two together again."""
    async with service(tmp_path, ask_limit_s=0.1) as served, engine(served) as one:
        assert one._answering is not None
        one._answering.cancel()
        await asyncio.gather(one._answering, return_exceptions=True)
        one._answering = None
        with pytest.raises(NoEngine, match=r"within 0\.1 s"):
            await served.link.ask(link.Hold("g", held=True))
        assert await one.gone()
        await until(lambda: not served.link.incarnation)


async def test_a_flood_costs_its_own_connection_and_bounded_room(tmp_path: Path) -> None:
    async with service(tmp_path) as served:
        served.saying = lambda: asyncio.sleep(3600)
        async with engine(served) as one:
            for _ in range(HEARD_MAX + 10):
                one.wire.send(link.Gone(["g"]))
            assert await one.gone()
        await until(lambda: not served.link.incarnation)
        served.saying = lambda: asyncio.sleep(0)
        async with engine(served, link.Hello("e2", [], [], []), here=True):
            assert (await served.link.ask(LOOK)).here


async def test_an_answer_is_heard_while_what_was_said_before_still_waits(tmp_path: Path) -> None:
    async with service(tmp_path) as served:
        go = asyncio.Event()
        served.saying = go.wait
        async with engine(served, here=True) as one:
            one.wire.send(link.Gone(["g"]))
            assert (await served.link.ask(LOOK)).here
            assert served.heard == []
            go.set()
            await until(lambda: bool(served.heard))


@pytest.mark.parametrize("where", ["came", "said"])
async def test_a_store_that_fails_while_an_engine_is_heard_makes_it_come_again(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "AGAIN_S", 0.01)
    async with service(tmp_path) as served:
        fine = served.coming

        async def failing() -> None:
            raise StoreError("full", "no room")

        if where == "came":
            served.coming = failing
            async with engine(served, None) as one:
                one.wire.send(HELLO)
                assert await one.gone()
        else:
            async with engine(served) as one:
                served.saying = failing
                one.wire.send(link.Gone(["g"]))
                assert await one.gone()
        served.coming, served.saying = fine, lambda: asyncio.sleep(0)
        await until(lambda: not served.link.incarnation)
        async with engine(served, here=True):
            assert (await served.link.ask(LOOK)).here


async def test_a_peer_that_reads_nothing_is_let_go_when_too_much_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "UNSENT_BYTES_MAX", 100_000)
    async with service(tmp_path) as served, engine(served) as one:
        assert one._answering is not None
        one._answering.cancel()
        one._answering = None
        asks = [asyncio.create_task(served.link.ask(link.Look("g" * 10_000))) for _ in range(200)]
        ended = await asyncio.wait_for(asyncio.gather(*asks, return_exceptions=True), LIMIT_S)
        assert {type(e) for e in ended} == {NoEngine}


async def test_closing_lets_everybody_go(tmp_path: Path) -> None:
    async with service(tmp_path) as served:
        served.saying = lambda: asyncio.sleep(3600)
        one = Engine(*await asyncio.open_unix_connection(served.path))
        one.wire.send(HELLO)
        one.answer()
        await until(lambda: served.link._told)
        one.wire.send(link.Gone(["g"]))
        two = Engine(*await asyncio.open_unix_connection(served.path))
        await asyncio.sleep(0.01)
        await asyncio.wait_for(served.link.close(), LIMIT_S)
        for other in (one, two):
            assert await other.gone()
            await other.close()


# The engine's side.


@asynccontextmanager
async def real_engine(path: Path) -> AsyncIterator[tuple[BlockGroups, Any]]:
    core, _ = make_core()
    groups = BlockGroups(core, None, worker_id="e", hosts=("127.0.0.1",))
    task = asyncio.create_task(BlockLink(path, core, groups, "e.1").run())
    try:
        yield groups, core
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_engine_outlives_its_service_and_tells_the_next_what_there_is(tmp_path: Path) -> None:
    async with real_engine(tmp_path / "engine.sock") as (groups, core):
        sequence = core.sequence("r", prompt(100), 1)
        run(core)
        async with service(tmp_path) as served:
            served.coming = lambda: served.link.ask(
                link.Sync([link.Known(g.block_group_id, held=True) for g in served.came_with[-1].groups], [])
            )  # fmt: skip
            await until(lambda: served.link._told)
            assert served.came_with == [link.Hello("e.1", [], [], [])]
            groups.noticed(sequence)
            await until(lambda: bool(served.heard))
            (publish,) = served.heard
            name = publish.group.block_group_id
            assert not (await served.link.ask(link.Hold(name, held=True))).here, "it is not written down yet"
            assert (await served.link.ask(link.Noted(name))).here
            assert (await served.link.ask(link.Hold(name, held=True))).here
        async with service(tmp_path) as again:
            again.coming = lambda: again.link.ask(link.Sync([link.Known(name, held=False)], []))
            await until(lambda: again.link._told)
            assert again.came_with == [link.Hello("e.1", [], [name], [])]
            said = await again.link.ask(link.Look(name))
            assert (said.here, said.in_use) == (True, False)
            await again.link.ask(link.Drop(name))
        assert core.pool.cached == 0


@pytest.mark.parametrize("kind", ["no msgpack", "a huge frame", "all bits", "half a frame"])
async def test_a_damaged_service_costs_an_engine_its_connection_only(tmp_path: Path, kind: str) -> None:
    connected = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connected
        connected += 1
        writer.write(DAMAGED[kind])
        writer.close()

    path = tmp_path / "engine.sock"
    server = await asyncio.start_unix_server(serve, path)
    async with real_engine(path):
        await until(lambda: connected > 1)
        server.close()
        async with service(tmp_path) as served:
            await until(lambda: served.link._told)


# The calls of one service to another.


class Mute(rpc.PeersServicer):  # type: ignore[misc, unused-ignore]
    """Answers nothing; says that it was called."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def Settle(self, _request: pb.SettleRequest, _context: Any) -> Any:  # noqa: N802 - gRPC's name
        self.called.set()
        await asyncio.Event().wait()


async def test_a_call_whose_connection_is_changed_under_it_is_unreachable_and_ends_no_migration(tmp_path: Path) -> None:
    """A service that comes back elsewhere: a call that waits at its old place must not end its caller."""
    mute, server = Mute(), grpc.aio.server()
    rpc.add_PeersServicer_to_server(mute, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    peer = RemoteNode(tmp_path, "b", b"the secret of this test")
    order = SettleOrder(operation_id="m", tenant="t", status=MigrationStatus.FAILED)
    with pytest.raises(PeerUnreachable, match="no block service yet"):
        await peer.settle(order)
    write_address(tmp_path, "b", Address("127.0.0.1", port))
    waiting = asyncio.create_task(peer.settle(order))
    await asyncio.wait_for(mute.called.wait(), LIMIT_S)
    write_address(tmp_path, "b", Address("127.0.0.1", 1))
    with pytest.raises(PeerUnreachable):
        await peer.settle(order)
    with pytest.raises(PeerUnreachable):
        await asyncio.wait_for(waiting, LIMIT_S)
    write_address(tmp_path, "b", Address("127.0.0.1", port))
    cancelled = asyncio.create_task(peer.settle(order))
    mute.called.clear()
    await asyncio.wait_for(mute.called.wait(), LIMIT_S)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await peer.close()
    await peer.close()
    await server.stop(None)

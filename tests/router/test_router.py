"""The router against fake engines: no failure passes unseen (KVC-ROUT-001, KVC-ROUT-002, KVC-LOCK-004)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from reference_impl.engine.registration import Registration, RegistrationError
from reference_impl.event_log import EventLog
from reference_impl.router.protocol import REGISTER_PATH, TOKEN_HEADER, Answer, Register
from reference_impl.router.server import Router
from reference_impl.rules.events import Event, EventKind
from tests.waiting import until_async

TOKEN = "the deployment's secret"


class FakeEngine:
    """Streams three events, and then what `ending` says: "done", "hang" (until `release`) or "break"."""

    def __init__(self, worker_id: str, epoch: int = 1, engine_id: str = "") -> None:
        self.worker_id, self.epoch = worker_id, epoch
        self.engine_id = engine_id or f"{worker_id}-e{epoch}"
        self.ending = "done"
        self.release = asyncio.Event()
        self.streaming = asyncio.Event()
        self.abandoned = asyncio.Event()
        self.requests = 0
        self.url = ""
        self.registration: Registration | None = None
        self.runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", self._answer)])
        self.runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def register(self, router: str, token: str = TOKEN) -> None:
        self.registration = Registration(router, token)
        await self.registration.register(Register(self.worker_id, self.engine_id, self.url, self.epoch))

    async def unregister(self) -> None:
        if self.registration is not None:
            await self.registration.close()

    async def stop(self) -> None:
        self.release.set()
        await self.unregister()
        if self.runner is not None:
            await self.runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.requests += 1
        if self.ending == "refuse":
            return web.json_response({"error": {"message": "bad"}}, status=400)
        headers = {"Content-Type": "text/event-stream", "x-pdproof-worker": self.worker_id}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for number in range(3):
            await response.write(f"data: {number}\n\n".encode())
        self.streaming.set()
        if self.ending == "hang":
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.abandoned.set()
                raise
        if self.ending == "break":
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


class Deployment:
    """A router and the engines that a test starts."""

    def __init__(self, events: Path) -> None:
        self.events_file = events
        self.runner = web.AppRunner(
            Router(TOKEN, EventLog(events, "router")).app, handler_cancellation=True, shutdown_timeout=0.1
        )
        self.url = ""
        self.session = aiohttp.ClientSession()
        self.engines: list[FakeEngine] = []

    async def engine(self, worker_id: str, epoch: int = 1, *, register: bool = True, name: str = "") -> FakeEngine:
        engine = FakeEngine(worker_id, epoch, name)
        self.engines.append(engine)
        await engine.start()
        if register:
            await engine.register(self.url)
        return engine

    async def ask(self) -> tuple[int, bytes, dict[str, str]]:
        """Return status, whole body and headers. Raises aiohttp.ClientPayloadError for a body that breaks off."""
        async with self.session.post(self.url + "/v1/completions", json={"prompt": [1]}) as response:
            return response.status, await response.read(), dict(response.headers)

    async def workers(self) -> list[str]:
        async with self.session.get(self.url + "/health") as response:
            return [w["engine_id"] for w in (await response.json())["workers"]]

    def events(self, kind: EventKind) -> list[Event]:
        lines = self.events_file.read_bytes().splitlines()
        return [e for e in (msgspec.json.decode(line, type=Event) for line in lines) if e.kind is kind]


@pytest_asyncio.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    running = Deployment(tmp_path / "events.jsonl")
    await running.runner.setup()
    await web.TCPSite(running.runner, "127.0.0.1", 0).start()
    running.url = f"http://127.0.0.1:{running.runner.addresses[0][1]}"
    yield running
    for engine in running.engines:
        await engine.stop()
    await running.session.close()
    await running.runner.cleanup()


async def test_requests_go_round(deployment: Deployment) -> None:
    for worker in ("w0", "w1"):
        await deployment.engine(worker)
    served = Counter([(await deployment.ask())[2]["x-pdproof-worker"] for _ in range(10)])
    assert served == {"w0": 5, "w1": 5}


async def test_a_stream_arrives_byte_for_byte(deployment: Deployment) -> None:
    await deployment.engine("w0")
    status, body, headers = await deployment.ask()
    assert (status, headers["Content-Type"]) == (200, "text/event-stream")
    assert body == b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


async def test_an_engines_own_error_is_passed_on(deployment: Deployment) -> None:
    engine = await deployment.engine("w0")
    engine.ending = "refuse"
    status, body, _ = await deployment.ask()
    assert status == 400
    assert b"bad" in body


async def test_without_a_worker_the_answer_is_503(deployment: Deployment) -> None:
    status, body, headers = await deployment.ask()
    assert status == 503
    assert headers["Retry-After"] == "1"
    assert json.loads(body)["error"]["type"] == "unavailable"


@pytest.mark.rule("KVC-ROUT-002")
async def test_a_stream_that_breaks_ends_in_an_error_the_client_sees(deployment: Deployment) -> None:
    engine = await deployment.engine("w0")
    engine.ending = "break"
    async with deployment.session.post(deployment.url + "/v1/completions", json={}) as response:
        got: list[bytes] = []
        with pytest.raises(aiohttp.ClientPayloadError):
            await _read_into(got, response)
    text = b"".join(got).decode()
    events = text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "upstream_error"
    assert "[DONE]" not in text


async def _read_into(parts: list[bytes], response: aiohttp.ClientResponse) -> None:
    async for part in response.content.iter_any():
        parts.append(part)


@pytest.mark.rule("KVC-ROUT-002")
async def test_a_failed_request_is_sent_to_nobody_else(deployment: Deployment) -> None:
    engines = [await deployment.engine(w) for w in ("w0", "w1")]
    for engine in engines:
        engine.ending = "break"
    with pytest.raises(aiohttp.ClientPayloadError):
        await deployment.ask()
    assert sum(e.requests for e in engines) == 1


@pytest.mark.rule("KVC-ROUT-001")
async def test_an_engine_whose_connection_closes_is_dropped_at_once(deployment: Deployment) -> None:
    first, _ = await deployment.engine("w0"), await deployment.engine("w1")
    await first.unregister()
    await until_async(lambda: deployment.events(EventKind.ROUTER_REMOVED), 5, "the removal is told")
    assert await deployment.workers() == ["w1-e1"]
    assert {(await deployment.ask())[2]["x-pdproof-worker"] for _ in range(4)} == {"w1"}


@pytest.mark.rule("KVC-ROUT-001")
async def test_an_engine_that_does_not_answer_the_connect_is_dropped_and_the_client_told(
    deployment: Deployment,
) -> None:
    engine = await deployment.engine("w0")
    assert engine.runner is not None
    await engine.runner.cleanup()  # its port is closed, its registration still open
    status, body, headers = await deployment.ask()
    assert status == 502
    assert headers["x-pdproof-worker"] == "w0"
    assert b"w0" in body
    assert await deployment.workers() == []


@pytest.mark.rule("KVC-ROUT-002")
async def test_a_successor_fences_what_still_runs_on_its_predecessor(deployment: Deployment) -> None:
    old = await deployment.engine("w0", 1)
    old.ending = "hang"
    asked = asyncio.create_task(deployment.ask())
    await asyncio.wait_for(old.streaming.wait(), 5)
    await deployment.engine("w0", 2)
    with pytest.raises(aiohttp.ClientPayloadError):
        await asyncio.wait_for(asked, 5)
    assert await deployment.workers() == ["w0-e2"]


@pytest.mark.rule("KVC-LOCK-004")
async def test_a_late_predecessor_is_refused_by_its_epoch(deployment: Deployment) -> None:
    await deployment.engine("w0", 2)
    late = await deployment.engine("w0", 1, register=False)
    with pytest.raises(RegistrationError, match="fenced"):
        await late.register(deployment.url)
    assert await deployment.workers() == ["w0-e2"]
    assert deployment.events(EventKind.ROUTER_REFUSED)[0].subject == "w0-e1"


async def test_the_end_of_a_fenced_engine_leaves_its_successor_alone(deployment: Deployment) -> None:
    old = await deployment.engine("w0", 1)
    await deployment.engine("w0", 2)
    await old.unregister()
    assert (await deployment.ask())[0] == 200
    assert await deployment.workers() == ["w0-e2"]


async def test_a_registration_without_the_token_is_refused(deployment: Deployment) -> None:
    engine = await deployment.engine("w0", register=False)
    with pytest.raises(RegistrationError):
        await engine.register(deployment.url, token="a guess")
    assert await deployment.workers() == []


@pytest.mark.parametrize("frame", [b"", b"not json", b"{}", b'{"worker_id": 1}', b"\xff" * 100])
async def test_a_malformed_registration_costs_only_its_own_connection(deployment: Deployment, frame: bytes) -> None:
    await deployment.engine("w0")
    url = deployment.url + REGISTER_PATH
    async with deployment.session.ws_connect(url, headers={TOKEN_HEADER: TOKEN}) as socket:
        await socket.send_bytes(frame)
        answer = msgspec.json.decode(await socket.receive_bytes(timeout=5), type=Answer)
        assert not answer.accepted
        assert (await socket.receive(timeout=5)).type is aiohttp.WSMsgType.CLOSE
    assert await deployment.workers() == ["w0-e1"]


async def test_a_client_that_goes_away_ends_the_upstream_request(deployment: Deployment) -> None:
    engine = await deployment.engine("w0")
    engine.ending = "hang"
    async with deployment.session.post(deployment.url + "/v1/completions", json={}) as response:
        await response.content.readline()
        response.close()
    await asyncio.wait_for(engine.abandoned.wait(), 5)
    assert await deployment.workers() == ["w0-e1"]

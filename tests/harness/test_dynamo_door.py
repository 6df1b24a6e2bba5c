"""The door before Dynamo's front end names who answers, and changes nothing that comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from harness.targets.dynamo.door import Door, Engine

LIMIT_S = 10.0
W1 = Engine("w1", "w1-e3", 3)
KNOWN = {9: W1}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(text: str, instance_id: int = 9) -> bytes:
    named = {"worker_id": {"decode_worker_id": instance_id}}
    return b"data: " + json.dumps({"choices": [{"text": text}], "nvext": named}).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def before(handler: Handler) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    door = Door(f"http://127.0.0.1:{runner.addresses[0][1]}", KNOWN, lambda: [W1])
    async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as session:
        try:
            yield await door.start("127.0.0.1", 0), session
        finally:
            await door.stop()
            await runner.cleanup()


async def stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def test_a_stream_is_passed_on_byte_for_byte_and_its_engine_named() -> None:
    told = b": keep-alive\n\n" + event(" a") + event(" b", 77) + b"data: [DONE]\n\n"

    async def answers(request: web.Request) -> web.StreamResponse:
        asked = json.loads(await request.read())
        assert asked == {"prompt": [1], "nvext": {"extra_fields": ["worker_id"]}}
        assert request.headers["X-Request-Id"] == "r1"
        assert request.path == "/v1/completions"
        response = await stream(request)
        for byte in range(0, len(told), 7):
            await response.write(told[byte : byte + 7])
            await asyncio.sleep(0)
        return response

    async with (
        before(answers) as (url, session),
        session.post(f"{url}/v1/completions", json={"prompt": [1]}, headers={"X-Request-Id": "r1"}) as got,
    ):
        assert got.status == 200
        assert got.content_type == "text/event-stream"
        assert (got.headers["x-pdproof-worker"], got.headers["x-pdproof-engine"]) == ("w1", "w1-e3")
        assert await got.read() == told


async def test_chunks_are_passed_on_as_they_come() -> None:
    go_on = asyncio.Event()

    async def answers(request: web.Request) -> web.StreamResponse:
        response = await stream(request)
        await response.write(event(" a"))
        await go_on.wait()
        await response.write(event(" b"))
        return response

    async with before(answers) as (url, session), session.post(f"{url}/v1/completions", json={}) as got:
        assert await got.content.readuntil(b"\n\n") == event(" a")
        go_on.set()
        assert await got.read() == event(" b")


async def test_a_refusal_goes_through_unnamed() -> None:
    async def refuses(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"message": "Service temporarily unavailable"}, status=503)

    async with before(refuses) as (url, session), session.post(f"{url}/v1/completions", json={}) as got:
        assert got.status == 503
        assert "x-pdproof-worker" not in got.headers
        assert await got.json() == {"message": "Service temporarily unavailable"}


async def test_an_instance_that_nobody_knows_is_not_named() -> None:
    async def answers(request: web.Request) -> web.StreamResponse:
        response = await stream(request)
        await response.write(event(" a", 5))
        return response

    async with before(answers) as (url, session), session.post(f"{url}/v1/completions", json={}) as got:
        assert "x-pdproof-worker" not in got.headers
        assert await got.read() == event(" a", 5)


@pytest.mark.parametrize("said", [b"", event(" a")], ids=["before the first event", "after it"])
async def test_a_stream_that_is_cut_short_is_cut_short_for_the_client(said: bytes) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = await stream(request)
        await response.write(said or b": keep-alive\n\n")
        await asyncio.sleep(0.05)  # so that the client has what was said, and not only a reset
        assert request.transport is not None
        request.transport.close()
        return response

    async with before(breaks) as (url, session), session.post(f"{url}/v1/completions", json={}) as got:
        assert got.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await got.read()


async def test_a_client_that_leaves_ends_its_request_at_the_front_end(caplog: pytest.LogCaptureFixture) -> None:
    left = asyncio.Event()

    async def answers(request: web.Request) -> web.StreamResponse:
        response = await stream(request)
        try:
            while True:
                await response.write(event(" a"))
                await asyncio.sleep(0.01)
        except (ConnectionError, asyncio.CancelledError):
            left.set()
            raise

    async with before(answers) as (url, session):
        async with session.post(f"{url}/v1/completions", json={}) as got:
            await got.content.readuntil(b"\n\n")
            got.close()
        await left.wait()
    assert caplog.records == []  # nobody's mistake, and no word of it where progress is told


async def test_a_front_end_that_is_away_is_a_502() -> None:
    door = Door("http://127.0.0.1:9", {}, list)
    url = await door.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/completions", json={}) as got:
                assert got.status == 502
                assert "front end" in (await got.json())["error"]["message"]
            async with session.get(f"{url}/health") as got:
                assert got.status == 503
                assert await got.json() == {"workers": []}
    finally:
        await door.stop()


async def test_health_says_who_serves_in_the_words_of_the_reference() -> None:
    async def nothing(_request: web.Request) -> web.StreamResponse:
        return web.Response(text="gauges")

    async with before(nothing) as (url, session):
        async with session.get(f"{url}/health") as got:
            (worker,) = (await got.json())["workers"]
            assert (worker["worker_id"], worker["engine_id"], worker["role"]) == ("w1", "w1-e3", "both")
        async with session.get(f"{url}/metrics") as got:
            assert await got.text() == "gauges"

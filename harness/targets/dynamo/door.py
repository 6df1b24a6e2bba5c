"""The door before Dynamo's front end: it tells the client in headers which worker serves it, and changes nothing else.

A request gets one field more (`nvext.extra_fields`), by which the front end says in each event who made it. The head of
the answer waits for the first event that does, and carries `x-pdproof-worker` and `x-pdproof-engine`; what came, and
all that follows, is passed on byte for byte: refusals, errors in the middle of a stream, and its being cut short. Where
the front end moves a request to another worker (DYN_MIGRATION_LIMIT), the head names the first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

from harness.targets.dynamo.frontend import NAMED_FIELD, answered_by
from reference_impl.error_body import error_body

BODY_BYTES_MAX: Final = 64 * 2**20
HEAD_BYTES_MAX: Final = 64 * 1024
"""An answer that has not said whose it is by then goes on without."""
CONNECT_LIMIT_S: Final = 10.0
_PASSED_ON: Final = ("Content-Type", "Cache-Control", "X-Request-Id", "Retry-After")
_LOST: Final = (aiohttp.ClientError, ConnectionError, TimeoutError)


class Engine(msgspec.Struct, frozen=True):
    """Who stands behind an instance of Dynamo's."""

    worker_id: str
    engine_id: str
    epoch: int = 0


class Door:
    """Listens in front of `upstream`. `engines` are all that there have been, by Dynamo's id; `serving` do now."""

    def __init__(self, upstream: str, engines: dict[int, Engine], serving: Callable[[], list[Engine]]) -> None:
        self._upstream = upstream
        self._engines = engines
        self._serving = serving
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the address. Raises OSError if the port cannot be had."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Listen no more, and break off what still runs."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _health(self, _request: web.Request) -> web.Response:
        """As the reference implementation's router says it; every worker is reached through the front end alone."""
        same = {"role": "both", "url": self._upstream}
        workers = [msgspec.to_builtins(engine) | same for engine in self._serving()]
        return web.json_response({"workers": workers}, status=200 if workers else 503)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.method == "POST":
            body = naming(body)
        headers = {n: request.headers[n] for n in ("Content-Type", "X-Request-Id") if n in request.headers}
        assert self._session is not None
        try:
            upstream = await self._session.request(
                request.method, self._upstream + request.path_qs, data=body or None, headers=headers
            )
        except _LOST as error:
            message = error_body(f"Dynamo's front end did not answer: {error!r}", "upstream_error", code=502)
            return web.Response(body=message, status=502, content_type="application/json")
        try:
            return await self._pass_on(request, upstream)
        finally:
            upstream.close()  # whoever left, Dynamo is to know it; an answer read to its end has ended already

    async def _pass_on(self, request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Send the answer on as it comes, from the moment on at which it says whose it is."""
        response = web.StreamResponse(status=upstream.status)
        response.headers.update({n: upstream.headers[n] for n in _PASSED_ON if n in upstream.headers})
        parts = upstream.content.iter_any()
        read = bytearray()
        broken = False
        try:
            engine = self._engines.get(await _until_named(parts, read) or 0)
            if engine is not None:
                response.headers["x-pdproof-worker"] = engine.worker_id
                response.headers["x-pdproof-engine"] = engine.engine_id
        except _LOST:
            broken = True
        try:
            await response.prepare(request)
            await response.write(bytes(read))
            while not broken:
                try:
                    part = await anext(parts)
                except StopAsyncIteration:
                    await response.write_eof()
                    break
                except _LOST:
                    broken = True
                else:
                    await response.write(part)
        except ConnectionError:
            return response  # the client has left
        if broken and request.transport is not None:
            request.transport.close()  # what is written still leaves; the body stays without its end, as it came
        return response


async def _until_named(parts: AsyncIterator[bytes], read: bytearray) -> int | None:
    """Read an answer into `read` until it says whose it is, and return that instance; None: it never said."""
    async for part in parts:
        read += part
        if (instance_id := instance_of(bytes(read))) is not None:
            return instance_id
        if len(read) > HEAD_BYTES_MAX:
            return None
    return answered_by(bytes(read))  # an answer that did not stream is one object


def instance_of(stream: bytes) -> int | None:
    """Return the instance that the whole events of `stream` are from, None if none of them says."""
    for line in stream.split(b"\n")[:-1]:
        if line.startswith(b"data: {") and (instance_id := answered_by(line.removeprefix(b"data: "))) is not None:
            return instance_id
    return None


def naming(body: bytes) -> bytes:
    """Return a request's body that asks besides who answers. What is no JSON object is for the front end to refuse."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        nvext = msgspec.json.decode(fields["nvext"], type=dict[str, Any]) if "nvext" in fields else {}
        asked = msgspec.convert(nvext.get("extra_fields") or [], list[str])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return body
    if NAMED_FIELD not in asked:
        nvext["extra_fields"] = [*asked, NAMED_FIELD]
        fields["nvext"] = msgspec.Raw(msgspec.json.encode(nvext))
    return msgspec.json.encode(fields)

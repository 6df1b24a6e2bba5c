"""The router: proxies completions to registered workers in turn, and lets no failure pass unseen (KVC-ROUT-001, -002).

A request is sent once. If its worker fails before the answer began, the client gets 502; if it fails inside a stream,
the client gets an error event and a connection that ends without its last chunk. Nothing is retried silently.
"""

from __future__ import annotations

import hmac
import io
from typing import Final

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from reference_impl.error_body import error_body
from reference_impl.event_log import EventLog
from reference_impl.router.protocol import MESSAGE_BYTES_MAX, REGISTER_PATH, TOKEN_HEADER, Answer, Register
from reference_impl.rules.events import EventKind, Scalar
from reference_impl.rules.routing import Route, RouteTable

BODY_BYTES_MAX: Final = 8 * 2**20
CONNECT_LIMIT_S: Final = 1.0
WHOLE_BYTES_MAX: Final = 2**20
SILENCE_LIMIT_S: Final = 120.0
"""Longest wait for a worker's next byte."""
_PASSED_ON: Final = ("Content-Type", "x-pdproof-worker", "x-pdproof-engine", "x-request-id")
_UPSTREAM_ERRORS: Final = (aiohttp.ClientError, TimeoutError, ConnectionError)


class Router:
    """The router's state and its HTTP application."""

    def __init__(self, token: str, events: EventLog) -> None:
        self._token = token
        self._events = events
        self._table = RouteTable()
        self._in_flight: dict[Route, set[aiohttp.ClientResponse]] = {}
        self._outcomes = {"passed_on": 0, "no_worker": 0, "worker_failed": 0, "client_gone": 0}
        self._session: aiohttp.ClientSession | None = None
        self.app = web.Application(client_max_size=BODY_BYTES_MAX)
        self.app.cleanup_ctx.append(self._client)
        self.app.add_routes([
            web.post("/v1/completions", self._proxy),
            web.post("/v1/chat/completions", self._proxy),
            web.get("/v1/models", self._proxy),
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            web.get(REGISTER_PATH, self._registration),
        ])  # fmt: skip

    async def _client(self, _app: web.Application):  # type: ignore[no-untyped-def] # aiohttp's own generator type
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S, sock_read=SILENCE_LIMIT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)
        yield
        await self._session.close()

    async def _proxy(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.read()
        except (web.RequestPayloadError, ContentEncodingError) as error:
            return _error(400, f"the body cannot be read: {error}")
        route = self._table.choose()
        if route is None or self._session is None:
            self._outcomes["no_worker"] += 1
            return _error(503, "no worker is registered; try again when one is", headers={"Retry-After": "1"})
        try:
            upstream = await self._session.request(
                request.method, route.url + request.path, data=_payload(body),
                headers={"Content-Type": request.headers.get("Content-Type", "application/json")},
            )  # fmt: skip
        except _UPSTREAM_ERRORS as error:
            self._outcomes["worker_failed"] += 1
            if isinstance(error, aiohttp.ClientConnectorError):
                self._drop(route, "connect failed")
            named = {"x-pdproof-worker": route.worker_id, "x-pdproof-engine": route.engine_id}
            return _error(502, f"worker {route.worker_id} failed before it answered: {error!r}", headers=named)
        in_flight = self._in_flight.setdefault(route, set())
        in_flight.add(upstream)
        try:
            return await self._pass_on(request, upstream, route)
        finally:
            in_flight.discard(upstream)
            upstream.close()  # an answer read to its end has given its connection back already

    async def _pass_on(
        self, request: web.Request, upstream: aiohttp.ClientResponse, route: Route
    ) -> web.StreamResponse:
        headers = {name: upstream.headers[name] for name in _PASSED_ON if name in upstream.headers}
        if "Content-Length" in upstream.headers:
            headers["Content-Length"] = upstream.headers["Content-Length"]
        response = web.StreamResponse(status=upstream.status, headers=headers)
        await response.prepare(request)
        parts = upstream.content.iter_any()
        while True:
            try:
                part = await anext(parts)
            except StopAsyncIteration:
                break
            except _UPSTREAM_ERRORS as error:
                return await self._broken_off(request, response, route, error)
            try:
                await response.write(part)
            except ConnectionError:
                self._outcomes["client_gone"] += 1
                upstream.close()
                raise
        await response.write_eof()
        self._outcomes["passed_on"] += 1
        return response

    async def _broken_off(
        self, request: web.Request, response: web.StreamResponse, route: Route, error: BaseException
    ) -> web.StreamResponse:
        """End a stream whose worker failed: an error event, then no last chunk."""
        self._outcomes["worker_failed"] += 1
        if response.content_type == "text/event-stream":
            message = f"worker {route.worker_id} failed inside the answer: {error!r}"
            await response.write(b"data: " + error_body(message, "upstream_error", code=502) + b"\n\n")
        if request.transport is not None:
            request.transport.close()  # what is written still leaves; the chunked body stays without its end
        return response

    async def _registration(self, request: web.Request) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get(TOKEN_HEADER, ""), self._token):
            return _error(403, "this registration needs the deployment's token")
        socket = web.WebSocketResponse(max_msg_size=MESSAGE_BYTES_MAX)
        await socket.prepare(request)
        route: Route | None = None
        try:
            async for message in socket:
                if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                    break
                try:
                    asked = msgspec.json.decode(message.data, type=Register)
                except msgspec.DecodeError as error:
                    await socket.send_bytes(msgspec.json.encode(Answer(False, 0, f"malformed: {error}")))
                    break
                admitted, reason = self._register(asked)
                route = admitted or route
                highest = self._table.highest_epoch(asked.worker_id)
                await socket.send_bytes(msgspec.json.encode(Answer(not reason, highest, reason)))
        finally:
            if route is not None:
                self._drop(route, "its connection closed")
        return socket

    def _register(self, asked: Register) -> tuple[Route | None, str]:
        route = Route(asked.worker_id, asked.engine_id, asked.url, asked.epoch)
        replaced, refusal = self._table.register(route)
        told: dict[str, Scalar] = {"worker_id": asked.worker_id, "epoch": asked.epoch}
        if refusal:
            self._events.say(EventKind.ROUTER_REFUSED, asked.engine_id, reason=refusal, **told)
            return None, refusal
        if replaced is not None:
            self._forget(replaced, "replaced by a later epoch")
        self._events.say(EventKind.ROUTER_REGISTERED, asked.engine_id, **told)
        return route, ""

    def _drop(self, route: Route, reason: str) -> None:
        if self._table.remove(route):
            self._forget(route, reason)

    def _forget(self, route: Route, reason: str) -> None:
        """Say that a route has gone, and end what still runs on it: its engine is dead, or fenced."""
        self._events.say(EventKind.ROUTER_REMOVED, route.engine_id, worker_id=route.worker_id, reason=reason)
        for upstream in self._in_flight.pop(route, set()):
            upstream.close()

    async def _health(self, _request: web.Request) -> web.Response:
        workers = [
            {"worker_id": r.worker_id, "engine_id": r.engine_id, "epoch": r.epoch, "url": r.url}
            for r in self._table.routes
        ]
        return web.json_response({"workers": workers}, status=200 if workers else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        lines = ["# TYPE pdproof:router_workers gauge", f"pdproof:router_workers {len(self._table.routes)}",
                 "# TYPE pdproof:router_requests counter"]  # fmt: skip
        lines += [f'pdproof:router_requests_total{{outcome="{k}"}} {v}' for k, v in self._outcomes.items()]
        return web.Response(text="\n".join(lines) + "\n")


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """Small bodies go out in one write; a large one in pieces, so that it does not hold up everybody's streams."""
    return None if not body else body if len(body) <= WHOLE_BYTES_MAX else io.BytesIO(body)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    kind = "unavailable" if status == 503 else "upstream_error" if status == 502 else "invalid_request_error"
    body = error_body(message, kind, code=status)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)

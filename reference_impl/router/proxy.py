"""Passing requests on to workers, whole or in two legs, so that no failure passes unseen (KVC-ROUT-002).

A request is sent once. If its worker fails before the answer began, the client gets 502; if it fails inside a stream,
the client gets an error event and a connection that ends without its last chunk. Nothing is retried silently.

Where workers of role prefill or decode are registered, a completion goes in two legs: to a prefill worker, whose answer
is the hand-off, and with it to a decode worker, whose answer is the client's. Only one thing is tried twice, because
nothing was sent by then: the connection to a decode worker. A hand-off that is not handed on is counted; its lease ends
by itself.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from reference_impl.error_body import error_body
from reference_impl.router import legs
from reference_impl.router.hold import HandoffHold
from reference_impl.rules.routing import Role, Route, RouteTable

if TYPE_CHECKING:
    from reference_impl.router.prefixes import Prefixes

CONNECT_LIMIT_S: Final = 1.0
WHOLE_BYTES_MAX: Final = 2**20
SILENCE_LIMIT_S: Final = 120.0
"""Longest wait for a worker's next byte."""
ANSWER_BYTES_MAX: Final = 8 * 2**20
"""Longest answer of a first leg: one token, and the ids of the prompt's blocks."""
PREFILL_HEADER: Final = "x-pdproof-prefill-worker"
_WORDS: Final = {Role.BOTH: "worker", Role.PREFILL: "prefill worker", Role.DECODE: "decode worker"}
_PASSED_ON: Final = ("Content-Type", "x-pdproof-worker", "x-pdproof-engine", "x-request-id")
_UPSTREAM_ERRORS: Final = (aiohttp.ClientError, TimeoutError, ConnectionError)
_NOT_CONNECTED: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Nothing was sent."""
_JSON: Final = "application/json"


class Refused(Exception):
    """The request ends here, with `answer` to the client. `sent`: whether a worker got it."""

    def __init__(self, answer: web.Response, *, sent: bool = False) -> None:
        super().__init__(str(answer.status))
        self.answer = answer
        self.sent = sent


class Leg(msgspec.Struct, frozen=True):
    """What one worker is asked, and as which part of a request."""

    part: Role
    method: str
    path: str
    body: bytes
    content_type: str = _JSON


class Proxy:
    """Passes requests on. `on_lost` is told of a worker that cannot be connected to, and why.

    With `prefixes`, a prefill gets the loan of a prefix that another node holds.
    """

    def __init__(
        self, table: RouteTable, hold: HandoffHold, on_lost: Callable[[Route, str], None],
        prefixes: Prefixes | None = None,
    ) -> None:  # fmt: skip
        self._prefixes = prefixes
        self._table = table
        self._hold = hold
        self._on_lost = on_lost
        self._in_flight: dict[Route, set[aiohttp.ClientResponse]] = {}
        self._session: aiohttp.ClientSession | None = None
        self.outcomes = {"passed_on": 0, "no_worker": 0, "worker_failed": 0, "client_gone": 0, "refused": 0}
        """Requests by how they ended."""
        self.handoffs = 0
        """Hand-offs that prefill workers gave."""
        self.handoffs_dropped = 0
        """Of those, the ones that no decode worker got."""

    async def client(self, _app: web.Application) -> AsyncIterator[None]:
        """Keep the connections to the workers, from the application's start to its end."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S, sock_read=SILENCE_LIMIT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)
        yield
        await self._session.close()

    def end(self, route: Route) -> None:
        """End what still runs on a worker that is dead, or fenced."""
        for upstream in self._in_flight.pop(route, set()):
            upstream.close()

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion request, in two legs where prefill and decode have workers of their own."""
        try:
            body = await read_body(request)
            if self._table.disaggregated:
                return await self._in_two_legs(request, body)
            leg = Leg(Role.BOTH, request.method, request.path, body, request.headers.get("Content-Type", _JSON))
            return await self._in_one_leg(request, self._choose(leg.part), leg)
        except Refused as refused:
            return refused.answer

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Answer `/v1/models` with what a worker says."""
        leg = Leg(Role.DECODE if self._table.disaggregated else Role.BOTH, "GET", request.path, b"")
        try:
            return await self._in_one_leg(request, self._choose(leg.part), leg)
        except Refused as refused:
            return refused.answer

    async def renew(self, request: web.Request) -> web.StreamResponse:
        """Pass a session's renewal on to the engine that holds its blocks (KVC-CLK-007)."""
        try:
            body = await read_body(request)
            holder = legs.holder_of(body)
            route = self._table.find(holder)
            if route is None:
                return error_answer(404, f"no engine {holder!r} is registered: what it held is gone", legs.PARAMS)
            return await self._in_one_leg(request, route, Leg(route.role, "POST", request.path, body))
        except legs.BadBody as error:
            return error_answer(400, str(error), error.param)
        except Refused as refused:
            return refused.answer

    async def _in_one_leg(self, request: web.Request, route: Route, leg: Leg) -> web.StreamResponse:
        try:
            upstream = await self._ask(route, leg)
        except _UPSTREAM_ERRORS as error:
            raise self._failed(route, leg, error) from error
        with self._running(route, upstream):
            return await self._pass_on(request, upstream, route, {})

    async def _in_two_legs(self, request: web.Request, body: bytes) -> web.StreamResponse:
        for part in (Role.PREFILL, Role.DECODE):  # a prefill that nobody can go on with would be in vain
            if not self._table.has(part):
                raise self._nobody(part)
        try:
            fields = legs.fields_of(body)
            route = self._choose(Role.PREFILL)
            loan = await self._loan(fields, route)
            first = Leg(Role.PREFILL, request.method, request.path, legs.prefill_body(fields, loan))
        except legs.BadBody as error:
            self.outcomes["refused"] += 1
            raise Refused(error_answer(400, str(error), error.param)) from error
        prefill, handoff = await self._prefill(route, first)
        named = {PREFILL_HEADER: prefill.name}
        second = Leg(Role.DECODE, request.method, request.path, legs.decode_body(fields, handoff))
        if handoff is not None:
            self.handoffs += 1
            await self._wait_held()
        try:
            decode, upstream = await self._decode(second, named)
        except Refused as refused:
            self.handoffs_dropped += handoff is not None and not refused.sent
            raise
        with self._running(decode, upstream):
            return await self._pass_on(request, upstream, decode, named)

    async def _loan(self, fields: legs.Fields, route: Route) -> msgspec.Raw | None:
        """Return the hand-off of a prefix that another node lends to the worker, None if there is none."""
        if self._prefixes is None or legs.params_of(fields):
            return None
        return await self._prefixes.borrow(fields, route.worker_id)

    async def _prefill(self, route: Route, leg: Leg) -> tuple[Route, msgspec.Raw | None]:
        """Run the first leg; return who did it and the hand-off, None if it gave none. Raises Refused."""
        try:
            upstream = await self._ask(route, leg)
            with self._running(route, upstream):
                answer = await _whole(upstream)
        except _UPSTREAM_ERRORS as error:
            raise self._failed(route, leg, error) from error
        if 400 <= upstream.status < 500:
            self.outcomes["passed_on"] += 1
            headers = {PREFILL_HEADER: route.name, "Content-Type": upstream.headers.get("Content-Type", _JSON)}
            raise Refused(web.Response(body=answer, status=upstream.status, headers=headers), sent=True)
        if upstream.status != 200:
            text = answer[:300].decode("utf-8", "replace")
            raise self._failed(route, leg, f"HTTP {upstream.status}: {text}")
        try:
            return route, legs.handoff_of(answer)
        except legs.BadBody as error:
            raise self._failed(route, leg, f"its answer is none: {error}") from error

    async def _wait_held(self) -> None:
        try:
            await self._hold.pass_through()
        except asyncio.CancelledError:
            self.handoffs_dropped += 1
            self.outcomes["client_gone"] += 1
            raise

    async def _decode(self, leg: Leg, named: dict[str, str]) -> tuple[Route, aiohttp.ClientResponse]:
        """Send the second leg; a worker that cannot be connected to got nothing, so another one is tried, once."""
        route = self._choose(leg.part, named)
        try:
            try:
                return route, await self._ask(route, leg)
            except _NOT_CONNECTED:
                if not self._table.has(leg.part):
                    raise
                route = self._choose(leg.part, named)
                return route, await self._ask(route, leg)
        except _UPSTREAM_ERRORS as error:
            raise self._failed(route, leg, error, named) from error

    def _choose(self, part: Role, named: dict[str, str] | None = None) -> Route:
        route = self._table.choose(part)
        if route is None:
            raise self._nobody(part, named)
        return route

    def _nobody(self, part: Role, named: dict[str, str] | None = None) -> Refused:
        self.outcomes["no_worker"] += 1
        message = f"no {_WORDS[part]} is registered; try again when one is"
        return Refused(error_answer(503, message, headers={"Retry-After": "1"} | (named or {})))

    def _failed(self, route: Route, leg: Leg, why: BaseException | str, named: dict[str, str] | None = None) -> Refused:
        """Return the answer 502 that names the worker: in the header that a good answer would name it in."""
        self.outcomes["worker_failed"] += 1
        who = {PREFILL_HEADER: route.name}
        if leg.part is not Role.PREFILL:
            who = {"x-pdproof-worker": route.worker_id, "x-pdproof-engine": route.engine_id} | (named or {})
        reason = why if isinstance(why, str) else repr(why)
        message = f"{_WORDS[leg.part]} {route.worker_id} failed before it answered: {reason}"
        sent = not isinstance(why, _NOT_CONNECTED)
        return Refused(error_answer(502, message, headers=who), sent=sent)

    async def _ask(self, route: Route, leg: Leg) -> aiohttp.ClientResponse:
        """Send a leg and return the answer's head. A worker that cannot be connected to is chosen no more."""
        if self._session is None:
            raise RuntimeError("the router has not started, or has ended")
        try:
            return await self._session.request(
                leg.method, route.url + leg.path, data=_payload(leg.body), headers={"Content-Type": leg.content_type}
            )
        except aiohttp.ClientConnectorError:
            self._on_lost(route, "connect failed")
            raise

    @contextmanager
    def _running(self, route: Route, upstream: aiohttp.ClientResponse) -> Iterator[None]:
        """Keep an answer where the end of its worker finds it (`end`), and close it in any case."""
        in_flight = self._in_flight.setdefault(route, set())
        in_flight.add(upstream)
        try:
            yield
        finally:
            in_flight.discard(upstream)
            upstream.close()  # an answer read to its end has given its connection back already

    async def _pass_on(
        self, request: web.Request, upstream: aiohttp.ClientResponse, route: Route, added: dict[str, str]
    ) -> web.StreamResponse:
        # An engine that is not ours does not name itself.
        who = {"x-pdproof-worker": route.worker_id, "x-pdproof-engine": route.engine_id}
        headers = who | {name: upstream.headers[name] for name in _PASSED_ON if name in upstream.headers} | added
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
                self.outcomes["client_gone"] += 1
                upstream.close()
                raise
        await response.write_eof()
        self.outcomes["passed_on"] += 1
        return response

    async def _broken_off(
        self, request: web.Request, response: web.StreamResponse, route: Route, error: BaseException
    ) -> web.StreamResponse:
        """End a stream whose worker failed: an error event, then no last chunk."""
        self.outcomes["worker_failed"] += 1
        if response.content_type == "text/event-stream":
            message = f"worker {route.worker_id} failed inside the answer: {error!r}"
            await response.write(b"data: " + error_body(message, "upstream_error", code=502) + b"\n\n")
        if request.transport is not None:
            request.transport.close()  # what is written still leaves; the chunked body stays without its end
        return response


async def read_body(request: web.Request) -> bytes:
    """Return the client's whole body. Raises Refused."""
    try:
        return await request.read()
    except (web.RequestPayloadError, ContentEncodingError) as error:
        raise Refused(error_answer(400, f"the body cannot be read: {error}")) from error


def error_answer(
    status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    """Return an error of the router's own, as OpenAI's API words it."""
    kind = "unavailable" if status == 503 else "upstream_error" if status == 502 else "invalid_request_error"
    return web.Response(
        body=error_body(message, kind, param, status), status=status, content_type=_JSON, headers=headers
    )


async def _whole(upstream: aiohttp.ClientResponse) -> bytes:
    """Return a worker's whole answer. Raises aiohttp.ClientError for one that is too long."""
    answer = bytearray()
    async for part in upstream.content.iter_any():
        answer += part
        if len(answer) > ANSWER_BYTES_MAX:
            raise aiohttp.ClientPayloadError(f"its answer is longer than {ANSWER_BYTES_MAX} bytes")
    return bytes(answer)


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """Small bodies go out in one write; a large one in pieces, so that it does not hold up everybody's streams."""
    return None if not body else body if len(body) <= WHOLE_BYTES_MAX else io.BytesIO(body)

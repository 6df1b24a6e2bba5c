"""The router: who is registered, what is asked of whom (`router.proxy`), and what can be seen of it (KVC-ROUT-001).

An engine is chosen from its registration on, and never again once the connection of that registration has ended.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
from aiohttp import web

from reference_impl.event_log import EventLog
from reference_impl.router.hold import HandoffHold, Hold
from reference_impl.router.protocol import (
    HOLD_PATH,
    MESSAGE_BYTES_MAX,
    REGISTER_PATH,
    RENEW_PATH,
    TOKEN_HEADER,
    Answer,
    Register,
)
from reference_impl.router.proxy import Proxy, Refused, error_answer, read_body
from reference_impl.rules.events import EventKind, Scalar
from reference_impl.rules.routing import Route, RouteTable

if TYPE_CHECKING:
    from reference_impl.router.prefixes import Prefixes

BODY_BYTES_MAX: Final = 8 * 2**20


class Router:
    """The router's state and its HTTP application."""

    def __init__(self, token: str, events: EventLog, prefixes: Prefixes | None = None) -> None:
        self._token = token
        self._events = events
        self._table = RouteTable()
        self.hold = HandoffHold()
        self._prefixes = prefixes
        self._proxy = Proxy(self._table, self.hold, self._drop, prefixes)
        self.app = web.Application(client_max_size=BODY_BYTES_MAX)
        self.app.cleanup_ctx.append(self._proxy.client)
        self.app.add_routes([
            web.post("/v1/completions", self._proxy.completion),
            web.post("/v1/chat/completions", self._proxy.completion),
            web.get("/v1/models", self._proxy.models),
            web.post(RENEW_PATH, self._proxy.renew),
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            web.get(HOLD_PATH, self._hold_report),
            web.post(HOLD_PATH, self._hold_order),
            web.get(REGISTER_PATH, self._registration),
        ])  # fmt: skip

    async def _registration(self, request: web.Request) -> web.StreamResponse:
        if not self._has_token(request):
            return error_answer(403, "this registration needs the deployment's token")
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
        route = Route(asked.worker_id, asked.engine_id, asked.url, asked.epoch, asked.role, asked.kv_engine_id)
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
        self._proxy.end(route)

    async def _hold_order(self, request: web.Request) -> web.StreamResponse:
        if not self._has_token(request):
            return error_answer(403, "to hold hand-offs needs the deployment's token")
        try:
            self.hold.order(msgspec.json.decode(await read_body(request), type=Hold))
        except msgspec.DecodeError as error:
            return error_answer(400, f"not an order to hold: {error}")
        except Refused as refused:
            return refused.answer
        return await self._hold_report(request)

    async def _hold_report(self, _request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.hold.report()), content_type="application/json")

    def _has_token(self, request: web.Request) -> bool:
        shown = request.headers.get(TOKEN_HEADER, "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(shown, self._token.encode())

    async def _health(self, _request: web.Request) -> web.Response:
        workers = [
            {"worker_id": r.worker_id, "engine_id": r.engine_id, "epoch": r.epoch, "url": r.url, "role": r.role}
            for r in self._table.routes
        ]
        return web.json_response({"workers": workers}, status=200 if workers else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        hold = self.hold.report()
        lines = ["# TYPE pdproof:router_workers gauge", f"pdproof:router_workers {len(self._table.routes)}",
                 "# TYPE pdproof:router_requests counter"]  # fmt: skip
        lines += [f'pdproof:router_requests_total{{outcome="{k}"}} {v}' for k, v in self._proxy.outcomes.items()]
        lines += ["# TYPE pdproof:router_handoffs_holding gauge", f"pdproof:router_handoffs_holding {hold.holding}"]
        for name, value in (
            ("router_handoffs", self._proxy.handoffs),
            ("router_handoffs_dropped", self._proxy.handoffs_dropped),
            ("router_handoffs_held", hold.held),
            ("router_handoffs_held_seconds", hold.held_s),
            ("router_prefixes_borrowed", self._prefixes.borrowed if self._prefixes else 0),
            ("router_prefixes_computed", self._prefixes.computed if self._prefixes else 0),
        ):
            lines += [f"# TYPE pdproof:{name} counter", f"pdproof:{name}_total {value}"]
        if self._prefixes is not None:
            lines += ["# TYPE pdproof:router_prefixes_known gauge"]
            lines += [
                f'pdproof:router_prefixes_known{{node="{n}"}} {count}' for n, count in self._prefixes.known.items()
            ]
        return web.Response(text="\n".join(lines) + "\n")

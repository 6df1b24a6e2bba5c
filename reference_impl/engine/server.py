"""The engine's HTTP face: OpenAI's two completion endpoints, `/v1/models`, `/health` and `/metrics`.

It listens from the start, so that a parked engine can be looked at; it serves only while its state allows.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final
from uuid import uuid4

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from reference_impl.content import BLOCK_TOKENS
from reference_impl.engine import openai
from reference_impl.engine.loop import LoadFailed, StepLoop, TokenStream
from reference_impl.engine.metrics import EngineMetrics
from reference_impl.error_body import error_body
from reference_impl.oracle import Weights
from reference_impl.realclock import now_ns, wall_ns
from reference_impl.rules import handoff
from reference_impl.rules.handoff import Asked, BadHandOff
from reference_impl.rules.lifecycle import EngineState

BODY_BYTES_MAX: Final = 8 * 2**20


class _Refused(Exception):
    """A request that is refused at the door."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except (web.RequestPayloadError, ContentEncodingError) as error:
        raise _Refused(f"the body cannot be read: {error}") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _Refused(f"the body is larger than {BODY_BYTES_MAX} bytes", status=413) from error


class EngineServer:
    """Answers HTTP for one engine. `loop` is None until the engine has memory to work on.

    `kv_hosts` are the hosts that a hand-off may send this engine to.
    """

    def __init__(
        self,
        *,
        model: str,
        engine_id: str,
        worker_id: str,
        weights: Weights,
        metrics: EngineMetrics,
        kv_hosts: tuple[str, ...] = (),
    ) -> None:
        self.loop: StepLoop | None = None
        self._kv_hosts = kv_hosts
        self._model = model
        self._weights = weights
        self._metrics = metrics
        self._headers = {"x-pdproof-worker": worker_id, "x-pdproof-engine": engine_id}
        self.app = web.Application(client_max_size=BODY_BYTES_MAX)
        self.app.add_routes([
            web.post("/v1/completions", self._completions),
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/kv/renew", self._renew),
            web.get("/v1/models", self._models),
            web.get("/health", self._health),
            web.get("/metrics", self._metrics_text),
        ])  # fmt: skip

    async def listen(self, host: str, port: int) -> tuple[web.AppRunner, int]:
        """Start listening and return the runner and the port. Raises OSError if the port is taken."""
        runner = web.AppRunner(self.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, host, port, backlog=512).start()
        return runner, runner.addresses[0][1]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat=True)

    async def _complete(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        loop = self.loop
        if loop is None or self._metrics.state is not EngineState.ACTIVE:
            return self._error(503, f"this engine is {self._metrics.state}, not active", "unavailable")
        try:
            raw = await _body(request)
            parsed, stream = self._submit(loop, raw, chat=chat)
        except _Refused as refused:
            return self._error(refused.status, str(refused), "invalid_request_error", refused.param)
        writer = openai.Writer(f"cmpl-{stream.sequence.request_id}", parsed, self._model, wall_ns() // 1_000_000_000)
        try:
            answer = self._stream if parsed.stream else self._whole
            return await answer(request, parsed, stream, writer)
        except LoadFailed as error:
            return self._error(500, f"the request's KV could not be loaded: {error}", "kv_load_failed")
        except (ConnectionResetError, asyncio.CancelledError):  # the client has gone: nobody wants the rest
            loop.abort(stream)
            raise

    def _submit(self, loop: StepLoop, raw: bytes, *, chat: bool) -> tuple[openai.Parsed, TokenStream]:
        """Queue the request in `raw`. Raises _Refused with what the client is told."""
        try:
            parsed = openai.parse(raw, chat=chat, model=self._model)
            asked = self._asked(loop, parsed)
            interval = None if parsed.stream else parsed.max_tokens
            stream = loop.submit(
                uuid4().hex, parsed.prompt, parsed.max_tokens, interval_tokens=interval, asked=asked
            )  # fmt: skip
        except openai.RequestError as error:
            self._let_go(loop, raw)
            raise _Refused(str(error), error.param) from error
        except BadHandOff as error:
            raise _Refused(str(error), error.param) from error
        except ValueError as error:
            raise _Refused(str(error), "messages" if chat else "prompt") from error
        return parsed, stream

    def _asked(self, loop: StepLoop, parsed: openai.Parsed) -> Asked | None:
        """Return what a request asks of the connector, None if nothing. Raises BadHandOff."""
        if parsed.kv_transfer_params is None:
            return None
        asked = handoff.parse(parsed.kv_transfer_params, block_tokens=BLOCK_TOKENS, hosts=self._kv_hosts)
        if not asked.keep and asked.load is None:
            return None
        if loop.connector is None:
            name = "do_remote_decode" if asked.keep else "do_remote_prefill"
            raise BadHandOff(f"this engine moves no KV, so kv_transfer_params.{name} cannot be had",
                             f"kv_transfer_params.{name}")  # fmt: skip
        return asked

    def _let_go(self, loop: StepLoop, raw: bytes) -> None:
        """Tell the holder of a refused request's blocks that nobody will come for them (KVC-REL-002)."""
        if loop.connector is None:
            return
        with contextlib.suppress(BadHandOff):
            params = openai.kv_transfer_params(raw)
            asked = handoff.parse(params or {}, block_tokens=BLOCK_TOKENS, hosts=self._kv_hosts)
            if asked.load is not None:
                loop.connector.reject(uuid4().hex, asked.load, now_ns())

    async def _stream(
        self, request: web.Request, parsed: openai.Parsed, stream: TokenStream, writer: openai.Writer
    ) -> web.StreamResponse:
        delta = await stream.next()  # before the head: a request that fails here has a status of its own
        response = web.StreamResponse(headers=self._headers | {"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            params = delta.kv_transfer_params if not parsed.include_usage else None
            await response.write(writer.event(delta.tokens, finished=delta.finished, params=params))
            if delta.finished:
                break
            delta = await stream.next()
        sequence = stream.sequence
        last = openai.DONE
        if parsed.include_usage:
            last = (
                writer.usage_event(sequence.output_tokens, sequence.cached_tokens, delta.kv_transfer_params) + last
            )  # fmt: skip
        await response.write(last)
        await response.write_eof()
        return response

    async def _whole(
        self, _request: web.Request, _parsed: openai.Parsed, stream: TokenStream, writer: openai.Writer
    ) -> web.StreamResponse:
        answer: list[int] = []
        params = None
        while len(answer) < stream.sequence.output_tokens_max:
            delta = await stream.next()
            answer += delta.tokens
            params = delta.kv_transfer_params
        body = writer.whole(answer, stream.sequence.cached_tokens, params)
        return web.Response(body=body, content_type="application/json", headers=self._headers)

    async def _renew(self, request: web.Request) -> web.Response:
        """Keep a finished turn's blocks for another time to live (KVC-CLK-007)."""
        loop = self.loop
        if loop is None or loop.connector is None:
            return self._error(503, "this engine keeps no KV", "unavailable")
        try:
            params = openai.kv_transfer_params(await _body(request))
            asked = handoff.parse(params, block_tokens=BLOCK_TOKENS, hosts=self._kv_hosts)
        except _Refused as refused:
            return self._error(refused.status, str(refused), "invalid_request_error", refused.param)
        except BadHandOff as error:
            return self._error(400, str(error), "invalid_request_error", error.param)
        renewed = loop.connector.renew(asked.load, now_ns()) if asked.load else None
        if renewed is None:
            return self._error(404, "these blocks are not kept here any more", "not_found")
        body = msgspec.json.encode({"kv_transfer_params": renewed})
        return web.Response(body=body, content_type="application/json", headers=self._headers)

    async def _models(self, _request: web.Request) -> web.Response:
        model = {
            "id": self._model, "object": "model", "owned_by": "pdproof",
            "oracle": {"weights_seed": self._weights.seed, "weights_words": self._weights.words,
                       "block_tokens": BLOCK_TOKENS},
        }  # fmt: skip
        body = msgspec.json.encode({"object": "list", "data": [model]})
        return web.Response(body=body, content_type="application/json", headers=self._headers)

    async def _health(self, _request: web.Request) -> web.Response:
        state = self._metrics.state
        status = 200 if state is EngineState.ACTIVE else 503
        return web.json_response({"state": state}, status=status, headers=self._headers)

    async def _metrics_text(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain", headers=self._headers)

    def _error(self, status: int, message: str, kind: str, param: str | None = None) -> web.Response:
        body = error_body(message, kind, param, status)
        return web.Response(body=body, status=status, content_type="application/json", headers=self._headers)

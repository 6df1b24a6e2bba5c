"""The engine's HTTP face: OpenAI's two completion endpoints, `/v1/models`, `/health` and `/metrics`.

It listens from the start, so that a parked engine can be looked at; it serves only while its state allows.
"""

from __future__ import annotations

import asyncio
from typing import Final
from uuid import uuid4

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from reference_impl.content import BLOCK_TOKENS
from reference_impl.engine import openai
from reference_impl.engine.loop import StepLoop, TokenStream
from reference_impl.engine.metrics import EngineMetrics
from reference_impl.error_body import error_body
from reference_impl.oracle import Weights
from reference_impl.realclock import wall_ns
from reference_impl.rules.lifecycle import EngineState

BODY_BYTES_MAX: Final = 8 * 2**20


class EngineServer:
    """Answers HTTP for one engine. `loop` is None until the engine has memory to work on."""

    def __init__(self, *, model: str, engine_id: str, worker_id: str, weights: Weights, metrics: EngineMetrics) -> None:
        self.loop: StepLoop | None = None
        self._model = model
        self._weights = weights
        self._metrics = metrics
        self._headers = {"x-pdproof-worker": worker_id, "x-pdproof-engine": engine_id}
        self.app = web.Application(client_max_size=BODY_BYTES_MAX)
        self.app.add_routes([
            web.post("/v1/completions", self._completions),
            web.post("/v1/chat/completions", self._chat),
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
            parsed = openai.parse(await request.read(), chat=chat, model=self._model)
            interval = None if parsed.stream else parsed.max_tokens
            stream = loop.submit(uuid4().hex, parsed.prompt, parsed.max_tokens, interval_tokens=interval)
        except openai.RequestError as error:
            return self._error(400, str(error), "invalid_request_error", error.param)
        except ValueError as error:
            return self._error(400, str(error), "invalid_request_error", "messages" if chat else "prompt")
        except (web.RequestPayloadError, ContentEncodingError) as error:
            return self._error(400, f"the body cannot be read: {error}", "invalid_request_error")
        except web.HTTPRequestEntityTooLarge:
            return self._error(413, f"the body is larger than {BODY_BYTES_MAX} bytes", "invalid_request_error")
        writer = openai.Writer(f"cmpl-{stream.sequence.request_id}", parsed, self._model, wall_ns() // 1_000_000_000)
        try:
            answer = self._stream if parsed.stream else self._whole
            return await answer(request, parsed, stream, writer)
        except (ConnectionResetError, asyncio.CancelledError):  # the client has gone: nobody wants the rest
            loop.abort(stream)
            raise

    async def _stream(
        self, request: web.Request, parsed: openai.Parsed, stream: TokenStream, writer: openai.Writer
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=self._headers | {"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            delta = await stream.next()
            await response.write(writer.event(delta.tokens, finished=delta.finished))
            if delta.finished:
                break
        sequence = stream.sequence
        usage = writer.usage_event(sequence.output_tokens, sequence.cached_tokens) if parsed.include_usage else b""
        await response.write(usage + openai.DONE)
        await response.write_eof()
        return response

    async def _whole(
        self, _request: web.Request, _parsed: openai.Parsed, stream: TokenStream, writer: openai.Writer
    ) -> web.StreamResponse:
        answer: list[int] = []
        while len(answer) < stream.sequence.output_tokens_max:
            answer += (await stream.next()).tokens
        body = writer.whole(answer, stream.sequence.cached_tokens)
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

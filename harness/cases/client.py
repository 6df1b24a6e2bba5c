"""One request to one server, written down as a row like any load's, and as a step with what was handed over.

The legs of a request go straight to the servers, so that a case can hold, alter, repeat or drop what lies between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.cases.steps import Call, StepLog
from reference_impl.realclock import now_ns
from workloads.answer import Answer
from workloads.prompts import NO_TOKENS, prompt_tokens
from workloads.rows import Chunk, Outcome, PromptSpec, RequestRecord
from workloads.sse import BadStream, error_text

ERROR_CHARS_MAX: Final = 400
Params = dict[str, Any]


@dataclass
class Meddler:
    """A broken hop between client and servers, for twins: what it may do to what passes through."""

    hand_off: Callable[[Params], Params] | None = None
    """To what the decode side is told."""
    answer: Callable[[list[int]], list[int]] | None = None
    """To the tokens of an answer of the decode side."""
    returned: Callable[[Params], Params] | None = None
    """To what the prefill side hands over."""
    turn: Callable[[Params], Params] | None = None
    """To what the prefill side is told of the turn before."""


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: dict[str, Any] | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Whole(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a request."""

    call: Call
    prompt: PromptSpec
    output_ids: list[int]

    @property
    def ok(self) -> bool:
        """Whether a whole answer came."""
        return self.call.ok

    @property
    def hand_off(self) -> Params:
        """The `kv_transfer_params` that came back, {} if none did."""
        return self.call.returned or {}


class Client:
    """Sends requests and writes down what comes of them. Use as an async context."""

    def __init__(self, model: str, rows: Path, steps: StepLog, headers: dict[str, str] | None = None) -> None:
        self.meddler = Meddler()
        self._model = model
        self._headers = headers or {}
        self._steps = steps
        self._rows = os.open(rows, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._session: aiohttp.ClientSession | None = None
        self._sent: dict[str, NDArray[np.int64]] = {}

    async def __aenter__(self) -> Self:
        # A connection each: a kept one may be closed by a server that dies, and the failure would be the client's.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), headers=self._headers
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
        os.close(self._rows)

    @property
    def session(self) -> aiohttp.ClientSession:
        """For looks at metrics and health."""
        assert self._session is not None
        return self._session

    async def ask(
        self, request_id: str, label: str, worker: str, url: str, leg: str, prompt: PromptSpec, max_tokens: int,
        *, params: Params | None = None, stream: bool = False, limit_s: float = 60.0, more: Params | None = None,
    ) -> Reply:  # fmt: skip
        """Send one request and return what came of it; also when it failed, or is cancelled (then it raises on)."""
        if leg == "decode" and params is not None and self.meddler.hand_off is not None:
            params = self.meddler.hand_off(params)
        tokens = self.tokens_of(prompt)
        self._sent[request_id] = tokens
        body: Params = {
            "model": self._model, "prompt": tokens.tolist(), "max_tokens": max_tokens, "temperature": 0,
            "stream": stream, "ignore_eos": True, "return_token_ids": True, "logprobs": 0,
        }  # fmt: skip
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        body |= {} if params is None else {"kv_transfer_params": params}
        exchange = _Exchange(msgspec.json.encode(body | (more or {})), stream=stream)
        begun_ns = now_ns()
        try:
            async with asyncio.timeout(limit_s):
                await exchange.run(self.session, f"{url}/v1/completions", request_id)
        except TimeoutError:
            exchange.outcome, exchange.error = Outcome.UNKNOWN, f"no end within {limit_s:g} s"
        except (aiohttp.ClientError, OSError, BadStream, msgspec.DecodeError) as error:
            exchange.outcome = Outcome.FAIL
            exchange.error = f"the connection broke: {type(error).__name__}: {error}"
        except asyncio.CancelledError:
            exchange.outcome, exchange.error = Outcome.UNKNOWN, "the client went away"
            raise
        finally:
            reply = self._write(request_id, label, worker, leg, prompt, max_tokens, params, begun_ns, exchange)
        return reply

    def tokens_of(self, prompt: PromptSpec) -> NDArray[np.int64]:
        """Return a prompt's tokens; a later turn's are made from what was sent and answered before."""
        return prompt_tokens(prompt, self._sent[prompt.after] if prompt.after else NO_TOKENS)

    def _write(
        self, request_id: str, label: str, worker: str, leg: str, prompt: PromptSpec, max_tokens: int,
        params: Params | None, begun_ns: int, exchange: _Exchange,
    ) -> Reply:  # fmt: skip
        end_ns = now_ns()
        ids = exchange.output_ids
        if leg == "decode" and ids and self.meddler.answer is not None:
            ids = self.meddler.answer(ids)
        handed = exchange.hand_off
        if leg == "prefill" and handed and self.meddler.returned is not None:
            handed = self.meddler.returned(handed)
        self._sent[request_id] = np.concatenate([self._sent[request_id], np.asarray(ids, np.int64)])
        error = " ".join(exchange.error.split())[:ERROR_CHARS_MAX]
        record = RequestRecord(
            request_id=request_id, prompt=prompt, max_tokens=max_tokens, intended_ns=begun_ns, send_began_ns=begun_ns,
            sent_ns=begun_ns, first_byte_ns=exchange.first_byte_ns, end_ns=end_ns, chunks=exchange.chunks,
            output_ids=ids, cached_tokens=exchange.cached_tokens, kv_handed=params is not None, turn=prompt.turn,
            outcome=exchange.outcome, http_status=exchange.status, error=error, node_d=worker,
            logprobs=exchange.logprobs,
        )  # fmt: skip
        os.write(self._rows, msgspec.json.encode(record) + b"\n")
        call = Call(
            request_id=request_id, label=label, worker=worker, leg=leg, sent_ns=begun_ns,
            first_ns=record.first_token_ns, end_ns=end_ns, input_tokens=prompt.input_tokens, max_tokens=max_tokens,
            output_tokens=len(ids), status=exchange.status, outcome=exchange.outcome, error=error,
            cached_tokens=exchange.cached_tokens, given=params, returned=handed,
        )  # fmt: skip
        self._steps.add(call)
        return Reply(call=call, prompt=prompt, output_ids=ids)


class _Exchange:
    """One HTTP exchange while it goes on."""

    def __init__(self, body: bytes, *, stream: bool) -> None:
        self._body = body
        self._stream = stream
        self._answer = Answer()
        self._whole: list[int] = []
        self._whole_logprobs: list[float] = []
        self.chunks: list[Chunk] = []
        self.first_byte_ns = 0
        self.status = 0
        self.outcome = Outcome.UNKNOWN
        self.error = ""
        self.cached_tokens: int | None = None
        self.hand_off: Params | None = None

    @property
    def output_ids(self) -> list[int]:
        return self._whole or self._answer.output_ids

    @property
    def logprobs(self) -> list[float]:
        """The logarithms of the tokens' probabilities, none if the server told none."""
        return self._whole_logprobs or self._answer.logprobs

    async def run(self, session: aiohttp.ClientSession, url: str, request_id: str) -> None:
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        async with session.post(url, data=self._body, headers=headers) as response:
            self.status = response.status
            self.first_byte_ns = now_ns()
            if response.status != 200:
                self.outcome = Outcome.FAIL
                self.error = f"HTTP {response.status}: {_words(await response.read())}"
            elif self._stream:
                await self._streamed(response)
            else:
                self._taken(await response.read(), now_ns())

    async def _streamed(self, response: aiohttp.ClientResponse) -> None:
        answer = self._answer
        try:
            async for piece in response.content.iter_any():
                answer.take(piece, now_ns())
                if answer.done_ns or answer.error:
                    break
        finally:
            self.chunks, self.cached_tokens = answer.chunks, answer.cached_tokens
            if answer.hand_off:
                with contextlib.suppress(msgspec.DecodeError):
                    self.hand_off = msgspec.json.decode(answer.hand_off, type=Params)
        self.outcome, self.error = answer.verdict()

    def _taken(self, body: bytes, t_ns: int) -> None:
        whole = msgspec.json.decode(body, type=_Whole)
        choice = whole.choices[0] if whole.choices else _Choice()
        self._whole = choice.token_ids or []
        told = (choice.logprobs.token_logprobs if choice.logprobs else None) or []
        self._whole_logprobs = [p for p in told if p is not None] if None not in told else []
        self.chunks = [Chunk(t_ns, len(self._whole))] if self._whole else []
        self.hand_off = whole.kv_transfer_params
        details = (whole.usage.prompt_tokens_details if whole.usage else None) or {}
        self.cached_tokens = details.get("cached_tokens")
        self.outcome = Outcome.OK


def _words(body: bytes) -> str:
    """Return the message of an error body, whoever words it."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace")
    if isinstance(found, dict):
        error = found.get("error") or found.get("message") or found.get("detail") or found
        param = error.get("param") if isinstance(error, dict) else None
        return f"{error_text(error)} (param {param})" if param else error_text(error)
    return str(found)

"""The step loop: runs the core's steps at the pace of the emulated hardware and hands out tokens."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from reference_impl.content import Ints
from reference_impl.engine.core import EngineCore, Sequence
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S, s_to_ns

CATCH_UP_NS: Final = NS_PER_S // 20
"""How far the loop may lag and still catch up: real work that took longer than emulated is not hidden beyond that."""


class Delta(msgspec.Struct, frozen=True):
    """Tokens of an answer that became ready together; `finished` is set on the last."""

    tokens: list[int]
    finished: bool


class TokenStream:
    """The answer of one request, as it comes: iterate over `Delta`s; leave early by `StepLoop.abort`."""

    def __init__(self, sequence: Sequence, interval_tokens: int) -> None:
        self.sequence = sequence
        self._interval = interval_tokens
        self._handed = 0
        self._ready: asyncio.Queue[Delta] = asyncio.Queue()  # holds at most the request's own answer

    def produced(self) -> None:
        """Hand out what the newest step made, if it fills an interval or ends the answer."""
        made = self.sequence.output_tokens
        whole = self.sequence.finished
        if made - self._handed < self._interval and not whole and self._handed:
            return
        start = self.sequence.prompt_tokens
        tokens = self.sequence.tokens[start + self._handed : start + made].tolist()
        self._handed = made
        self._ready.put_nowait(Delta(tokens, whole))

    async def next(self) -> Delta:
        """Return the next delta."""
        return await self._ready.get()


class StepLoop:
    """Drives `core`. `run` is one task for the engine's life; everything happens on one event loop."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._streams: dict[int, TokenStream] = {}
        self._work = asyncio.Event()
        self.steps = 0

    def submit(
        self, request_id: str, prompt: Ints, output_tokens_max: int, *, interval_tokens: int | None = None
    ) -> TokenStream:
        """Queue a request and return its answer's stream. Raises ValueError if it could never run."""
        sequence = self.core.sequence(request_id, prompt, output_tokens_max)
        stream = TokenStream(sequence, interval_tokens or self.core.profile.stream_interval_tokens)
        self._streams[id(sequence)] = stream
        self._work.set()
        return stream

    def abort(self, stream: TokenStream) -> None:
        """Give up on an answer and free its blocks; harmless when it has ended."""
        if self._streams.pop(id(stream.sequence), None):
            self.core.abort(stream.sequence)

    async def run(self) -> None:
        """Step while there is work, wait while there is none."""
        deadline = 0
        while True:
            if not self.core.has_work:
                self._work.clear()
                await self._work.wait()
            begun = now_ns()
            step = self.core.step()
            self.steps += 1
            base = deadline if begun - deadline < CATCH_UP_NS else begun
            deadline = base + s_to_ns(step.compute_s)
            await asyncio.sleep(max(0, deadline - now_ns()) / NS_PER_S)
            for sequence in step.produced:
                self._hand_out(sequence)

    def _hand_out(self, sequence: Sequence) -> None:
        stream = self._streams.get(id(sequence))
        if stream is None:  # aborted while the step ran
            return
        if sequence.finished:
            del self._streams[id(sequence)]
        stream.produced()

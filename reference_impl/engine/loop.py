"""The step loop: runs the core's steps at the pace of the emulated hardware and hands out tokens."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

import msgspec

from reference_impl.content import Ints
from reference_impl.engine.block_groups import BlockGroups
from reference_impl.engine.connector import Connector
from reference_impl.engine.core import EngineCore, Sequence
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S, s_to_ns
from reference_impl.rules.handoff import Asked

CATCH_UP_NS: Final = NS_PER_S // 20
"""How far the loop may lag and still catch up: real work that took longer than emulated is not hidden beyond that."""

BUSY_POLL_S: Final = 0.002
"""Between looks at the connector while leases or loads are under way; a look takes some tens of microseconds."""
IDLE_POLL_S: Final = 0.05
"""Between looks while nothing is: a late message still has to be read, and leaves nothing behind."""


class LoadFailed(Exception):
    """A request ended because its KV could not be loaded and the policy is to fail (R2); the message says why."""


class Delta(msgspec.Struct, frozen=True):
    """Tokens of an answer that became ready together; `finished` is set on the last."""

    tokens: list[int]
    finished: bool
    kv_transfer_params: dict[str, Any] | None = None
    """On the last: the hand-off, if the blocks are kept for somebody."""


class TokenStream:
    """The answer of one request, as it comes: iterate over `Delta`s; leave early by `StepLoop.abort`."""

    def __init__(self, sequence: Sequence, interval_tokens: int) -> None:
        self.sequence = sequence
        self._interval = interval_tokens
        self._handed = 0
        self._ready: asyncio.Queue[Delta | LoadFailed] = asyncio.Queue()  # holds at most the request's own answer

    def produced(self, kv_transfer_params: dict[str, Any] | None = None) -> None:
        """Hand out what the newest step made, if it fills an interval or ends the answer."""
        made = self.sequence.output_tokens
        whole = self.sequence.finished
        if made - self._handed < self._interval and not whole and self._handed:
            return
        start = self.sequence.prompt_tokens
        tokens = self.sequence.tokens[start + self._handed : start + made].tolist()
        self._handed = made
        self._ready.put_nowait(Delta(tokens, whole, kv_transfer_params))

    def failed(self, reason: str) -> None:
        """End the answer, of which nothing has been handed out, with an error."""
        self._ready.put_nowait(LoadFailed(reason))

    async def next(self) -> Delta:
        """Return the next delta. Raises LoadFailed in place of the first."""
        delta = await self._ready.get()
        if isinstance(delta, LoadFailed):
            raise delta
        return delta


class StepLoop:
    """Drives `core`. `run` is one task for the engine's life; everything happens on one event loop.

    With a `connector`, KV moves between engines: it is looked at before every step, while a step's emulated time
    passes, and while there is nothing to do.
    """

    def __init__(self, core: EngineCore, connector: Connector | None = None) -> None:
        self.core = core
        self.connector = connector
        self.groups: BlockGroups | None = None
        """Told of every sequence that ends, where a block service stands beside the engine."""
        self._streams: dict[int, TokenStream] = {}
        self._work = asyncio.Event()
        self.steps = 0

    def submit(
        self,
        request_id: str,
        prompt: Ints,
        output_tokens_max: int,
        *,
        interval_tokens: int | None = None,
        asked: Asked | None = None,
    ) -> TokenStream:
        """Queue a request and return its answer's stream.

        Raises ValueError if it could never run, BadHandOff if what is `asked` of the connector cannot be done.
        """
        if asked is None or self.connector is None:
            sequence = self.core.sequence(request_id, prompt, output_tokens_max)
        else:
            sequence = self.connector.submit(request_id, prompt, output_tokens_max, asked, now_ns())
        stream = TokenStream(sequence, interval_tokens or self.core.profile.stream_interval_tokens)
        self._streams[id(sequence)] = stream
        self._work.set()
        return stream

    def abort(self, stream: TokenStream) -> None:
        """Give up on an answer and free its blocks; harmless when it has ended."""
        here = self._streams.pop(id(stream.sequence), None)
        if self.connector is not None:
            self.connector.abort(stream.sequence)
        elif here:
            self.core.abort(stream.sequence)
        self._work.set()  # what it leaves may let another in

    async def run(self) -> None:
        """Step while there is work, wait while there is none."""
        deadline = 0
        while True:
            self._poll()
            if not self.core.has_work:
                await self._idle()
                continue
            begun = now_ns()
            step = self.core.step()
            self.steps += 1
            base = deadline if begun - deadline < CATCH_UP_NS else begun
            deadline = base + s_to_ns(step.compute_s)
            await self._pass_time(deadline)
            for sequence in step.produced:
                self._hand_out(sequence)

    def _poll(self) -> None:
        """Look at the connector; end what it has given up on."""
        if self.connector is None:
            return
        self.connector.poll(now_ns())
        failed, self.connector.failed = self.connector.failed, []
        for sequence, reason in failed:
            stream = self._streams.pop(id(sequence), None)
            if stream is not None:
                stream.failed(reason)

    async def _idle(self) -> None:
        """Return when there is work, or when the connector is to be looked at again."""
        self._work.clear()
        if self.connector is None:
            await self._work.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BUSY_POLL_S if self.connector.busy else IDLE_POLL_S):
                await self._work.wait()

    async def _pass_time(self, deadline_ns: int) -> None:
        """Let a step's emulated time pass: no message has to wait for a long step's end."""
        while self.connector is not None and self.connector.busy:
            left_s = (deadline_ns - now_ns()) / NS_PER_S
            if left_s <= BUSY_POLL_S:
                break
            await asyncio.sleep(BUSY_POLL_S)
            self._poll()
        await asyncio.sleep(max(0, deadline_ns - now_ns()) / NS_PER_S)

    def _hand_out(self, sequence: Sequence) -> None:
        params = None
        if sequence.finished and self.connector is not None:
            params = self.connector.finished(sequence, now_ns())
        if sequence.finished and self.groups is not None:
            self.groups.noticed(sequence)
        stream = self._streams.get(id(sequence))
        if stream is None:  # aborted while the step ran
            return
        if sequence.finished:
            del self._streams[id(sequence)]
        stream.produced(params)

"""What came of one request's answer so far, and the verdict on it once the stream is over. Pure."""

from __future__ import annotations

import math
from array import array
from typing import Final

from workloads.rows import Chunk, Outcome
from workloads.sse import NO_PARAMS, SseReader, decode_event

BROKEN_FINISHES: Final = frozenset({"abort", "error"})
"""Finish reasons with which an engine says that it gave up."""


class Answer:
    """Gathers the events of one stream. `chunks` and `output_ids` stay, however the stream ends.

    Numbers are kept in arrays: as objects in lists, those of a few hundred streams make the garbage collector stop
    the client for 10 ms at a time.
    """

    def __init__(self) -> None:
        self._chunk_ns = array("q")
        self._chunk_tokens = array("q")
        self._ids = array("q")
        self._logprobs = array("d")
        self.done_ns = 0
        self.error = ""
        self.hand_off = b""
        """The last `kv_transfer_params` that came, byte for byte; empty if none did."""
        self.cached_tokens: int | None = None
        self._finish_reason = ""
        self._counted_tokens: int | None = None
        self._reader = SseReader()

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks with content so far, in order."""
        return list(map(Chunk, self._chunk_ns, self._chunk_tokens))

    @property
    def output_ids(self) -> list[int]:
        """The tokens so far, in order."""
        return self._ids.tolist()

    @property
    def logprobs(self) -> list[float]:
        """The logarithms of their probabilities, one a token; none if they were not asked for."""
        return self._logprobs.tolist()

    def take(self, piece: bytes, t_ns: int) -> None:
        """Take what one read returned. Raises `sse.BadStream`."""
        for event_ns, payload in self._reader.feed(piece, t_ns):
            self._event(event_ns, payload)

    def _event(self, t_ns: int, payload: bytes) -> None:
        event = decode_event(payload)
        if event.choices:
            choice = event.choices[0]
            if choice.token_ids:
                self._add(t_ns, len(choice.token_ids))
                self._ids.extend(choice.token_ids)
                if choice.logprobs is not None and choice.logprobs.token_logprobs is not None:
                    self._logprobs.extend(math.nan if p is None else p for p in choice.logprobs.token_logprobs)
            elif choice.content:
                # The text of a server that names no tokens: a chunk is taken for one until the usage says more.
                self._add(t_ns, 0 if self._ids else 1)
            if choice.finish_reason:
                self._finish_reason = choice.finish_reason
        elif event.done:
            self.done_ns = t_ns
        if event.usage is not None:
            self._counted_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                self.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        if event.kv_transfer_params is not NO_PARAMS and (hand_off := bytes(event.kv_transfer_params)) != b"null":
            self.hand_off = hand_off
        if not self.error and (event.error is not None or event.object == "error"):
            self.error = f"the stream said: {event.error_text}"

    def _add(self, t_ns: int, tokens: int) -> None:
        self._chunk_ns.append(t_ns)
        self._chunk_tokens.append(tokens)

    @property
    def chunk_count(self) -> int:
        """How many chunks with content came so far."""
        return len(self._chunk_ns)

    def verdict(self) -> tuple[Outcome, str]:
        """Return how a stream that is over ended, and why if it failed."""
        if self.error:
            return Outcome.FAIL, self.error
        if not self.done_ns or not self._finish_reason:
            missing = "no [DONE]" if not self.done_ns else "no finish_reason"
            return Outcome.FAIL, f"the stream was cut short after {self.chunk_count} chunks ({missing})"
        if self._finish_reason in BROKEN_FINISHES:
            return Outcome.FAIL, f'the engine gave up: finish_reason "{self._finish_reason}"'
        self._spread_count()
        return Outcome.OK, ""

    def _spread_count(self) -> None:
        """Where the server named no tokens, give the last chunk what the server's own count has over the chunks."""
        if not self._ids and self._chunk_tokens and self._counted_tokens is not None:
            self._chunk_tokens[-1] += max(0, self._counted_tokens - sum(self._chunk_tokens))

"""What came of one request's answer so far, and the verdict on it once the stream is over. Pure."""

from __future__ import annotations

from typing import Final

from workloads.rows import Chunk, Outcome
from workloads.sse import SseReader, decode_event

BROKEN_FINISHES: Final = frozenset({"abort", "error"})
"""Finish reasons with which an engine says that it gave up."""


class Answer:
    """Gathers the events of one stream. `chunks` and `output_ids` stay, however the stream ends."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.output_ids: list[int] = []
        self.done_ns = 0
        self.error = ""
        self._finish_reason = ""
        self._counted_tokens: int | None = None
        self._told_ids = False
        self._reader = SseReader()

    def take(self, piece: bytes, t_ns: int) -> None:
        """Take what one read returned. Raises `sse.BadStream`."""
        for event_ns, payload in self._reader.feed(piece, t_ns):
            self._event(event_ns, payload)

    def _event(self, t_ns: int, payload: bytes) -> None:
        event = decode_event(payload)
        if event.choices:
            choice = event.choices[0]
            if choice.token_ids:
                self.chunks.append(Chunk(t_ns, len(choice.token_ids)))
                self.output_ids += choice.token_ids
                self._told_ids = True
            elif choice.content:
                # The text of a server that names no tokens: a chunk is taken for one until the usage says more.
                self.chunks.append(Chunk(t_ns, 0 if self._told_ids else 1))
            if choice.finish_reason:
                self._finish_reason = choice.finish_reason
        elif event.done:
            self.done_ns = t_ns
        if event.usage is not None:
            self._counted_tokens = event.usage.completion_tokens
        if not self.error and (event.error is not None or event.object == "error"):
            self.error = f"the stream said: {event.error_text}"

    def verdict(self) -> tuple[Outcome, str]:
        """Return how a stream that is over ended, and why if it failed."""
        if self.error:
            return Outcome.FAIL, self.error
        if not self.done_ns or not self._finish_reason:
            missing = "no [DONE]" if not self.done_ns else "no finish_reason"
            return Outcome.FAIL, f"the stream was cut short after {len(self.chunks)} chunks ({missing})"
        if self._finish_reason in BROKEN_FINISHES:
            return Outcome.FAIL, f'the engine gave up: finish_reason "{self._finish_reason}"'
        self._spread_count()
        return Outcome.OK, ""

    def _spread_count(self) -> None:
        """Where the server named no tokens, give the last chunk what the server's own count has over the chunks."""
        if self._told_ids or not self.chunks or self._counted_tokens is None:
            return
        missing = self._counted_tokens - sum(chunk.tokens for chunk in self.chunks)
        if missing > 0:
            last = self.chunks[-1]
            self.chunks[-1] = Chunk(last.t_ns, last.tokens + missing)

"""Server-sent events of an OpenAI stream: bytes in, typed events out. Pure, and cheap: it runs once a chunk.

Lines end in LF or CRLF (a lone CR, which no server sends, ends none). Rule: WHATWG HTML, 9.2.6.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

LINE_BYTES_MAX: Final = 16 * 1024 * 1024
"""A line that grows past this is no event of ours; the stream is refused instead of filling the memory."""


NO_PARAMS: Final = msgspec.Raw()
"""What an event without `kv_transfer_params` has; by its identity, since this is asked once a chunk."""


class BadStream(ValueError):
    """The server sent something that is no OpenAI stream."""


class PromptDetails(msgspec.Struct, frozen=True, gc=False):
    """How many of the prompt's tokens the server found in its cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True, gc=False):
    """How many tokens the server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct, frozen=True, gc=False):
    """New text of a chat answer, its thoughts included: they are decoded tokens as well."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Logprobs(msgspec.Struct, frozen=True, gc=False):
    """The logarithms of the probabilities of the tokens that an event holds (completions)."""

    token_logprobs: list[float | None] | None = None


class Choice(msgspec.Struct, frozen=True, gc=False):
    """New content of one answer."""

    text: str | None = None
    delta: Delta | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        """The new text, "" if there is none (such as the role that opens a chat answer)."""
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""


class StreamEvent(msgspec.Struct, frozen=True, gc=False):
    """One event. Only the first choice counts: one answer is asked for."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None
    kv_transfer_params: msgspec.Raw = NO_PARAMS
    """Two-turn mode of vLLM's NixlConnector: where the KV of this answer waits for a next turn, as it came."""
    done: bool = False

    @property
    def error_text(self) -> str:
        """What the server says went wrong, "" if nothing did."""
        if self.error is None and self.object != "error":
            return ""
        return error_text(self.error) or self.message or "the server sent an error without a message"


_DONE: Final = StreamEvent(done=True)
_decode: Final = msgspec.json.Decoder(StreamEvent).decode


def decode_event(payload: bytes) -> StreamEvent:
    """Return the event that `payload` (the data of one server-sent event) holds. Raises `BadStream`."""
    if payload == b"[DONE]":
        return _DONE
    try:
        return _decode(payload)
    except msgspec.DecodeError as error:
        raise BadStream(f"an event is no OpenAI chunk ({error}): {payload[:80]!r}") from None


def error_text(error: object) -> str:
    """Return the message of an OpenAI error object, or of the plain text that some servers send instead."""
    if isinstance(error, dict):
        return str(error.get("message") or error.get("type") or error)
    return "" if error is None else str(error)


class SseReader:
    """Cuts a stream of bytes into the data of its events, however the bytes were split on their way."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._data_ns = 0

    def feed(self, piece: bytes, t_ns: int) -> list[tuple[int, bytes]]:
        """Take the bytes that one read returned at `t_ns`; return (t_ns, data) of every event that is now whole.

        An event's time is the read that completed its last line of data: the blank line that ends it holds nothing.
        """
        if (
            not self._rest
            and not self._data
            and piece.startswith(b"data: ")
            and piece.find(b"\n") == len(piece) - 2
            and piece.endswith(b"\n\n")
            and b"\r" not in piece
        ):
            return [(t_ns, piece[6:-2])]  # the common case: one read, one event
        whole, newline, self._rest = (self._rest + piece).rpartition(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise BadStream(f"a line is longer than {LINE_BYTES_MAX} bytes")
        if not newline:
            return []
        events: list[tuple[int, bytes]] = []
        for line in whole.split(b"\n"):
            self._line(line.removesuffix(b"\r"), t_ns, events)
        return events

    def _line(self, line: bytes, t_ns: int, events: list[tuple[int, bytes]]) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._data_ns = t_ns
        elif not line and self._data:
            events.append((self._data_ns, b"\n".join(self._data)))
            self._data = []
        # Comments (the keep-alives of proxies), event names, ids and retry times hold nothing for us.

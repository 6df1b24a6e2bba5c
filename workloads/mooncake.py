"""Reads a trace in the Mooncake format: one JSON object a line with a request's start, lengths and prefix blocks.

Fields: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids` (one id for each 512-token block of
the prompt, the last of which may be part of one; equal ids stand for equal prefixes). Format: Mooncake, FAST'25,
`FAST25-release`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

BLOCK_TOKENS: Final = 512
NS_PER_MS: Final = 1_000_000


class BadTrace(ValueError):
    """A trace cannot be used; one line that says which file, which line of it, which field, and why."""


class _Line(msgspec.Struct, frozen=True):
    """One line of the file."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace: start in ns after the first one, lengths in tokens, and the blocks of its prompt."""

    offset_ns: int
    input_tokens: int
    output_tokens: int
    block_ids: list[int]
    block_tokens: int


def read_trace(path: Path, time_scale: float = 1.0, length_scale: float = 1.0) -> list[TraceRequest]:
    """Return the trace's requests in order, `time_scale` times faster and with lengths times `length_scale`.

    Blocks are scaled like lengths, so that as many blocks are shared as before; every length stays at least 1 token.
    Raises `BadTrace`, and OSError if the file cannot be read.
    """
    lines: list[_Line] = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if text.strip():
            lines.append(_line(f"trace {path}, line {number}", text, lines[-1].timestamp if lines else 0.0))
    if not lines:
        raise BadTrace(f"trace {path} holds no request")
    return [_scaled(line, lines[0].timestamp, time_scale, length_scale) for line in lines]


def _scaled(line: _Line, origin_ms: float, time_scale: float, length_scale: float) -> TraceRequest:
    def scaled(tokens: int) -> int:
        return max(1, round(tokens * length_scale))

    block_tokens = scaled(BLOCK_TOKENS)
    whole = len(line.hash_ids) - 1
    return TraceRequest(
        offset_ns=round((line.timestamp - origin_ms) * NS_PER_MS / time_scale),
        # From the blocks and not from the whole length: rounding must not move a block's edge.
        input_tokens=whole * block_tokens + scaled(line.input_length - whole * BLOCK_TOKENS),
        output_tokens=scaled(line.output_length),
        block_ids=line.hash_ids,
        block_tokens=block_tokens,
    )


def _line(place: str, text: bytes, before_ms: float) -> _Line:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.DecodeError as error:
        raise BadTrace(f"{place}: {error}") from None
    for name in ("input_length", "output_length"):
        if (length := getattr(line, name)) < 1:
            raise BadTrace(f"{place}: `{name}` must be at least 1 token, got {length}")
    if not line.timestamp >= before_ms:
        raise BadTrace(f"{place}: `timestamp` must not go back: {line.timestamp:g} ms after {before_ms:g} ms")
    blocks = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) != blocks:
        raise BadTrace(f"{place}: `hash_ids` must hold {blocks} ids, one for each {BLOCK_TOKENS} tokens of "
                       f"`input_length` {line.input_length}, got {len(line.hash_ids)}")  # fmt: skip
    return line

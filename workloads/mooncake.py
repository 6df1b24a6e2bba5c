"""Reads a trace in the Mooncake format: one JSON object a line with a request's start, lengths and prefix blocks.

Fields: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids` (one id for each 512-token block of
the prompt; an id stands for the whole prefix up to its block's end). Format: Mooncake, FAST'25, `FAST25-release`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

BLOCK_TOKENS: Final = 512
NS_PER_MS: Final = 1_000_000


class BadTrace(ValueError):
    """A trace cannot be used; says which line and why."""


class TraceLine(msgspec.Struct, frozen=True):
    """One line of the file."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace: start in ns after the first one, lengths, and the prefix it shares with others.

    A trace's prefixes form a tree, a prompt's `prefix_group` is a single line of tokens. So the requests along one
    branch (the turns of a conversation) share a group, and what different branches have in common below their fork
    is not shared: a replay reuses at most what the trace reuses.
    """

    offset_ns: int
    input_tokens: int
    output_tokens: int
    prefix_group: int
    prefix_tokens: int


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the trace's requests in order. Raises `BadTrace` with the line's number, OSError if it cannot be read."""
    lines = [_line(path, number, text) for number, text in enumerate(path.read_bytes().splitlines(), 1) if text.strip()]
    if not lines:
        raise BadTrace(f"trace {path} holds no request")
    for number, (earlier, later) in enumerate(itertools.pairwise(lines), 2):
        if later.timestamp < earlier.timestamp:
            raise BadTrace(
                f"trace {path}, request {number}: timestamp {later.timestamp:g} ms is before its forerunner's"
            )
    shared = _shared_blocks(lines)
    leaves = _leaves(shared)
    return [
        TraceRequest(
            offset_ns=round((line.timestamp - lines[0].timestamp) * NS_PER_MS),
            input_tokens=line.input_length,
            output_tokens=line.output_length,
            prefix_group=leaves[blocks[-1]] if blocks else -1,
            prefix_tokens=min(len(blocks) * BLOCK_TOKENS, line.input_length - 1),
        )
        for line, blocks in zip(lines, shared, strict=True)
    ]


def _line(path: Path, number: int, text: bytes) -> TraceLine:
    try:
        line = msgspec.json.decode(text, type=TraceLine)
    except msgspec.DecodeError as error:
        raise BadTrace(f"trace {path}, line {number}: {error}") from None
    if line.input_length < 1 or line.output_length < 1 or line.timestamp < 0:
        raise BadTrace(f"trace {path}, line {number}: lengths must be at least 1 token and the timestamp at least 0 ms")
    return line


def _shared_blocks(lines: list[TraceLine]) -> list[list[int]]:
    """Return each line's leading blocks that another line has, too."""
    holders = Counter(block for line in lines for block in set(line.hash_ids))
    shared = []
    for line in lines:
        depth = 0
        while depth < len(line.hash_ids) and holders[line.hash_ids[depth]] > 1:
            depth += 1
        shared.append(line.hash_ids[:depth])
    return shared


def _leaves(shared: list[list[int]]) -> dict[int, int]:
    """Return for each shared block the last block of the longest shared prefix that runs through it."""
    longest: dict[int, list[int]] = {}
    for blocks in shared:
        for block in blocks:
            if len(blocks) > len(longest.get(block, [])):
                longest[block] = blocks
    return {block: blocks[-1] for block, blocks in longest.items()}

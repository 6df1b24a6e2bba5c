"""Traces in the Mooncake format: read, scaled, refused, and sharing exactly what they say."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.mooncake import BLOCK_TOKENS, BadTrace, TraceRequest, read_trace
from workloads.prompts import prompt_tokens
from workloads.rows import PromptSpec

SAMPLE = Path(__file__).parents[2] / "workloads/traces/sample.jsonl"
GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}'


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace_becomes_requests(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "", GOOD.replace("5", "7.5").replace("[1, 2]", "[1, 3]"), GOOD.replace("5", "9"))
    requests = read_trace(path)
    assert [request.offset_ns for request in requests] == [0, 2_500_000, 4_000_000]
    assert [request.block_ids for request in requests] == [[1, 2], [1, 3], [1, 2]]
    assert {(r.input_tokens, r.output_tokens, r.block_tokens) for r in requests} == {(600, 3, 512)}


def test_a_trace_is_scaled_in_time_and_in_length(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, GOOD.replace("5", "9").replace("600", "1024"))
    first, second = read_trace(path, time_scale=4, length_scale=0.1)
    assert (first.offset_ns, second.offset_ns) == (0, 1_000_000)
    assert (first.block_tokens, first.input_tokens, first.output_tokens) == (51, 51 + 9, 1)
    assert second.input_tokens == 2 * 51
    tiny = read_trace(path, length_scale=0.0001)
    assert [(r.block_tokens, r.input_tokens, r.output_tokens) for r in tiny] == [(1, 2, 1)] * 2


@given(st.integers(1, 20_000), st.floats(0.0001, 3))
def test_scaled_blocks_always_fill_the_prompt(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, scale: float
) -> None:
    blocks = list(range(-(-tokens // BLOCK_TOKENS)))
    line = {"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": blocks}
    path = write(tmp_path_factory.mktemp("trace"), msgspec.json.encode(line).decode())
    [request] = read_trace(path, length_scale=scale)
    assert len(tokens_of(request, 0)) == request.input_tokens


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (GOOD[:40], "line 2: Input data was truncated"),
        (GOOD[:-1], "line 2: Input data was truncated"),
        ("{", "line 2: Input data was truncated"),
        (GOOD + GOOD, "line 2: JSON is malformed"),
        ('{"timestamp": 5, "output_length": 3}', "line 2: Object missing required field `input_length`"),
        (GOOD.replace(', "hash_ids": [1, 2]', ""), "line 2: Object missing required field `hash_ids`"),
        (GOOD.replace("600", '"many"'), "line 2: Expected `int`, got `str` - at `$.input_length`"),
        (GOOD.replace("[1, 2]", '[1, "b"]'), "line 2: Expected `int`, got `str` - at `$.hash_ids[1]`"),
        (GOOD.replace("600", "0"), "line 2: `input_length` must be at least 1 token, got 0"),
        (GOOD.replace('"output_length": 3', '"output_length": -3'), "line 2: `output_length` must be at least 1"),
        (GOOD.replace("[1, 2]", "[1]"), "line 2: `hash_ids` must hold 2 ids, one for each 512 tokens"),
        (GOOD.replace("[1, 2]", "[1, 2, 3]"), "line 2: `hash_ids` must hold 2 ids"),
        (GOOD.replace("5", "4"), "line 2: `timestamp` must not go back: 4 ms after 5 ms"),
        (GOOD.replace("5", "-4"), "line 2: `timestamp` must not go back: -4 ms after 5 ms"),
        (GOOD.replace("5", "null"), "line 2: Expected `float`, got `null` - at `$.timestamp`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path, GOOD, line)
    with pytest.raises(BadTrace) as caught:
        read_trace(path)
    assert f"trace {path}, {words}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="holds no request"):
        read_trace(write(tmp_path, ""))


def tokens_of(request: TraceRequest, index: int) -> np.ndarray:
    spec = PromptSpec(
        1, index, request.input_tokens, block_ids=request.block_ids, block_tokens=request.block_tokens
    )  # fmt: skip
    return prompt_tokens(spec)


def common(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading numbers are equal."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if len(differs) else shorter


# An id stands for its whole prefix, so a prompt is a path in a tree: here its children are numbered 1 to 3.
PATHS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=2, max_size=6)


@given(PATHS, st.sampled_from([1.0, 0.1]), st.integers(0, 500))
def test_two_requests_share_exactly_what_the_trace_says(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[int]], scale: float, cut: int
) -> None:
    """At forks as well: what two branches have in common below their fork is shared, and not a token more."""
    ids = [[int("".join(map(str, path[: depth + 1]))) for depth in range(len(path))] for path in paths]
    lines = [
        {"timestamp": n, "input_length": len(blocks) * BLOCK_TOKENS - cut, "output_length": 1, "hash_ids": blocks}
        for n, blocks in enumerate(ids)
    ]
    path = write(tmp_path_factory.mktemp("trace"), *(msgspec.json.encode(line).decode() for line in lines))
    requests = read_trace(path, length_scale=scale)
    prompts = [tokens_of(request, index) for index, request in enumerate(requests)]
    for one, its, mine in zip(requests, ids, prompts, strict=True):
        for their_ids, theirs in zip(ids, prompts, strict=True):
            said = common(np.array(its), np.array(their_ids)) * one.block_tokens
            expected = min(said, len(mine), len(theirs))
            # Past the fork tokens are equal only by chance: one in 4,096.
            assert expected <= common(mine, theirs) <= expected + 2


def shared_blocks(requests: list[TraceRequest]) -> float:
    """The share of prompt blocks that were seen before."""
    seen: set[int] = set()
    again = total = 0
    for request in requests:
        again += len(seen & set(request.block_ids))
        total += len(request.block_ids)
        seen |= set(request.block_ids)
    return again / total


def test_the_sample_reuses_its_conversations() -> None:
    requests = read_trace(SAMPLE)
    assert len(requests) == 40
    assert 0.3 < shared_blocks(requests) < 1
    turns = [r for r in requests if len(r.block_ids) > 1]
    forks = {tuple(r.block_ids[:depth]) for r in turns for depth in range(1, len(r.block_ids))}
    assert len(forks) > 10


@pytest.mark.skipif("PDPROOF_TRACE_DATA" not in os.environ, reason="PDPROOF_TRACE_DATA names no published trace")
def test_a_published_trace_can_be_replayed() -> None:
    requests = read_trace(Path(os.environ["PDPROOF_TRACE_DATA"]), time_scale=10, length_scale=0.1)
    assert len(requests) >= 1000
    assert shared_blocks(requests) > 0.2
    for index, request in enumerate(requests[:200]):
        assert len(tokens_of(request, index)) == request.input_tokens

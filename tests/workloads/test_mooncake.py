"""Traces in the Mooncake format: read, refused, and never sharing more than they say."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.mooncake import BLOCK_TOKENS, BadTrace, TraceRequest, read_trace

GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}'


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace_becomes_requests(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "", GOOD.replace("5", "7.5").replace("[1, 2]", "[1, 3]"), GOOD.replace("5", "9"))
    shared = [2 * BLOCK_TOKENS, BLOCK_TOKENS, 2 * BLOCK_TOKENS]
    requests = read_trace(path)
    assert [request.offset_ns for request in requests] == [0, 2_500_000, 4_000_000]
    assert [request.prefix_tokens for request in requests] == [min(tokens, 599) for tokens in shared]
    assert {request.prefix_group for request in requests} == {2}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: Input data was truncated"),
        ('{"timestamp": 5, "output_length": 3}', "line 2: Object missing required field `input_length`"),
        (GOOD.replace("600", '"many"'), "line 2: Expected `int`, got `str`"),
        (GOOD.replace("600", "0"), "line 2: lengths must be at least 1"),
        (GOOD.replace("5", "4"), "request 2: timestamp 4 ms is before"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(BadTrace) as caught:
        read_trace(write(tmp_path, GOOD, line))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="holds no request"):
        read_trace(write(tmp_path, ""))


def _shared(one: TraceRequest, other: TraceRequest) -> int:
    return min(one.prefix_tokens, other.prefix_tokens) if one.prefix_group == other.prefix_group >= 0 else 0


def _common(one: list[int], other: list[int]) -> int:
    depth = 0
    while depth < min(len(one), len(other)) and one[depth] == other[depth]:
        depth += 1
    return depth * BLOCK_TOKENS


# An id stands for its whole prefix, so a prompt is a path in a tree: here its children are numbered 1 to 3.
PATHS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=8)


@given(PATHS)
def test_no_two_requests_share_more_than_the_trace_says(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[int]]
) -> None:
    ids = [[int("".join(map(str, path[: depth + 1]))) for depth in range(len(path))] for path in paths]
    lines = [
        {"timestamp": n, "input_length": len(blocks) * BLOCK_TOKENS, "output_length": 1, "hash_ids": blocks}
        for n, blocks in enumerate(ids)
    ]
    path = write(tmp_path_factory.mktemp("trace"), *(msgspec.json.encode(line).decode() for line in lines))
    requests = read_trace(path)
    for one, its in zip(requests, ids, strict=True):
        for other, theirs in zip(requests, ids, strict=True):
            if one is not other:
                assert _shared(one, other) <= _common(its, theirs)


def test_the_sample_reuses_its_conversations() -> None:
    requests = read_trace(Path(__file__).parents[2] / "workloads/traces/sample.jsonl")
    reused = sum(request.prefix_tokens for request in requests) / sum(request.input_tokens for request in requests)
    assert len(requests) == 40
    assert 0.3 < reused < 1

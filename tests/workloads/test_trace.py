"""The locustfile of traces, a child process, against the golden server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.golden import golden, load, rows_of, wait_for_lines
from tests.golden_server import Plan
from workloads.mooncake import read_trace

FILE = "workloads/trace.py"
SAMPLE = Path(__file__).parents[2] / "workloads/traces/sample.jsonl"
QUICK = [Plan(first_ms=1, gap_ms=1)]


def test_a_trace_is_replayed_and_its_prefixes_are_the_same_tokens(tmp_path: Path) -> None:
    rows, scales = tmp_path / "rows.jsonl", ("--time-scale", 20, "--length-scale", 0.02)
    with golden(tmp_path, QUICK) as server:
        done = load("--host", server.url, "--trace", SAMPLE, "--rows", rows, "--requests", 25, *scales, file=FILE)
        wait_for_lines(server.truth, 25)
        truths = server.truths()
    assert done.returncode == 0, done.stderr
    found = {row.prompt.index: row for row in rows_of(rows).values()}
    expected = read_trace(SAMPLE, time_scale=20, length_scale=0.02)[:25]
    assert len(found) == 25
    by_block: dict[int, list[int]] = {}
    for index, request in enumerate(expected):
        row = found[index]
        assert (row.prompt.input_tokens, row.max_tokens) == (request.input_tokens, request.output_tokens)
        assert row.intended_ns - found[0].intended_ns == request.offset_ns
        sent = msgspec.json.decode(truths[row.request_id].body)["prompt"]
        assert len(sent) == request.input_tokens
        for place, block in enumerate(request.block_ids):
            tokens = sent[place * request.block_tokens : (place + 1) * request.block_tokens]
            known = by_block.setdefault(block, tokens)
            shorter = min(len(known), len(tokens))
            assert known[:shorter] == tokens[:shorter]
    assert len(by_block) < sum(len(request.block_ids) for request in expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"timestamp": 0, "input_length": 60, "outp', "line 1: Input data was truncated"),
        ('{"timestamp": 0, "input_length": 60, "output_length": 5, "hash_ids": []}', "line 1: `hash_ids` must hold 1"),
    ],
)
def test_a_line_that_is_wrong_ends_it_with_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    done = load("--host", "http://127.0.0.1:9", "--trace", path, file=FILE)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert f"--trace: trace {path}, {words}" in line
    assert "Traceback" not in done.stderr


def test_a_trace_must_be_named() -> None:
    done = load("--host", "http://127.0.0.1:9", file=FILE)
    assert done.returncode == 2
    assert "pdproof: error: name a trace with --trace FILE" in done.stderr

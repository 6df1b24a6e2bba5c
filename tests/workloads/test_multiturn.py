"""The locustfile of sessions, a child process, against the golden server: prompts, hand-offs, think time, ends."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.content import sent_prompt
from tests.golden import Golden, golden, load, rows_of, wait_for_lines
from tests.golden_server import Fault, HandOff, Plan
from workloads.rows import Outcome, RequestRecord

FILE = "workloads/multiturn.py"
NS_PER_MS = 1_000_000
SIZES = ("--input-tokens", 40, "--output-tokens", 20, "--turn-tokens", 10)
GOOD = Plan(first_ms=5, gap_ms=1, hand_off=True, cached_tokens=32)


def run(server: Golden, rows: Path, *options: object, code: int = 0) -> dict[str, RequestRecord]:
    done = load("--host", server.url, "--rows", rows, *SIZES, *options, file=FILE)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return rows_of(rows)


def sessions(rows: dict[str, RequestRecord]) -> list[list[RequestRecord]]:
    """The turns of each session, in order."""
    ordered = sorted(rows.values(), key=lambda row: (row.session, row.turn))
    return [list(turns) for _, turns in itertools.groupby(ordered, key=lambda row: row.session)]


def bodies(server: Golden, count: int) -> dict[str, dict[str, Any]]:
    wait_for_lines(server.truth, count)
    return {name: msgspec.json.decode(truth.body) for name, truth in server.truths().items()}


def test_a_turn_repeats_the_whole_talk_and_sends_its_hand_off_on(tmp_path: Path) -> None:
    with golden(tmp_path, [GOOD]) as server:
        options = ("--rate-per-s", 10, "--sessions", 4, "--turns", 3, "--think-s", "0.1,0.3", "--seed", 2)
        rows = run(server, tmp_path / "rows.jsonl", *options)
        sent = bodies(server, 12)
        truths = server.truths()
    assert [len(turns) for turns in sessions(rows)] == [3] * 4
    for turns in sessions(rows):
        said: list[int] = []
        for number, row in enumerate(turns):
            prompt = sent[row.request_id]["prompt"]
            assert row.turn == number
            assert len(prompt) == row.prompt.input_tokens == 40 + number * 30
            assert prompt[: len(said)] == said
            assert prompt == sent_prompt(row, rows).tolist()  # type: ignore[union-attr]
            assert row.cached_tokens == 32
            assert row.kv_handed is (number > 0)
            said = prompt + row.output_ids
        for before, row in itertools.pairwise(turns):
            assert row.prompt.after == before.request_id
            assert row.intended_ns == before.end_ns + round(row.think_ms * NS_PER_MS)
            assert row.intended_ns <= row.send_began_ns
            text = HandOff(remote_request_id=before.request_id).text()
            assert b'"kv_transfer_params":' + text in bytes(truths[row.request_id].body)
    thinks = {row.think_ms for row in rows.values() if row.turn}
    assert thinks == {100, 300}


def test_hand_offs_can_be_left_out(tmp_path: Path) -> None:
    with golden(tmp_path, [GOOD]) as server:
        options = ("--rate-per-s", 10, "--sessions", 2, "--turns", 2, "--think-s", 0, "--no-kv-handoff")
        rows = run(server, tmp_path / "rows.jsonl", *options)
        sent = bodies(server, 4)
    assert len(rows) == 4
    assert not any("kv_transfer_params" in body for body in sent.values())
    assert not any(row.kv_handed for row in rows.values())


def test_a_hand_off_that_was_never_given_out_is_noticed(tmp_path: Path) -> None:
    """The golden server's own check, so that the tests above mean something: answers hand over, but are not renewed."""
    with golden(tmp_path, [Plan(first_ms=1, gap_ms=1)]) as server:
        options = ("--rate-per-s", 10, "--sessions", 1, "--turns", 2, "--think-s", 0)
        rows = run(server, tmp_path / "rows.jsonl", *options)
    assert [row.kv_handed for row in rows.values()] == [False, False]


@pytest.mark.rule("KVC-CLK-007")
def test_a_session_is_kept_alive_while_its_user_thinks(tmp_path: Path) -> None:
    with golden(tmp_path, [GOOD]) as server:
        options = ("--rate-per-s", 10, "--sessions", 1, "--turns", 2, "--think-s", 1.4, "--keep-alive-s", 0.4)
        [[first, second]] = sessions(run(server, tmp_path / "rows.jsonl", *options))
        renewals = server.renewals()
        sent = bodies(server, 2)
    assert [renewal.expiry for renewal in renewals] == [480, 960, 1440]  # each renews what the last one gave
    assert {renewal.request_id for renewal in renewals} == {first.request_id}
    for beat, renewal in enumerate(renewals, 1):
        assert renewal.t_ns >= first.end_ns + beat * 400 * NS_PER_MS
    assert sent[second.request_id]["kv_transfer_params"]["remote_blocks_expiry_time"] == 480 * 4
    assert (second.renewals, second.renewals_failed, second.outcome) == (3, 0, Outcome.OK)


@pytest.mark.rule("KVC-CLK-007")
def test_a_renewal_that_fails_is_counted_and_never_fatal(tmp_path: Path) -> None:
    with golden(tmp_path, [GOOD], renew_status=503) as server:
        options = ("--rate-per-s", 10, "--sessions", 1, "--turns", 2, "--think-s", 1, "--keep-alive-s", 0.4)
        [[_, second]] = sessions(run(server, tmp_path / "rows.jsonl", *options))
        sent = bodies(server, 2)
    assert sent[second.request_id]["kv_transfer_params"]["remote_blocks_expiry_time"] == 480
    assert (second.renewals, second.renewals_failed, second.outcome) == (0, 2, Outcome.OK)


@pytest.mark.parametrize(
    ("plan", "outcome", "words"),
    [
        (Plan(fault=Fault.CUT, after_chunks=2), Outcome.FAIL, "cut short after 2 chunks"),
        (Plan(fault=Fault.STALL, after_chunks=2), Outcome.UNKNOWN, "no end within 2 s"),
        (Plan(status=503), Outcome.FAIL, "HTTP 503"),
        (Plan(first_ms=1, gap_ms=1, token_ids=False), Outcome.FAIL, "the answer named no tokens"),
    ],
)
def test_a_turn_that_is_not_whole_is_the_sessions_last(
    tmp_path: Path, plan: Plan, outcome: Outcome, words: str
) -> None:
    with golden(tmp_path, [GOOD, plan]) as server:
        options = ("--rate-per-s", 10, "--sessions", 1, "--turns", 4, "--think-s", 0, "--request-timeout-s", 2)
        [[first, second]] = sessions(run(server, tmp_path / "rows.jsonl", *options, code=1))
    assert first.outcome is Outcome.OK
    assert second.outcome is outcome
    assert words in second.error


def test_a_stop_ends_sessions_that_think_and_drains_those_that_speak(tmp_path: Path) -> None:
    slow = Plan(first_ms=2000, gap_ms=1, hand_off=True)
    with golden(tmp_path, [GOOD, slow]) as server:
        options = ("--rate-per-s", 20, "--arrivals", "constant", "--sessions", 2, "--turns", 3, "--think-s", 60)
        rows = run(server, tmp_path / "rows.jsonl", *options, "-t", "1s")
    assert [(row.turn, row.outcome) for row in rows.values()] == [(0, Outcome.OK)] * 2


def test_the_drain_begins_with_the_last_turn(tmp_path: Path) -> None:
    """A session's think time is no part of it."""
    with golden(tmp_path, [GOOD]) as server:
        options = ("--rate-per-s", 20, "--sessions", 2, "--turns", 2, "--think-s", 1.5, "--drain-s", 0.5)
        rows = run(server, tmp_path / "rows.jsonl", *options)
    assert [row.outcome for row in rows.values()] == [Outcome.OK] * 4


def test_processes_share_the_sessions(tmp_path: Path) -> None:
    with golden(tmp_path, [GOOD]) as server:
        options = ("--rate-per-s", 20, "--sessions", 5, "--turns", 2, "--think-s", 0.2, "--processes", 2)
        done = load("--host", server.url, "--rows", tmp_path / "rows.jsonl", *SIZES, *options, file=FILE)
    assert done.returncode == 0, done.stderr
    assert "10 requests: 10 ok" in done.stdout
    assert "hand-offs sent 5, renewed 0 times, renewals failed 0" in done.stdout
    shards = [sessions(rows_of(tmp_path / f"rows-{worker}.jsonl")) for worker in (0, 1)]
    assert [[turns[0].session for turns in shard] for shard in shards] == [[0, 2, 4], [1, 3]]
    assert all(len(turns) == 2 for shard in shards for turns in shard)

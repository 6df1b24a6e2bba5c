"""A retry storm of 200 clients: what the retry budget does to it (KVC-IDEM-013)."""

from __future__ import annotations

import msgspec
import pytest

from workloads.retry_storm import BIN_MS, StormResult, StormRow, storm

SECONDS = 6.0


def result(*rows: StormRow) -> StormResult:
    return StormResult(
        budget=True, clients=1, seed=1, seconds=3.0, capacity_per_s=100, outage_from_ms=500, outage_to_ms=1000,
        rows=list(rows),
    )  # fmt: skip


def check_whole(run: StormResult) -> None:
    """Every call has ended once, and nothing that arrived was not sent."""
    calls = run.total("calls_started", 0, float("inf"))
    ended = sum(run.total(column, 0, float("inf")) for column in ("succeeded", "failed", "unknown"))
    assert calls == ended
    assert [row.t_ms for row in run.rows] == list(range(0, BIN_MS * len(run.rows), BIN_MS))
    assert run.amplification() <= 4


@pytest.mark.rule("KVC-IDEM-013")
async def test_a_budget_keeps_a_storm_from_outlasting_its_outage() -> None:
    bounded = await storm(budget=True, seconds=SECONDS)
    unbounded = await storm(budget=False, seconds=SECONDS)
    check_whole(bounded)
    check_whole(unbounded)
    assert unbounded.storm_amplification > 1.7 * bounded.storm_amplification
    assert unbounded.amplification() > 1.7 * bounded.amplification()
    assert bounded.goodput_after > unbounded.goodput_after + 0.15
    assert bounded.recovered_ms >= 0
    assert unbounded.recovered_ms == -1 or unbounded.recovered_ms > bounded.recovered_ms
    assert {row.failed for row in (*bounded.rows, *unbounded.rows)} == {0}  # a lost answer is no failure


def test_amplification_is_attempts_a_call_in_a_part_of_the_run() -> None:
    run = result(StormRow(0, 10, 10, 10, 0, 0), StormRow(500, 10, 30, 0, 0, 10), StormRow(900, 10, 40, 0, 0, 10))
    assert (run.amplification(), run.storm_amplification) == (80 / 30, 70 / 20)
    assert result().amplification() == 0


def test_recovery_is_half_a_second_of_successes() -> None:
    bad = [StormRow(t, 10, 10, 0, 0, 10) for t in range(0, 1300, BIN_MS)]
    good = [StormRow(t, 10, 10, 10, 0, 0) for t in range(1300, 3000, BIN_MS)]
    assert result(*bad, *good).recovered_ms == 200  # from 1.2 s on, four bins of five are good
    assert result(*bad, *good).goodput_after == pytest.approx(16 / 19)
    assert result(*bad).recovered_ms == -1


def test_a_result_can_be_written_down() -> None:
    run = result(StormRow(0, 1, 2, 1, 0, 0))
    assert msgspec.json.decode(msgspec.json.encode(run), type=StormResult) == run

"""The client's own lateness: which rows it spoils, and which not."""

from __future__ import annotations

from workloads.lateness import LagLog, spoilt

MS = 1_000_000


def log(*ticks: tuple[int, int]) -> LagLog:
    """A log of ticks (due, came) in ms."""
    lags = LagLog()
    for due_ms, came_ms in ticks:
        lags.expect(due_ms * MS)
        lags.tick(came_ms * MS)
    return lags


def test_only_a_stand_that_overlaps_a_row_counts() -> None:
    lags = log((100, 101), (106, 130), (135, 140), (145, 200), (205, 205))
    lags.expect(1_000_000 * MS)
    assert lags.worst_ms(0, 105 * MS) == 0
    assert lags.worst_ms(0, 110 * MS) == 24
    assert lags.worst_ms(131 * MS, 144 * MS) == 0
    assert lags.worst_ms(120 * MS, 150 * MS) == 55
    assert lags.worst_ms(201 * MS, 300 * MS) == 0


def test_only_a_stand_that_made_a_stamp_late_counts() -> None:
    lags = log((100, 101), (145, 200), (205, 205))
    lags.expect(1_000_000 * MS)
    assert lags.worst_at_ms([90 * MS, 140 * MS, 300 * MS]) == 0  # it stood between the stamps
    assert lags.worst_at_ms([90 * MS, 170 * MS]) == 55  # in the middle of it
    assert lags.worst_at_ms([203 * MS]) == 55  # worked off just behind it
    assert lags.worst_at_ms([210 * MS]) == 0
    assert lags.worst_at_ms([0, 0]) == 0  # moments that never were
    assert lags.worst_at_ms([]) == 0


def test_a_tick_that_is_overdue_counts_before_it_comes() -> None:
    lags = log((5, 5))
    lags.expect(10 * MS)
    assert lags.worst_ms(0, 15 * MS) == 0
    assert lags.worst_ms(0, 40 * MS) == 30


def test_the_reason_names_its_figure() -> None:
    assert spoilt(9.9, 0.0) == ""
    assert spoilt(0.0, 31.23) == "loop lag 31.2 ms (limit 10)"
    assert spoilt(12.0, 31.0) == "schedule lag 12.0 ms (limit 10)"

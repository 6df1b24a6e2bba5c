"""Offsets between clocks: no late use and no early decline, for any offset, drift and delay."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference_impl.rules.clock import NS_PER_S, PPM, ManualClock
from reference_impl.rules.clocksync import AGE_NS, DRIFT_PPM, SAMPLES_MAX, ClockSync, Sample, left_ns
from reference_impl.rules.consumer import TURN_MARGIN_NS

S, MS = NS_PER_S, NS_PER_S // 1000
DAY = 86_400 * S
START_NS = 10 * DAY
"""What the clocks show at the start, so that none shows a negative time."""
GRAIN_NS = 4
"""Clocks show whole nanoseconds."""

offsets = st.one_of(st.integers(-5 * DAY, 5 * DAY), st.integers(-10 * S, 10 * S), st.just(0))
drifts = st.integers(-200, 200)
delays = st.one_of(st.integers(0, 20 * MS), st.integers(0, 3 * S))


class Pair:
    """Our clock and a peer's; both move together."""

    def __init__(self, offset_ns: int, our_ppm: int, their_ppm: int) -> None:
        self.ours = ManualClock(offset_ns=START_NS, drift_ppm=our_ppm)
        self.theirs = ManualClock(offset_ns=START_NS + offset_ns, drift_ppm=their_ppm)

    def advance(self, true_ns: int) -> None:
        self.ours.advance(true_ns)
        self.theirs.advance(true_ns)

    def sample(self, there_ns: int, back_ns: int) -> Sample:
        sent = self.ours.now_ns()
        self.advance(there_ns)
        remote = self.theirs.now_ns()
        self.advance(back_ns)
        return Sample(sent, remote, self.ours.now_ns())

    @property
    def offset_ns(self) -> int:
        return self.theirs.now_ns() - self.ours.now_ns()


@pytest.mark.rule("KVC-CLK-002")
def test_the_sample_with_the_smallest_round_trip_wins() -> None:
    sync, pair = ClockSync(), Pair(7 * S, 0, 0)
    for there, back in ((40 * MS, 2 * MS), (1 * MS, 1 * MS), (500 * MS, 3 * MS)):
        sync.add(pair.sample(there, back))
    best = sync.estimate(pair.ours.now_ns())
    assert best is not None
    assert best.offset_ns == 7 * S
    assert best.error_ns < 2 * MS


@pytest.mark.rule("KVC-CLK-003")
@pytest.mark.rule("KVC-CLK-005")
@given(
    offset=offsets, our_ppm=drifts, their_ppm=drifts,
    trips=st.lists(st.tuples(delays, delays), min_size=1, max_size=20), age=st.integers(0, 3600 * S),
)  # fmt: skip
@example(offset=0, our_ppm=-200, their_ppm=200, trips=[(0, 3 * S)], age=3600 * S)
@example(offset=0, our_ppm=200, their_ppm=-200, trips=[(3 * S, 0)], age=3600 * S)
@example(offset=-5 * DAY, our_ppm=-200, their_ppm=200, trips=[(0, 0)], age=3600 * S)
def test_the_offset_is_never_further_off_than_stated(
    offset: int, our_ppm: int, their_ppm: int, trips: list[tuple[int, int]], age: int
) -> None:
    sync, pair = ClockSync(), Pair(offset, our_ppm, their_ppm)
    for there, back in trips:
        sync.add(pair.sample(there, back))
    pair.advance(age)
    estimate = sync.estimate(pair.ours.now_ns())
    assert estimate is not None
    assert abs(estimate.offset_ns - pair.offset_ns) <= estimate.error_ns + GRAIN_NS
    best_half = min(sum(trip) for trip in trips[-SAMPLES_MAX:]) // 2
    drifted = (age + sum(map(sum, trips))) * DRIFT_PPM // PPM
    assert estimate.error_ns <= best_half * (1 + 1e-3) + drifted * (1 + 1e-3) + GRAIN_NS


@pytest.mark.rule("KVC-CLK-005")
@given(
    offset=offsets, our_ppm=drifts, their_ppm=drifts, trip=st.tuples(delays, delays),
    age=st.integers(0, 3600 * S), true_left=st.integers(-10 * S, 480 * S),
)  # fmt: skip
def test_no_late_use_and_no_early_decline(
    offset: int, our_ppm: int, their_ppm: int, trip: tuple[int, int], age: int, true_left: int
) -> None:
    sync, pair = ClockSync(), Pair(offset, our_ppm, their_ppm)
    sync.add(pair.sample(*trip))
    pair.advance(age)
    now, their_now = pair.ours.now_ns(), pair.theirs.now_ns()
    expiry = their_now + true_left
    estimate = sync.estimate(now)
    assert estimate is not None
    left = left_ns(expiry, estimate, now)
    live = left > TURN_MARGIN_NS
    if live:
        assert true_left > TURN_MARGIN_NS - GRAIN_NS, "judged live, and has less than the margin left: late use"
    else:
        assert true_left <= TURN_MARGIN_NS + 2 * estimate.error_ns + GRAIN_NS, "declined early"
    assert left <= true_left + GRAIN_NS


@pytest.mark.rule("KVC-CLK-006")
def test_it_is_measured_again_as_it_ages_and_sooner_while_it_is_poor() -> None:
    sync = ClockSync()
    assert sync.stale(0)
    assert sync.estimate(0) is None
    sync.add(Sample(0, 0, 2 * MS))
    assert not sync.stale(AGE_NS)
    assert sync.stale(AGE_NS + 3 * MS)
    poor = ClockSync()
    poor.add(Sample(0, 0, S))
    assert not poor.stale(S + AGE_NS // 10)
    assert poor.stale(S + AGE_NS // 10 + 1)


@pytest.mark.rule("KVC-CLK-006")
@settings(max_examples=15, deadline=None)
@given(offset=offsets, our_ppm=drifts, their_ppm=drifts)
def test_measured_in_time_the_error_stays_within_the_margin_for_an_hour(
    offset: int, our_ppm: int, their_ppm: int
) -> None:
    sync, pair = ClockSync(), Pair(offset, our_ppm, their_ppm)
    for _ in range(720):
        if sync.stale(pair.ours.now_ns()):
            sync.add(pair.sample(MS, MS))
        estimate = sync.estimate(pair.ours.now_ns())
        assert estimate is not None
        assert estimate.error_ns < TURN_MARGIN_NS
        assert abs(estimate.offset_ns - pair.offset_ns) <= estimate.error_ns + GRAIN_NS
        pair.advance(5 * S)


def test_a_sample_that_went_back_in_time_is_not_taken() -> None:
    sync = ClockSync()
    assert not sync.add(Sample(2, 0, 1))
    assert sync.estimate(5) is None


def test_only_the_newest_samples_are_kept() -> None:
    sync = ClockSync()
    sync.add(Sample(0, 0, 0))
    for _ in range(SAMPLES_MAX):
        sync.add(Sample(10, 20, 10 + 2 * MS))
    best = sync.estimate(10 + 2 * MS)
    assert best is not None
    assert best.error_ns >= MS

"""Chance, arrivals and plans: the same for the same seed, and the shards are the whole."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.chance import generator
from workloads.options import LoadOptions, PdOptions, SessionOptions, TraceOptions
from workloads.plan import Planned, longest_ns, plan
from workloads.rows import PromptSpec
from workloads.schedule import Arrivals, ArrivalSchedule, stripe

NS_PER_S = 1e9
SAMPLE = str(Path(__file__).parents[2] / "workloads/traces/sample.jsonl")


def test_a_stream_depends_on_its_seed_and_every_label() -> None:
    def draw(seed: int, *stream: str | int) -> list[int]:
        return [int(n) for n in generator(seed, *stream).integers(2**62, size=4)]

    streams = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 1), (0, "a", "1"), (0, "a", 1, 1), (0, "a", 11)]
    drawn = [draw(*stream) for stream in streams]
    assert len({tuple(numbers) for numbers in drawn}) == len(streams)
    assert draw(0, "a") == drawn[0]
    assert draw(0, "a", np.int64(1)) == drawn[3]  # type: ignore[arg-type]


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        generator(-1, "a")


def test_constant_arrivals_keep_their_rate_without_drift() -> None:
    schedule = ArrivalSchedule(seed=0, rate_per_s=3, arrivals=Arrivals.CONSTANT, count=3001)
    offsets = [arrival.offset_ns for arrival in schedule]
    assert offsets[0] == 0
    assert offsets[3000] == 1000 * NS_PER_S
    assert set(np.diff(offsets)) == {333333333, 333333334}


def test_poisson_arrivals_have_the_mean_and_the_spread_of_their_law() -> None:
    schedule = ArrivalSchedule(seed=3, rate_per_s=50, count=20_000)
    gaps = np.diff([arrival.offset_ns for arrival in schedule]) / NS_PER_S
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)


@pytest.mark.parametrize("arrivals", list(Arrivals))
def test_duration_and_count_end_it_and_nothing_else_does(arrivals: Arrivals) -> None:
    endless = ArrivalSchedule(seed=1, rate_per_s=10, arrivals=arrivals)
    first = list(itertools.islice(endless, 3000))
    assert [arrival.index for arrival in first] == list(range(3000))
    for end_s in (0.05, 1.0, 100.0):
        bounded = list(ArrivalSchedule(seed=1, rate_per_s=10, arrivals=arrivals, duration_s=end_s))
        assert bounded == [arrival for arrival in first if arrival.offset_ns < end_s * NS_PER_S]
    assert list(ArrivalSchedule(seed=1, rate_per_s=10, arrivals=arrivals, count=7)) == first[:7]


@given(shards=st.integers(1, 9), count=st.integers(1, 60), seed=st.integers(0, 2**40))
def test_the_shards_together_are_the_schedule(shards: int, count: int, seed: int) -> None:
    schedule = ArrivalSchedule(seed=seed, rate_per_s=2, count=count)
    parts = [arrival for index in range(shards) for arrival in schedule.shard(index, shards)]
    assert sorted(parts, key=lambda arrival: arrival.index) == list(schedule)


def test_a_shard_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="shard 2 of 2"):
        stripe(iter([1]), 2, 2)


@pytest.mark.parametrize(
    "wrong", [{"rate_per_s": 0}, {"rate_per_s": 1, "count": 0}, {"rate_per_s": 1, "duration_s": -1}]
)
def test_a_schedule_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        ArrivalSchedule(seed=0, **wrong)  # type: ignore[arg-type]


def first(item: Planned) -> PromptSpec:
    return item.turns[0].prompt


@pytest.mark.parametrize(
    "options",
    [
        PdOptions(requests=50, prefix_groups=3, prefix_tokens=100, input_tokens=200, seed=9),
        SessionOptions(sessions=50, turns=4, think_s="1,2,3", seed=9),
        TraceOptions(trace=SAMPLE, seed=9),
    ],
)
def test_a_plan_is_the_same_whoever_walks_it(options: LoadOptions) -> None:
    whole = list(plan(options))
    shards = [item for index in range(4) for item in plan(options, index, 4)]
    assert sorted(shards, key=lambda item: item.index) == whole
    assert list(plan(msgspec.structs.replace(options, seed=10))) != whole
    end_ns = longest_ns(options)
    assert end_ns is not None
    assert whole[-1].offset_ns <= end_ns


def test_prefix_groups_are_all_drawn() -> None:
    whole = list(plan(PdOptions(requests=50, prefix_groups=3, prefix_tokens=100, input_tokens=200, seed=9)))
    assert {first(item).prefix_group for item in whole} == {0, 1, 2}
    assert {first(item).prefix_tokens for item in whole} == {100}
    assert {len(item.turns) for item in whole} == {1}


def test_a_session_has_its_turns_and_draws_its_think_times() -> None:
    options = SessionOptions(sessions=40, turns=4, think_s="0,1.5,60", turn_tokens=7, keep_alive_s=9)
    whole = list(plan(options))
    starts = ArrivalSchedule(seed=0, rate_per_s=0.7, count=40)
    assert [item.offset_ns for item in whole] == [arrival.offset_ns for arrival in starts]
    for item in whole:
        assert [turn.prompt.turn for turn in item.turns] == [0, 1, 2, 3]
        assert [turn.prompt.input_tokens for turn in item.turns] == [8000, 7, 7, 7]
        assert item.turns[0].think_ms == 0
        assert (item.kv_handoff, item.keep_alive_s) == (True, 9)
    assert {turn.think_ms for item in whole for turn in item.turns[1:]} == {0, 1500, 60_000}
    assert longest_ns(options) == whole[-1].offset_ns + 3 * (600 + 60) * NS_PER_S


def test_a_plan_without_an_end_says_so() -> None:
    assert longest_ns(PdOptions()) is None
    assert longest_ns(PdOptions(duration_s=3)) == 3 * NS_PER_S
    assert longest_ns(SessionOptions(duration_s=3, turns=2, think_s="1", request_timeout_s=10)) == 14 * NS_PER_S


def test_a_plan_of_a_trace_follows_the_trace() -> None:
    options = TraceOptions(trace=SAMPLE)
    whole = list(plan(options))
    assert len(whole) == 40
    assert whole[0].offset_ns == 0
    assert (first(whole[0]).input_tokens, whole[0].turns[0].max_tokens) == (2347, 424)
    assert first(whole[0]).block_ids == [0, 1000, 1001, 1002, 1003]
    assert longest_ns(options) == whole[-1].offset_ns
    assert list(plan(msgspec.structs.replace(options, requests=5))) == whole[:5]
    assert list(plan(msgspec.structs.replace(options, duration_s=2.0))) == whole[:3]

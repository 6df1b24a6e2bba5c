import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.rules.clock import NS_PER_MS
from reference_impl.rules.probe import HangDetector, Liveness

SILENT_MS, BUSY_MS, STEP_MS = 1_000, 30_000, 100


def detector() -> HangDetector:
    return HangDetector(SILENT_MS * NS_PER_MS, BUSY_MS * NS_PER_MS)


class Engine:
    """An observed engine: `look` lets time pass, with so many ticks and so much CPU, and observes."""

    def __init__(self, judge: HangDetector | None = None) -> None:
        self.judge = judge or detector()
        self.now_ms, self.ticks, self.cpu_ms = 5_000, 0, 700
        self.look(0)

    def look(self, ms: int = STEP_MS, *, ticks: int = 0, cpu_ms: int = 0) -> Liveness:
        self.now_ms += ms
        self.ticks += ticks
        self.cpu_ms += cpu_ms
        return self.judge.observe(self.now_ms * NS_PER_MS, self.ticks, self.cpu_ms * NS_PER_MS)

    def looks(self, n: int, ms: int = STEP_MS, *, ticks: int = 0, cpu_ms: int = 0) -> list[Liveness]:
        return [self.look(ms, ticks=ticks, cpu_ms=cpu_ms) for _ in range(n)]


def test_the_first_observation_claims_nothing():
    assert detector().observe(0, 0, 0) is Liveness.SILENT


def test_a_ticking_engine_is_alive_whatever_its_cpu():
    engine = Engine()
    assert set(engine.looks(400, ticks=5)) == {Liveness.ALIVE}
    assert set(engine.looks(400, ticks=1, cpu_ms=100)) == {Liveness.ALIVE}


def test_a_stopped_engine_is_hung_at_the_silent_limit_and_not_before():
    engine = Engine()
    engine.look(ticks=1)
    verdicts = engine.looks(12)
    assert verdicts == [Liveness.SILENT] * 9 + [Liveness.HUNG] * 3
    assert engine.judge.silent_ns == 1_200 * NS_PER_MS


def test_a_long_forward_pass_is_busy_until_the_busy_limit_and_then_a_livelock():
    engine = Engine()
    verdicts = engine.looks(301, cpu_ms=95)
    assert verdicts == [Liveness.BUSY] * 299 + [Liveness.HUNG] * 2


def test_an_engine_that_gets_a_tenth_of_a_core_is_busy_and_not_hung():
    assert set(Engine().looks(299, cpu_ms=10)) == {Liveness.SILENT, Liveness.BUSY}


def test_stray_cpu_below_the_noise_does_not_keep_a_deadlock_alive():
    assert Engine().looks(10, cpu_ms=4)[-1] is Liveness.HUNG


def test_the_grain_of_proc_stat_does_not_keep_a_stopped_engine_alive():
    engine = Engine()
    engine.look(cpu_ms=20)
    assert engine.looks(9)[-1] is Liveness.HUNG


def test_a_hung_engine_that_moves_again_is_no_longer_hung():
    engine = Engine()
    assert engine.looks(11)[-1] is Liveness.HUNG
    assert engine.look(ticks=1) is Liveness.ALIVE
    assert engine.looks(11)[-1] is Liveness.HUNG
    assert engine.look(cpu_ms=90) is Liveness.BUSY


def test_a_gap_of_the_observer_is_not_held_against_the_engine():
    engine = Engine()
    engine.looks(8)
    assert engine.look(5_000) is Liveness.SILENT
    assert engine.looks(9) == [Liveness.SILENT] * 9
    assert engine.look() is Liveness.HUNG


def test_a_gap_does_not_make_a_busy_engine_a_livelock():
    engine = Engine()
    engine.looks(200, cpu_ms=95)
    assert engine.look(60_000, cpu_ms=50_000) is Liveness.BUSY
    assert set(engine.looks(99, cpu_ms=95)) == {Liveness.BUSY}
    assert engine.look(cpu_ms=95) is Liveness.HUNG


def test_a_gap_shows_life_if_ticks_moved_in_it():
    assert Engine().look(5_000, ticks=1) is Liveness.ALIVE


@pytest.mark.parametrize("change", [{"ticks": -3}, {"ticks": 1}])
def test_a_counter_that_starts_anew_counts_as_a_tick(change):
    engine = Engine()
    engine.look(ticks=9)
    assert engine.look(**change) is Liveness.ALIVE


def test_time_that_goes_back_is_refused():
    engine = Engine()
    with pytest.raises(ValueError, match="went back"):
        engine.look(-1)


@pytest.mark.parametrize(
    ("limits", "options"),
    [((0, 1), {}), ((2, 1), {}), ((1, 2), {"cpu_noise_ns": -1}), ((1, 2), {"gap_limit_ns": 0})],
)
def test_senseless_limits_are_refused(limits, options):
    with pytest.raises(ValueError, match="need"):
        HangDetector(*limits, **options)


# Any history: (milliseconds since the last look, ticks, CPU milliseconds), a CPU faster than time left out.
history = st.lists(
    st.tuples(st.integers(1, 900), st.sampled_from([0, 0, 0, 1]), st.sampled_from([0, 0, 3, 50])), max_size=80
)


def wrongly_hung(judge: HangDetector, steps: list[tuple[int, int, int]]) -> list[int]:
    """The steps at which `judge` said HUNG although the engine moved, by ticks or by CPU, within the silent limit.

    Only time that was watched counts: a step above 500 ms is a gap.
    """
    engine = Engine(judge)
    watched_ms = since_tick_ms = 0
    wrong = []
    for i, (ms, ticks, cpu_ms) in enumerate(steps):
        verdict = engine.look(ms, ticks=ticks, cpu_ms=cpu_ms)
        gap = ms > SILENT_MS // 2
        watched_ms = 0 if ticks or gap or cpu_ms == 50 else watched_ms + ms
        since_tick_ms = 0 if ticks else since_tick_ms + (0 if gap else ms)
        if verdict is Liveness.HUNG and watched_ms < SILENT_MS and since_tick_ms < BUSY_MS:
            wrong.append(i)
    return wrong


@given(history)
def test_no_engine_that_moved_within_the_limit_is_called_hung(steps):
    assert wrongly_hung(detector(), steps) == []


@given(history)
def test_every_engine_that_stops_is_called_hung_in_time_after_any_history(steps):
    engine = Engine()
    for ms, ticks, cpu_ms in steps:
        engine.look(ms, ticks=ticks, cpu_ms=cpu_ms)
    assert Liveness.HUNG in engine.looks(SILENT_MS // STEP_MS)


class _CountsGaps(HangDetector):
    """Holds the observer's own absence against the engine."""

    def __init__(self) -> None:
        super().__init__(SILENT_MS * NS_PER_MS, BUSY_MS * NS_PER_MS, gap_limit_ns=2**62)


class _IgnoresCpu(HangDetector):
    """Takes a busy engine for a hung one."""

    def __init__(self) -> None:
        super().__init__(SILENT_MS * NS_PER_MS, BUSY_MS * NS_PER_MS, cpu_noise_ns=2**62)


@pytest.mark.parametrize(
    ("twin", "steps"), [(_CountsGaps, [(900, 0, 0), (900, 0, 0)]), (_IgnoresCpu, [(100, 0, 50)] * 12)]
)
def test_broken_detectors_are_caught(twin, steps):
    assert wrongly_hung(detector(), steps) == []
    assert wrongly_hung(twin(), steps)

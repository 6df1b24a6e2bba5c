import asyncio
import mmap
import signal
import struct
from collections.abc import Iterator

import pytest

from reference_impl.failover.prober import ProbeLimits, Prober
from reference_impl.realclock import now_ns
from reference_impl.rules.probe import Liveness
from tests.failover.children import PATIENCE_S, Child, Family
from tests.waiting import until, until_async

QUICK = ProbeLimits(silent_s=0.4, busy_s=30.0, interval_s=0.02)
TICKS = struct.Struct("=q")


class Watched:
    """A child with a tick counter in shared memory, under a prober."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.reports: list[int] = []

    def ticks(self) -> int:
        return TICKS.unpack_from(self.memory)[0]

    def tick(self) -> None:
        TICKS.pack_into(self.memory, 0, self.ticks() + 1)

    def tick_forever(self) -> None:
        async def main() -> None:
            while True:
                self.tick()
                await asyncio.sleep(0.01)

        asyncio.run(main())

    def burn_forever(self) -> None:
        self.tick()
        while True:
            pass

    def sleep_forever(self) -> None:
        self.tick()
        signal.pause()

    def start(self, body: str) -> Child:
        child = self.family.start(getattr(self, body))
        until(lambda: self.ticks() > 0, PATIENCE_S, "it has started")
        return child

    async def report(self, silent_ms: int) -> None:
        self.reports.append(silent_ms)

    def prober(self, child: Child, limits: ProbeLimits = QUICK) -> Prober:
        return Prober(child.pid, self.ticks, self.report, limits)


@pytest.fixture
def watched() -> Iterator[Watched]:
    family = Family()
    yield Watched(family)
    family.end()


async def run_until(prober: Prober, condition, what: str) -> None:
    """Run `prober` in the background until `condition` holds, and fail if it ended by itself."""
    task = asyncio.create_task(prober.run())
    await until_async(lambda: condition() or task.done(), PATIENCE_S, what)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stopped_engine_is_reported_once_after_the_silent_limit(watched):
    child = watched.start("tick_forever")
    prober = watched.prober(child)
    task = asyncio.create_task(prober.run())
    await until_async(lambda: prober.liveness is Liveness.ALIVE, PATIENCE_S, "it is seen alive")
    child.signal(signal.SIGSTOP)
    stopped_ns = now_ns()
    async with asyncio.timeout(PATIENCE_S):
        await task
    took_s = (now_ns() - stopped_ns) / 1e9
    assert prober.liveness is Liveness.HUNG
    assert len(watched.reports) == 1
    assert watched.reports[0] >= 400
    assert 0.35 <= took_s < 3.0


async def test_a_deadlocked_engine_is_reported(watched):
    prober = watched.prober(watched.start("sleep_forever"))
    async with asyncio.timeout(PATIENCE_S):
        await prober.run()
    assert len(watched.reports) == 1


async def test_an_engine_that_burns_cpu_without_ticks_is_left_alone(watched):
    prober = watched.prober(watched.start("burn_forever"))
    # Two and a half times the silent limit: the same engine without CPU use is reported well within (above).
    end_ns = now_ns() + 1_000_000_000
    await run_until(prober, lambda: now_ns() > end_ns, "1 s has passed")
    assert prober.liveness in (Liveness.BUSY, Liveness.SILENT)
    assert watched.reports == []


async def test_an_engine_that_burns_cpu_beyond_the_busy_limit_is_a_livelock(watched):
    prober = watched.prober(watched.start("burn_forever"), ProbeLimits(silent_s=0.4, busy_s=0.6, interval_s=0.02))
    async with asyncio.timeout(PATIENCE_S):
        await prober.run()
    assert watched.reports[0] >= 600


async def test_a_ticking_engine_is_left_alone(watched):
    child = watched.start("tick_forever")
    end_ns = now_ns() + 800_000_000
    await run_until(watched.prober(child), lambda: now_ns() > end_ns, "0.8 s have passed")
    assert watched.reports == []


async def test_a_prober_that_did_not_run_does_not_blame_the_engine(watched):
    child = watched.start("tick_forever")
    prober = watched.prober(child)
    task = asyncio.create_task(prober.run())
    await until_async(lambda: prober.liveness is Liveness.ALIVE, PATIENCE_S, "it is seen alive")
    child.signal(signal.SIGSTOP)
    blind_until_ns = now_ns() + 600_000_000
    until(lambda: now_ns() > blind_until_ns, PATIENCE_S, "the loop was blocked for 0.6 s")
    child.signal(signal.SIGCONT)
    seen = watched.ticks()
    await until_async(lambda: watched.ticks() > seen + 20, PATIENCE_S, "it ticks again")
    assert not task.done()
    assert watched.reports == []
    task.cancel()


@pytest.mark.parametrize("stop_first", [False, True])
async def test_a_death_ends_the_probe_without_a_report(watched, stop_first):
    child = watched.start("sleep_forever")
    if stop_first:
        child.signal(signal.SIGSTOP)
    prober = watched.prober(child)
    task = asyncio.create_task(prober.run())
    child.signal(signal.SIGKILL)  # not reaped: a zombie neither ticks nor burns, and is not hung
    async with asyncio.timeout(PATIENCE_S):
        await task
    assert watched.reports == []
    assert prober.liveness is not Liveness.HUNG


def test_a_process_that_has_gone_cannot_be_probed(watched):
    child = watched.start("sleep_forever")
    child.kill()
    with pytest.raises(ProcessLookupError, match="nothing to probe"):
        watched.prober(child)


@pytest.mark.parametrize(
    "limits",
    [ProbeLimits(interval_s=0), ProbeLimits(silent_s=0.3), ProbeLimits(silent_s=2, busy_s=1), ProbeLimits(silent_s=0)],
)
def test_senseless_limits_are_refused(watched, limits):
    child = watched.start("sleep_forever")
    with pytest.raises(ValueError, match=r"must be|need"):
        watched.prober(child, limits)


def test_the_defaults_leave_room_for_a_forward_pass():
    assert ProbeLimits() == ProbeLimits(silent_s=1.0, busy_s=30.0, interval_s=0.1)

"""Calibration: the rate that a load may have comes from how long requests take on every worker at once."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from rich.console import Console

from harness.calibration import calibrated
from harness.errors import StartFailed
from harness.plan import RunPlan
from harness.progress import RunProgress
from harness.scenario import Arm, Load, Phase, Scenario
from reference_impl.announcement import Announcement

SERVICE_S = 0.4


class Target:
    """A deployment of two workers that answers each request after a while, or not at all."""

    def __init__(self, status: int) -> None:
        self.asked: list[dict[str, Any]] = []
        self.ended = False
        self._status = status
        self._runner: web.AppRunner | None = None
        self.url = ""
        self.announcement = Announcement(url="", model="canary", run_dir="", workers=["w0", "w1"])

    async def start(self, _progress: Callable[[str], None]) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self.answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(msgspec.json.decode(await request.read()))
        await asyncio.sleep(SERVICE_S)
        return web.Response(text="data: [DONE]\n\n", status=self._status)

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        self.ended = True


class FakeSystem:
    name = "fake"

    def __init__(self, status: int = 200) -> None:
        self.made = Target(status)

    def target(self, _plan: RunPlan) -> Target:
        return self.made


def plan(system: Any, utilisation: float) -> RunPlan:
    load = Load(utilisation=utilisation, input_tokens=50, output_tokens=7, rate_per_s=9.0)
    phases = [Phase(name="baseline", seconds=1), Phase(name="drain", seconds=1)]
    scenario = Scenario(name="s", title="s", load=load, phases=phases)
    return RunPlan(scenario=scenario, arm=Arm.COLD, system=system, profile="", time_scale=1, seed=3, folder=Path("x"),
                   command=[])  # fmt: skip


@asynccontextmanager
async def progress() -> AsyncIterator[RunProgress]:
    with RunProgress(Console(file=io.StringIO()), "calibration") as shown:
        yield shown


async def test_the_rate_is_a_share_of_what_the_workers_hold_at_once() -> None:
    system = FakeSystem()
    async with progress() as shown:
        found = (await calibrated(plan(system, 0.5), shown)).scenario.load
    assert found.calibrated_s >= SERVICE_S
    assert found.rate_per_s == pytest.approx(0.5 * 2 / found.calibrated_s, rel=0.01)
    assert len(system.made.asked) == 4  # twice one a worker
    assert {len(body["prompt"]) for body in system.made.asked} == {50}
    assert len({str(body["prompt"]) for body in system.made.asked}) == 4  # no cache may answer
    assert system.made.ended


async def test_a_load_with_a_rate_of_its_own_is_left_alone() -> None:
    system = FakeSystem()
    asked = plan(system, 0.0)
    async with progress() as shown:
        assert await calibrated(asked, shown) is asked
    assert not system.made.asked


async def test_a_deployment_that_does_not_answer_ends_the_calibration_and_is_ended() -> None:
    system = FakeSystem(status=500)
    async with progress() as shown:
        with pytest.raises(StartFailed, match="answered a request with 500"):
            await calibrated(plan(system, 0.5), shown)
    assert system.made.ended

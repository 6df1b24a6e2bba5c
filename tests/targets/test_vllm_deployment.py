"""The guarded servers of the system `vllm`, with three processes in vLLM's place: what is tested is all around them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from harness.errors import StartFailed
from harness.targets.deployment import DeploymentTarget
from harness.targets.vllm.deployment import Place, VllmDeployment
from reference_impl.failover.pidfd import can_run
from reference_impl.failover.worker import ProcessInfo
from reference_impl.rules.events import Event, EventKind
from reference_impl.rules.routing import Role
from tests.targets import fake_vllm

FAKE = str(Path(fake_vllm.__file__))
LIMIT_S = 20.0


def deployment(folder: Path, *, shadow: bool, answer: int = 7, extra: tuple[str, ...] = ()) -> DeploymentTarget:
    for name in ("parts", "logs"):
        (folder / name).mkdir(parents=True)

    def command(run_dir: Path) -> list[str]:
        place = Place(
            worker_id="w0", role=Role.BOTH, cores=[], environment={},
            command=[sys.executable, FAKE, "--port", "{port}", "--answer", str(answer), *extra],
        )  # fmt: skip
        config = VllmDeployment(
            places=[place], shadow=shadow, model="canary", canary=[1, 2, 3], canary_answer=[7], warm_tokens=3,
            run_dir=str(run_dir), events_dir=str(folder / "parts"), logs_dir=str(folder / "logs"),
        )  # fmt: skip
        return ["harness.targets.vllm.deployment", msgspec.json.encode(config).decode()]

    return DeploymentTarget(command)


@contextlib.asynccontextmanager
async def running(folder: Path, *, shadow: bool) -> AsyncIterator[DeploymentTarget]:
    target = deployment(folder, shadow=shadow)
    try:
        await target.start(lambda _: None)
        yield target
    finally:
        await target.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.02)


def parts(target: DeploymentTarget, engine: str) -> list[ProcessInfo]:
    return [p for _, p in target.processes() if p.engine == engine]


def alive(process: ProcessInfo) -> bool:
    return can_run(process.pid, process.start_ticks)


def events(folder: Path) -> list[Event]:
    lines = [line for path in (folder / "parts").glob("events-*.jsonl") for line in path.read_bytes().splitlines()]
    return sorted((msgspec.json.decode(line, type=Event) for line in lines), key=lambda e: e.t_ns)


@pytest.mark.rule("KVC-SHDW-003", "KVC-LOCK-002", "KVC-SHDW-002")
@pytest.mark.parametrize("victim", ["api_server", "engine_core", "worker"])
async def test_the_death_of_any_process_wakes_the_shadow_after_the_last_of_them(tmp_path: Path, victim: str) -> None:
    async with running(tmp_path, shadow=True) as target:
        first, shadow = target.active_engine("w0"), target.parked_engine("w0")
        assert first is not None
        assert shadow is not None
        group = parts(target, first.name)
        assert {p.role for p in group} == {"api_server", "engine_core", "worker"}
        os.kill(next(p.pid for p in group if p.role == victim), signal.SIGKILL)
        await until(lambda: (now := target.active_engine("w0")) is not None and now.name == shadow.name)
        assert not [p for p in group if alive(p)]
        await until(lambda: target.parked_engine("w0") is not None)  # and there is a shadow again
    told = events(tmp_path)
    gone = next(e for e in told if e.kind is EventKind.PROCESS_EXITED and e.subject == first.name)
    awake = next(e for e in told if e.kind is EventKind.ENGINE_AWAKE and e.subject == shadow.name)
    registered = next(e for e in told if e.kind is EventKind.ROUTER_REGISTERED and e.subject == shadow.name)
    won = next(e for e in told if e.kind is EventKind.LOCK_WON and e.subject == shadow.name)
    assert won.t_ns < gone.t_ns < awake.t_ns < registered.t_ns


@pytest.mark.rule("KVC-LOCK-002", "KVC-LOCK-004")
async def test_a_killed_guard_leaves_its_successor_a_group_that_it_ends(tmp_path: Path) -> None:
    async with running(tmp_path, shadow=True) as target:
        first = target.active_engine("w0")
        assert first is not None
        group = parts(target, first.name)
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: (now := target.active_engine("w0")) is not None and now.name != first.name)
        assert not [p for p in group if alive(p)]


async def test_a_server_without_a_shadow_comes_back_at_the_same_address(tmp_path: Path) -> None:
    async with running(tmp_path, shadow=False) as target:
        first = target.active_engine("w0")
        assert first is not None
        os.kill(parts(target, first.name)[0].pid, signal.SIGKILL)
        await until(lambda: (now := target.active_engine("w0")) is not None and now.name != first.name)
    ports = {e.detail.get("url") for e in events(tmp_path)}
    assert len(ports) == 1
    phases = [e for e in events(tmp_path) if e.kind is EventKind.INIT_PHASE]
    assert {e.detail["emulated"] for e in phases} == {False}


async def test_nothing_is_left_when_the_deployment_ends_or_is_killed(tmp_path: Path) -> None:
    for number, signum in enumerate((signal.SIGTERM, signal.SIGKILL)):
        async with running(tmp_path / str(number), shadow=True) as target:
            everything = [p for _, p in target.processes()]
            assert len(everything) == 8
            assert target.pid is not None
            os.kill(target.pid, signum)
            await target.ended()
            await until(lambda all_of=everything: not [p for p in all_of if alive(p)])  # type: ignore[misc]


async def test_a_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    target = deployment(tmp_path, shadow=False, extra=("--fail",))
    try:
        with pytest.raises(StartFailed, match="no memory for the KV cache"):
            await target.start(lambda _: None)
    finally:
        await target.stop()


@pytest.mark.rule("KVC-SHDW-005")
async def test_a_server_whose_canary_is_wrong_is_never_registered(tmp_path: Path) -> None:
    target = deployment(tmp_path, shadow=False, answer=8)
    try:
        with pytest.raises(StartFailed, match="the canary's answer is"):
            await target.start(lambda _: None)
    finally:
        await target.stop()
    assert not [e for e in events(tmp_path) if e.kind is EventKind.ROUTER_REGISTERED]

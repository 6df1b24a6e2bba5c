"""A Dynamo deployment, with a package of our own in Dynamo's place: what is tested is all around it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

from harness.errors import StartFailed
from harness.targets.deployment import DeploymentTarget
from harness.targets.dynamo.launch import PYTHON_VARIABLE
from harness.targets.dynamo.system import dynamo_target
from reference_impl.failover.pidfd import read_stat
from reference_impl.rules.events import Event, EventKind
from tests.harness import fake_dynamo
from tests.waiting import until_async

LIMIT_S = 20.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder; PDPROOF_DYNAMO_PYTHON names an interpreter that finds the fake."""
    installed = tmp_path / "site" / "ai_dynamo-0.0.1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ai-dynamo\nVersion: 0.0.1\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    fake = Path(fake_dynamo.__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(fake), str(installed.parent)]))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    return tmp_path / "run"


def target_of(folder: Path, workers: int = 2) -> DeploymentTarget:
    return dynamo_target(folder.parent / "model", folder, workers=workers)


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[DeploymentTarget]:
    target = target_of(folder)
    try:
        await target.start(lambda _: None)
        yield target
    finally:
        await target.stop()


def events(folder: Path) -> list[Event]:
    lines = [line for path in (folder / "parts").glob("events-*.jsonl") for line in path.read_bytes().splitlines()]
    return sorted((msgspec.json.decode(line, type=Event) for line in lines), key=lambda e: e.t_ns)


def kinds_of(folder: Path, subject: str) -> list[EventKind]:
    return [e.kind for e in events(folder) if e.subject == subject]


async def test_it_serves_by_all_its_workers_and_names_them(folder: Path) -> None:
    async with running(folder) as target, aiohttp.ClientSession() as session:
        assert target.announcement.workers == ["w0", "w1"]
        served = set()
        for _ in range(4):
            async with session.post(f"{target.url}/v1/completions", json={"prompt": [1]}) as got:
                assert got.status == 200
                served.add((got.headers["x-pdproof-worker"], got.headers["x-pdproof-engine"]))
        assert served == {("w0", "w0-e1"), ("w1", "w1-e1")}


async def test_a_killed_worker_comes_back_and_its_history_tells_how(folder: Path) -> None:
    async with running(folder) as target:
        victim = target.active_engine("w0")
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)

        def successor() -> bool:
            engine = target.active_engine("w0")
            return engine is not None and engine.name == "w0-e2"

        await until_async(successor, LIMIT_S, "w0-e2 serves")
        await until_async(lambda: EventKind.ROUTER_REMOVED in kinds_of(folder, "w0-e1"), LIMIT_S, "w0-e1 is forgotten")
    rise = [
        EventKind.PROCESS_STARTED, EventKind.INIT_PHASE, EventKind.ENGINE_AWAKE, EventKind.CANARY_ANSWERED,
        EventKind.PROMOTION_PHASE, EventKind.ROUTER_REGISTERED, EventKind.PROCESS_EXITED,
    ]  # fmt: skip
    assert kinds_of(folder, "w0-e1") == [*rise, EventKind.ROUTER_REMOVED]
    assert kinds_of(folder, "w0-e2") == rise
    death = next(e for e in events(folder) if e.subject == "w0-e1" and e.kind is EventKind.PROCESS_EXITED)
    assert death.detail["status"] == -signal.SIGKILL
    start, awake = (
        next(e for e in events(folder) if e.subject == "w0-e2" and e.kind is kind)
        for kind in (EventKind.PROCESS_STARTED, EventKind.ENGINE_AWAKE)
    )
    assert death.t_ns < start.t_ns < awake.t_ns
    assert awake.detail["epoch"] == 2


async def test_the_phases_of_a_start_follow_each_other_without_a_gap(folder: Path) -> None:
    async with running(folder):
        pass
    init, promotion, registered = (
        next(e for e in events(folder) if e.subject == "w1-e1" and e.kind is kind)
        for kind in (EventKind.INIT_PHASE, EventKind.PROMOTION_PHASE, EventKind.ROUTER_REGISTERED)
    )
    assert init.detail["end_ns"] == promotion.detail["start_ns"]
    assert promotion.detail["end_ns"] == registered.t_ns


async def test_what_dynamo_runs_never_sees_the_deployments_secret(folder: Path) -> None:
    async with running(folder) as target:
        for _, process in target.processes():
            said = Path(f"/proc/{process.pid}/environ").read_bytes()
            assert target.token.encode() not in said
            assert b"DYN_DISCOVERY_BACKEND=file" in said


async def test_nothing_outlives_a_deployment_that_is_killed(folder: Path) -> None:
    async with running(folder) as target:
        assert target.pid is not None
        children = psutil.Process(target.pid).children(recursive=True)
        assert len(children) == 3  # the front end and two mockers
        os.kill(target.pid, signal.SIGKILL)
        assert await target.ended() == "the deployment was ended by SIGKILL"

        def all_dead() -> bool:
            stats = [read_stat(child.pid) for child in children]
            return all(stat is None or stat.is_dead for stat in stats)

        await until_async(all_dead, LIMIT_S, "its processes are dead")


async def test_mockers_that_do_not_start_end_it_with_their_last_word(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DYNAMO_FAILS", "1")
    target = target_of(folder, workers=1)
    try:
        with pytest.raises(StartFailed, match=r"5 mockers in a row did not come to serve.*no such model here"):
            await target.start(lambda _: None)
    finally:
        await target.stop()


async def test_a_front_end_that_dies_ends_it(folder: Path) -> None:
    async with running(folder) as target:
        assert target.pid is not None
        (frontend,) = (child for child in psutil.Process(target.pid).children() if "dynamo.frontend" in child.cmdline())
        frontend.kill()
        assert "front end ended with -9" in await target.ended()


async def test_an_interpreter_without_dynamo_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    target = target_of(folder)
    try:
        with pytest.raises(StartFailed, match="has no ai-dynamo") as failed:
            await target.start(lambda _: None)
        assert failed.value.exit_code == 5
    finally:
        await target.stop()

"""A worker of real processes: promotion, redundancy, hangs, and SIGKILL at every step of a life."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from reference_impl.engine.profile import InitPhase, load_profile
from reference_impl.failover.prober import ProbeLimits
from reference_impl.failover.supervisor import FAILED_STARTS_MAX, Supervisor, WorkerFailed
from reference_impl.oracle import Weights, expected_answers
from reference_impl.rules.events import EventKind
from tests.failover import faulty_engine
from tests.failover.workers import PROMPT, SEED, Worker, kill
from tests.waiting import until, until_async


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: Unix sockets take 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="pdp-") as name:
        yield Path(name)


def right() -> list[int]:
    weights = Weights(SEED, load_profile("tiny").weights_bytes // 8)
    return expected_answers([np.array(PROMPT)], [8], weights)[0].tolist()


@pytest.mark.rule("KVC-LOCK-002", "KVC-SHDW-001", "KVC-SHDW-003", "KVC-MEM-001")
async def test_a_killed_engine_is_replaced_by_its_shadow_and_comes_back_as_one(folder: Path) -> None:
    """KVC-LOCK-002, KVC-SHDW-001, KVC-SHDW-003, KVC-MEM-001."""
    async with Worker(folder) as worker:
        active, shadow = await worker.whole()
        assert await worker.answer() == right()
        for _ in range(2):
            kill(active)
            promoted = await worker.in_state("active", but=active.name)
            assert promoted.name == shadow.name
            assert promoted.epoch == active.epoch + 1
            assert await worker.answer() == right()
            active, shadow = await worker.whole()
        loads = [str(e.detail["name"]) for e in worker.events(EventKind.INIT_PHASE)]
        loads = sorted(n for n in loads if n.startswith("weights"))
        assert loads == ["weights attached"] * 3 + ["weights read from file"]
        names = [p.pid for p in worker.processes()]
    assert not any(_alive(pid) for pid in names)


@pytest.mark.rule("KVC-SHDW-002")
async def test_the_critical_path_of_a_promotion_is_lock_map_canary_register(folder: Path) -> None:
    """KVC-SHDW-002."""
    async with Worker(folder) as worker:
        active, shadow = await worker.whole()
        kill(active)
        await worker.in_state("active", but=active.name)
        phases = [e for e in worker.events(EventKind.PROMOTION_PHASE) if e.subject == shadow.name]
        assert [e.detail["name"] for e in phases] == ["map weights", "map KV", "canary", "register"]
        assert not any(e.detail["emulated"] for e in phases)
        restarted = [e for e in worker.events(EventKind.PROCESS_STARTED) if str(e.subject).endswith("e3")]
        registered = worker.events(EventKind.ROUTER_REGISTERED)[-1]
        assert not restarted or restarted[0].t_ns > registered.t_ns


@pytest.mark.rule("KVC-SHDW-001")
async def test_a_parked_shadow_maps_neither_weights_nor_kv_and_serves_nothing(folder: Path) -> None:
    """KVC-SHDW-001, on the kernel's word."""
    async with Worker(folder) as worker:
        active, shadow = await worker.whole()
        assert "/memfd:pdproof:weights" in Path(f"/proc/{active.pid}/maps").read_text()
        assert "/memfd:pdproof:kv_cache" in Path(f"/proc/{active.pid}/maps").read_text()
        parked = Path(f"/proc/{shadow.pid}/maps").read_text()
        assert "/memfd:pdproof:weights" not in parked
        assert "/memfd:pdproof:kv_cache" not in parked


@pytest.mark.rule("KVC-SHDW-003")
async def test_a_second_kill_before_a_new_shadow_is_parked_falls_back_to_a_cold_start(folder: Path) -> None:
    """KVC-SHDW-003."""
    async with Worker(folder) as worker:
        first, second = await worker.whole()
        kill(first)
        kill(await worker.in_state("active", but=first.name))
        third = await until_async(
            lambda: next((p for p in [worker.engine("active")] if p and p.name not in {first.name, second.name}), None),
            30, "a third engine is active",
        )  # fmt: skip
        assert third is not None
        assert await worker.answer() == right()


async def test_a_cold_worker_restarts_its_engine(folder: Path) -> None:
    async with Worker(folder, shadow=False) as worker:
        first = await worker.in_state("active")
        assert await worker.answer() == right()
        kill(first)
        second = await worker.in_state("active", but=first.name)
        assert second.epoch == first.epoch + 1
        assert await worker.answer() == right()
        assert {e.detail["name"] for e in worker.events(EventKind.INIT_PHASE)} >= {"weights read from file"}


@pytest.mark.rule("KVC-LOCK-005")
async def test_a_stopped_engine_is_killed_and_replaced(folder: Path) -> None:
    """KVC-LOCK-005: SIGSTOP is a hang."""
    async with Worker(folder, probe=ProbeLimits(silent_s=0.8, interval_s=0.05)) as worker:
        active, _ = await worker.whole()
        kill(active, signal.SIGSTOP)
        await worker.in_state("active", but=active.name)
        hung = worker.events(EventKind.PROCESS_HUNG)
        assert [e.subject for e in hung] == [active.name]
        assert await worker.answer() == right()


async def test_an_engine_that_starts_slowly_and_silently_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for disk or for a core: neither ticks nor CPU time, and yet no hang."""
    monkeypatch.setattr(Supervisor, "ENGINE_MODULE", "tests.failover.slow_engine")
    async with Worker(folder, shadow=False, probe=ProbeLimits(silent_s=0.4, interval_s=0.05)) as worker:
        assert (await worker.in_state("active")).name == "w0-e1"
        assert worker.events(EventKind.PROCESS_HUNG) == []


async def test_an_engine_that_hangs_while_it_starts_is_killed_after_its_longer_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "ENGINE_MODULE", "tests.failover.slow_engine")
    monkeypatch.setattr("reference_impl.failover.supervisor.START_SILENT_LIMIT_NS", 1)
    async with Worker(folder, shadow=False, probe=ProbeLimits(silent_s=0.4, interval_s=0.05)) as worker:
        hung = await until_async(lambda: worker.events(EventKind.PROCESS_HUNG), 10, "the hang is told")
        assert hung[0].subject == "w0-e1"
        killed = await until_async(lambda: worker.events(EventKind.PROCESS_EXITED), 10, "its death is told")
        assert (killed[0].subject, killed[0].detail["status"]) == ("w0-e1", -9)


async def test_a_stopped_shadow_is_replaced_too(folder: Path) -> None:
    async with Worker(folder, probe=ProbeLimits(silent_s=0.8, interval_s=0.05)) as worker:
        active, shadow = await worker.whole()
        kill(shadow, signal.SIGSTOP)
        await worker.in_state("standby", but=shadow.name)
        assert (await worker.in_state("active")).name == active.name


@pytest.mark.rule("KVC-LOCK-005")
async def test_a_busy_engine_is_left_alone(folder: Path) -> None:
    """KVC-LOCK-005, the other half: requests that keep the loop busy are no hang."""
    async with Worker(folder, probe=ProbeLimits(silent_s=0.4, interval_s=0.05)) as worker:
        active, _ = await worker.whole()
        answers = await asyncio.gather(*(worker.answer() for _ in range(40)))
        assert all(a == right() for a in answers)
        assert worker.events(EventKind.PROCESS_HUNG) == []
        assert (await worker.in_state("active")).name == active.name


async def test_when_the_memory_service_dies_the_worker_starts_anew(folder: Path) -> None:
    async with Worker(folder) as worker:
        before, _ = await worker.whole()
        service = next(p for p in worker.processes() if p.role == "memory-service")
        kill(service)
        await until_async(
            lambda: (p := worker.engine("active")) is not None and p.epoch > before.epoch, 30, "a new engine is active"
        )
        assert await worker.answer() == right()
        exited = {e.subject for e in worker.events(EventKind.PROCESS_EXITED)}
        assert exited == {"w0-gms", "w0-e1", "w0-e2"}, "every death is told, also of those the supervisor caused"


STEPS = [
    "engine.init_phase:spawn and import", "before-commit", "after-commit", "weights.mapped",
    "engine.init_phase:KV pool", "engine.init_phase:warm up", "engine.init_phase:listen and connect", "engine.asleep",
    "lock.waiting", "lock.won", "engine.waking", "engine.promotion_phase:map weights", "engine.promotion_phase:map KV",
    "kv.mapped", "engine.promotion_phase:canary", "engine.canary_answered", "engine.awake",
    "engine.promotion_phase:register",
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
async def test_sigkill_at_any_step_of_a_life_costs_only_that_engine(
    folder: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start, commit, park and wake: whichever engine dies where, the worker comes up whole and answers rightly."""
    monkeypatch.setattr(Supervisor, "ENGINE_MODULE", "tests.failover.dying_engine")
    monkeypatch.setenv("PDPROOF_TEST_DIE_AT", step)
    monkeypatch.setenv("PDPROOF_TEST_DIED", str(folder / "died"))
    async with Worker(folder) as worker:
        await worker.whole()
        assert await worker.answer() == right()
        epochs = [int(e.detail["epoch"] or 0) for e in worker.events(EventKind.LOCK_WON)]
        assert epochs == sorted(set(epochs))
        assert [e.detail["status"] for e in worker.events(EventKind.PROCESS_EXITED)] == [-9]


@pytest.mark.rule("KVC-SHDW-005")
async def test_a_failed_wake_is_never_registered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVC-SHDW-005: an engine whose canary is wrong dies unregistered, and the other takes over."""
    monkeypatch.setattr(Supervisor, "ENGINE_MODULE", "tests.failover.wrong_engine")
    async with Worker(folder) as worker:
        await worker.whole()
        failed = worker.events(EventKind.WAKE_FAILED)
        assert len(failed) == 1
        assert failed[0].subject not in {e.subject for e in worker.events(EventKind.ROUTER_REGISTERED)}
        assert await worker.answer() == right()


async def test_an_engine_whose_step_loop_breaks_dies_and_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that ended in silence would leave an engine that is alive, registered, and answers nobody."""
    monkeypatch.setattr(Supervisor, "ENGINE_MODULE", "tests.failover.faulty_engine")
    async with Worker(folder) as worker:
        active, shadow = await worker.whole()
        body = {"prompt": list(range(faulty_engine.BAD_LENGTH)), "max_tokens": 2}
        async with worker.session.post(worker.url + "/v1/completions", json=body) as response:
            assert response.status == 502
        assert (await worker.in_state("active", but=active.name)).name == shadow.name
        assert await worker.answer() == right()
        assert "a bug in the forward pass" in (folder / f"{active.name}.log").read_text()


async def test_engines_that_keep_dying_while_they_start_end_the_worker_with_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "ENGINE_MODULE", "tests.failover.no_such_engine")
    monkeypatch.setattr("reference_impl.failover.supervisor.BACKOFF_S", 0.001)
    async with Worker(folder, shadow=False) as worker:
        with pytest.raises(WorkerFailed, match=f"{FAILED_STARTS_MAX} engines in a row") as caught:
            await asyncio.wait_for(asyncio.shield(worker.task), 30)
        assert "\n" not in str(caught.value)
        log = str(caught.value).rpartition(" ")[2]
        assert "no_such_engine" in Path(log).read_text()


async def test_an_emulated_start_is_said_to_be_emulated(folder: Path) -> None:
    tiny = load_profile("tiny")
    profile = type(tiny)(**{f: getattr(tiny, f) for f in tiny.__struct_fields__} | {
        "init": [InitPhase("load weights", 0.05)], "detection_s": 0.05, "promotion_s": 0.05,
    })  # fmt: skip
    async with Worker(folder, profile=profile) as worker:
        active, _ = await worker.whole()
        kill(active)
        await worker.in_state("active", but=active.name)
        emulated = [
            e.detail["name"] for e in worker.events(EventKind.INIT_PHASE, EventKind.PROMOTION_PHASE)
            if e.detail["emulated"]
        ]  # fmt: skip
        assert emulated[:2] == ["load weights", "load weights"]
        assert emulated[-2:] == ["notice the death", "wake the model"]


def test_when_the_deployment_is_killed_nothing_of_it_is_left(folder: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "reference_impl.deployment", "--workers", "1", "--profile", "tiny", "--announce",
         "--weights-dir", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        announced = json.loads(child.stdout.readline())
        below = [(p.pid, p.create_time()) for p in psutil.Process(child.pid).children(recursive=True)]
        assert len(below) == 5  # router, supervisor, memory service, two engines
        child.kill()
        child.wait()
    until(lambda: not any(_alive(pid) for pid, _ in below), 10, "everything below the deployment has died")
    shutil.rmtree(announced["run_dir"])


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
    except ProcessLookupError:
        return False

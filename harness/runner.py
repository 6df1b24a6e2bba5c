"""Runs a scenario: brings the target up, drives load, injects and proves faults, and writes a run folder.

It records and does not judge. Whatever happens, every process that it started is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from faults.fail_point import FailPoint, Order
from faults.fault import Evidence, Fault, FaultMissed, ProcessRef
from faults.kill import Kill
from faults.router_hold import RouterHold
from harness import content
from harness.control_load import ControlLoad, gathered, moves_ended
from harness.errors import MachineLimit, PdproofError, StartFailed
from harness.holding import held
from harness.load import LocustLoad
from harness.plan import RunPlan
from harness.progress import RunProgress
from harness.run_folder import RunFolder, RunWriter
from harness.sampler import Sampler
from harness.scenario import DRAIN, Arm, FaultKind, FaultSpec
from harness.targets.deployment import DeploymentTarget
from reference_impl.deployment_options import scaled
from reference_impl.failover.pidfd import read_stat, start_ticks
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S, s_to_ns
from reference_impl.rules.events import EventKind, Scalar
from workloads.retry_storm import storm
from workloads.rows import RequestRecord, read_records

TARGET_LIMIT_S: Final = 10.0
CONVERGE_LIMIT_S: Final = 60.0
AUDIT_S: Final = 1.5
FULL_BYTES: Final = 64 * 1024
TICK_S: Final = 0.25
LOOK_S: Final = 0.05
POINT_LIMIT_S: Final = 15.0
"""In which something must pass an armed fail point."""
MOVES_LIMIT_S: Final = 45.0
"""A migration without a copy fails after 30 s; its target is then told."""
LEASE_LOOK_S: Final = 0.5
LEASE_SPARE_S: Final = 5.0


async def execute(plan: RunPlan, progress: RunProgress) -> RunFolder:
    """Run `plan` and return the finished folder. Raises PdproofError; the folder then stays, as incomplete."""
    try:
        return await _execute(plan, progress)
    except (PdproofError, OSError) as error:
        for place in (plan.folder, Path(tempfile.gettempdir())):
            if _is_full(place):
                raise MachineLimit(f"{place}: the disk is full; free some space or choose another folder") from error
        raise


def _is_full(place: Path) -> bool:
    """Whether so little is free that what went wrong needs no other reason."""
    try:
        return shutil.disk_usage(place).free < FULL_BYTES
    except OSError:
        return False


async def _execute(plan: RunPlan, progress: RunProgress) -> RunFolder:
    writer = RunWriter(plan.folder, plan.manifest())
    target = plan.system.target(plan)
    started: list[ProcessRef] = []
    try:
        await target.start(progress.say)
        run = asyncio.create_task(_Run(plan, target, writer, progress).measure())
        ended = asyncio.create_task(target.ended())
        try:
            await asyncio.wait({run, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                raise StartFailed(f"the deployment ended in the middle of the run: {ended.result()}")
            run.result()
        finally:
            started = _processes_below(target)
            await _cancelled(run, ended)
    finally:
        progress.say("ending the deployment")
        await asyncio.shield(target.stop())
    _audit_processes(writer, started)
    records = _read_rows(writer.parts)
    progress.say(f"checking the content of {len(records)} answers")
    verdicts = await asyncio.to_thread(_judged, plan, target, records)
    phases = _phases_of(writer, records)
    rows = zip(records, phases, verdicts, strict=True)
    if plan.scenario.control is None:
        return writer.finish(rows)
    progress.say("gathering what the block services keep")
    history = await asyncio.to_thread(gathered, writer, plan.scenario.worker_ids)
    await _storms(plan.scenario.control.storm_s, plan.seed, writer, progress)
    return writer.finish(rows, history)


async def _storms(seconds: float, seed: int, writer: RunWriter, progress: RunProgress) -> None:
    """Have a retry storm with the retry budget, and one without, where the scenario wants them."""
    if not seconds:
        return
    results = []
    for budget in (True, False):
        progress.say(f"retry storm of {seconds:g} s {'with' if budget else 'without'} the retry budget")
        results.append(await storm(budget=budget, seconds=seconds, seed=seed))
    (writer.path / "storm.json").write_bytes(msgspec.json.encode(results))


async def _cancelled(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Run:
    """The measured part of a run: from the first request to the last, and the audit behind it."""

    def __init__(self, plan: RunPlan, target: DeploymentTarget, writer: RunWriter, progress: RunProgress) -> None:
        self._plan = plan
        self._target = target
        self._writer = writer
        self._progress = progress
        self._healing: list[asyncio.Task[None]] = []
        self._faults = 0

    async def measure(self) -> None:
        plan, scenario = self._plan, self._plan.scenario
        drain_s = plan.real_s(scenario.phases[-1].seconds)
        load = LocustLoad(
            load=scenario.load, time_scale=plan.time_scale,
            load_s=plan.real_s(scenario.load_s + scenario.waits_s), drain_s=drain_s, seed=plan.seed,
            logprobs=plan.system.logprobs,
        )  # fmt: skip
        phases: asyncio.Task[None] | None = None
        loading: asyncio.Task[None] | None = None
        operating: asyncio.Task[None] | None = None
        operations = self._operations()
        sampling = asyncio.create_task(Sampler(self._target, self._writer).run())
        try:
            origin_ns = await load.start(self._target.url, self._target.announcement.model, self._writer)
            loading = asyncio.create_task(load.wait(self._writer))
            if operations is not None:
                await operations.start(origin_ns, self._writer)
                operating = asyncio.create_task(operations.wait(self._writer))
            self._progress.say("locust is starting")
            await _until(origin_ns)
            self._progress.total(plan.real_s(scenario.load_s) + drain_s)
            phases = asyncio.create_task(self._phases(origin_ns))
            driving = {task for task in (loading, operating) if task is not None}
            await _all_or_a_failure(phases, driving)
            if scenario.waits_s:  # fewer were needed than there might have been
                load.enough()
            async with self._phase(DRAIN):
                self._progress.say("drain: waiting for the last answers")
                await loading
                if operating is not None:
                    await operating
            async with self._phase("converge"):
                await self._converge()
            async with self._phase("audit"):
                await asyncio.sleep(AUDIT_S)
        finally:
            await asyncio.shield(load.stop())
            if operations is not None:
                await asyncio.shield(operations.stop())
            await _cancelled(sampling, *self._healing, *(t for t in (phases, loading, operating) if t is not None))

    def _operations(self) -> ControlLoad | None:
        plan = self._plan
        if plan.scenario.control is None:
            return None
        return ControlLoad(
            plan.scenario.control, self._target.announcement.blocks, self._target.token,
            seconds=plan.real_s(plan.scenario.load_s), seed=plan.seed,
        )  # fmt: skip

    async def _phases(self, origin_ns: int) -> None:
        at_ns = origin_ns
        for phase in self._plan.scenario.phases[:-1]:
            for repeat in range(phase.repeats):
                at_ns += s_to_ns(self._plan.real_s(phase.seconds))
                name = f"{phase.name} {repeat + 1}" if phase.repeats > 1 else phase.name
                if phase.fault is not None and phase.fault.when_whole_s:
                    at_ns += await self._until_whole(name, phase.fault.when_whole_s)
                async with self._phase(name):
                    self._progress.say(name)
                    if phase.fault is not None:
                        await self._strike(phase.fault)
                    await self._pass_time(at_ns)

    @contextlib.asynccontextmanager
    async def _phase(self, name: str) -> AsyncIterator[None]:
        self._writer.events.say(EventKind.PHASE_STARTED, self._plan.folder.name, phase=name)
        yield
        self._writer.events.say(EventKind.PHASE_ENDED, self._plan.folder.name, phase=name)

    async def _pass_time(self, until_ns: int) -> None:
        while (left_ns := until_ns - now_ns()) > 0:
            step_s = min(TICK_S, left_ns / NS_PER_S)
            await asyncio.sleep(step_s)
            self._progress.advance(step_s)

    async def _strike(self, spec: FaultSpec) -> None:
        """Inject one fault and prove it; its healing is watched while the phase goes on."""
        self._faults += 1
        fault_id = f"{spec.kind}-{self._faults}"
        told: dict[str, Scalar] = {"worker_id": spec.worker, "fault": spec.kind}
        try:
            fault = await self._fault(spec, told)
            if (hindered := fault.available()) is not None:
                raise FaultMissed(hindered)
            moment = await fault.inject()
        except FaultMissed as error:
            self._writer.events.say(EventKind.FAULT_UNPROVED, fault_id, reason=str(error), **told)
            return
        self._writer.events.say_at(moment, EventKind.FAULT_INJECTED, fault_id, **told)
        self._healing.append(asyncio.create_task(self._attest(fault, fault_id, spec.worker)))

    async def _fault(self, spec: FaultSpec, told: dict[str, Scalar]) -> Fault:
        """Return the fault with its target chosen, which `told` learns. Raises FaultMissed if there is no target."""
        if spec.kind is FaultKind.ROUTER_HOLD:
            seconds = self._plan.real_s(spec.seconds)
            told |= {"target": "router", "seconds": seconds, "requests": spec.requests}
            return RouterHold(self._target.url, self._target.token, seconds=seconds, requests=spec.requests)
        look = self._target.active_engine if spec.kind is FaultKind.KILL else self._target.block_service
        victim = await self._victim(look, spec.worker)
        if victim is None:
            what = "engine" if spec.kind is FaultKind.KILL else "block service"
            raise FaultMissed(f"no {what} of {spec.worker} was active within {TARGET_LIMIT_S:g} s")
        engine = victim
        told |= {"target": victim.name, "pid": victim.pid}
        if spec.process:
            victim = self._part(spec, engine)
            told |= {"pid": victim.pid, "process": spec.process}
        if spec.kind is FaultKind.FAIL_POINT:
            return self._fail_point(spec, victim, told)

        def successor() -> str | None:
            found = look(spec.worker)
            return found.name if found is not None and found.pid != engine.pid else None

        return Kill(victim, successor)

    def _part(self, spec: FaultSpec, engine: ProcessRef) -> ProcessRef:
        part = self._target.part_of(spec.worker, engine.name, spec.process)
        if part is None:
            raise FaultMissed(f"{engine.name} has no process {spec.process}")
        return part

    def _fail_point(self, spec: FaultSpec, victim: ProcessRef, told: dict[str, Scalar]) -> FailPoint:
        assert spec.point is not None
        assert spec.action is not None
        order = Order(
            point=spec.point, action=spec.action, times=max(1, spec.requests), seconds=spec.seconds, method=spec.method
        )
        told |= {"point": spec.point, "action": spec.action, "requests": order.times, "seconds": spec.seconds}
        return FailPoint(
            victim, self._target.announcement.blocks[spec.worker], self._target.token.encode(), order,
            events=self._writer.parts / f"events-{spec.worker}-blocks.jsonl", within_s=POINT_LIMIT_S,
        )  # fmt: skip

    async def _victim(self, look: Callable[[str], ProcessRef | None], worker_id: str) -> ProcessRef | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TARGET_LIMIT_S):
                while True:
                    if (found := look(worker_id)) is not None:
                        return found
                    await asyncio.sleep(LOOK_S)
        return None

    async def _attest(self, fault: Fault, fault_id: str, worker_id: str) -> None:
        proof = await fault.prove()
        self._say_proof(EventKind.FAULT_PROVED if proof.holds else EventKind.FAULT_UNPROVED, fault_id, worker_id, proof)
        await fault.heal()
        healed = await fault.prove_healed()
        if healed.holds:
            self._say_proof(EventKind.FAULT_HEALED, fault_id, worker_id, healed)

    def _say_proof(self, kind: EventKind, fault_id: str, worker_id: str, proof: Evidence) -> None:
        self._writer.events.say(kind, fault_id, worker_id=worker_id, evidence=proof.shown_by, reason=proof.shown_by)

    async def _until_whole(self, name: str, limit_s: float) -> int:
        """Wait until every worker is whole again, within a bound; return how many ns that took."""
        begun_ns = now_ns()
        self._progress.say(f"before {name}: waiting for full redundancy")
        await self._wait_whole(self._plan.real_s(limit_s))
        return now_ns() - begun_ns

    async def _wait_whole(self, limit_s: float) -> None:
        wanted = {"active": 1, "standby": 1 if self._plan.arm is Arm.SHADOW else 0}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not self._whole(wanted):
                    await asyncio.sleep(LOOK_S)

    async def _converge(self) -> None:
        """Wait until every worker is whole again, within a bound; whether it came to that is for the checks."""
        self._progress.say("converge: waiting for full redundancy")
        await self._wait_whole(CONVERGE_LIMIT_S + self._plan.system.start_s(self._plan))
        await self._moves_ended()
        await self._leases_ended()

    async def _moves_ended(self) -> None:
        """Wait, within a bound, until every migration has ended at both its nodes; what is left is for the checks."""
        if self._plan.scenario.control is not None:
            self._progress.say(f"converge: waiting up to {MOVES_LIMIT_S:.0f} s for the last migration to end")
            await moves_ended(self._target.announcement.blocks, self._target.token, MOVES_LIMIT_S)

    async def _leases_ended(self) -> None:
        """Wait, for as long as the longest lease may last, until nothing is kept for anybody."""
        terms = self._plan.terms
        if terms is None:
            return
        terms = scaled(terms, self._plan.time_scale)
        longest_ns = max(terms.first_ns, terms.ttl_ns if terms.bidirectional_kv_xfer else 0)
        self._progress.say(f"converge: waiting up to {longest_ns / NS_PER_S:.0f} s for the last lease to end")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_ns / NS_PER_S + LEASE_SPARE_S):
                while self._standing():
                    await asyncio.sleep(LEASE_LOOK_S)

    def _standing(self) -> int:
        """Return how many leases stand, by what their holders have said so far."""
        return sum(lease.ended_ns is None for lease in held(RunFolder(self._writer.path)))

    def _whole(self, wanted: dict[str, int]) -> bool:
        states = [(w, p.state) for w, p in self._target.processes() if p.role == "engine"]
        return all(
            states.count((worker, state)) == count
            for worker in self._target.announcement.workers
            for state, count in wanted.items()
        )


async def _all_or_a_failure(phases: asyncio.Task[None], driving: set[asyncio.Task[None]]) -> None:
    """Wait for the phases; raise at once what ends one of the loads. One that has come to its end before is well."""
    left = set(driving)
    while not phases.done():
        done, _ = await asyncio.wait({phases, *left}, return_when=asyncio.FIRST_COMPLETED)
        for task in done & left:
            task.result()
        left -= done
    phases.result()


async def _until(moment_ns: int) -> None:
    await asyncio.sleep(max(0, moment_ns - now_ns()) / NS_PER_S)


def _judged(plan: RunPlan, target: DeploymentTarget, records: Sequence[RequestRecord]) -> list[bool | None]:
    oracle = plan.system.oracle(target.announcement)
    return [None] * len(records) if oracle is None else content.judge(records, oracle)


def _read_rows(parts: Path) -> list[RequestRecord]:
    return [record for path in sorted(parts.glob("requests-*.jsonl")) for record in read_records(path)]


def _phases_of(writer: RunWriter, records: Sequence[RequestRecord]) -> list[str]:
    """Return the phase in which each request was to start."""
    begun = [e for e in RunFolder(writer.path).events if e.kind is EventKind.PHASE_STARTED]
    names = []
    for record in records:
        before = [e for e in begun if e.t_ns <= record.intended_ns] or begun[:1]
        names.append(str(before[-1].detail["phase"]) if before else "")
    return names


def _processes_below(target: DeploymentTarget) -> list[ProcessRef]:
    """Return every process of the deployment, whoever started it, so that none can be left behind unnoticed."""
    found = []
    pid = target.pid
    if pid is None:
        return []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            ticks = start_ticks(child.pid)
            if ticks is not None:
                found.append(ProcessRef(name=str(child.pid), role="", worker_id="", pid=child.pid, start_ticks=ticks))
    return found


def _audit_processes(writer: RunWriter, started: Sequence[ProcessRef]) -> None:
    left = 0
    for process in started:
        stat = read_stat(process.pid)
        if stat is not None and stat.start_ticks == process.start_ticks and not stat.is_dead:
            left += 1
            writer.events.say(EventKind.PROCESS_LEFT, process.name, pid=process.pid)
    writer.events.say(EventKind.AUDITED, writer.manifest.run_id, processes=len(started), left=left)

"""Sample run folders: made-up data in the real format, so that pages can be built and looked at without a deployment.

`python -m tests.reports.sample_runs OUTDIR` writes a cold and a shadow run of each profile, and their pages.
Two workers answer round robin; w0 is killed three times. Nothing here was measured.
"""

from __future__ import annotations

import random
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from harness.run_folder import Manifest, RunFolder, RunWriter
from harness.verdicts import CheckResult, Verdict
from reference_impl.rules.events import EventKind, Scalar
from workloads.rows import Chunk, Outcome, PromptSpec, RequestRecord

S = 1_000_000_000
GIB = 2**30
BASE_NS = 1_000 * S
WALL_NS = 1_767_225_600 * S
COMPUTE = ["compute time: prefill 60,000 tokens/s; decode step 8 ms + 0.6 ms a request"]

Phases = list[tuple[str, float, bool]]
"""Name, seconds, emulated."""


@dataclass(frozen=True)
class Sample:
    """What to make up. Times are seconds of the run itself (already divided by `time_scale`)."""

    arm: str
    init: Phases
    promotion: Phases
    notice_s: float
    """Emulated time between the lock and its notice."""
    spawn_s: float
    profile: str = "default"
    time_scale: float = 1.0
    emulated: list[str] = field(default_factory=lambda: list(COMPUTE))
    kills_s: tuple[float, ...] = (24.0, 54.0, 84.0)
    end_s: float = 116.0
    rate: float = 0.74
    prefill_s: float = 1.05
    gap_s: float = 0.0052
    chunk_tokens: int = 10
    seed: int = 7


DEFAULT_INIT: Phases = [
    ("spawn and import", 1.3, False), ("weights read", 4.2, False), ("KV pool", 2.1, False), ("warm up", 0.8, False),
    ("listen and connect", 0.02, False),
]  # fmt: skip
COLD_WAKE: Phases = [("map weights", 0.0004, False), ("map KV", 0.0006, False), ("canary", 0.034, False)]
DEFAULT_WAKE: Phases = [("map weights", 0.007, False), ("map KV", 0.021, False), ("canary", 0.034, False)]
GLM_INIT: Phases = [
    ("spawn and import", 0.7, False), ("weights read", 0.3, False), ("KV pool", 0.2, False),
    ("load weights", 7.5, True), ("compile kernels", 3.5, True), ("capture graphs", 3.15, True),
    ("warm up", 0.1, False), ("listen and connect", 0.02, False),
]  # fmt: skip
GLM_WAKE: Phases = [
    ("map weights", 0.004, False), ("map KV", 0.012, False), ("wake the model", 0.28, True), ("canary", 0.03, False),
]  # fmt: skip
GLM_EMULATED = [
    "compute time: prefill 30,000 tokens/s; decode step 8 ms + 0.6 ms a request",
    "model arithmetic: tokens come from the content oracle, computed from the real bytes of KV and weights",
    "cold start: load weights, 150 s", "cold start: compile kernels, 70 s", "cold start: capture graphs, 63 s",
    "detection: 1.7 s added", "promotion: 5.6 s added",
]  # fmt: skip


def sample(arm: str, profile: str = "default") -> Sample:
    """Return the sample of an arm ("cold" or "shadow") of a profile ("default" or "glm-5.2-b200")."""
    cold = arm == "cold"
    if profile == "default":
        return Sample(arm, DEFAULT_INIT, COLD_WAKE if cold else DEFAULT_WAKE, 0.0, 0.02)
    return Sample(
        arm, GLM_INIT, COLD_WAKE if cold else GLM_WAKE, 0.085, 0.02, profile, 20.0, GLM_EMULATED,
        kills_s=(8.0, 34.0, 60.0), end_s=84.0, rate=14.0, prefill_s=0.054, gap_s=0.00108, chunk_tokens=20,
    )  # fmt: skip


class _Deployment:
    """Says the events of two workers, of which w0 is killed, and remembers when w0 could serve."""

    def __init__(self, writer: RunWriter, plan: Sample, rng: random.Random) -> None:
        self.writer = writer
        self.plan = plan
        self.rng = rng
        self.engine = "w0-e0"
        self.shadow = "w0-e1" if plan.arm == "shadow" else ""
        self.made = 2 if self.shadow else 1
        self.outages: list[tuple[float, float]] = []
        self.lives: list[tuple[str, float, float]] = []
        self.parked: dict[str, tuple[float, float]] = {self.shadow: (0.0, plan.end_s)} if self.shadow else {}

    def say(self, at_s: float, kind: EventKind, subject: str, **detail: Scalar) -> None:
        self.writer.events.say_at(BASE_NS + round(at_s * S), kind, subject, worker_id="w0", **detail)

    def phases(self, at_s: float, kind: EventKind, engine: str, phases: Phases) -> float:
        for name, seconds, emulated in phases:
            end_s = at_s + seconds * self.rng.uniform(0.92, 1.1)
            self.say(
                end_s, kind, engine, name=name, start_ns=BASE_NS + round(at_s * S), end_ns=BASE_NS + round(end_s * S),
                emulated=emulated,
            )  # fmt: skip
            at_s = end_s
        return at_s

    def start(self, at_s: float, engine: str) -> float:
        self.say(at_s, EventKind.PROCESS_STARTED, engine, pid=4000 + self.made, role="engine")
        return self.phases(at_s, EventKind.INIT_PHASE, engine, self.plan.init)

    def new_engine(self) -> str:
        self.made += 1
        return f"w0-e{self.made - 1}"

    def kill(self, number: int, at_s: float, born_s: float) -> float:
        """Kill the active engine at `at_s` and return when the next is registered."""
        fault = f"kill-{number}"
        self.say(at_s, EventKind.FAULT_INJECTED, fault, fault="kill", target=self.engine, pid=4000 + number)
        self.say(
            at_s + 0.001, EventKind.FAULT_PROVED, fault, fault="kill", target=self.engine,
            evidence="pidfd readable 0.6 ms after SIGKILL; /proc state Z, same start ticks",
        )  # fmt: skip
        self.say(at_s + 0.002, EventKind.ROUTER_REMOVED, self.engine, reason="connection closed")
        self.lives.append((self.engine, born_s, at_s))
        up_s = self.promote(at_s) if self.shadow else self.restart(at_s)
        self.outages.append((at_s, up_s))
        return up_s

    def promote(self, at_s: float) -> float:
        won_s = at_s + 0.004 * self.rng.uniform(0.9, 1.3)
        if self.plan.notice_s:
            notice: Phases = [("notice the death", self.plan.notice_s, True)]
            won_s = self.phases(won_s, EventKind.PROMOTION_PHASE, self.shadow, notice)
        self.say(won_s, EventKind.LOCK_WON, self.shadow, epoch=2)
        up_s = self.register(won_s, self.shadow)
        self.parked[self.shadow] = (self.parked[self.shadow][0], at_s)
        self.engine, self.shadow = self.shadow, self.new_engine()
        ready_s = self.start(up_s + 0.1, self.shadow)
        self.say(ready_s, EventKind.ENGINE_ASLEEP, self.shadow, pss_bytes=GIB // 2)
        self.parked[self.shadow] = (ready_s, self.plan.end_s)
        return up_s

    def restart(self, at_s: float) -> float:
        self.engine = self.new_engine()
        ready_s = self.start(at_s + self.plan.spawn_s, self.engine)
        self.say(ready_s + 0.002, EventKind.LOCK_WON, self.engine, epoch=2)
        return self.register(ready_s + 0.002, self.engine)

    def register(self, at_s: float, engine: str) -> float:
        ready_s = self.phases(at_s + 0.001, EventKind.PROMOTION_PHASE, engine, self.plan.promotion)
        self.say(ready_s, EventKind.ENGINE_AWAKE, engine, epoch=2)
        self.phases(ready_s, EventKind.PROMOTION_PHASE, engine, [("register", 0.007, False)])
        self.say(ready_s + 0.006, EventKind.ROUTER_REGISTERED, engine, epoch=2)
        return ready_s + 0.006


def write(path: Path, plan: Sample, *, verdict: Verdict | None = Verdict.PASS, error: str = "") -> RunFolder:
    """Write a whole run folder at `path`. `error` replaces the text of every failed request's error."""
    rng = random.Random(plan.seed)
    writer = RunWriter(path, _manifest(path.name, plan))
    deployment = _Deployment(writer, plan, rng)
    deployment.say(0.0, EventKind.PHASE_STARTED, path.name, phase="baseline")
    deployment.say(plan.kills_s[0] - 0.01, EventKind.PHASE_STARTED, path.name, phase="fault") if plan.kills_s else None
    born_s = 0.0
    for number, at_s in enumerate(plan.kills_s, 1):
        born_s = deployment.kill(number, at_s, born_s)
    deployment.lives.append((deployment.engine, born_s, plan.end_s))
    deployment.say(plan.end_s, EventKind.PHASE_ENDED, path.name, phase="fault")
    _memory(writer, plan, deployment)
    requests = _requests(plan, deployment, rng, error or "ServerDisconnected: connection closed in mid-answer")
    run = writer.finish(requests)
    if verdict is not None:
        run.write_verdicts(_checks(plan, verdict))
    return run


def _manifest(run_id: str, plan: Sample) -> Manifest:
    return Manifest(
        run_id=run_id, scenario="kill-active", arm=plan.arm,
        title="SIGKILL of an engine, replaced by a cold start" if plan.arm == "cold"
        else "SIGKILL of an engine, replaced by its shadow",
        profile=plan.profile, time_scale=plan.time_scale, seed=plan.seed, started_wall_ns=WALL_NS,
        command=["pdproof", "compare", "--profile", plan.profile, "--time-scale", f"{plan.time_scale:g}"],
        versions={"pdproof": "0.1.0", "python": "3.11.2", "locust": "2.40.5", "sample data": "not measured"},
        commit="0000000000000000",
        machine={"cpu": "made up", "cores": 2, "memory_gib": 23.5, "platform": "Linux x86_64"},
        configuration={"workers": 2, "rate": plan.rate, "input_tokens": 32000, "output_tokens": 1000},
        emulated=plan.emulated,
    )  # fmt: skip


def _requests(
    plan: Sample, deployment: _Deployment, rng: random.Random, error: str
) -> list[tuple[RequestRecord, str, bool | None]]:
    """A queue of prefills a worker, round robin over the workers that are up; who is on w0 when it dies, fails."""
    free_s = {"w0": 0.0, "w1": 0.0}
    made: list[tuple[RequestRecord, str, bool | None]] = []
    at_s, number = 0.5, 0
    while at_s < plan.end_s - 1.5:
        up = not any(a <= at_s < b for a, b in deployment.outages)
        worker = "w0" if up and number % 2 == 0 else "w1"
        begin_s = max(at_s, free_s[worker])
        crowd = 1.0 if up else 1.35
        first_s = begin_s + plan.prefill_s * crowd * rng.uniform(0.96, 1.06)
        free_s[worker] = first_s
        record = _record(plan, deployment, rng, number, worker=worker, at_s=at_s, first_s=first_s, error=error)
        phase = "baseline" if at_s < plan.kills_s[0] else "fault"
        made.append((record, phase, True if record.outcome is Outcome.OK else None))
        at_s += rng.expovariate(plan.rate)
        number += 1
    return made


def _record(
    plan: Sample,
    deployment: _Deployment,
    rng: random.Random,
    number: int,
    *,
    worker: str,
    at_s: float,
    first_s: float,
    error: str,
) -> RequestRecord:
    late = any(a - 1 <= first_s < b + (b - a) / 2 for a, b in deployment.outages if b - a > 1)
    gap_s = plan.gap_s * (4.2 * rng.uniform(0.6, 1.1) if late and worker == "w1" else 1.0) * rng.uniform(0.95, 1.15)
    stamps = [first_s + plan.chunk_tokens * gap_s * i for i in range(1000 // plan.chunk_tokens)]
    died = min((a for a, _ in deployment.outages if worker == "w0" and at_s <= a < stamps[-1]), default=None)
    outcome = Outcome.OK if died is None else Outcome.FAIL
    limit_s = plan.end_s if died is None else died
    if stamps[-1] > plan.end_s and died is None:
        outcome = Outcome.UNKNOWN
    stamps = [t for t in stamps if t <= limit_s]
    life = next((e for e, a, b in deployment.lives if a <= first_s <= b), deployment.lives[-1][0])
    sent_ns = BASE_NS + round((at_s + rng.uniform(0.0002, 0.002)) * S)
    return RequestRecord(
        request_id=f"r{number:04d}", prompt=PromptSpec(plan.seed, number, 32_000), max_tokens=1000,
        intended_ns=BASE_NS + round(at_s * S), send_began_ns=sent_ns, sent_ns=sent_ns + 100_000,
        end_ns=BASE_NS + round((stamps[-1] if stamps and outcome is Outcome.OK else limit_s + 0.004) * S),
        chunks=[Chunk(BASE_NS + round(t * S), plan.chunk_tokens) for t in stamps], outcome=outcome,
        http_status=200 if stamps else 502, error=error if outcome is Outcome.FAIL else "",
        node_d=f"w0/{life}" if worker == "w0" else "w1/w1-e0", node_p="",
        spoilt="event loop late by 31 ms" if number == 5 else "",
    )  # fmt: skip


def _memory(writer: RunWriter, plan: Sample, deployment: _Deployment) -> None:
    weights, kv = GIB, GIB // 4
    for tick in range(int(plan.end_s * 2)):
        at_s, t_ns = tick / 2, BASE_NS + tick * S // 2
        down = any(a <= at_s < b for a, b in deployment.outages)
        gone = down and plan.arm == "cold"
        writer.metric(t_ns, "w0", "memory_weights_bytes", 0 if gone else weights)
        writer.metric(t_ns, "w0", "memory_kv_bytes", 0 if down else kv)
        active = [e for e, a, b in deployment.lives if a <= at_s < b]
        parked = [e for e, (a, b) in deployment.parked.items() if a <= at_s < b]
        shared = weights // max(1, len(active) + len(parked))
        for engine in active:
            writer.metric(t_ns, f"w0/{engine}", "engine_pss_bytes", shared + kv + GIB // 12)
        for engine in parked:
            writer.metric(t_ns, f"w0/{engine}", "engine_pss_bytes", shared + GIB // 24)


def _checks(plan: Sample, verdict: Verdict) -> list[CheckResult]:
    texts = [
        ("recovery", "The worker serves again", ["KVC-SHDW-4"], "3 of 3 kills recovered"),
        ("errors", "Errors only inside the fault window", ["KVC-ROUT-2"], "every failure began before a kill"),
        ("content", "Every answer is right", ["KVC-MEM-1", "KVC-MEM-7"], "0 wrong of all checked answers"),
        ("one-awake", "At most one engine awake a device", ["KVC-LOCK-1"], "never two in the whole history"),
        ("memory", "Memory is back where it was", ["KVC-MEM-9"], "0 bytes and 0 descriptors gained"),
    ]
    return [
        CheckResult(check=c, title=t, rules=r, verdict=verdict if i == 0 else Verdict.PASS, found=f)
        for i, (c, t, r, f) in enumerate(texts)
    ]  # fmt: skip


def main(out: Path) -> None:
    """Write both arms of both profiles under `out`, with their pages."""
    from reports.comparison import write_comparison
    from reports.page import write_run_page

    shutil.rmtree(out, ignore_errors=True)
    for profile in ("default", "glm-5.2-b200"):
        folder = out / profile
        for arm in ("cold", "shadow"):
            write_run_page(write(folder / arm, sample(arm, profile)), folder / arm / "report.html")
        write_comparison(folder / "cold", folder / "shadow", folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

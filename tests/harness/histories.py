"""A clean run, made up in the real format, that a test may break in one place before it is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from harness.run_folder import Manifest, RunFolder, RunWriter
from harness.scenario import FaultKind, FaultSpec, Phase, Scenario
from reference_impl.engine.profile import load_profile
from reference_impl.rules.events import Event, EventKind, Scalar
from workloads.rows import Chunk, Outcome, PromptSpec, RequestRecord

S = 1_000_000_000
ORIGIN = 100 * S
MIB = 2**20
SCENARIO = Scenario(
    name="made-up", title="Two kills", requests_min=20,
    phases=[
        Phase(name="baseline", seconds=20),
        Phase(name="fault", seconds=20, repeats=2, fault=FaultSpec(kind=FaultKind.KILL, worker="w0")),
        Phase(name="drain", seconds=10),
    ],
)  # fmt: skip
KILLS_S = (20.0, 40.0)


def at(seconds: float) -> int:
    return ORIGIN + round(seconds * S)


class History:
    """Events, requests and gauges of a run, as lists to be changed at will."""

    def __init__(self, arm: str = "shadow") -> None:
        self.arm = arm
        self.scenario = SCENARIO
        self.configuration: dict[str, object] = {}
        self.events: list[Event] = []
        self.requests: list[tuple[RequestRecord, str, bool | None]] = []
        self.metrics: list[tuple[int, str, str, float]] = []
        self._phases()
        self._lives()
        self._load()
        self._gauges()

    def say(self, seconds: float, actor: str, kind: EventKind, subject: str, **detail: Scalar) -> None:
        self.events.append(Event(at(seconds), at(seconds), actor, kind, subject, detail))

    def drop(self, matches: Callable[[Event], bool]) -> None:
        """Take events away; there must be some."""
        kept = [e for e in self.events if not matches(e)]
        assert len(kept) < len(self.events), "the mutation must change something"
        self.events = kept

    def change_request(self, number: int, *, content_ok: bool | None = True, **fields: object) -> None:
        record, phase, _ = self.requests[number]
        self.requests[number] = (msgspec.structs.replace(record, **fields), phase, content_ok)

    def write(self, path: Path) -> RunFolder:
        manifest = Manifest(
            run_id=path.name, scenario=self.scenario.name, arm=self.arm, title=self.scenario.title, profile="tiny",
            time_scale=1.0, seed=1, started_wall_ns=0, command=["pdproof"], versions={}, commit="", machine={},
            configuration={
                "scenario": msgspec.to_builtins(self.scenario), "profile": msgspec.to_builtins(load_profile("tiny")),
                **self.configuration,
            },
        )  # fmt: skip
        writer = RunWriter(path, manifest)
        for event in self.events:
            with writer.events_part(event.actor).open("ab") as part:
                part.write(msgspec.json.encode(event) + b"\n")
        for row in self.metrics:
            writer.metric(*row)
        return writer.finish(self.requests)

    def _phases(self) -> None:
        for name, start, end in (("baseline", 0, 20), ("fault 1", 20, 40), ("fault 2", 40, 60), ("drain", 60, 65),
                                 ("converge", 65, 66), ("audit", 66, 68)):  # fmt: skip
            self.say(start, "harness", EventKind.PHASE_STARTED, "run", phase=name)
            self.say(end, "harness", EventKind.PHASE_ENDED, "run", phase=name)
        self.say(70, "harness", EventKind.AUDITED, "run", processes=8, left=0)

    def _lives(self) -> None:
        """w0-e1 dies at the first kill, w0-e2 at the second; each successor is the next engine."""
        self._wake(-5, "w0-e1", 1)
        for number, kill_s in enumerate(KILLS_S, 1):
            victim, successor, new = f"w0-e{number}", f"w0-e{number + 1}", f"w0-e{number + 2}"
            fault = f"kill-{number}"
            self.say(kill_s, "harness", EventKind.FAULT_INJECTED, fault, worker_id="w0", fault="kill", target=victim)
            self.say(kill_s + 0.02, "harness", EventKind.FAULT_PROVED, fault, worker_id="w0", evidence="pidfd")
            self.say(kill_s + 0.02, "supervisor", EventKind.PROCESS_EXITED, victim, worker_id="w0", status=-9)
            cold = self.arm == "cold"
            woken_s = kill_s + (3.0 if cold else 0.01)
            if cold:
                self.say(kill_s + 0.03, "supervisor", EventKind.PROCESS_STARTED, successor, worker_id="w0")
                self._span(kill_s + 0.03, kill_s + 2.9, successor, EventKind.INIT_PHASE, "weights read from file")
            self._wake(woken_s, successor, number + 1)
            if not cold:
                self.say(kill_s + 0.1, "supervisor", EventKind.PROCESS_STARTED, new, worker_id="w0")
                self.say(kill_s + 1.0, new, EventKind.ENGINE_ASLEEP, new, worker_id="w0", pss_bytes=1)

    def _wake(self, seconds: float, engine: str, epoch: int) -> None:
        self.say(seconds, engine, EventKind.LOCK_WON, engine, worker_id="w0", epoch=epoch)
        self._span(seconds, seconds + 0.004, engine, EventKind.PROMOTION_PHASE, "map weights")
        self._span(seconds + 0.004, seconds + 0.01, engine, EventKind.PROMOTION_PHASE, "canary")
        self.say(seconds + 0.01, engine, EventKind.CANARY_ANSWERED, engine, worker_id="w0", ok=True)
        self.say(seconds + 0.011, engine, EventKind.ENGINE_AWAKE, engine, worker_id="w0", epoch=epoch)
        self.say(seconds + 0.012, "router", EventKind.ROUTER_REGISTERED, engine, worker_id="w0", epoch=epoch)

    def _span(self, start: float, end: float, engine: str, kind: EventKind, name: str) -> None:
        self.say(end, engine, kind, engine, worker_id="w0", name=name, start_ns=at(start), end_ns=at(end),
                 emulated=False)  # fmt: skip

    def _load(self) -> None:
        """One request a second for a minute, half a second long, in turn on w1 and w0."""
        for number in range(60):
            start, end = number + 0.1, number + 0.6
            record = RequestRecord(
                request_id=f"r{number}", prompt=PromptSpec(1, number, 100), max_tokens=3, intended_ns=at(start),
                send_began_ns=at(start + 0.001), sent_ns=at(start + 0.002), end_ns=at(end), outcome=Outcome.OK,
                chunks=[Chunk(at(start + t), 1) for t in (0.1, 0.2, 0.3)], output_ids=[1, 2, 3], http_status=200,
                node_d="w1/w1-e1" if number % 2 else "w0/w0-e1",
            )  # fmt: skip
            self.requests.append((record, "baseline", True))
        for kill_s in KILLS_S:  # the request that was running on the victim
            number = int(kill_s) - 2
            self.change_request(
                number, outcome=Outcome.FAIL, error="the stream said: worker w0 failed", end_ns=at(kill_s + 0.05),
                node_d=f"w0/w0-e{KILLS_S.index(kill_s) + 1}",
            )  # fmt: skip

    def _gauges(self) -> None:
        for second in range(68):
            self.metrics += [
                (at(second), "w0", "memory_weights_bytes", 4 * MIB),
                (at(second), "w0", "memory_kv_bytes", 8 * MIB),
                (at(second), "w0/w0-gms", "open_descriptors", 12),
                (at(second), "w1/w1-e1", "open_descriptors", 20 + second % 3),
            ]


def clean(path: Path, arm: str = "shadow") -> RunFolder:
    return History(arm).write(path)

"""Made-up runs of a control plane in the real format: histories by the real rules, under faults. Nothing was measured.

`python -m tests.reports.control_runs OUTDIR` writes them, and their pages.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness.run_folder import Manifest, RunFolder, RunWriter
from harness.verdicts import CheckResult, Verdict
from reference_impl.blockservice.rpc_log import Line, _encoded
from reference_impl.blockservice.store import Done
from reference_impl.rules.blockgroups import Group
from reference_impl.rules.events import Event, EventKind
from tests.harness.operation_histories import MS, Asked, Fate, Flaw, Node, Simulation
from tests.reports.kv_runs import KvRun, S, terms
from workloads.operation_rows import ControlRows, EffectRow, joined
from workloads.retry_storm import StormResult, StormRow
from workloads.rows import Outcome

NODES = ("p0", "d0")
AWAY_MS = 900
BEGAN_NS = 1_000 * MS
"""Where a simulation's clock starts: the run's origin."""
GROUP_BYTES = 48 << 20
ATTEMPTS = 6
FAULTS: list[tuple[float, str, str, str, int]] = [
    (6, "p0", "", "", 1), (10, "d0", "after_commit_before_reply", "exit", 1),
    (14, "p0", "before_commit", "kill", 1), (18, "p0", "after_commit_before_reply", "drop", 4), (22, "d0", "", "", 1),
    (26, "d0", "after_commit_before_reply", "delay", 3), (30, "p0", "after_commit_before_reply", "exit", 1),
    (34, "p0", "received", "repeat", 3), (38, "d0", "before_commit", "full", 3),
    (42, "d0", "after_commit_before_reply", "exit", 1), (46, "p0", "", "", 1), (50, "p0", "before_commit", "kill", 1),
]  # fmt: skip
"""At which second, whom, fail point and action ("": a kill of the service), how often."""
FATES = {"exit": Fate.CRASH_AFTER_COMMIT, "kill": Fate.CRASH_BEFORE_COMMIT, "drop": Fate.REPLY_LOST,
         "delay": Fate.REPLY_LOST, "repeat": Fate.COMES_TWICE}  # fmt: skip
CHECKS = [
    ("operations", "Every operation has one effect and one answer, whatever is lost", ["KVC-IDEM-001", "KVC-IDEM-003"]),
    ("one-owner", "Every group has one owner, and none is lost on its way", ["KVC-IDEM-011"]),
    ("faults-proved", "Every planned fault demonstrably happened", []),
]


class Plane(Simulation):
    """A simulation whose nodes are away for a while after a crash, with faults on a schedule, events and log lines."""

    def __init__(self, seed: int, flaw: Flaw | None = None, *, seconds: float = 58) -> None:
        super().__init__(seed, flaw)
        self.seconds = seconds
        self.events: list[Event] = []
        self.lines: dict[str, list[Line]] = {node: [] for node in (*NODES, "clients")}
        self.retries = self.timeouts = 0
        self._away: dict[str, int] = {}
        self._orders: dict[str, list[list[Any]]] = {node: [] for node in NODES}
        """Fault, point, action, times left."""
        self._pids = dict.fromkeys(NODES, 4000)
        self._ids = 0

    def say(self, actor: str, kind: EventKind, subject: str, after_ms: float = 0, **detail: Any) -> None:
        t_ns = self.now_ns + round(after_ms * MS)
        self.events.append(Event(t_ns, t_ns, actor, kind, subject, detail))

    def play(self, faults: list[tuple[float, str, str, str, int]], clients: int = 12) -> ControlRows:
        """Run it all; the history."""
        nodes = {name: Node(name, lambda: self.now_ns, self.reached, self.flaw) for name in NODES}
        self.nodes.update(nodes)
        self.restart = lambda name: self._crashed(name, nodes[name])
        self.say("harness", EventKind.PHASE_STARTED, "run", phase="baseline")
        for node in NODES:
            self.say(f"{node}-supervisor", EventKind.PROCESS_STARTED, f"{node}-blocks", pid=self._pids[node],
                     role="block-service", worker_id=node)  # fmt: skip
        names = [f"{node}-g{n}" for node in NODES for n in range(6)]
        for number in range(clients):
            self.start(self._steady(f"c{number}", names))
        self.start(self._engines(names, round(self.seconds * 30)))
        self.start(self._strike(faults))
        self.run(0, groups=6)
        return joined([ControlRows(invocations=self.invocations), *(node.rows() for node in nodes.values())])

    def _fresh(self, node: str, name: str) -> Group:
        return msgspec.structs.replace(super()._fresh(node, name), size_bytes=GROUP_BYTES)

    def _steady(self, name: str, groups: list[str]) -> Iterator[int]:
        while self.now_ns < BEGAN_NS + self.seconds * S:
            yield self._wait(560)
            asked = self._choose(groups)
            for _ in range(3):
                yield from self._call(name, asked)
                if self.invocations[-1].outcome != "unknown":
                    break
                yield self._wait(400)

    def _call(self, client: str, asked: Asked) -> Iterator[int]:
        """One call of a client: up to six attempts with pauses between them."""
        start_ns, timeouts, doubtful, code = self.now_ns, 0, False, ""
        self._ids += 1
        request_id = f"{client}.{self._ids}"
        for attempt in range(1, ATTEMPTS + 1):
            yield self._wait(4)
            self.retries += attempt > 1
            code, lost = "UNAVAILABLE", False
            if self._away.get(asked.node, 0) <= self.now_ns:
                done, action = self._try(asked)
                lost = action in ("drop", "delay")
                began_ns = self.now_ns
                yield 1000 * MS if lost else self._wait(3)
                if done is not None or lost:
                    code = "CANCELLED" if lost else done.answer.refusal if done else ""
                    self._log(asked, request_id, attempt, began_ns, code)
                if done is not None and not lost:
                    self._client_log(asked, request_id, attempt, start_ns, code)
                    refused = not done.answer.applied
                    unsure = doubtful and done.answer.refusal in ("ID_EXPIRED", "FROM_THE_FUTURE")
                    outcome = "unknown" if unsure else "fail" if refused else "ok"
                    self._ended(client, asked, start_ns, outcome, done, attempt, timeouts, code)
                    return
            doubtful, timeouts = True, timeouts + lost
            self.timeouts += lost
            yield round(50 * MS * 2 ** (attempt - 1) * self.chance.uniform(0.8, 1.2))
        self._client_log(asked, request_id, ATTEMPTS, start_ns, code)
        self._ended(client, asked, start_ns, "unknown", None, ATTEMPTS, timeouts, code)

    def _try(self, asked: Asked) -> tuple[Done | None, str]:
        """Let a request arrive, with whatever is ordered for it."""
        orders = self._orders[asked.node]
        if not orders:
            return self._come(asked, Fate.FINE), ""
        fault, point, action, _ = orders[0]
        orders[0][3] -= 1
        method = "" if point == "before_commit" else _rpc(asked)
        self.say(f"{asked.node}-blocks", EventKind.FAIL_POINT_REACHED, point, action=action, method=method,
                 node=asked.node, pid=self._pids[asked.node])  # fmt: skip
        if not orders[0][3]:
            orders.pop(0)
            self.say("harness", EventKind.FAULT_PROVED, fault, 3, worker_id=asked.node, evidence=f"{action} at {point}")
        done = None if action == "full" else self._come(asked, FATES[action])
        if action in ("exit", "kill") and self._away.get(asked.node, 0) <= self.now_ns:
            self.restart(asked.node)  # the store was not even asked to commit
            done = None
        return done, action

    def _come(self, asked: Asked, fate: Fate) -> Done | None:
        node = self.nodes[asked.node]
        assert isinstance(node, Node)
        kept = len(node._log)
        done = self._arrive(asked, fate)
        record = node._log.get((asked.tenant, asked.operation_id))
        new = len(node._log) > kept and record is not None
        if new or (done is not None and done.replayed):
            applied = record is not None and record.outcome == "APPLIED"
            kind = EventKind.OPERATION_APPLIED if applied else EventKind.OPERATION_REFUSED
            self.say(f"{asked.node}-blocks", kind if new else EventKind.OPERATION_REPLAYED, asked.operation_id,
                     -0.01 if done is None else 0, tenant=asked.tenant, method="x",
                     block_group_id=asked.request.block_group_id, epoch=1, refusal="")  # fmt: skip
        return done

    def _crashed(self, name: str, node: Node) -> None:
        node.restart()
        if self._away.get(name, 0) > self.now_ns:
            return
        self._away[name] = self.now_ns + AWAY_MS * MS
        old, self._pids[name] = self._pids[name], self._pids[name] + 1
        actor, subject = f"{name}-supervisor", f"{name}-blocks"
        self.say(actor, EventKind.PROCESS_EXITED, subject, 0.5, pid=old, status=86, worker_id=name)
        self.say(actor, EventKind.PROCESS_STARTED, subject, 30, pid=self._pids[name], role="block-service",
                 worker_id=name)  # fmt: skip
        self.say(subject, EventKind.BLOCKS_LINKED, name, AWAY_MS - 60, incarnation="i", new=False, groups=6, lost=0)

    def _strike(self, faults: list[tuple[float, str, str, str, int]]) -> Iterator[int]:
        for number, (at_s, node, point, action, times) in enumerate(faults, 1):
            yield max(1, BEGAN_NS + round(at_s * S) - self.now_ns)
            told: dict[str, Any] = {"worker_id": node, "target": f"{node}-blocks", "pid": self._pids[node]}
            if point:
                fault = f"fail_point-{number}"
                self.say("harness", EventKind.FAULT_INJECTED, fault, fault="fail_point", point=point, action=action,
                         requests=times, **told)  # fmt: skip
                self._orders[node].append([fault, point, action, times])
            else:
                fault = f"blocks_kill-{number}"
                self.say("harness", EventKind.FAULT_INJECTED, fault, fault="blocks_kill", **told)
                self.say("harness", EventKind.FAULT_PROVED, fault, 2, worker_id=node, evidence="pidfd readable")
                self.restart(node)

    def _log(self, asked: Asked, request_id: str, attempt: int, began_ns: int, code: str) -> None:
        request = asked.request
        left_ms = max(1, 1000 - attempt)
        self.lines[asked.node].append(
            Line(
                request_id=request_id, operation_id=asked.operation_id, block_group_id=request.block_group_id,
                dst_node=asked.node, epoch=request.epoch, timeout_ms=left_ms, retry_count=attempt - 1, error_code=code,
                rpc_method=_rpc(asked),
                latency_ms=(self.now_ns - began_ns) / MS,
            )
        )  # fmt: skip

    def _client_log(self, asked: Asked, request_id: str, attempts: int, start_ns: int, code: str) -> None:
        self.lines["clients"].append(
            Line(
                request_id=request_id, operation_id=asked.operation_id, block_group_id=asked.request.block_group_id,
                epoch=asked.request.epoch, rpc_method=_rpc(asked), timeout_ms=4000, retry_count=attempts - 1,
                error_code=code, latency_ms=(self.now_ns - start_ns) / MS,
            )
        )  # fmt: skip


def _rpc(asked: Asked) -> str:
    """The RPC of a request."""
    return "".join(word.title() for word in str(asked.request.__struct_config__.tag).split("_"))


class ControlRun(KvRun):
    """One run, as lists to be changed at will."""

    def __init__(self, scenario: str = "reply_loss") -> None:
        super().__init__(scenario, "lease")
        self.events = []
        self.control = ControlRows()
        self.lines: dict[str, list[Line]] = {}
        self.storms: list[StormResult] = []
        self.configuration = {
            "scenario": {"name": scenario, "kv": {"prefill": 1, "decode": 1},
                         "control": {"clients": 12, "rate_per_s": 40, "tenants": 2}},
            "terms": msgspec.to_builtins(terms("lease", 1.0)), "roles": {"p0": "prefill", "d0": "decode"},
            "client_policy": {"attempts_max": ATTEMPTS, "initial_s": 0.05, "multiplier": 2, "max_s": 1.0,
                              "jitter": 0.2, "attempt_timeout_s": 1.0, "call_timeout_s": 4.0},
        }  # fmt: skip
        self.verdicts = [
            CheckResult(check=c, title=t, rules=r, verdict=Verdict.PASS, found="as it should be") for c, t, r in CHECKS
        ]

    def request_at(self, seconds: float, ttft_s: float, **fields: Any) -> None:
        """Add a user's request, in seconds of the simulation's clock (which is not the other runs')."""
        before = len(self.requests)
        self.request(seconds, seconds + ttft_s, **fields)
        shift = BEGAN_NS - 1_000 * S  # KvRun's own origin
        record, phase, ok = self.requests[before]
        stamps = {n: getattr(record, n) + shift for n in ("intended_ns", "send_began_ns", "sent_ns", "end_ns")}
        chunks = [msgspec.structs.replace(c, t_ns=c.t_ns + shift) for c in record.chunks]
        moved = type(record)(**{f: getattr(record, f) for f in record.__struct_fields__} | stamps | {"chunks": chunks})
        self.requests[before] = (moved, phase, ok)

    def write(self, path: Path, *, judged: bool = True) -> RunFolder:
        """Write the folder."""
        manifest = Manifest(
            run_id=path.name, scenario=self.scenario, arm=self.arm,
            title="Control plane: crashes and lost replies, and one effect an operation", profile="pd",
            time_scale=self.scale, seed=7, started_wall_ns=1_767_225_600 * S,
            command=["pdproof", "run", self.scenario], versions={"pdproof": "0.1.0", "sample data": "not measured"},
            commit="0000", machine={"cores": 2}, configuration=self.configuration, emulated=self.emulated,
        )  # fmt: skip
        writer = RunWriter(path, manifest)
        for event in self.events:
            with writer.events_part(event.actor).open("ab") as part:
                part.write(msgspec.json.encode(event) + b"\n")
        for row in self.metrics:
            writer.metric(*row)
        for node, lines in self.lines.items():
            (writer.logs / f"{node}-rpc.jsonl").write_bytes(b"".join(_encoded(line) for line in lines))
        if self.storms:
            (path / "storm.json").write_bytes(msgspec.json.encode(self.storms))
        run = writer.finish(self.requests, self.control)
        if judged:
            run.write_verdicts(self.verdicts)
        return run


def reply_loss(
    seed: int = 7,
    flaw: Flaw | None = None,
    *,
    seconds: float = 58,
    faults: list[tuple[float, str, str, str, int]] = FAULTS,
) -> ControlRun:
    """A run under all sorts of faults, whole but for a flaw."""
    plane, run = Plane(seed, flaw, seconds=seconds), ControlRun()
    run.control = plane.play([fault for fault in faults if fault[0] < seconds])
    run.events, run.lines = sorted(plane.events, key=lambda e: e.t_ns), plane.lines
    rng = random.Random(seed)
    for number in range(round(seconds * 0.9)):
        run.request_at(0.4 + number * 1.1, rng.uniform(0.45, 0.6), content_ok=True)
    _scraped(run, plane, seconds)
    run.storms = [storm_of(budget=True), storm_of(budget=False)]
    run.events.append(Event(plane.now_ns, 0, "harness", EventKind.PHASE_ENDED, "run", {"phase": "drain"}))
    return run


def _scraped(run: ControlRun, plane: Plane, seconds: float) -> None:
    rng = random.Random(3)
    retries, limited = 0, dict.fromkeys(NODES, 0)
    for tick in range(round(seconds * 2)):
        t_ns = BEGAN_NS + tick * S // 2
        retries += rng.randint(0, 3)
        state = 2 if 46 <= tick / 2 < 48 else 1 if tick / 2 == 48 else 0
        for name, value in (
            ("rpc_qps", 38 + rng.random() * 6), ("rpc_retry_count", retries), ("rpc_timeout_count", retries // 4),
            ("rpc_latency_p50", 4.1), ("rpc_latency_p99", 240.0), ("rpc_error_rate", 0.01),
            ("rpc_inflight_requests", rng.randint(0, 9)), ("connection_pool_in_use", rng.randint(0, 6)),
            ("connection_pool_wait_time", tick * 0.4), ("circuit_breaker_state", state),
        ):  # fmt: skip
            run.metrics.append((t_ns, "clients", name, float(value)))
        for node in NODES:
            limited[node] = 0 if tick == 60 else limited[node] + (tick % 20 == 0)
            for name, value in (
                ("rpc_qps Pin", 8.0), ("rpc_qps Reserve", 6.5), ("rpc_latency_p50 Pin", 2.2), ("rpc_error_rate Pin", 0),
                ("rpc_latency_p99 Pin", 9.0), ("rpc_inflight_requests", rng.randint(0, 5)),
                ("rpc_queue_length", rng.randint(0, 3)), ("rpc_retry_count Pin", tick // 3),
                ("rpc_timeout_count Pin", 0),
                ("rate_limited_count migration_bytes_token delayed", limited[node]), ("pin_latency 0.99", 9.0),
                ("get_metadata_latency 0.99", 1.4), ("evict_latency 0.99", 7.5), ("unpin_latency 0.99", 8.8),
                ("migrate_start_latency 0.99", 11.0), ("remote_read_timeout_count", 0),
            ):  # fmt: skip
                run.metrics.append((t_ns, f"{node}/blocks", name, float(value)))


def storm_of(*, budget: bool, seconds: float = 12.0, capacity: float = 250.0) -> StormResult:
    """A storm as it might be: with a budget it ends with its outage."""
    rng, rows = random.Random(budget), []
    for t_ms in range(0, round(seconds * 1e3), 100):
        share = t_ms / seconds / 1e3
        calls = round((0.3 if share < 0.08 or share > 0.94 else 0.7) * capacity / 10 + rng.uniform(-3, 3))
        out = 0.2 <= share < 0.6
        tail = 0.6 <= share < 0.92
        factor = (1.15 if out else 1.0) if budget else (3.8 if out else 3.1 if tail else 1.0)
        good = 0.0 if out else 0.25 if tail and not budget else 1.0
        rows.append(StormRow(t_ms, calls, round(calls * factor), round(calls * good), 0, round(calls * (1 - good))))
    return StormResult(
        budget=budget, clients=200, seed=7, seconds=seconds, capacity_per_s=capacity,
        outage_from_ms=round(0.2 * seconds * 1e3), outage_to_ms=round(0.6 * seconds * 1e3), rows=rows,
    )  # fmt: skip


def broken() -> ControlRun:
    """A double effect, a fault without proof, one that never struck, no storm, a wrong answer of an engine."""
    run = reply_loss(flaw=Flaw.DEDUP_LOST_ON_RESTART, seconds=24)
    proofs = [e for e in run.events if e.kind is EventKind.FAULT_PROVED]
    run.events = [e for e in run.events if e is not proofs[0]]
    last = run.events[-1]
    run.events.append(msgspec.structs.replace(
        last, kind=EventKind.FAULT_UNPROVED, subject="fail_point-99",
        detail={"fault": "fail_point", "point": "migration_copied", "action": "exit", "worker_id": "p0",
                "reason": "no block service of p0 was active"}))  # fmt: skip
    run.storms = []
    run.request_at(3.0, 0.5, content_ok=False)
    run.request_at(4.0, 0.5, outcome=Outcome.FAIL)
    return run


def idle() -> ControlRun:
    """A control plane that nobody asked anything."""
    run = ControlRun()
    run.events = [Event(BEGAN_NS, 0, "harness", EventKind.PHASE_STARTED, "run", {"phase": "baseline"})]
    return run


def effects_of(rows: ControlRows) -> list[EffectRow]:
    """The effects that clients' operations had."""
    return [e for e in rows.effects if e.cause == "client"]


def main(out: Path) -> None:
    """Write a page for each run under `out`."""
    from reports.control.page import write_control_page

    shutil.rmtree(out, ignore_errors=True)
    for name, run in (("whole", reply_loss()), ("broken", broken()), ("idle", idle())):
        write_control_page(run.write(out / "runs" / name), out / name / "index.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

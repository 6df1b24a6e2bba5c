"""Made-up prefill/decode runs in the real format, a shape for each scenario. Nothing here was measured.

`python -m tests.reports.kv_runs OUTDIR` writes them, and their pages.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from harness.run_folder import Manifest, RunFolder, RunWriter
from harness.verdicts import CheckResult, Verdict
from reference_impl.rules.events import Event, EventKind, Scalar
from reference_impl.rules.terms import KvTerms, LeaseDesign
from workloads.rows import Chunk, Outcome, PromptSpec, RequestRecord

S = 1_000_000_000
BASE_NS = 1_000 * S
BLOCKS = 2_000
"""Of one prompt of 32,000 tokens."""
POOL = 65_536
ARMS = ("lease", "single-timeout-480", "single-timeout-5")
AHEAD_S = 5_000.0
GONE = "no lease: it has ended, or never was"


def terms(arm: str, scale: float, *, ttl_s: float = 0.0) -> KvTerms:
    """Return an arm's terms as they are in a run of this time scale; with `ttl_s` (at full scale) for two turns."""
    timeout_s = 480.0 if arm.startswith("lease") else float(arm.split("-")[2])
    return KvTerms(
        design=LeaseDesign.LEASE if arm.startswith("lease") else LeaseDesign.SINGLE_TIMEOUT,
        kv_lease_duration=30 / scale, single_timeout=timeout_s / scale, bidirectional_kv_xfer=ttl_s > 0,
        decoder_kv_blocks_ttl=(ttl_s or 480) / scale, clock_correction="uncorrected" not in arm,
        read_limit=10 / scale, load_limit=60 / scale,
    )  # fmt: skip


class KvRun:
    """Events, requests and gauges of one run, as lists to be changed at will. Seconds are those of the run itself."""

    def __init__(self, scenario: str, arm: str, scale: float = 1.0, *, ttl_s: float = 0.0) -> None:
        self.scenario = scenario
        self.arm = arm
        self.scale = scale
        self.terms = terms(arm, scale, ttl_s=ttl_s)
        self.events: list[Event] = []
        self.requests: list[tuple[RequestRecord, str, bool | None]] = []
        self.metrics: list[tuple[int, str, str, float]] = []
        self.configuration: dict[str, Any] = {
            "scenario": {"name": scenario, "kv": {"prefill": 1, "decode": 2, "decode_slots": 3}},
            "profile": {"kv_blocks": POOL}, "terms": msgspec.to_builtins(self.terms),
            "roles": {"p0": "prefill", "d0": "decode", "d1": "decode"},
        }  # fmt: skip
        self.verdicts = [_check("content", "Every answer is right, token by token", Verdict.PASS, "0 wrong")]
        self.emulated = ["compute time: prefill 60,000 tokens/s; decode step 8 ms + 0.6 ms a request"]
        self.say(0, "harness", EventKind.PHASE_STARTED, "run", phase="baseline")

    def say(self, seconds: float, actor: str, kind: EventKind, subject: str, **detail: Scalar) -> None:
        """Add an event; one of an engine names it and its worker."""
        own: dict[str, Scalar] = {}
        if "-e" in actor:
            own = {"engine_id": actor, "worker_id": actor.split("-", maxsplit=1)[0]}
        t_ns = BASE_NS + round(seconds * S)
        self.events.append(Event(t_ns, t_ns, actor, kind, subject, own | detail))

    def grant(self, seconds: float, name: str, *, blocks: int = BLOCKS, turn: bool = False) -> None:
        """Grant a prefill's lease on p0, or a turn's on d0."""
        length_s = self.terms.decoder_kv_blocks_ttl if turn else self.terms.first_ns / S
        holder = "d0-e1" if turn else "p0-e1"
        self.say(seconds, holder, EventKind.LEASE_GRANTED, name, blocks=blocks, duration_s=length_s, turn=turn)

    def release(
        self, seconds: float, name: str, *, how: str = "read", turn: bool = False, blocks: int = BLOCKS
    ) -> None:
        """Release it."""
        holder = "d0-e1" if turn else "p0-e1"
        self.say(seconds, holder, EventKind.LEASE_RELEASED, name, blocks=blocks, held_ms=1.0, how=how, turn=turn)

    def expire(self, seconds: float, name: str, *, turn: bool = False, blocks: int = BLOCKS) -> None:
        """Let it run out."""
        holder = "d0-e1" if turn else "p0-e1"
        self.say(seconds, holder, EventKind.LEASE_EXPIRED, name, blocks=blocks, held_ms=1.0, turn=turn)

    def load(
        self, seconds: float, name: str, *, reader: str = "d0-e1", holder: str = "p0-e1.ab12", waited_ms: float = 12.0,
        read_ms: float = 8.0, blocks: int = BLOCKS, remote: str = "",
    ) -> None:  # fmt: skip
        """Say that a load is done."""
        self.say(
            seconds, reader, EventKind.LOAD_DONE, name, tokens=blocks * 16, blocks=blocks, waited_ms=waited_ms,
            read_ms=read_ms, remote_engine_id=holder, remote_request_id=remote or name,
        )  # fmt: skip

    def beat(self, seconds: float, leases: int) -> None:
        """Let a heartbeat extend so many leases."""
        self.say(seconds, "p0-e1", EventKind.LEASE_EXTENDED, "d0-e1.cd34", leases=leases, unknown=0)

    def too_late(self, seconds: float, name: str) -> None:
        """Let a reader come for a lease that has run out: it is refused, and computes again."""
        reader = f"reader-of-{name}"
        self.say(seconds, "p0-e1", EventKind.CLAIM_REFUSED, name, reader=reader, reason=GONE)
        self.say(seconds, "d0-e1", EventKind.LOAD_FAILED, reader, reason=f"the holder refuses: {GONE}",
                 policy="recompute", expired=False)  # fmt: skip

    def over(self, seconds: float) -> None:
        """End the run."""
        self.say(seconds, "harness", EventKind.PHASE_ENDED, "run", phase="drain")

    def kill(self, seconds: float, worker: str = "d0", *, proved: bool = True) -> None:
        """Kill a worker's engine."""
        self.say(seconds, "harness", EventKind.FAULT_INJECTED, "kill-1", fault="kill", worker_id=worker,
                 target=f"{worker}-e1", pid=4711)  # fmt: skip
        kind = EventKind.FAULT_PROVED if proved else EventKind.FAULT_UNPROVED
        self.say(seconds + 0.001, "harness", kind, "kill-1", worker_id=worker, evidence="pidfd readable")
        self.say(seconds + 0.002, f"{worker}-supervisor", EventKind.PROCESS_EXITED, f"{worker}-e1", status=-9)

    def request(self, seconds: float, first_s: float, *, outcome: Outcome = Outcome.OK, content_ok: bool | None = True,
                **fields: Any) -> None:  # fmt: skip
        """Add a request that was answered from `first_s` on, in two tokens; one that failed, failed then."""
        number = len(self.requests)
        at, first = BASE_NS + round(seconds * S), BASE_NS + round(first_s * S)
        ok = outcome is Outcome.OK
        record = RequestRecord(
            request_id=f"r{number:03d}", prompt=PromptSpec(7, number, 32_000), max_tokens=2, intended_ns=at,
            send_began_ns=at, sent_ns=at, end_ns=first + S // 100, chunks=[Chunk(first, 1), Chunk(first + S // 100, 1)]
            if ok else [], outcome=outcome, http_status=200 if ok else 502, error="" if ok else "worker d0 failed",
            node_d="d0/d0-e1", node_p="p0/p0-e1", **fields,
        )  # fmt: skip
        self.requests.append((record, "baseline", content_ok if ok else None))

    def gauge(self, seconds: float, node: str, name: str, value: float) -> None:
        """Add a scraped value."""
        self.metrics.append((BASE_NS + round(seconds * S), node, name, value))

    def write(self, path: Path, *, judged: bool = True) -> RunFolder:
        """Write the folder."""
        manifest = Manifest(
            run_id=path.name, scenario=self.scenario, arm=self.arm, title=f"The scenario {self.scenario}",
            profile="default", time_scale=self.scale, seed=7, started_wall_ns=1_767_225_600 * S,
            command=["pdproof", "run", self.scenario], versions={"pdproof": "0.1.0", "sample data": "not measured"},
            commit="0000", machine={"cores": 2}, configuration=self.configuration, emulated=self.emulated,
        )  # fmt: skip
        writer = RunWriter(path, manifest)
        for event in self.events:
            with writer.events_part(event.actor).open("ab") as part:
                part.write(msgspec.json.encode(event) + b"\n")
        for row in self.metrics:
            writer.metric(*row)
        run = writer.finish(self.requests)
        if judged:
            run.write_verdicts(self.verdicts)
        return run


def _check(name: str, title: str, verdict: Verdict, found: str) -> CheckResult:
    return CheckResult(check=name, title=title, rules=["KVC-LEASE-009"], verdict=verdict, found=found)


def d_crash(arm: str, scale: float = 10.0) -> KvRun:
    """D is killed 60 s (full scale) into the load, with 12 prefills waiting for it; the last lease began 2 s before.

    The leases were last renewed 3 s before the crash, so they end 17 s after it. With one timeout of 480 s they end 469
    to 478 s after it; with one of 5 s, 8 ended before it, and their readers came too late.
    """
    run, rng = KvRun("d_crash", arm, scale), random.Random(3)
    s = 1 / scale
    for number in range(34):  # read at once, a little before and after the crash
        at = 2 + number * 1.6 if number < 26 else 64 + (number - 26) * 5
        reader, name = "d1-e1" if number % 2 or at > 60 else "d0-e1", f"read-{number}"
        run.grant(at * s, name)
        run.load((at + 1.5) * s, name, reader=reader, waited_ms=10 + rng.uniform(0, 5), read_ms=rng.uniform(6, 9))
        run.release((at + 1.5) * s, name)
        run.request((at - 1) * s, (at + 2) * s)
    for number in range(12):
        granted, name = 49 + number * 9 / 11, f"left-{number}"
        ends = {"lease": 77.0, "single-timeout-480": granted + 480, "single-timeout-5": granted + 5}[arm]
        run.grant(granted * s, name)
        run.expire(ends * s, name)
        if ends <= 60:
            run.too_late((ends + 2) * s, name)
        run.request((granted - 1) * s, 60 * s + 0.01, outcome=Outcome.FAIL)
    for at in (47, 52, 57) if run.terms.renews else ():
        run.beat(at * s, 6)
    run.say(0.1, "d0-e1", EventKind.PEER_CONNECTED, "p0-e1.ab12", handshake_ms=21.0, offset_ms=0.0, offset_error_ms=0.4)
    run.kill(60 * s)
    end = 600 if arm == "single-timeout-480" else 130
    _waiting(run, end, lambda at: 6 if 48 < at < 60 else 1)
    for tick in range(0, end, 5):
        if tick < 60:
            lost = 8 * 40_000 if tick >= 50 and arm == "single-timeout-5" else 0
            run.gauge(tick * s, "d0/d0-e1", "pdproof:recomputed_tokens_total", lost)
        run.gauge(tick * s, "d1/d1-e1", "pdproof:recomputed_tokens_total", 0)
        run.gauge(tick * s, "p0/p0-e1", "pdproof:recomputed_tokens_total", 7)  # no decode engine's
    run.over(end * s)
    run.verdicts.append(_check("faults-proved", "Every planned fault happened", Verdict.PASS, "1 of 1 is proved"))
    if arm != "lease":
        found = "12 leases stood longer than one extension after the crash"
        run.verdicts.append(_check("reclaim", "A dead reader's blocks are free in time", Verdict.FAIL, found))
    return run


def surge(arm: str, scale: float = 10.0) -> KvRun:
    """40 prefills wait up to 80 s (full scale) for D. Leases are renewed; a timeout of 5 s frees what is needed."""
    run = KvRun("surge", arm, scale)
    s = 1 / scale
    lost = 0
    for number in range(40):
        granted, served, name = 2.0 + number, 4.0 + number * 3, f"queued-{number}"
        run.grant(granted * s, name)
        if arm == "single-timeout-5" and served > granted + 5:
            run.expire((granted + 5) * s, name)
            run.too_late(served * s, name)
            lost += 1
        else:
            run.load(served * s, name)
            run.release(served * s, name)
        run.request((granted - 1) * s, (served + 1) * s)
    for at in range(5, 120, 5) if run.terms.renews else ():
        run.beat(at * s, 10)
    _waiting(run, 140, lambda at: max(0, min(at, 40) - at / 3))
    for tick in range(0, 140, 5):
        run.gauge(tick * s, "d0/d0-e1", "pdproof:recomputed_tokens_total", lost * 32_000 if tick > 130 else 0)
    run.over(140 * s)
    if lost:
        found = f"{lost} leases ran out"
        run.verdicts.append(_check("leases-kept", "No lease ends while its reader lives", Verdict.FAIL, found))
    return run


def two_turn(arm: str = "lease", ahead_s: float = AHEAD_S, scale: float = 2.0) -> KvRun:
    """30 later turns after 2 to 28 s, with a time to live of 20 s (full scale).

    Without correction, D's clock ahead makes every turn look live, and behind, every turn expired.
    """
    run = KvRun("two_turn", arm, scale, ttl_s=20)
    s = 1 / scale
    run.configuration["clock_offsets_s"] = {"d0": ahead_s}
    run.say(0.05, "p0-e1", EventKind.PEER_CONNECTED, "d0-e1.cd34", handshake_ms=19.0, offset_ms=ahead_s * 1e3 + 0.2,
            offset_error_ms=0.6)  # fmt: skip
    for number in range(30):
        ended, gap, name = 2.0 + number * 2, 2.0 + 26 * number / 29, f"turn-{number}"
        came, gone = ended + gap, ended + 20.0
        run.grant(ended * s, name, turn=True, blocks=500)
        if gap >= 20:
            run.expire(gone * s, name, turn=True, blocks=500)
        believed = (gone - came) * s + (ahead_s if not run.terms.clock_correction else 0)
        live = believed > 0.05
        remote: dict[str, Scalar] = {"remote_engine_id": "d0-e1.cd34", "remote_request_id": name}
        run.say(
            came * s,
            "p0-e1",
            EventKind.TURN_JUDGED,
            f"next-{number}",
            live=live,
            left_ms=believed * 1e3,
            error_ms=0.9 if run.terms.clock_correction else 0.0,
            **remote,
        )
        if live and gap < 20:
            run.load(came * s + 0.01, f"next-{number}", reader="p0-e1", holder="d0-e1.cd34", blocks=500, remote=name)
        elif live:
            run.say(
                came * s + 0.004,
                "d0-e1",
                EventKind.CLAIM_REFUSED,
                name,
                reader=f"next-{number}",
                reason=GONE,
            )
        if not live or gap >= 20:
            reason = "the holder refuses: no lease" if live else "the turn's blocks have expired"
            run.say(
                came * s + 0.005,
                "p0-e1",
                EventKind.LOAD_FAILED,
                f"next-{number}",
                reason=reason,
                policy="recompute",
                expired=True,
                **remote,
            )
        if gap < 20:
            run.release(came * s + 0.011, name, turn=True, blocks=500, how="read" if live else "failed")
        run.request(came * s, came * s + (0.05 if live and gap < 20 else 0.4), session=number, turn=1,
                    think_ms=gap * s * 1e3, cached_tokens=8_000 if live and gap < 20 else 0)  # fmt: skip
    for number in range(30):
        run.grant((1 + number * 2) * s, f"first-{number}", blocks=500)
        run.load((1.5 + number * 2) * s, f"first-{number}", blocks=500)
        run.release((1.5 + number * 2) * s, f"first-{number}", blocks=500)
    _waiting(run, 100, lambda at: at % 3)
    run.over(100 * s)
    return run


def quiet(scale: float = 1.0) -> KvRun:
    """20 requests, no fault, and nothing else."""
    run = KvRun("quiet", "lease", scale)
    for number in range(20):
        run.grant(1.0 + number, f"q-{number}")
        run.load(1.5 + number, f"q-{number}")
        run.release(1.5 + number, f"q-{number}")
        run.request(0.5 + number, 2.0 + number)
    run.over(30)
    return run


def _waiting(run: KvRun, end: int, queue: Callable[[float], float]) -> None:
    for tick in range(end):
        run.gauge(tick / run.scale, "d0/d0-e1", "vllm:num_requests_waiting", float(round(queue(tick))))
        run.gauge(tick / run.scale, "p0/p0-e1", "vllm:num_requests_waiting", 99.0)  # the prefill side's own queue


def main(out: Path) -> None:
    """Write a page for each scenario under `out`."""
    from reports.kv.page import write_kv_page

    shutil.rmtree(out, ignore_errors=True)
    for name, made in (
        ("d_crash", [d_crash(arm) for arm in ARMS]), ("surge", [surge(arm) for arm in ARMS]),
        ("two_turn", [two_turn(), two_turn("lease-uncorrected")]), ("quiet", [quiet()]),
    ):  # fmt: skip
        write_kv_page([run.write(out / name / run.arm) for run in made], out / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

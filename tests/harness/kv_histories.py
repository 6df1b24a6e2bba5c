"""A clean run of prefill and decode apart, made up in the real format, to be broken in one place.

d0 is killed at 20 s with two prefilled requests waiting for it. Leases last 6 s, extensions 4 s. In two-turn mode d1
keeps each turn's blocks for 10 s; turns come back after 5 s (in time) and after 12 s (too late).
"""

from __future__ import annotations

import msgspec

from harness.scenario import FaultKind, FaultSpec, KvSpec, Phase, Scenario
from reference_impl.rules.events import EventKind
from reference_impl.rules.terms import LeaseDesign
from tests.harness.histories import History, at

KV = KvSpec(decode=2, kv_lease_duration=6, single_timeout=48, bidirectional_kv_xfer=True, decoder_kv_blocks_ttl=10)
KILL_S = 20.0
TURN_BLOCKS = 130


class KvHistory(History):
    """Events, requests and gauges of a run, as lists to be changed at will."""

    def __init__(self) -> None:
        super().__init__("lease")
        self.scenario = Scenario(
            name="made-up-pd", title="One reader dies", requests_min=20, kv=KV,
            phases=[
                Phase(name="baseline", seconds=20),
                Phase(name="fault", seconds=40, fault=FaultSpec(kind=FaultKind.KILL, worker="d0")),
                Phase(name="drain", seconds=5),
            ],
        )  # fmt: skip
        terms = KV.terms(LeaseDesign.LEASE, clock_correction=True)
        self.configuration = {
            "terms": msgspec.to_builtins(terms), "roles": {"p0": "prefill", "d0": "decode", "d1": "decode"},
        }  # fmt: skip
        self._leases()
        self._turns()

    def _lives(self) -> None:
        """d0-e1 dies, and d0-e2 takes its place."""
        for engine in ("p0-e1", "d0-e1", "d1-e1"):
            self._live(-5, engine, 1)
        self.say(KILL_S, "harness", EventKind.FAULT_INJECTED, "kill-1", worker_id="d0", fault="kill", target="d0-e1")
        self.say(KILL_S + 0.02, "harness", EventKind.FAULT_PROVED, "kill-1", worker_id="d0", evidence="pidfd")
        self.say(KILL_S + 0.02, "supervisor", EventKind.PROCESS_EXITED, "d0-e1", worker_id="d0", status=-9)
        self._live(KILL_S + 2, "d0-e2", 2)
        self.say(KILL_S + 2.1, "harness", EventKind.FAULT_HEALED, "kill-1", worker_id="d0", evidence="d0-e2")

    def _live(self, seconds: float, engine: str, epoch: int) -> None:
        worker = engine.split("-", maxsplit=1)[0]
        self.say(seconds, engine, EventKind.LOCK_WON, engine, worker_id=worker, epoch=epoch)
        self.say(seconds + 0.01, engine, EventKind.CANARY_ANSWERED, engine, worker_id=worker, ok=True)
        self.say(seconds + 0.01, engine, EventKind.ENGINE_AWAKE, engine, worker_id=worker, epoch=epoch)
        self.say(seconds + 0.02, "router", EventKind.ROUTER_REGISTERED, engine, worker_id=worker, epoch=epoch)

    def of_p(self, seconds: float, kind: EventKind, subject: str, **detail: object) -> None:
        self.say(seconds, "p0-e1", kind, subject, engine_id="p0-e1", worker_id="p0", **detail)  # type: ignore[arg-type]

    def of_d(self, seconds: float, kind: EventKind, subject: str, **detail: object) -> None:
        self.say(seconds, "d1-e1", kind, subject, engine_id="d1-e1", worker_id="d1", **detail)  # type: ignore[arg-type]

    def grant(self, seconds: float, request: str, blocks: int = 125) -> None:
        self.of_p(seconds, EventKind.LEASE_GRANTED, request, blocks=blocks, duration_s=6.0, turn=False)

    def release(self, seconds: float, request: str, how: str = "read") -> None:
        self.of_p(
            seconds, EventKind.LEASE_RELEASED, request, blocks=125, held_ms=1.0, how=how, turn=False
        )  # fmt: skip

    def expire(self, seconds: float, request: str, heard_from: str = "d0-e1.x") -> None:
        self.of_p(
            seconds, EventKind.LEASE_EXPIRED, request, blocks=125, held_ms=1.0, turn=False, heard_from=heard_from
        )  # fmt: skip

    def loaded(self, seconds: float, request: str) -> None:
        self.of_d(
            seconds, EventKind.LOAD_DONE, f"of-{request}", tokens=2000, blocks=125, waited_ms=1.0, read_ms=1.0,
            remote_engine_id="p0-e1.x", remote_request_id=request,
        )  # fmt: skip

    def load_failed(self, seconds: float, request: str, *, expired: bool = False) -> None:
        self.of_d(
            seconds, EventKind.LOAD_FAILED, f"of-{request}", reason="torn", policy="recompute", expired=expired,
            remote_engine_id="p0-e1.x", remote_request_id=request,
        )  # fmt: skip

    def _leases(self) -> None:
        """One a second, read after 0.3 s; two were waiting for d0 when it died, one of them renewed just before."""
        for number in range(60):
            self.grant(number + 0.1, f"p{number}")
            if number not in (17, 18):
                self.loaded(number + 0.39, f"p{number}")
                self.release(number + 0.4, f"p{number}")
        self.expire(KILL_S + 3.2, "p17")
        self.expire(KILL_S + 4.1, "p18")

    def judge(self, seconds: float, turn: str, *, live: bool, reader: str) -> None:
        self.of_p(
            seconds, EventKind.TURN_JUDGED, reader, live=live, left_ms=0.0, error_ms=1.0, remote_request_id=turn,
            remote_engine_id="d1-e1.x",
        )  # fmt: skip

    def _turns(self) -> None:
        for number in range(10):
            turn, ended_s = f"t{number}", 2.0 * number + 1
            self.of_d(
                ended_s, EventKind.LEASE_GRANTED, turn, blocks=TURN_BLOCKS, duration_s=10.0, turn=True
            )  # fmt: skip
            in_time = number % 2 == 0
            self.judge(ended_s + (5 if in_time else 12), turn, live=in_time, reader=f"again{number}")
            if in_time:
                self.of_d(
                    ended_s + 5.1, EventKind.LEASE_RELEASED, turn, blocks=TURN_BLOCKS, held_ms=1.0, how="read",
                    turn=True,
                )  # fmt: skip
            else:
                self.of_d(ended_s + 10, EventKind.LEASE_EXPIRED, turn, blocks=TURN_BLOCKS, held_ms=1.0, turn=True)

    def _load(self) -> None:
        super()._load()
        for number, (record, phase, ok) in enumerate(self.requests):
            node = "d1/d1-e1" if record.node_d.startswith("w1") else "d0/d0-e1"
            self.requests[number] = (msgspec.structs.replace(record, node_d=node, node_p="p0/p0-e1"), phase, ok)
        self.change_request(38, outcome="ok", error="", end_ns=at(38.6))

    def _gauges(self) -> None:
        super()._gauges()
        for second in range(68):
            for engine in ("p0/p0-e1", "d1/d1-e1"):
                held = 125.0 if second < 60 else 0.0
                self.metrics += [
                    (at(second), engine, "pdproof:leases_live", held / 125),
                    (at(second), engine, "pdproof:lease_blocks_held", held),
                    (at(second), engine, "vllm:num_requests_waiting", 0.0),
                ]

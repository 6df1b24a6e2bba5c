"""Scenarios as data: load, phases and faults, read from TOML."""

from __future__ import annotations

import enum
from typing import Annotated, Final, Literal

import msgspec

from harness.errors import BadInput
from reference_impl import named_toml
from reference_impl.blockservice.failpoints import Action, Order, Point
from reference_impl.blockservice.metrics import METHODS
from reference_impl.rules.terms import KvTerms, LeaseDesign, LoadPolicy

PACKAGE: Final = "harness.scenarios"
DRAIN: Final = "drain"
RATE_MAX: Final = 100_000.0
TOKENS_MAX: Final = 10_000_000
SECONDS_MAX: Final = 1e6
WORKERS_MAX: Final = 64


class Arm(enum.StrEnum):
    """What stands behind an engine: nothing (a cold restart) or a shadow."""

    COLD = "cold"
    SHADOW = "shadow"


class Arrivals(enum.StrEnum):
    """The law of the gaps between requests."""

    POISSON = "poisson"
    CONSTANT = "constant"


class Sessions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arrivals are sessions of several turns.

    Before each turn but the first lies a think time, drawn from `think_s` (seconds at full scale).
    """

    turns: Annotated[int, msgspec.Meta(ge=2, le=1000)] = 3
    turn_tokens: Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)] = 500
    think_s: Annotated[list[Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]], msgspec.Meta(min_length=1)]
    keep_alive_s: Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)] = 0.0
    """During think time the client renews its blocks so often; 0: never."""


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An open loop of requests. At full scale: with a time scale K, arrivals come K times faster."""

    rate_per_s: Annotated[float, msgspec.Meta(gt=0, le=RATE_MAX)] = 0.7
    arrivals: Arrivals = Arrivals.POISSON
    input_tokens: Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)] = 32_000
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)] = 1_000
    request_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=SECONDS_MAX)] = 120.0
    utilisation: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Of what the workers hold at once; above 0, a calibration before the run finds `rate_per_s`."""
    calibrated_s: float = 0.0
    """How long a request took in that calibration."""
    sessions: Sessions | None = None

    @property
    def tokens_max(self) -> int:
        """Tokens in and out of the longest request: a session's last turn repeats all that was said before."""
        first = self.input_tokens + self.output_tokens
        if self.sessions is None:
            return first
        return first + (self.sessions.turns - 1) * (self.sessions.turn_tokens + self.output_tokens)


class FaultKind(enum.StrEnum):
    """What can be done to a deployment."""

    KILL = "kill"
    """SIGKILL of the worker's active engine."""
    ROUTER_HOLD = "router_hold"
    """The router keeps hand-offs to itself for a while."""
    BLOCKS_KILL = "blocks_kill"
    """SIGKILL of the worker's block service."""
    FAIL_POINT = "fail_point"
    """The worker's block service fails at a named place."""


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault: of the worker whose active engine it strikes, or of the router."""

    kind: FaultKind
    worker: str = ""
    process: Annotated[str, msgspec.Meta(pattern=r"^[a-z_]{0,40}$")] = ""
    """kill: which process of an engine that has several (vLLM: api_server, engine_core, worker); "": its only one."""
    when_whole_s: Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)] = 0.0
    """kill: wait until every worker is whole again (it serves, and its shadow is parked), at most so long; 0: strike at
    the phase's start. The load goes on meanwhile, and all later phases are so much later."""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)] = 0.0
    """router_hold: how long each hand-off is kept, at full scale."""
    requests: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    """router_hold: how many hand-offs are kept. fail_point: how many requests are struck (0: one)."""
    point: Point | None = None
    """fail_point: where."""
    action: Action | None = None
    """fail_point: what happens there; `seconds` of a delay are not scaled."""
    method: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """fail_point: only to calls of this method of blocks.proto; "": to any."""

    def __post_init__(self) -> None:
        """Refuse a fault that would do nothing."""
        kill = self.kind in (FaultKind.KILL, FaultKind.BLOCKS_KILL)
        if kill and not self.worker:
            raise ValueError(f"a {self.kind} needs the worker whose process it strikes")
        if self.process and self.kind is not FaultKind.KILL:
            raise ValueError(f"process is of a kill, and this is a {self.kind}")
        if self.when_whole_s and self.kind is not FaultKind.KILL:
            raise ValueError(f"when_whole_s is of a kill, and this is a {self.kind}")
        if kill and (self.seconds or self.requests):
            raise ValueError(f"seconds and requests are of a router_hold, and this is a {self.kind}")
        if self.kind is FaultKind.FAIL_POINT:
            self._check_point()
        elif self.point is not None or self.action is not None or self.method:
            raise ValueError(f"point, action and method are of a fail_point, and this is a {self.kind}")
        if self.kind is FaultKind.ROUTER_HOLD and self.worker:
            raise ValueError("a router_hold strikes no worker")
        if self.kind is FaultKind.ROUTER_HOLD and not (self.seconds and self.requests):
            raise ValueError("a router_hold needs seconds and requests above 0")

    def _check_point(self) -> None:
        if not self.worker or self.point is None or self.action is None:
            raise ValueError("a fail_point needs worker, point and action")
        order = Order(
            point=self.point, action=self.action, times=max(1, self.requests), seconds=self.seconds, method=self.method
        )  # fmt: skip
        field, problem = order.problem()
        if field:
            raise ValueError(f"{field}: {problem}")
        if self.method and self.method not in METHODS:
            raise ValueError(f"method: {self.method} is none of blocks.proto's: {', '.join(METHODS)}")
        if self.method and self.point.startswith("migration"):
            raise ValueError(f"method: no call passes {self.point}")
        if self.action in (Action.EXIT, Action.KILL) and self.requests > 1:
            raise ValueError(f"requests: a process ends once, got {self.requests} with {self.action}")


_Ranks = Literal[1, 2, 4, 8]
_Count = Annotated[int, msgspec.Meta(ge=1, le=WORKERS_MAX)]


class KvSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prefill and decode apart, and the terms on which KV moves between them; seconds at full scale.

    Workers are called p0, p1 ... and d0, d1 ...
    """

    prefill: _Count = 1
    decode: _Count = 1
    prefill_ranks: _Ranks = 1
    decode_ranks: _Ranks = 1
    decode_slots: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    """Requests that a decode engine runs at once; 0: as many as its profile says."""
    decode_clock_offset_s: Annotated[float, msgspec.Meta(ge=-SECONDS_MAX, le=SECONDS_MAX)] = 0.0
    """How far the decode workers' clock is ahead of the prefill workers'."""
    kv_lease_duration: float = 30.0
    single_timeout: float = 480.0
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl: float = 480.0
    kv_load_failure_policy: LoadPolicy = LoadPolicy.RECOMPUTE

    def __post_init__(self) -> None:
        """Refuse terms that no engine would take."""
        self.terms(LeaseDesign.LEASE, clock_correction=True)

    def terms(self, design: LeaseDesign, *, clock_correction: bool) -> KvTerms:
        """Return the engines' terms under a design."""
        return KvTerms(
            design=design,
            kv_lease_duration=self.kv_lease_duration,
            single_timeout=self.single_timeout,
            bidirectional_kv_xfer=self.bidirectional_kv_xfer,
            decoder_kv_blocks_ttl=self.decoder_kv_blocks_ttl,
            kv_load_failure_policy=self.kv_load_failure_policy,
            clock_correction=clock_correction,
        )

    @property
    def worker_ids(self) -> list[str]:
        """The workers' names."""
        return [*(f"p{n}" for n in range(self.prefill)), *(f"d{n}" for n in range(self.decode))]


class ControlSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Clients of the block groups' control plane, beside the load, and how much must happen to prove anything."""

    clients: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    rate_per_s: Annotated[float, msgspec.Meta(gt=0, le=RATE_MAX)] = 60.0
    """Operations a second, of all clients together. A time scale does not change it."""
    tenants: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    applied_min: Annotated[int, msgspec.Meta(ge=0)] = 200
    """Operations that were applied."""
    retried_min: Annotated[int, msgspec.Meta(ge=0)] = 20
    """Invocations that took more than one attempt, or asked again for what had been asked before."""
    replayed_min: Annotated[int, msgspec.Meta(ge=0)] = 5
    """Answers that had been given before."""
    crashes_min: Annotated[int, msgspec.Meta(ge=0)] = 5
    """Faults that ended a process, injected and proved."""
    migration_mib_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    """What a tenant's migrations may move to a node, in MiB a second; 0: as much as there is."""
    storm_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0
    """Behind the run, a retry storm of so many seconds with the retry budget, and one without; 0: none."""


class Phase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stretch of the run, in seconds at full scale. A fault strikes at its start; `repeats` runs it so often."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=60)]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=SECONDS_MAX)]
    fault: FaultSpec | None = None
    repeats: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run does. `phases` follow one another; load arrives from the first to the last but `drain`.

    Workers are called w0, w1 and so on; with `kv` they are split into those that prefill and those that decode.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,80}$")]
    title: str
    about: str = ""
    workers: Annotated[int, msgspec.Meta(ge=1, le=WORKERS_MAX)] = 2
    kv: KvSpec | None = None
    control: ControlSpec | None = None
    profile: str = "default"
    """The compute profile that it is meant for."""
    load: Load = Load()
    phases: list[Phase]
    requests_min: Annotated[int, msgspec.Meta(ge=1)] = 20
    """Fewer than this, and the run proves nothing."""

    def __post_init__(self) -> None:
        """Refuse what could not be run."""
        names = [phase.name for phase in self.phases]
        if len(names) < 2 or names[-1] != DRAIN or names.count(DRAIN) != 1:
            raise ValueError("phases must be one or more, and then one named drain, in which no request starts")
        drain = self.phases[-1]
        if drain.fault is not None or drain.repeats != 1:
            raise ValueError("the phase drain must have no fault and no repeats")
        if len(set(names)) != len(names):
            raise ValueError("each phase needs a name of its own; `repeats` runs one several times")
        for phase in self.phases:
            if phase.fault is not None:
                self._check_fault(phase.name, phase.fault)
        if self.load.sessions is not None and (self.kv is None or not self.kv.bidirectional_kv_xfer):
            raise ValueError("load.sessions needs kv.bidirectional_kv_xfer = true: its turns read what decoding left")
        if self.control is not None and self.kv is None:
            raise ValueError("control needs [kv]: a control plane is of block groups that move between engines")
        if self.control is not None and self.waits_s:
            raise ValueError("when_whole_s does not go with [control]: its operations have a schedule of their own")

    def _check_fault(self, phase: str, fault: FaultSpec) -> None:
        if fault.kind is FaultKind.KILL and fault.worker not in self.worker_ids:
            raise ValueError(f"phase {phase}: no worker {fault.worker}; there are {', '.join(self.worker_ids)}")
        if fault.kind in (FaultKind.BLOCKS_KILL, FaultKind.FAIL_POINT):
            if self.control is None:
                raise ValueError(f"phase {phase}: {fault.kind} needs [control]: without it there are no block services")
            if fault.worker not in self.worker_ids:
                raise ValueError(f"phase {phase}: no worker {fault.worker}; there are {', '.join(self.worker_ids)}")
        if fault.kind is FaultKind.ROUTER_HOLD and self.kv is None:
            raise ValueError(f"phase {phase}: router_hold needs [kv]: without it there are no hand-offs")

    @property
    def worker_ids(self) -> list[str]:
        """The workers' names."""
        return self.kv.worker_ids if self.kv else [f"w{number}" for number in range(self.workers)]

    @property
    def load_s(self) -> float:
        """Seconds at full scale in which requests arrive."""
        return sum(p.seconds * p.repeats for p in self.phases if p.name != DRAIN)

    @property
    def waits_s(self) -> float:
        """Seconds at full scale that faults may wait until the deployment is whole; `load_s` is without them."""
        return sum(p.fault.when_whole_s * p.repeats for p in self.phases if p.fault)

    @property
    def faults(self) -> int:
        """How many faults are to be injected."""
        return sum(p.repeats for p in self.phases if p.fault)


def scenario_names() -> list[str]:
    """Return the names of the scenarios that come with the package."""
    return named_toml.names(PACKAGE)


def load_scenario(name: str) -> Scenario:
    """Return the scenario of this name, or of the TOML file at this path. Raises BadInput with one clear line."""
    try:
        return named_toml.load("scenario", name, PACKAGE, Scenario)
    except named_toml.BadToml as error:
        raise BadInput(str(error)) from error


def with_kv(scenario: Scenario, **changes: float) -> Scenario:
    """Return a scenario that has `kv`, with some of its terms changed. Raises BadInput if they make no sense."""
    if scenario.kv is None:
        raise BadInput(f"scenario {scenario.name} moves no KV, so it has no such terms")
    try:
        kv = msgspec.convert(msgspec.to_builtins(scenario.kv) | changes, KvSpec)
    except ValueError as error:
        raise BadInput(f"scenario {scenario.name}: {error}") from error
    return msgspec.structs.replace(scenario, kv=kv)

"""Scenarios as data: load, phases and faults, read from TOML."""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec

from harness.errors import BadInput
from reference_impl import named_toml

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


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An open loop of requests. At full scale: with a time scale K, arrivals come K times faster."""

    rate_per_s: Annotated[float, msgspec.Meta(gt=0, le=RATE_MAX)] = 0.7
    arrivals: Arrivals = Arrivals.POISSON
    input_tokens: Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)] = 32_000
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)] = 1_000
    request_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=SECONDS_MAX)] = 120.0


class FaultKind(enum.StrEnum):
    """What can be done to a deployment."""

    KILL = "kill"
    """SIGKILL of the worker's active engine."""


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault and the worker whose active engine it strikes."""

    kind: FaultKind
    worker: str = "w0"


class Phase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stretch of the run, in seconds at full scale. A fault strikes at its start; `repeats` runs it so often."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=60)]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=SECONDS_MAX)]
    fault: FaultSpec | None = None
    repeats: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run does. `phases` follow one another; load arrives from the first to the last but `drain`.

    Workers are called w0, w1 and so on.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,80}$")]
    title: str
    about: str = ""
    workers: Annotated[int, msgspec.Meta(ge=1, le=WORKERS_MAX)] = 2
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
        workers = [f"w{number}" for number in range(self.workers)]
        for phase in self.phases:
            if phase.fault is not None and phase.fault.worker not in workers:
                raise ValueError(f"phase {phase.name}: no worker {phase.fault.worker}; there are {', '.join(workers)}")

    @property
    def load_s(self) -> float:
        """Seconds at full scale in which requests arrive."""
        return sum(p.seconds * p.repeats for p in self.phases if p.name != DRAIN)

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

"""Scenarios as data: load, phases and faults, read from TOML."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from harness.errors import BadInput
from reference_impl import named_toml

PACKAGE: Final = "harness.scenarios"


class Arm(enum.StrEnum):
    """What stands behind an engine: nothing (a cold restart) or a shadow."""

    COLD = "cold"
    SHADOW = "shadow"


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An open loop of requests. At full scale: with a time scale K, arrivals come K times faster."""

    rate_per_s: float = 0.7
    arrivals: str = "poisson"
    input_tokens: int = 32_000
    output_tokens: int = 1_000
    request_timeout_s: float = 120.0


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault and its aim: a process of `role` in `state`, of the given worker."""

    kind: str
    role: str = "engine"
    state: str = "active"
    worker: str = "w0"


class Phase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stretch of the run, in seconds at full scale. A fault strikes at its start; `repeats` runs it so often."""

    name: str
    seconds: float
    fault: FaultSpec | None = None
    repeats: int = 1


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run does. `phases` follow one another; load arrives from the first to the last but `drain`."""

    name: str
    title: str
    about: str = ""
    workers: int = 2
    load: Load = Load()
    phases: list[Phase]
    requests_min: int = 20
    """Fewer than this, and the run proves nothing."""

    def __post_init__(self) -> None:
        """Refuse what could not be run."""
        if not self.phases or self.phases[-1].name != "drain":
            raise ValueError("phases must end with one named drain, in which no request starts")
        for phase in self.phases:
            if phase.seconds <= 0 or phase.repeats < 1:
                raise ValueError(f"phase {phase.name} needs seconds > 0 and repeats >= 1")

    @property
    def load_s(self) -> float:
        """Seconds at full scale in which requests arrive."""
        return sum(p.seconds * p.repeats for p in self.phases if p.name != "drain")

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

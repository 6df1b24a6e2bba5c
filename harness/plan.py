"""One run as asked for: a scenario, on a system, with the choices that a command line offers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from harness import machine
from harness.control_load import client_policy
from harness.errors import BadInput
from harness.run_folder import Manifest
from harness.scenario import Arm, Scenario
from harness.targets.deployment import DeploymentTarget
from reference_impl.announcement import Announcement
from reference_impl.deployment_options import scaled
from reference_impl.realclock import wall_ns
from reference_impl.rules.terms import KvTerms, LeaseDesign

if TYPE_CHECKING:
    from harness.content import Oracle


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest holds of the system under test."""

    configuration: dict[str, Any]
    emulated: list[str]
    """What is not as in production, one sentence each."""
    context_tokens_max: int
    """Tokens in and out of its longest request."""
    versions: dict[str, str] = {}
    """Of its own software, beside the harness's."""


class System(Protocol):
    """What can be put under test: how it is described, brought up and judged."""

    name: str
    logprobs: bool
    """Whether its oracle wants the probabilities of an answer's tokens."""

    def describe(self, plan: RunPlan) -> Description:
        """Return what the manifest says of it. Raises BadInput for what cannot be run."""
        ...

    def target(self, plan: RunPlan) -> DeploymentTarget:
        """Return the deployment that the plan asks for, not started."""
        ...

    def oracle(self, announcement: Announcement) -> Oracle | None:
        """Return who knows the right answers; None: nobody does, and the manifest says why."""
        ...

    def start_s(self, plan: RunPlan) -> float:
        """Return how long an engine takes to start at least, as far as that is known beforehand."""
        ...


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as asked for."""

    scenario: Scenario
    arm: Arm
    system: System
    profile: str
    time_scale: float
    seed: int
    folder: Path
    command: list[str]
    port: int = 0
    design: LeaseDesign = LeaseDesign.LEASE
    """Where KV moves: how a holder decides that nobody will read its blocks any more."""
    clock_correction: bool = True

    @property
    def terms(self) -> KvTerms | None:
        """The engines' terms at full scale; None if no KV moves."""
        kv = self.scenario.kv
        return kv.terms(self.design, clock_correction=self.clock_correction) if kv else None

    @property
    def label(self) -> str:
        """What tells this run from the others of its scenario."""
        terms = self.terms
        if terms is None:
            return self.arm
        name = "lease" if terms.renews else f"{terms.design}-{terms.single_timeout:g}"
        return name if terms.clock_correction else f"{name}-uncorrected"

    def real_s(self, seconds: float) -> float:
        """Return full-scale seconds as they pass in this run."""
        return seconds / self.time_scale

    def manifest(self) -> Manifest:
        """Return what is to run. Raises BadInput for what cannot be."""
        described = self.system.describe(self)
        try:
            str(self.folder).encode()
        except UnicodeEncodeError as error:
            raise BadInput(f"--out {str(self.folder)!r}: its name is not valid UTF-8; choose another") from error
        longest = self.scenario.load.tokens_max
        if longest > described.context_tokens_max:
            raise BadInput(
                f"scenario {self.scenario.name}: requests of up to {longest} tokens in and out exceed the "
                f"context of profile {self.profile}, {described.context_tokens_max}"
            )
        return Manifest(
            run_id=self.folder.name,
            scenario=self.scenario.name,
            arm=self.label,
            title=self.scenario.title,
            profile=self.profile,
            time_scale=self.time_scale,
            seed=self.seed,
            started_wall_ns=wall_ns(),
            command=self.command,
            versions=machine.versions() | described.versions,
            commit=machine.commit(),
            machine=machine.machine(),
            configuration={
                "scenario": msgspec.to_builtins(self.scenario),
                "target": self.system.name,
                **described.configuration,
                **self._moving(),
            },
            emulated=described.emulated,
        )

    def _moving(self) -> dict[str, Any]:
        """Return what readers of the folder need where KV moves: the terms as they are in this run, and the roles."""
        terms = self.terms
        if terms is None:
            return {}
        try:
            as_run = scaled(terms, self.time_scale)
        except ValueError as error:
            raise BadInput(f"--time-scale {self.time_scale:g}: {error}; choose a smaller one") from error
        roles = {w: "prefill" if w.startswith("p") else "decode" for w in self.scenario.worker_ids}
        moving = {"terms": msgspec.to_builtins(as_run), "roles": roles}
        return moving | ({"client_policy": client_policy()} if self.scenario.control else {})

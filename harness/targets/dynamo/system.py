"""The system `dynamo`: what a run plan asks of NVIDIA Dynamo's front end and its mocker workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from harness.content import Oracle
from harness.errors import BadInput
from harness.plan import Description, RunPlan
from harness.scenario import Arm, FaultKind
from harness.targets.deployment import DeploymentTarget
from harness.targets.dynamo.launch import installed, settings
from reference_impl.announcement import Announcement
from reference_impl.rules.terms import LeaseDesign

CONTEXT_TOKENS_MAX: Final = 40_960
"""The canary model's positions. A mocker itself knows no limit."""
START_S: Final = 5.0
UNLIKE_PRODUCTION: Final = (
    "Dynamo's mocker stands in the place of an engine: it emulates the times of prefill and decoding by Dynamo's own "
    "model and loads nothing, so that a worker's start is shorter than any real engine's",
    "a mocker's answers are tokens drawn by chance, so no answer's content is judged",
    "dead workers are restarted by the harness, at once, as Kubernetes would with a delay of its own",
    "requests pass a door before Dynamo's front end, which learns from each answer which worker gave it and tells the "
    "client in a header; the answer itself goes on byte for byte",
)
"""What is not as in production, one sentence each."""


class DynamoSystem:
    """Dynamo, as the interpreter that PDPROOF_DYNAMO_PYTHON names has it. Raises BadInput if it has none."""

    name = "dynamo"
    logprobs = False

    def __init__(self) -> None:
        self._installed = installed()

    def describe(self, plan: RunPlan) -> Description:
        """Return what the manifest says of it. Raises BadInput for what this deployment cannot do."""
        _check(plan)
        emulated = list(UNLIKE_PRODUCTION)
        if plan.time_scale != 1:
            emulated.append(
                f"time scale {plan.time_scale:g}: the mocker's durations divided, arrivals multiplied by it, starts as "
                "they are"
            )
        configuration: dict[str, Any] = {
            "profile": {"name": self.name},
            "dynamo": {"router_mode": "round-robin", "discovery": "file", "settings": settings(os.environ)},
        }
        return Description(
            configuration=configuration, emulated=emulated, context_tokens_max=CONTEXT_TOKENS_MAX,
            versions=self._installed.versions,
        )  # fmt: skip

    def target(self, plan: RunPlan) -> DeploymentTarget:
        """Return the deployment that the plan asks for, not started. Makes the canary's folder if need be."""
        from workloads.canary.model import canary_folder, make_canary

        return dynamo_target(
            make_canary(canary_folder()), plan.folder, workers=plan.scenario.workers, speedup=plan.time_scale,
            port=plan.port,
        )  # fmt: skip

    def oracle(self, announcement: Announcement) -> Oracle | None:  # noqa: ARG002 # the interface's
        """Nobody knows what a mocker will answer: it draws its tokens by chance."""
        return None

    def start_s(self, plan: RunPlan) -> float:  # noqa: ARG002 # the interface's
        """Return how long a mocker's start may well take on a busy machine."""
        return START_S


def dynamo_target(model: Path, folder: Path, *, workers: int, speedup: float = 1.0, port: int = 0) -> DeploymentTarget:
    """Return a deployment, not started, that writes into the run folder `folder`."""
    arguments = [
        "--model", str(model), "--workers", str(workers), "--speedup", str(speedup), "--folder", str(folder),
        "--port", str(port), "--announce", "--end-with-stdin",
    ]  # fmt: skip
    return DeploymentTarget(
        lambda run_dir: ["harness.targets.dynamo.deployment", *arguments, "--run-dir", str(run_dir)]
    )


def _check(plan: RunPlan) -> None:
    scenario = plan.scenario
    if plan.arm is Arm.SHADOW:
        raise BadInput("dynamo has no shadows: run it with --arm cold")
    if scenario.kv is not None:
        raise BadInput(f"scenario {scenario.name}: Dynamo's mockers move no KV, so nothing of it can be seen there")
    if plan.design is not LeaseDesign.LEASE or not plan.clock_correction:
        raise BadInput("dynamo's mockers keep no KV for anybody; baselines are the reference implementation's")
    for phase in scenario.phases:
        fault = phase.fault
        if fault is not None and (fault.kind is not FaultKind.KILL or fault.process):
            what = fault.process or str(fault.kind)
            raise BadInput(f"scenario {scenario.name}, phase {phase.name}: dynamo has no {what}; it knows plain kills")

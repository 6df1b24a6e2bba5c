"""The system `reference`: the reference deployment, as a child process that this machine runs."""

from __future__ import annotations

from typing import Final

import msgspec

from harness.content import Oracle, ReferenceOracle
from harness.errors import BadInput
from harness.plan import Description, RunPlan
from harness.scenario import Arm, Scenario
from harness.targets.deployment import DeploymentTarget
from reference_impl.announcement import Announcement
from reference_impl.engine.profile import Profile, ProfileError, load_profile
from reference_impl.rules.terms import KvTerms


class ReferenceSystem:
    """The reference implementation, under the plan's compute profile and time scale."""

    name = "reference"
    logprobs = False

    def describe(self, plan: RunPlan) -> Description:
        """Return what the manifest says of it. Raises BadInput for an unknown profile."""
        profile = _profile(plan)
        emulated = profile.emulated()
        if plan.time_scale != 1:
            emulated.append(f"time scale {plan.time_scale:g}: emulated durations divided, arrivals multiplied by it")
        return Description(
            configuration={"profile": msgspec.to_builtins(profile)},
            emulated=emulated,
            context_tokens_max=profile.context_tokens_max,
        )

    def target(self, plan: RunPlan) -> DeploymentTarget:
        """Return the reference deployment that the plan asks for, not started."""
        arguments = [
            "--shadow" if plan.arm is Arm.SHADOW else "--no-shadow", "--profile", plan.profile,
            "--time-scale", str(plan.time_scale), "--folder", str(plan.folder), "--port", str(plan.port), "--announce",
            "--end-with-stdin", *_workers(plan.scenario, plan.terms),
            *_blocks(plan.scenario),
        ]  # fmt: skip
        return DeploymentTarget(lambda run_dir: ["reference_impl.deployment", *arguments, "--run-dir", str(run_dir)])

    def oracle(self, announcement: Announcement) -> Oracle | None:
        """Return the content oracle of its weights."""
        return None if announcement.weights is None else ReferenceOracle(announcement.weights)

    def start_s(self, plan: RunPlan) -> float:
        """Return the emulated part of an engine's start."""
        return sum(phase.seconds for phase in _profile(plan).init)


REFERENCE: Final = ReferenceSystem()


def _profile(plan: RunPlan) -> Profile:
    try:
        return load_profile(plan.profile).scaled(plan.time_scale)
    except ProfileError as error:
        raise BadInput(str(error)) from error


def _blocks(scenario: Scenario) -> list[str]:
    """Return the options of the deployment's block services."""
    if scenario.control is None:
        return []
    return ["--blocks", "--fail-points", f"--migration-mib-per-s={scenario.control.migration_mib_per_s}"]


def _workers(scenario: Scenario, terms: KvTerms | None) -> list[str]:
    """Return the options of the deployment's workers; `terms` at full scale."""
    kv = scenario.kv
    if kv is None or terms is None:
        return ["--workers", str(scenario.workers)]
    options = {
        "prefill": kv.prefill, "decode": kv.decode, "prefill-ranks": kv.prefill_ranks, "decode-ranks": kv.decode_ranks,
        "decode-slots": kv.decode_slots, "decode-clock-offset-s": kv.decode_clock_offset_s, "design": terms.design,
        "kv-lease-duration": terms.kv_lease_duration, "single-timeout": terms.single_timeout,
        "decoder-kv-blocks-ttl": terms.decoder_kv_blocks_ttl, "kv-load-failure-policy": terms.kv_load_failure_policy,
    }  # fmt: skip
    return [
        *(f"--{name}={value}" for name, value in options.items()),
        *(["--bidirectional"] if terms.bidirectional_kv_xfer else []),
        *([] if terms.clock_correction else ["--no-clock-correction"]),
    ]

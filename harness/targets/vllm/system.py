"""The system `vllm`: what a run plan asks of real vLLM servers."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.content import Oracle
from harness.errors import BadInput
from harness.plan import Description, RunPlan
from harness.scenario import Arm
from harness.targets.deployment import DeploymentTarget
from harness.targets.vllm.config import VllmConfig, installed
from harness.targets.vllm.shape import Shape, Terms, vllm_target
from reference_impl.announcement import Announcement
from reference_impl.rules.terms import LeaseDesign
from workloads.canary.oracle import CanaryOracle
from workloads.canary.spec import CANARY

START_S = 60.0
"""A server's start on a busy machine, at least: nothing depends on it but how long a run waits for its end."""


class VllmSystem:
    """Real vLLM, as the interpreter that PDPROOF_VLLM_PYTHON names has it."""

    def __init__(self, config: VllmConfig) -> None:
        self.name = config.name
        self.logprobs = not config.model
        self._config = config
        self._installed = installed()

    def describe(self, plan: RunPlan) -> Description:
        """Return what the manifest says of it. Raises BadInput for what vLLM cannot do."""
        if plan.time_scale != 1:
            raise BadInput(f"--time-scale {plan.time_scale:g}: nothing is emulated on {self.name}, so nothing scales")
        if plan.scenario.control is not None:
            raise BadInput(f"scenario {plan.scenario.name}: its control plane is the reference implementation's own")
        if plan.design is not LeaseDesign.LEASE or not plan.clock_correction:
            raise BadInput(f"{self.name} has one design of leases; baselines are the reference implementation's")
        return Description(
            configuration={"vllm": msgspec.to_builtins(self._config), "profile": {"name": self.name}},
            emulated=self.unlike_production(),
            context_tokens_max=self._config.context_tokens_max,
            versions=self._installed.versions,
        )

    def unlike_production(self) -> list[str]:
        """Return what is not as in production, one sentence each."""
        said = []
        if not self._installed.gpu:
            said.append("no GPU: vLLM's CPU build, KV in host memory, each worker pinned to its share of the cores")
        if not self._config.model:
            said.append("a canary model of one layer, made by code: its answers can be checked, its compute is small")
        return said

    def target(self, plan: RunPlan) -> DeploymentTarget:
        """Return the servers that the plan asks for, not started."""
        return vllm_target(self._config, self._installed, _shape(plan), plan.folder, plan.port)

    def oracle(self, announcement: Announcement) -> Oracle | None:  # noqa: ARG002 # the interface's
        """Return the canary's oracle; nobody knows another model's answers."""
        return None if self._config.model else CanaryOracle(CANARY)

    def start_s(self, plan: RunPlan) -> float:  # noqa: ARG002 # the interface's
        """Return how long a server's start may well take."""
        return START_S


def _shape(plan: RunPlan) -> Shape:
    kv: Any = plan.scenario.kv
    if kv is None:
        return Shape(workers=plan.scenario.workers, shadow=plan.arm is Arm.SHADOW)
    return Shape(
        prefill=kv.prefill, decode=kv.decode, decode_slots=kv.decode_slots,
        decode_clock_offset_s=kv.decode_clock_offset_s,
        terms=Terms(
            lease_s=round(kv.kv_lease_duration), bidirectional=kv.bidirectional_kv_xfer,
            ttl_s=round(kv.decoder_kv_blocks_ttl), load_failure_policy=str(kv.kv_load_failure_policy),
        ),
    )  # fmt: skip

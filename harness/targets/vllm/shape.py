"""What vLLM servers are to be started, on which terms: from a configuration to a deployment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from harness.errors import BadInput
from harness.targets.deployment import DeploymentTarget
from harness.targets.vllm.config import Installed, TermKeys, VllmConfig, connector_of
from harness.targets.vllm.deployment import Place, VllmDeployment, filled
from reference_impl.deployment import clock_offsets_s
from reference_impl.rules.routing import Role
from workloads.canary.model import canary_folder, make_canary
from workloads.canary.oracle import CanaryOracle
from workloads.canary.spec import CANARY

MODEL_NAME: Final = "canary"
CANARY_TOKENS: Final = 40
HOST: Final = "127.0.0.1"
WARM_TOKENS: Final = 600
MEMORY_BYTES: Final = 256 * 2**20
"""What a worker's memory service may give out: the canary's weights, several times."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On which terms KV moves between the servers; seconds as they pass. None: the connector's own."""

    lease_s: int | None = None
    bidirectional: bool | None = None
    ttl_s: int | None = None
    load_failure_policy: str | None = None


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Which servers there are to be."""

    workers: int = 0
    """That do whole requests."""
    prefill: int = 0
    decode: int = 0
    shadow: bool = False
    terms: Terms = Terms()
    decode_slots: int = 0
    """Requests that a decode server runs at once; 0: vLLM's own limit."""
    decode_clock_offset_s: float = 0.0
    pool_blocks: int = 0
    """Blocks of each server's KV pool; 0: as many as fit."""
    environment: dict[str, str] = {}
    """Of every server, besides the configuration's; may hold the placeholders {worker} and {run_dir}."""
    arguments: list[str] = []


def vllm_target(
    config: VllmConfig, installed: Installed, shape: Shape, folder: Path, port: int = 0
) -> DeploymentTarget:
    """Return a deployment, not started, that writes into the run folder `folder`. Makes the canary model if need be."""
    model = config.model or str(make_canary(canary_folder()))
    prompt = ((np.arange(CANARY_TOKENS) * 97 + 13) % CANARY.vocabulary).astype(np.int64)
    answer = [] if config.model else CanaryOracle(CANARY).answer(prompt, 1)[0]

    def command(run_dir: Path) -> Sequence[str]:
        deployment = VllmDeployment(
            places=_places(config, installed, shape, model, run_dir), shadow=shape.shadow, model=MODEL_NAME,
            canary=prompt.tolist(), canary_answer=[int(token) for token in answer], warm_tokens=WARM_TOKENS,
            run_dir=str(run_dir), events_dir=str(_made(folder / "parts")), logs_dir=str(_made(folder / "logs")),
            host=HOST, port=port,
        )  # fmt: skip
        return ["harness.targets.vllm.deployment", msgspec.json.encode(deployment).decode()]

    return DeploymentTarget(command)


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def _places(config: VllmConfig, installed: Installed, shape: Shape, model: str, run_dir: Path) -> list[Place]:
    prefill_ahead_s, decode_ahead_s = clock_offsets_s(shape.decode_clock_offset_s)
    kinds = [(f"w{n}", Role.BOTH, 0.0) for n in range(shape.workers)]
    kinds += [(f"p{n}", Role.PREFILL, prefill_ahead_s) for n in range(shape.prefill)]
    kinds += [(f"d{n}", Role.DECODE, decode_ahead_s) for n in range(shape.decode)]
    shares = _cores(len(kinds), installed.gpu)
    device = "cuda" if installed.gpu else "cpu"
    places = []
    for (worker_id, role, ahead_s), cores in zip(kinds, shares, strict=True):
        values = {"host": HOST, "worker": worker_id, "run_dir": str(run_dir), "device": device}
        command = [installed.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
                   "--served-model-name", MODEL_NAME, "--host", HOST, "--port", "{port}",
                   *_arguments(config, installed, shape, role)]  # fmt: skip
        environment = {name: filled(text, values) for name, text in (config.environment | shape.environment).items()}
        places.append(
            Place(
                worker_id=worker_id, role=role, cores=cores, clock_offset_s=ahead_s, environment=environment,
                command=[filled(word, values) for word in command],
                memory_bytes=MEMORY_BYTES if _shares_weights(config, installed, shape) else 0,
            )
        )  # fmt: skip
    return places


def _arguments(config: VllmConfig, installed: Installed, shape: Shape, role: Role) -> list[str]:
    words = [*config.arguments, *(config.gpu_arguments if installed.gpu else []), *shape.arguments]
    if shape.pool_blocks:
        words += ["--num-gpu-blocks-override", str(shape.pool_blocks)]
    if role is Role.DECODE and shape.decode_slots:
        words += ["--max-num-seqs", str(shape.decode_slots)]
    if _shares_weights(config, installed, shape):
        # Unpacked linears: vLLM's CPU build would pack each matrix into private memory, and share nothing in effect.
        words += ["--load-format", "pdproof", "--model-loader-extra-config", '{"linears": "mapped"}']
    if role is not Role.BOTH:
        connector = with_terms(connector_of(config), config.term_keys, shape.terms)
        if not connector:
            raise BadInput(f"vLLM configuration {config.name}: no kv_transfer_config, and KV is to move")
        words += ["--kv-transfer-config", msgspec.json.encode(connector).decode()]
    return words


def _shares_weights(config: VllmConfig, installed: Installed, shape: Shape) -> bool:
    """Whether an engine and its shadow map the same weights: with the canary, on a CPU."""
    return shape.shadow and not installed.gpu and not config.model


def with_terms(connector: dict[str, Any], keys: TermKeys, terms: Terms) -> dict[str, Any]:
    """Return a connector's JSON with the terms where `keys` says. What the connector cannot be told stays out."""
    told: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(connector))
    for name, value in msgspec.structs.asdict(terms).items():
        path = [part for part in getattr(keys, name).split(".") if part]
        if value is None or not path:
            continue
        place = told
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = value
    return told


def _cores(workers: int, gpu: bool) -> list[list[int]]:
    """Return each worker's own share of the machine's cores; on a GPU's machine nobody is bound to any."""
    ours = sorted(os.sched_getaffinity(0))
    share = len(ours) // workers
    if gpu or not share:
        return [[] for _ in range(workers)] if gpu else [[ours[n % len(ours)]] for n in range(workers)]
    return [ours[n * share : (n + 1) * share] for n in range(workers)]

"""The canary on real vLLM: what the server answers and how probable it says that was is what the oracle computes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from harness.targets.deployment import DeploymentTarget
from harness.targets.vllm.config import installed, load_config
from harness.targets.vllm.shape import Shape, vllm_target
from reference_impl import tokens
from workloads.canary.oracle import TOLERANCE, CanaryOracle
from workloads.canary.spec import CANARY
from workloads.prompts import prompt_tokens
from workloads.rows import PromptSpec

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


async def ask(session: aiohttp.ClientSession, target: DeploymentTarget, spec: PromptSpec, count: int) -> dict[str, Any]:
    body = {
        "model": target.announcement.model, "prompt": prompt_tokens(spec).tolist(), "max_tokens": count,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 0,
    }  # fmt: skip
    async with session.post(f"{target.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = (await answer.json())["choices"][0]
        return found


async def test_a_real_servers_answers_are_the_oracles(tmp_path: Path) -> None:
    oracle = CanaryOracle(CANARY)
    target = vllm_target(load_config("nixl"), installed(), Shape(workers=1), tmp_path)
    shapes = [(100, 20), (2_000, 64), (2_000, 64), (2_000, 64), (8_000, 64), (32_000, 1_000)]
    specs = [PromptSpec(seed=3, index=index, input_tokens=size) for index, (size, _) in enumerate(shapes)]
    try:
        await target.start(lambda _: None)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(200)) as session:
            alone = [await ask(session, target, specs[0], 20)]
            together = await asyncio.gather(
                *(ask(session, target, s, n) for s, (_, n) in zip(specs, shapes, strict=True))
            )
            from_cache = [await ask(session, target, specs[1], 64)]
    finally:
        await target.stop()
    judged = [*zip([specs[0]], alone, strict=True), *zip(specs, together, strict=True), (specs[1], from_cache[0])]
    worst = 0.0
    for spec, choice in judged:
        said = oracle.judge(prompt_tokens(spec), choice["token_ids"], choice["logprobs"]["token_logprobs"])
        assert said.right, (spec, said)
        worst = max(worst, said.worst_error)
        assert choice["text"].split() == tokens.decode(choice["token_ids"]).split()
    assert worst < TOLERANCE / 10, worst
    print("worst error", worst)  # noqa: T201 # shown with -s

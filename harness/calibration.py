"""How much load a machine holds: found by asking for one request on every worker at once, before the run."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from harness.errors import StartFailed
from harness.plan import RunPlan
from harness.progress import RunProgress
from harness.targets.deployment import DeploymentTarget
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S
from workloads.prompts import Api, PromptFormat, prompt_tokens, request_body
from workloads.rows import PromptSpec

ROUNDS: Final = 2
"""The first warms up, the second is measured."""
LIMIT_S: Final = 300.0


async def calibrated(plan: RunPlan, progress: RunProgress) -> RunPlan:
    """Return the plan with the rate at which its load uses `utilisation` of what the workers hold.

    A plan whose scenario names no utilisation is returned as it is. Raises StartFailed.
    """
    load = plan.scenario.load
    if not load.utilisation:
        return plan
    with tempfile.TemporaryDirectory(prefix="pdproof-") as folder:
        trial = msgspec.structs.replace(plan, folder=Path(folder))
        target = plan.system.target(trial)
        try:
            progress.say("calibrating: bringing the deployment up")
            await target.start(progress.say)
            service_s = 0.0
            for number in range(ROUNDS):
                progress.say(f"calibrating: one request a worker, round {number + 1} of {ROUNDS}")
                service_s = await _round(target, trial, number)
        finally:
            await asyncio.shield(target.stop())
    at_once = len(plan.scenario.worker_ids) if plan.scenario.kv is None else plan.scenario.kv.decode
    rate = round(load.utilisation * at_once / service_s, 4)
    progress.say(f"calibrated: a request takes {service_s:.1f} s; {rate:g} requests/s are {load.utilisation:.0%}")
    found = msgspec.structs.replace(load, rate_per_s=rate, calibrated_s=round(service_s, 3))
    return msgspec.structs.replace(plan, scenario=msgspec.structs.replace(plan.scenario, load=found))


async def _round(target: DeploymentTarget, plan: RunPlan, number: int) -> float:
    """Return how long the slowest of as many requests as there are workers took, all at once, in seconds."""
    load, workers = plan.scenario.load, len(target.announcement.workers)
    timeout = aiohttp.ClientTimeout(LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20) as session:
        asked = []
        for index in range(workers):
            prompt = PromptSpec(seed=plan.seed + 1, index=number * workers + index, input_tokens=load.input_tokens)
            body = request_body(
                prompt_tokens(prompt), model=target.announcement.model, max_tokens=load.output_tokens,
                api=Api.COMPLETIONS, prompt_format=PromptFormat.IDS,
            )  # fmt: skip
            asked.append(_answered(session, target.url + Api.COMPLETIONS.path, body))
        return max(await asyncio.gather(*asked))


async def _answered(session: aiohttp.ClientSession, url: str, body: bytes) -> float:
    begun_ns = now_ns()
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
            async for _ in answer.content.iter_chunked(2**16):
                pass
            if answer.status != 200:
                raise StartFailed(f"calibration: the deployment answered a request with {answer.status}")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise StartFailed(f"calibration: the deployment did not answer a request: {error!r}") from error
    return (now_ns() - begun_ns) / NS_PER_S

"""NVIDIA Dynamo itself: its front end and mockers are brought up, a worker is killed under load, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest

from harness.errors import BadInput
from harness.targets.deployment import DeploymentTarget
from harness.targets.dynamo.launch import PYTHON_VARIABLE, installed
from harness.targets.dynamo.system import dynamo_target
from reference_impl.realclock import now_ns
from reference_impl.rules.events import Event, EventKind
from tests.waiting import until_async
from workloads.answer import Answer
from workloads.canary.model import make_canary
from workloads.prompts import Api, PromptFormat, request_body
from workloads.rows import Outcome

LIMIT_S = 60.0
TOKENS = 64
LONG = 600
"""Tokens of an answer that takes seconds."""


def _lacks() -> str | None:
    try:
        installed()
    except BadInput as error:
        return str(error)
    return None


_LACK = _lacks() if os.environ.get(PYTHON_VARIABLE) else f"{PYTHON_VARIABLE} names no interpreter that has Dynamo"
pytestmark = pytest.mark.skipif(_LACK is not None, reason=_LACK or "")


async def ask(session: aiohttp.ClientSession, url: str, seed: int, tokens: int = TOKENS) -> tuple[str, int, Answer]:
    """Send what the load client sends, and take the answer as it does. Return who answered, the status, the answer."""
    prompt = np.random.default_rng(seed).integers(0, 4096, 500)
    body = request_body(prompt, model="canary", max_tokens=tokens, api=Api.COMPLETIONS, prompt_format=PromptFormat.IDS)
    answer = Answer()
    async with session.post(f"{url}/v1/completions", data=body, headers={"Content-Type": "application/json"}) as got:
        if got.status == 200:
            async for part in got.content.iter_any():
                answer.take(part, now_ns())
        return got.headers.get("x-pdproof-engine", ""), got.status, answer


def history(folder: Path, subject: str) -> dict[EventKind, Event]:
    lines = [line for path in (folder / "parts").glob("events-*.jsonl") for line in path.read_bytes().splitlines()]
    events = [msgspec.json.decode(line, type=Event) for line in lines]
    return {event.kind: event for event in events if event.subject == subject}


async def until_serves(target: DeploymentTarget, engine: str) -> None:
    def serves() -> bool:
        active = target.active_engine("w0")
        return active is not None and active.name == engine

    await until_async(serves, LIMIT_S, f"{engine} serves")


async def test_a_killed_mocker_breaks_its_answers_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    target = dynamo_target(make_canary(tmp_path / "model"), folder, workers=2)
    try:
        await target.start(lambda _: None)
        async with aiohttp.ClientSession() as session:
            answers = [await ask(session, target.url, seed) for seed in range(4)]
            assert {engine for engine, _, _ in answers} == {"w0-e1", "w1-e1"}
            for _, status, answer in answers:
                assert status == 200
                assert answer.verdict() == (Outcome.OK, "")
                assert sum(chunk.tokens for chunk in answer.chunks) == TOKENS

            running = [asyncio.create_task(ask(session, target.url, seed, LONG)) for seed in range(10, 14)]
            await asyncio.sleep(1.0)  # the answers of LONG tokens have begun, and have seconds to go
            victim = target.active_engine("w0")
            assert victim is not None
            os.kill(victim.pid, signal.SIGKILL)
            await until_serves(target, "w0-e2")
            broken = [(engine, answer.verdict()[0]) for engine, _, answer in await asyncio.gather(*running)]
            assert broken.count(("w0-e1", Outcome.FAIL)) == 2
            assert broken.count(("w1-e1", Outcome.OK)) == 2

            async def served_again() -> bool:
                return "w0-e2" in [(await ask(session, target.url, seed))[0] for seed in range(4)]

            async with asyncio.timeout(LIMIT_S):
                while not await served_again():  # one of them may still be sent to the dead one, and refused
                    pass
            await until_async(
                lambda: EventKind.ROUTER_REMOVED in history(folder, "w0-e1"), LIMIT_S, "w0-e1 is listed no more"
            )
    finally:
        await target.stop()
    died = history(folder, "w0-e1")
    rose = history(folder, "w0-e2")
    order = [
        died[EventKind.PROCESS_EXITED], rose[EventKind.PROCESS_STARTED], rose[EventKind.ENGINE_AWAKE],
        rose[EventKind.ROUTER_REGISTERED],
    ]  # fmt: skip
    # The spawn's stamp is taken before the spawn, and the death's once the kernel has told of it: both are in order.
    assert [event.t_ns for event in order] == sorted(event.t_ns for event in order)
    assert died[EventKind.ROUTER_REMOVED].t_ns > rose[EventKind.ROUTER_REGISTERED].t_ns

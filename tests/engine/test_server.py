"""The engine's HTTP face, in process: answers, streams, refusals, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from reference_impl.content import BLOCK_WORDS, weight_words
from reference_impl.engine.core import EngineCore
from reference_impl.engine.loop import StepLoop
from reference_impl.engine.metrics import EngineMetrics
from reference_impl.engine.profile import Profile
from reference_impl.engine.server import BODY_BYTES_MAX, EngineServer
from reference_impl.oracle import Weights, expected_answers
from reference_impl.rules.lifecycle import EngineState
from tests.waiting import until_async

WEIGHTS = Weights(seed=7, words=4096)
PROMPT = list(range(100, 200))


class Running:
    """A server in process, awake."""

    def __init__(self) -> None:
        profile = Profile(
            name="test", prefill_tokens_per_s=1e7, decode_base_s=0.001, decode_per_request_s=0.0, chunk_tokens=256,
            requests_max=8, context_tokens_max=1024, kv_blocks=256, weights_mib=1,
        )  # fmt: skip
        kv = np.zeros((profile.kv_blocks, BLOCK_WORDS), np.uint64)
        self.core = EngineCore(profile).bind(kv, weight_words(WEIGHTS.seed, 0, WEIGHTS.words))
        self.metrics = EngineMetrics("m", "e1")
        self.metrics.state = EngineState.ACTIVE
        self.metrics.core = self.core
        self.server = EngineServer(
            model="m", engine_id="e1", worker_id="w0", weights=WEIGHTS, metrics=self.metrics
        )  # fmt: skip
        self.server.loop = StepLoop(self.core)
        self.url = ""
        self.session = aiohttp.ClientSession()

    async def post(self, **fields: object) -> tuple[int, dict[str, object], bytes]:
        return await self.post_raw(json.dumps(fields).encode())

    async def post_raw(self, raw: bytes, path: str = "/v1/completions") -> tuple[int, dict[str, object], bytes]:
        async with self.session.post(self.url + path, data=io.BytesIO(raw)) as response:
            text = await response.read()
            whole = json.loads(text) if response.content_type == "application/json" else {}
            return response.status, whole, text


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Running]:
    running = Running()
    assert running.server.loop is not None
    stepping = asyncio.create_task(running.server.loop.run())
    runner, port = await running.server.listen("127.0.0.1", 0)
    running.url = f"http://127.0.0.1:{port}"
    yield running
    stepping.cancel()
    await asyncio.gather(stepping, return_exceptions=True)
    await running.session.close()
    await runner.cleanup()


def right(count: int) -> list[int]:
    return expected_answers([np.array(PROMPT)], [count], WEIGHTS)[0].tolist()


async def test_a_whole_answer_is_the_oracles(engine: Running) -> None:
    status, whole, _ = await engine.post(prompt=PROMPT, max_tokens=20, return_token_ids=True)
    assert status == 200
    assert whole["choices"][0]["token_ids"] == right(20)  # type: ignore[index]
    assert whole["usage"]["completion_tokens"] == 20  # type: ignore[index]


async def test_a_streamed_answer_is_the_same_and_ends_with_done(engine: Running) -> None:
    status, _, text = await engine.post(
        prompt=PROMPT, max_tokens=20, stream=True, return_token_ids=True, stream_options={"include_usage": True}
    )
    assert status == 200
    events = [e.removeprefix("data: ") for e in text.decode().strip().split("\n\n")]
    assert events.pop() == "[DONE]"
    usage = json.loads(events.pop())
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 20
    chunks = [json.loads(e)["choices"][0] for e in events]
    assert [t for c in chunks for t in c["token_ids"]] == right(20)
    assert [c["finish_reason"] for c in chunks] == [None] * 19 + ["length"]


async def test_chat_streams_too(engine: Running) -> None:
    raw = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}).encode()
    status, _, text = await engine.post_raw(raw, "/v1/chat/completions")
    assert status == 200
    assert text.count(b'"delta"') == 3


@pytest.mark.parametrize(
    ("raw", "status", "param"),
    [
        (b"not json", 400, None),
        (b'{"prompt": [99999]}', 400, "prompt"),
        (b'{"prompt": "a", "max_tokens": "x"}', 400, "max_tokens"),
        (json.dumps({"prompt": PROMPT, "max_tokens": 2000}).encode(), 400, "prompt"),
        (json.dumps({"prompt": PROMPT, "max_tokens": 10**12}).encode(), 400, "prompt"),
        (json.dumps({"prompt": PROMPT, "max_tokens": 10**30}).encode(), 400, "prompt"),
        (b'{"x": ' + b"[" * 100_000, 400, None),
        (b"x" * (BODY_BYTES_MAX + 1), 413, None),
    ],
)
async def test_a_bad_body_gets_a_4xx_that_names_the_field_and_the_engine_goes_on(
    engine: Running, raw: bytes, status: int, param: str | None
) -> None:
    """KVC-XFER-005's kind: no body can end the engine."""
    got, whole, _ = await engine.post_raw(raw)
    assert got == status
    assert whole["error"]["param"] == param  # type: ignore[index]
    assert (await engine.post(prompt=PROMPT, max_tokens=1))[0] == 200


async def test_a_body_that_is_not_as_encoded_as_it_says_gets_400(engine: Running) -> None:
    headers = {"Content-Encoding": "gzip"}
    async with engine.session.post(engine.url + "/v1/completions", data=b"not gzip", headers=headers) as response:
        assert response.status == 400


@pytest.mark.rule("KVC-SHDW-001")
async def test_an_engine_that_is_not_active_serves_nothing(engine: Running) -> None:
    """KVC-SHDW-001."""
    engine.metrics.state = EngineState.STANDBY
    status, whole, _ = await engine.post(prompt=PROMPT)
    assert status == 503
    assert "standby" in whole["error"]["message"]  # type: ignore[index]
    async with engine.session.get(engine.url + "/health") as response:
        assert response.status == 503


async def test_a_client_that_goes_away_frees_its_blocks(engine: Running) -> None:
    async with engine.session.post(
        engine.url + "/v1/completions", json={"prompt": PROMPT, "max_tokens": 900, "stream": True}
    ) as response:
        await response.content.readline()
        assert engine.core.pool.held > 0
        response.close()
    await until_async(lambda: engine.core.pool.held == 0, 5, "the blocks of the client that went away to be free")
    assert engine.core.totals.aborted == 1


async def test_metrics_have_vllms_names(engine: Running) -> None:
    await engine.post(prompt=PROMPT, max_tokens=5)
    async with engine.session.get(engine.url + "/metrics") as response:
        text = await response.text()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
                 "generation_tokens_total", "request_success_total", "prefix_cache_hits_total"):  # fmt: skip
        assert f"vllm:{name}{{" in text
    assert 'vllm:generation_tokens_total{engine="e1",model_name="m"} 5.0' in text


async def test_the_model_list_tells_a_client_what_the_oracle_needs(engine: Running) -> None:
    async with engine.session.get(engine.url + "/v1/models") as response:
        model = (await response.json())["data"][0]
    assert model["id"] == "m"
    assert model["oracle"]["weights_words"] == WEIGHTS.words

"""What runs in process, by pytest-benchmark: the hot paths of engine, oracle and client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference_impl.content import BLOCK_WORDS, block_digests, weight_words
from reference_impl.engine.core import EngineCore
from reference_impl.engine.profile import load_profile
from reference_impl.oracle import Weights, expected_answers
from reference_impl.rules.blocks import BlockPool
from workloads.prompts import prompt_tokens
from workloads.rows import PromptSpec

pytestmark = pytest.mark.bench
PROMPT = prompt_tokens(PromptSpec(1, 1, 32_000))
WEIGHTS = Weights(7, 2**17)


def core() -> EngineCore:
    profile = load_profile("default")
    kv = np.zeros((profile.kv_blocks, BLOCK_WORDS), np.uint64)
    return EngineCore(profile).bind(kv, weight_words(WEIGHTS.seed, 0, WEIGHTS.words))


def test_digests_of_a_prompt_of_32k(benchmark: Any) -> None:
    assert len(benchmark(block_digests, PROMPT)) == 2000


def test_prefill_of_32k(benchmark: Any) -> None:
    engine = core()

    def prefill() -> int:
        engine.pool.forget()
        engine.sequence("a", PROMPT, 1)
        while engine.has_work:
            engine.step()
        return engine.pool.held

    assert benchmark(prefill) == 0


def test_a_decode_step_of_eight_requests(benchmark: Any) -> None:
    engine = core()
    for number in range(8):
        engine.sequence(str(number), PROMPT, 8000)
    while len(engine.running) < 8 or any(not s.output_tokens for s in engine.running.values()):
        engine.step()
    assert len(benchmark(engine.step).produced) == 8


def test_the_right_answer_of_1k_to_32k(benchmark: Any) -> None:
    (answer,) = benchmark.pedantic(expected_answers, ([PROMPT], [1000], WEIGHTS), rounds=5)
    assert len(answer) == 1000


def test_blocks_of_a_request_taken_and_given_back(benchmark: Any) -> None:
    pool = BlockPool(65_536)

    def cycle() -> None:
        pool.release(pool.allocate(2063))

    benchmark(cycle)
    assert pool.held == 0

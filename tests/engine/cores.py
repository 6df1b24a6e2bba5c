"""Cores over memory of their own, and the answers that they must give."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import pytest

from reference_impl.content import BLOCK_WORDS, Ints, Words, weight_words
from reference_impl.engine.core import EngineCore, Sequence
from reference_impl.engine.profile import Profile
from reference_impl.oracle import Weights, expected_answers

WEIGHTS = Weights(seed=7, words=4096)
PROFILE = Profile(
    name="test", prefill_tokens_per_s=1e6, decode_base_s=0.001, decode_per_request_s=0.0001, chunk_tokens=64,
    requests_max=8, context_tokens_max=2048, kv_blocks=256, weights_mib=1,
)  # fmt: skip
STEPS_MAX = 100_000


def make_core(profile: Profile = PROFILE) -> tuple[EngineCore, Words]:
    kv = np.zeros((profile.kv_blocks, BLOCK_WORDS), np.uint64)
    return EngineCore(profile).bind(kv, weight_words(WEIGHTS.seed, 0, WEIGHTS.words)), kv


def with_fields(**fields: object) -> Profile:
    return msgspec.structs.replace(PROFILE, **fields)


def prompt(length: int, seed: int = 1) -> Ints:
    return np.random.default_rng(seed).integers(0, 4096, length)


def run(core: EngineCore) -> None:
    for _ in range(STEPS_MAX):
        if not core.has_work:
            return
        core.step()
    pytest.fail("the core did not come to an end")


def answer(sequence: Sequence) -> list[int]:
    """The answer so far."""
    return sequence.tokens[sequence.prompt_tokens : sequence.known_tokens].tolist()


def right_answers(sequences: Iterable[Sequence], *, so_far: bool = False) -> list[list[int]]:
    """What the oracle says: whole answers, or as much of them as there is `so_far`."""
    counts = [(s, s.output_tokens if so_far else s.output_tokens_max) for s in sequences]
    prompts = [s.tokens[: s.prompt_tokens] for s, _ in counts]
    expected = expected_answers(prompts, [max(count, 1) for _, count in counts], WEIGHTS)
    return [tokens[:count].tolist() for tokens, (_, count) in zip(expected, counts, strict=True)]

"""The content oracle: the engine answers as the oracle says, and one damaged block shows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.content import BLOCK_TOKENS, BLOCK_WORDS, Ints, Words, weight_words
from reference_impl.engine.core import EngineCore, Sequence, audit
from reference_impl.engine.profile import Profile
from reference_impl.oracle import Weights, expected_answers

WEIGHTS = Weights(seed=7, words=4096)
PROFILE = Profile(
    name="test", prefill_tokens_per_s=1e6, decode_base_s=0.001, decode_per_request_s=0.0001, chunk_tokens=64,
    requests_max=8, context_tokens_max=2048, kv_blocks=256, weights_mib=1,
)  # fmt: skip


def make_core(profile: Profile = PROFILE) -> tuple[EngineCore, Words]:
    kv = np.zeros((profile.kv_blocks, BLOCK_WORDS), np.uint64)
    return EngineCore(profile).bind(kv, weight_words(WEIGHTS.seed, 0, WEIGHTS.words)), kv


def prompt(length: int, seed: int = 1) -> Ints:
    return np.random.default_rng(seed).integers(0, 4096, length)


def run(core: EngineCore) -> None:
    for _ in range(100_000):
        if not core.has_work:
            return
        core.step()
    pytest.fail("the core did not come to an end")


def answer(sequence: Sequence) -> list[int]:
    return sequence.tokens[sequence.prompt_tokens :].tolist()


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 40)), min_size=1, max_size=12), seed=st.integers()
)
def test_whatever_runs_together_each_answer_is_the_oracles(lengths: list[tuple[int, int]], seed: int) -> None:
    core, _ = make_core()
    sequences = [core.sequence(str(i), prompt(n, abs(seed) + i), out) for i, (n, out) in enumerate(lengths)]
    run(core)
    expected = expected_answers(
        [s.tokens[: s.prompt_tokens] for s in sequences], [s.output_tokens_max for s in sequences], WEIGHTS
    )
    assert [answer(s) for s in sequences] == [e.tolist() for e in expected]
    assert audit(core, sequences) == []


def test_a_cached_prefix_gives_the_same_answer_and_is_counted() -> None:
    core, _ = make_core()
    first = core.sequence("a", prompt(200), 8)
    run(core)
    second = core.sequence("b", prompt(200), 8)
    run(core)
    assert answer(first) == answer(second)
    assert second.cached_tokens == (200 - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def half_way(length: int = 600) -> tuple[EngineCore, Words, Sequence, list[int]]:
    """A core whose one request has its prefill behind it, and the right answer."""
    core, kv = make_core()
    sequence = core.sequence("a", prompt(length), 64)
    while sequence.computed < length - 1 or not sequence.output_tokens:
        core.step()
    return core, kv, sequence, expected_answers([prompt(length)], [64], WEIGHTS)[0].tolist()


@pytest.mark.parametrize("block", range(600 // BLOCK_TOKENS))
def test_damage_to_any_one_block_shows(block: int) -> None:
    """KVC-XFER-001: the oracle is sensitive at every block position."""
    core, kv, sequence, right = half_way()
    kv[sequence.blocks[block]] = 0
    run(core)
    assert answer(sequence) != right


def test_without_damage_nothing_shows() -> None:
    core, _, sequence, right = half_way()
    run(core)
    assert answer(sequence) == right


def test_two_blocks_that_changed_places_show() -> None:
    core, kv, sequence, right = half_way()
    a, b = sequence.blocks[3], sequence.blocks[20]
    kv[[a, b]] = kv[[b, a]]
    run(core)
    assert answer(sequence) != right


def test_other_weights_show() -> None:
    core, _, sequence, right = half_way()
    core._weights[:] = weight_words(WEIGHTS.seed + 1, 0, WEIGHTS.words)
    run(core)
    assert answer(sequence) != right


def test_a_block_of_another_request_shows_in_the_very_first_token() -> None:
    """The first token reads every full block, so even a one-token answer tells."""
    wrong = 0
    for block in range(20):
        core, kv = make_core(PROFILE)
        sequence = core.sequence("a", prompt(330), 1)
        while sequence.computed < 320:
            core.step()
        kv[sequence.blocks[block]] = kv[sequence.blocks[(block + 7) % 20]]
        run(core)
        wrong += answer(sequence) != expected_answers([prompt(330)], [1], WEIGHTS)[0].tolist()
    assert wrong >= 19  # by chance one token in 4,096 is right all the same


def test_aborting_at_any_moment_returns_every_block() -> None:
    for steps in range(12):
        core, _ = make_core()
        sequences = [core.sequence(str(i), prompt(150, i), 5) for i in range(10)]
        for _ in range(steps):
            core.step()
        for sequence in sequences[::2]:
            core.abort(sequence)
            core.abort(sequence)
        run(core)
        assert core.pool.held == 0
        assert audit(core, sequences) == []
        assert core.totals.finished + core.totals.aborted == 10


def test_more_requests_than_fit_wait_and_all_are_answered() -> None:
    core, _ = make_core()
    sequences = [core.sequence(str(i), prompt(1000, i), 3) for i in range(9)]  # 63 blocks each: four fit
    core.step()
    assert 0 < len(core.running) < 9
    run(core)
    assert all(s.finished for s in sequences)


@pytest.mark.parametrize(
    ("prompt_tokens", "out", "message"),
    [(0, 1, "one prompt token"), (2048, 1, "exceed"), (1, 10**15, "exceed"), (1, 10**30, "exceed")],
)
def test_what_could_never_run_is_refused(prompt_tokens: int, out: int, message: str) -> None:
    core, _ = make_core()
    with pytest.raises(ValueError, match=message):
        core.sequence("a", prompt(prompt_tokens), out)
    assert not core.has_work

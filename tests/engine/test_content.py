"""The content oracle: the engine answers as the oracle says, and one damaged block shows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.content import (
    BLOCK_TOKENS,
    BLOCK_WORDS,
    GROUP_WORDS,
    HEAD_GROUPS,
    SLOT_WORDS,
    WORD_COLUMNS,
    Words,
    block_digests,
    block_words,
    digest_seed,
    slot_seeds,
    slot_words,
    weight_words,
)
from reference_impl.engine.core import EngineCore, Sequence, audit
from reference_impl.oracle import expected_answers
from tests.engine.cores import PROFILE, WEIGHTS, answer, make_core, prompt, run


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


def test_a_word_stands_where_its_head_group_does() -> None:
    seeds = np.arange(3 * BLOCK_TOKENS, dtype=np.uint64).reshape(3, BLOCK_TOKENS)
    blocks, slots = block_words(seeds), slot_words(seeds)
    for slot in range(BLOCK_TOKENS):
        for place in range(SLOT_WORDS):
            column = place // 4 * 64 + slot * 4 + place % 4
            assert column == WORD_COLUMNS[slot, place]
            assert (blocks[:, column] == slots[:, slot, place]).all()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_rank_owns_one_contiguous_part_of_a_block(ranks: int) -> None:
    owner = np.empty(BLOCK_WORDS, np.int64)
    for place in range(SLOT_WORDS):
        owner[WORD_COLUMNS[:, place]] = place // GROUP_WORDS * ranks // HEAD_GROUPS
    assert owner.tolist() == [word * ranks // BLOCK_WORDS for word in range(BLOCK_WORDS)]


@pytest.mark.parametrize("length", [1, 5, 16, 40, 100])
def test_prefill_and_decode_lay_blocks_out_alike(length: int) -> None:
    """The bytes of a request are what the same tokens as one prompt would have left, up to the last token."""
    core, kv = make_core()
    sequence = core.sequence("a", prompt(length), 30, hold=True)
    run(core)
    tokens = sequence.tokens[: sequence.computed]
    parents = [digest_seed(bytes(16)), *(digest_seed(d) for d in block_digests(tokens))]
    padded = np.zeros(len(sequence.held_blocks) * BLOCK_TOKENS, np.int64)
    padded[: len(tokens)] = tokens
    parents = parents[: len(sequence.held_blocks)]
    words = slot_words(slot_seeds(padded.reshape(-1, BLOCK_TOKENS), np.array(parents, np.uint64)))
    for place in range(len(tokens)):
        block, slot = sequence.held_blocks[place // BLOCK_TOKENS], place % BLOCK_TOKENS
        assert (kv[block, WORD_COLUMNS[slot]] == words[place // BLOCK_TOKENS, slot]).all()


def test_memory_in_pieces_is_refused() -> None:
    kv = np.zeros((PROFILE.kv_blocks, 2 * BLOCK_WORDS), np.uint64)[:, ::2]
    with pytest.raises(ValueError, match="one piece"):
        EngineCore(PROFILE).bind(kv, weight_words(WEIGHTS.seed, 0, WEIGHTS.words))


@pytest.mark.rule("KVC-XFER-001")
@pytest.mark.parametrize("group", range(HEAD_GROUPS))
def test_the_first_token_shows_damage_to_any_one_rank_s_part_of_a_loaded_block(group: int) -> None:
    words = prompt(600)
    [right] = expected_answers([words], [1], WEIGHTS)
    holder, theirs = make_core()
    held = holder.sequence("held", words, 1, hold=True)
    run(holder)
    part = slice(group * BLOCK_WORDS // HEAD_GROUPS, (group + 1) * BLOCK_WORDS // HEAD_GROUPS)
    wrong = 0
    full = len(words) // BLOCK_TOKENS
    for damaged in range(full):
        reader, ours = make_core()
        sequence = reader.sequence("reads", words, 1, remote_tokens=len(words))
        reader.step()
        ours[sequence.blocks] = theirs[held.held_blocks]
        ours[sequence.blocks[damaged], part] = 0
        reader.loaded(sequence)
        run(reader)
        wrong += answer(sequence) != right.tolist()
    assert wrong >= full - 1  # one in 4,096 goes unnoticed by chance

"""Right answers by the content oracle, for many prompts at once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from reference_impl.content import (
    BLOCK_TOKENS,
    ROOT_DIGEST,
    Ints,
    Words,
    block_digests,
    digest_seed,
    last_word_place,
    next_seeds,
    next_tokens,
    one_word,
    slot_seeds,
    weight_words,
)

BATCH = 64
"""Prompts worked on together: the arrays of 64 prompts of 32,000 tokens take 16 MiB."""


class Weights(msgspec.Struct, frozen=True):
    """The weights that an engine was given: `words` 64-bit words made from `seed`."""

    seed: int
    words: int

    def read(self, draws: Words) -> Words:
        """Return the words at `draws` modulo the size, computed and not read."""
        places = draws % np.uint64(self.words)
        return np.concatenate([weight_words(self.seed, int(p), 1) for p in places]) if places.size else places


def expected_answers(prompts: Sequence[Ints], counts: Sequence[int], weights: Weights) -> list[Ints]:
    """Return the first `counts[i]` output tokens of each prompt (each of one token or more)."""
    answers: list[Ints] = []
    for start in range(0, len(prompts), BATCH):
        answers += _Batch(prompts[start : start + BATCH], counts[start : start + BATCH], weights).answers()
    return answers


class _Batch:
    """Decodes some prompts in step, on seeds in place of KV blocks."""

    def __init__(self, prompts: Sequence[Ints], counts: Sequence[int], weights: Weights) -> None:
        self._weights = weights
        self._counts = np.asarray(counts, np.int64)
        self._lengths = np.array([len(p) for p in prompts], np.int64)
        longest = int((self._lengths + self._counts).max())
        shape = (len(prompts), longest // BLOCK_TOKENS + 1, BLOCK_TOKENS)
        self._seeds = np.zeros(shape, np.uint64)
        self._tokens = np.zeros(shape, np.int64)
        self._digests = [ROOT_DIGEST] * len(prompts)
        self._digested = np.zeros(len(prompts), np.int64)
        self._last = np.zeros(len(prompts), np.uint64)
        self._out = np.zeros((len(prompts), int(self._counts.max())), np.int64)
        for row, prompt in enumerate(prompts):
            self._prefill(row, prompt)

    def _prefill(self, row: int, prompt: Ints) -> None:
        digests = [ROOT_DIGEST, *block_digests(prompt)]
        self._digests[row] = digests[-1]
        self._digested[row] = len(digests) - 1
        blocks = len(digests)
        padded = np.zeros(blocks * BLOCK_TOKENS, np.int64)
        padded[: len(prompt)] = prompt
        self._tokens[row, :blocks] = padded.reshape(blocks, BLOCK_TOKENS)
        parents = np.array([digest_seed(d) for d in digests], np.uint64)
        self._seeds[row, :blocks] = slot_seeds(self._tokens[row, :blocks], parents)
        self._last[row] = self._seeds[row].reshape(-1)[len(prompt) - 1]

    def answers(self) -> list[Ints]:
        for ordinal in range(self._out.shape[1]):
            rows = np.flatnonzero(self._counts > ordinal)
            order = np.full(len(rows), ordinal, np.int64)
            last = one_word(self._last[rows], last_word_place(order))
            tokens = next_tokens(rows, order, self._lengths[rows], self._read, last, self._weights.read)
            self._out[rows, ordinal] = tokens
            self._append(rows, tokens)
        return [self._out[row, : self._counts[row]] for row in range(len(self._counts))]

    def _read(self, rows: Ints, blocks: Ints, slots: Ints, places: Ints) -> Words:
        return one_word(self._seeds[rows, blocks, slots], places)

    def _append(self, rows: Ints, tokens: Ints) -> None:
        places = self._lengths[rows]
        block, slot = places // BLOCK_TOKENS, places % BLOCK_TOKENS
        for row in rows[slot == 0]:
            self._start_block(int(row))
        before = np.where(slot == 0, self._last[rows], self._seeds[rows, block, slot - 1])
        self._tokens[rows, block, slot] = tokens
        self._seeds[rows, block, slot] = self._last[rows] = next_seeds(before, tokens)
        self._lengths[rows] += 1

    def _start_block(self, row: int) -> None:
        """Set `_last` to the seed of the digest that the row's next block stands behind."""
        full = int(self._lengths[row]) // BLOCK_TOKENS
        if full > self._digested[row]:  # an answer's own block has just become full
            self._digests[row] = block_digests(self._tokens[row, full - 1], self._digests[row])[-1]
            self._digested[row] = full
        self._last[row] = digest_seed(self._digests[row])

"""The content oracle: what every block must hold and what every answer must be, computed from the prompt alone.

A token's slot in a KV block holds words that are a function of the whole prefix up to that token; the next token is a
function of words read from the KV blocks and from the weights. So an engine that reads a lost, stale or foreign block
answers wrongly, and a client that knows only the prompt can tell (KVC-XFER-001).

Coverage: the first output token reads one word of every head group of every full block, so of every rank's part; each
later one reads a rotating window of `WINDOW_BLOCKS` blocks, the last token's slot and one word of the weights. Words
are 64 bits, so a wrong one goes unnoticed in one token with probability 1/4096 and in an answer of a thousand not at
all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from reference_impl.tokens import VOCABULARY

Words: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.int64]

BLOCK_TOKENS: Final = 16
SLOT_WORDS: Final = 32
BLOCK_WORDS: Final = BLOCK_TOKENS * SLOT_WORDS
BLOCK_BYTES: Final = BLOCK_WORDS * 8
HEAD_GROUPS: Final = 8
"""A block is laid out [8 head groups][16 slots][4 words], so a rank of 1, 2, 4 or 8 owns one contiguous part of it."""
GROUP_WORDS: Final = 4
"""Words of one slot in one head group."""
WINDOW_BLOCKS: Final = 64
ROOT_DIGEST: Final = bytes(16)
"""The digest in front of a prompt's first block."""

WORD_COLUMNS: Final[Ints] = (
    np.arange(BLOCK_WORDS)
    .reshape(HEAD_GROUPS, BLOCK_TOKENS, GROUP_WORDS)
    .swapaxes(0, 1)
    .reshape(BLOCK_TOKENS, SLOT_WORDS)
)
"""Where in a block word `place` (0..31) of slot `slot` (0..15) stands: `WORD_COLUMNS[slot, place]`."""

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_TOKEN: Final = np.uint64(0xD1B54A32D192ED03)
_WORD_OFFSETS: Final = np.arange(1, SLOT_WORDS + 1, dtype=np.uint64) * _GAMMA
_BLOCK_OFFSETS: Final = np.tile(_WORD_OFFSETS.reshape(HEAD_GROUPS, GROUP_WORDS), BLOCK_TOKENS)
"""What is added to each slot's seed in a block's layout, shape [8, 64]."""


def mix(words: Words) -> Words:
    """Return the words scrambled, elementwise (the finaliser of splitmix64: a bijection on 64 bits)."""
    x = words ^ (words >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def block_digests(tokens: Sequence[int] | Ints, parent: bytes = ROOT_DIGEST) -> list[bytes]:
    """Return the 16-byte digest of each full block of `tokens`; each covers the whole prefix behind `parent`."""
    raw = np.asarray(tokens, dtype="<u2").tobytes()
    size = 2 * BLOCK_TOKENS
    digests = []
    for start in range(0, len(raw) - size + 1, size):
        parent = hashlib.blake2b(raw[start : start + size], key=parent, digest_size=16).digest()
        digests.append(parent)
    return digests


def digest_seed(digest: bytes) -> int:
    """Return the 64-bit seed that the slots of the block behind `digest` start from."""
    return int.from_bytes(digest[:8], "little")


def next_seeds(seeds: Words, tokens: Ints) -> Words:
    """Return the seed of each slot whose token is `tokens`, from the seed of the slot (or digest) before it."""
    return mix(seeds ^ ((tokens.astype(np.uint64) + np.uint64(1)) * _TOKEN))


def slot_seeds(tokens: Ints, parents: Words) -> Words:
    """Return the slots' seeds, shape [blocks, 16], of `tokens` [blocks, 16] behind the seeds `parents` [blocks]."""
    seeds = np.empty(tokens.shape, np.uint64)
    seed = parents
    for place in range(tokens.shape[1]):
        seed = seeds[:, place] = next_seeds(seed, tokens[:, place])
    return seeds


def slot_words(seeds: Words) -> Words:
    """Return the words that the slots with `seeds` hold: one more axis, of length 32."""
    return mix(seeds[..., None] + _WORD_OFFSETS)


def block_words(seeds: Words) -> Words:
    """Return the blocks, shape [blocks, 512], whose slots have the seeds `seeds` [blocks, 16], as they are laid out."""
    repeated = np.repeat(seeds, GROUP_WORDS, axis=1)
    return mix(repeated[:, None, :] + _BLOCK_OFFSETS).reshape(len(seeds), BLOCK_WORDS)


def one_word(seeds: Words, place: Ints) -> Words:
    """Return word `place` of each slot: `slot_words(seeds)[..., place]` without the rest."""
    return mix(seeds + _WORD_OFFSETS[place])


def weight_words(seed: int, start: int, count: int) -> Words:
    """Return words `start .. start + count` of the weights made from `seed`."""
    places = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return mix(places * _GAMMA + np.uint64(seed & 0xFFFFFFFFFFFFFFFF))


ReadBlocks: TypeAlias = Callable[[Ints, Ints, Ints, Ints], Words]
"""(row [n, k], block index within the row [n, k], slot [n, 1], word [n, 1]) -> words [n, k]."""
ReadWeights: TypeAlias = Callable[[Words], Words]
"""64-bit draws [n] -> the weights' words at draw modulo size."""


def next_tokens(
    rows: Ints, order: Ints, lengths: Ints, read_blocks: ReadBlocks, last_slots: Words, read_weights: ReadWeights
) -> Ints:
    """Return the next token of each row.

    `order` is each row's output ordinal (0 for the first token), `lengths` how many tokens of KV it has, `last_slots`
    the word that it holds in the slot of its last token (any one word; callers use `last_word_place`). All [n]. Rows
    of ordinal 0 read every full block and must all have ordinal 0; other rows may be mixed.
    """
    full = lengths // BLOCK_TOKENS
    first = bool(order.size) and int(order[0]) == 0
    width = max(int(full.max(initial=0)) if first else min(WINDOW_BLOCKS, int(full.max(initial=0))), 1)
    offsets = np.arange(width, dtype=np.int64)[None, :]
    within = offsets < full[:, None]
    index = (order[:, None] * width + offsets) % np.maximum(full, 1)[:, None] if not first else offsets
    index = np.where(within, index, 0)
    slots = (order % BLOCK_TOKENS)[:, None]
    if first:
        words = _one_of_each_group(rows[:, None], index, slots, read_blocks)
    else:
        words = read_blocks(rows[:, None], index, slots, last_word_place(order)[:, None])
    weighted = words * (index.astype(np.uint64) * np.uint64(2) + np.uint64(1))
    folded = np.where(within, weighted, np.uint64(0)).sum(axis=1, dtype=np.uint64)
    state = mix(folded ^ last_slots)
    return (mix(state ^ read_weights(state)) % np.uint64(VOCABULARY)).astype(np.int64)


def _one_of_each_group(rows: Ints, blocks: Ints, slots: Ints, read_blocks: ReadBlocks) -> Words:
    """Return one word a block, made from one of each of its head groups: no rank's part can be wrong unnoticed."""
    words = np.zeros(blocks.shape, np.uint64)
    for group in range(HEAD_GROUPS):
        place = np.full(slots.shape, group * GROUP_WORDS + GROUP_WORDS - 1, np.int64)
        words += read_blocks(rows, blocks, slots, place) * np.uint64(2 * group + 1)
    return mix(words)


def last_word_place(order: Ints) -> Ints:
    """Return which of a slot's 32 words output ordinal `order` reads."""
    return (order * 7 + 3) % SLOT_WORDS

"""What stands in a paged KV cache in place of keys and values: in each slot, a hash of all tokens up to its own.

So a slot is right only for one prefix, and a block that was lost, stale or somebody else's shows in the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

SLOT_BYTES: Final = 8
_SEED: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_VOCABULARY: Final = 4_096


def prefix_hashes(tokens: Sequence[int], start: int = 0, before: int = _SEED) -> NDArray[np.uint64]:
    """Return the hash of each prefix that ends at or after `start`; `before` is the one that ends before it."""
    found, state = np.empty(len(tokens) - start, np.uint64), before
    for place, token in enumerate(tokens[start:]):
        state = ((state ^ (token + 1)) * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 29
        found[place] = state
    return found


class Pages:
    """The slots of a KV cache: `cache` are its bytes, [blocks, heads, tokens of a block, bytes of a head's slot]."""

    def __init__(self, cache: NDArray[np.uint8]) -> None:
        self._cache = cache
        self._block_tokens = cache.shape[2]

    def write(self, blocks: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """Compute the slots of the tokens `start` to `end`, as a forward pass would."""
        if start >= end:
            return
        rows, slots = self._places(blocks, start, end)
        self._cache[rows, :, slots] = self._bytes(prefix_hashes(tokens[:end])[start:])[:, None, :]

    def wrong(self, blocks: Sequence[int], tokens: Sequence[int], end: int) -> int | None:
        """Return the first of the tokens before `end` whose slot is not right, every byte of it; None: all are."""
        if not end:
            return None
        rows, slots = self._places(blocks, 0, end)
        right = self._bytes(prefix_hashes(tokens[:end]))[:, None, :]
        bad = (self._cache[rows, :, slots] != right).any(axis=(1, 2))
        return int(bad.argmax()) if bad.any() else None

    def _places(self, blocks: Sequence[int], start: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        places = np.arange(start, end)
        return np.asarray(blocks, np.int64)[places // self._block_tokens], places % self._block_tokens

    def _bytes(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Return a hash's bytes over and over, as many as a head's slot has: [tokens, bytes]."""
        size = self._cache.shape[3]
        return np.tile(hashes.view(np.uint8).reshape(-1, SLOT_BYTES), (1, -(-size // SLOT_BYTES)))[:, :size]


def next_token(tokens: Sequence[int]) -> int:
    """Return the token that the model says next."""
    return int(prefix_hashes(tokens)[-1] >> np.uint64(40)) % _VOCABULARY

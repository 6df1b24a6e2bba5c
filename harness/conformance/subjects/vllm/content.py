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
    """The slots of a KV cache. `pages` are its bytes, [blocks, bytes of a block]."""

    def __init__(self, pages: NDArray[np.uint8], block_tokens: int) -> None:
        self._block_tokens = block_tokens
        blocks, size_bytes = pages.shape
        self._slots = pages.reshape(blocks, block_tokens, size_bytes // block_tokens)

    def write(self, blocks: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """Compute the slots of the tokens `start` to `end`, as a forward pass would."""
        hashes = prefix_hashes(tokens[:end])[start:]
        for place, value in enumerate(hashes, start=start):
            slot = self._slots[blocks[place // self._block_tokens], place % self._block_tokens]
            slot[:] = np.resize(np.frombuffer(value.tobytes(), np.uint8), slot.shape)

    def wrong(self, blocks: Sequence[int], tokens: Sequence[int], end: int) -> int | None:
        """Return the first of the tokens before `end` whose slot is not right, every byte of it; None: all are."""
        if not end:
            return None
        hashes = prefix_hashes(tokens[:end])
        places = np.arange(end)
        rows = self._slots[np.asarray(blocks, np.int64)[places // self._block_tokens], places % self._block_tokens]
        bytes_of = hashes.view(np.uint8).reshape(end, SLOT_BYTES)
        right = np.tile(bytes_of, (1, -(-rows.shape[1] // SLOT_BYTES)))[:, : rows.shape[1]]
        bad = (rows != right).any(axis=1)
        return int(bad.argmax()) if bad.any() else None


def next_token(tokens: Sequence[int]) -> int:
    """Return the token that the model says next."""
    return int(prefix_hashes(tokens)[-1] >> np.uint64(40)) % _VOCABULARY

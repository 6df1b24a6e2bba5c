"""The KV memory of a `SimpleEngine`: blocks whose every slot is a function of the whole prefix.

So a block that is lost, stale or another prompt's shows as soon as somebody reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from reference_impl.rules.blocks import BlockPool

BLOCK_TOKENS: Final = 16
"""Tokens in a block."""
CONTEXT_TOKENS_MAX: Final = 1_024
"""The longest prompt and answer together."""
VOCABULARY: Final = 4_000

Slots: TypeAlias = NDArray[np.uint64]

_POWERS: Final = np.cumprod(np.full(CONTEXT_TOKENS_MAX, 0x9E3779B97F4A7C15, np.uint64))
_FACTOR: Final = np.uint64(0xD6E8FEB86659FD93)
_SHIFT: Final = np.uint64(32)


def slots_of(tokens: NDArray[np.int64]) -> Slots:
    """Return the KV of each token: a function of it and of all tokens before it."""
    sums = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * _POWERS[: len(tokens)])
    mixed: Slots = (sums ^ (sums >> _SHIFT)) * _FACTOR
    return mixed


def next_token(slots: Slots) -> int:
    """Return the token that follows, made from all KV that was read."""
    total = int(slots.sum())
    return (total ^ (total >> 29)) % VOCABULARY


def blocks_for(tokens: int) -> int:
    """Return how many blocks so many tokens take."""
    return -(-tokens // BLOCK_TOKENS)


class Pool:
    """An engine's blocks: who holds them (`blocks`), what is in them (`slots`)."""

    def __init__(self, blocks: int) -> None:
        self.blocks = BlockPool(blocks)
        self.slots: Slots = np.zeros((blocks, BLOCK_TOKENS), np.uint64)

    def read(self, blocks: Sequence[int], tokens: int) -> Slots:
        """Return the KV of the first tokens, as it stands in some blocks."""
        read: Slots = self.slots[list(blocks[: blocks_for(tokens)])].reshape(-1)[:tokens]
        return read

    def write(self, blocks: Sequence[int], start: int, slots: Slots) -> None:
        """Write the KV of the tokens from `start` on."""
        places = np.arange(start, start + len(slots))
        self.slots[np.asarray(blocks)[places // BLOCK_TOKENS], places % BLOCK_TOKENS] = slots

    def digests(self, slots: Slots) -> list[bytes]:
        """Return what a prefix cache knows the full blocks of a prefix by."""
        return [int(last).to_bytes(8) for last in slots[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]]

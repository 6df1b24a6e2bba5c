"""Who reads what: the words of a block that each pair of ranks moves, and runs of neighbouring blocks. No I/O."""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference_impl.content import BLOCK_BYTES, BLOCK_WORDS

WORD_BYTES: Final = 8
RUN_BLOCKS_MAX: Final = 4096
"""Blocks in one descriptor, 16 MiB: more in one go would hold the caller up."""

Blocks = NDArray[np.int64]
Descriptors = NDArray[np.uint64]
"""Shape [n, 3]: address, length in bytes, device (0)."""


class Piece(NamedTuple):
    """The words `first` to `first + words` of every block, which a rank here reads from a rank there."""

    local_rank: int
    remote_rank: int
    first: int
    words: int


def pieces(local_ranks: int, remote_ranks: int) -> list[Piece]:
    """Return one piece for each pair of ranks: as many as the side with more ranks has."""
    count = max(local_ranks, remote_ranks)
    words = BLOCK_WORDS // count
    return [Piece(n * local_ranks // count, n * remote_ranks // count, n * words, words) for n in range(count)]


@dataclass(frozen=True)
class BlockList:
    """The blocks of a read, in the order of the remote ones; equal length, one at least."""

    remote: Blocks
    local: Blocks
    breaks: Blocks
    """Places at which a run of neighbours, on both sides, ends and the next begins."""


def block_list(remote: list[int], local: list[int], remote_count: int, local_count: int) -> BlockList:
    """Check a read's blocks against both pools. Raises ValueError with the reason."""
    if not remote or len(remote) != len(local):
        raise ValueError(f"a read needs as many local blocks as remote ones: {len(local)} and {len(remote)}")
    theirs, ours = _checked("remote", remote, remote_count), _checked("local", local, local_count)
    remote_steps, local_steps = np.diff(theirs), np.diff(ours)
    if len(ours) > 1 and local_steps.min() <= 0 and np.bincount(ours).max() > 1:
        raise ValueError("a local block is named twice")
    if len(theirs) > 1 and remote_steps.min() < 0:
        order = np.argsort(theirs, kind="stable")
        theirs, ours = theirs[order], ours[order]
        remote_steps, local_steps = np.diff(theirs), np.diff(ours)
    return BlockList(theirs, ours, np.flatnonzero((remote_steps != 1) | (local_steps != 1)) + 1)


def _checked(side: str, blocks: list[int], count: int) -> Blocks:
    try:
        found = np.frombuffer(struct.pack(f"{len(blocks)}q", *blocks), dtype=np.int64)  # four times np.array's speed
    except struct.error as error:
        raise ValueError(f"{side} blocks are no block numbers: {error}") from error
    first, last = int(found.min()), int(found.max())
    if first < 0 or last >= count:
        raise ValueError(f"{side} blocks go from {first} to {last}; the pool has 0 to {count - 1}")
    return found


def descriptors(blocks: BlockList, piece: Piece, remote_base: int, local_base: int) -> tuple[Descriptors, Descriptors]:
    """Return what to read, remote and local side: one row a block, or one a run where whole blocks are neighbours.

    Runs matter: one of 2,000 blocks is read in 0.6 ms, 2,000 single blocks in 7 ms (`benchmarks/transfer.py`).
    """
    count = len(blocks.remote)
    starts = np.arange(count) if piece.words < BLOCK_WORDS else _starts(blocks, count)
    sizes = np.diff(starts, append=count) * (piece.words * WORD_BYTES)
    offset = piece.first * WORD_BYTES
    return (
        _rows(remote_base + offset, blocks.remote[starts], sizes),
        _rows(local_base + offset, blocks.local[starts], sizes),
    )


def _starts(blocks: BlockList, count: int) -> Blocks:
    """Return where each descriptor's run begins."""
    edges = [0, *blocks.breaks.tolist(), count]
    return np.array([at for begin, end in itertools.pairwise(edges) for at in range(begin, end, RUN_BLOCKS_MAX)])


def _rows(base: int, blocks: Blocks, sizes: NDArray[np.int64]) -> Descriptors:
    rows = np.zeros((len(blocks), 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(base) + blocks.astype(np.uint64) * np.uint64(BLOCK_BYTES)
    rows[:, 1] = sizes.astype(np.uint64)
    return rows

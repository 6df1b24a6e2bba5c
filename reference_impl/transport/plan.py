"""Who reads what: the words of a block that each pair of ranks moves, and runs of neighbouring blocks. No I/O."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference_impl.content import BLOCK_BYTES, BLOCK_WORDS

WORD_BYTES: Final = 8
RUN_BLOCKS_MAX: Final = 4096
"""Blocks in one descriptor, 16 MiB: more in one go would hold the caller up."""

GAP_BLOCKS_MAX: Final = 1024
"""Generations between two runs that are read along with them: 8 KiB, which take less than a descriptor more."""

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
    """The blocks of a read, remote ones ascending; equal length, one at least. The arrays are nobody else's."""

    remote: Blocks
    local: Blocks
    starts: Blocks
    """Places at which a run of neighbours, on both sides, begins."""
    counts: Blocks
    """Blocks in each run."""


def block_list(
    remote: Sequence[int] | Blocks, local: Sequence[int] | Blocks, remote_count: int, local_count: int
) -> BlockList:
    """Check a read's blocks against both pools. Raises ValueError with the reason."""
    if not len(remote) or len(remote) != len(local):
        raise ValueError(f"a read needs as many local blocks as remote ones: {len(local)} and {len(remote)}")
    theirs, ours = _array("remote", remote), _array("local", local)
    _check("remote", theirs, remote_count)
    _check("local", ours, local_count)
    blocks = _runs(theirs, ours)
    if len(blocks.starts) == 1:
        return blocks
    firsts = blocks.remote[blocks.starts]
    if (firsts[1:] < firsts[:-1] + blocks.counts[:-1] - 1).any():
        order = np.argsort(blocks.remote, kind="stable")
        blocks = _runs(blocks.remote[order], blocks.local[order])
    _check_distinct(blocks)
    return blocks


def _runs(theirs: Blocks, ours: Blocks) -> BlockList:
    breaks = np.flatnonzero((theirs[1:] - theirs[:-1] != 1) | (ours[1:] - ours[:-1] != 1))
    edges = np.zeros(len(breaks) + 2, dtype=np.int64)
    edges[1:-1] = breaks
    edges[1:-1] += 1
    edges[-1] = len(theirs)
    return BlockList(theirs, ours, edges[:-1], edges[1:] - edges[:-1])


def _array(side: str, blocks: Sequence[int] | Blocks) -> Blocks:
    """Return block numbers as an array of our own. A list takes 30 us for 2,000 (`np.array`: 80), an array 1."""
    if isinstance(blocks, np.ndarray):
        if blocks.ndim != 1 or blocks.dtype != np.int64:
            raise ValueError(f"{side} blocks must be one row of int64, got {blocks.dtype} of shape {blocks.shape}")
        return blocks.copy()
    try:
        return np.frombuffer(struct.pack(f"{len(blocks)}q", *blocks), dtype=np.int64)
    except struct.error as error:
        raise ValueError(f"{side} blocks are no block numbers: {error}") from error


def _check(side: str, blocks: Blocks, count: int) -> None:
    if int(blocks.view(np.uint64).max()) >= count:  # a negative number is a huge one here
        raise ValueError(f"{side} blocks go from {blocks.min()} to {blocks.max()}; the pool has 0 to {count - 1}")


def _check_distinct(blocks: BlockList) -> None:
    """Raise ValueError if a local block is named twice, that is if two runs overlap."""
    firsts = blocks.local[blocks.starts]
    order = np.argsort(firsts)
    if (firsts[order[1:]] < (firsts + blocks.counts)[order[:-1]]).any():
        raise ValueError("a local block is named twice")


class Windows(NamedTuple):
    """The stretches of a peer's generations that hold those of a read's blocks, to be read one behind the other."""

    firsts: Blocks
    counts: Blocks
    words: int
    """All counts together."""

    def places(self, remote: Blocks) -> Blocks:
        """Return where the generations of these blocks then stand."""
        window = np.searchsorted(self.firsts, remote, side="right") - 1
        found: Blocks = remote - self.firsts[window] + (np.cumsum(self.counts) - self.counts)[window]
        return found


def windows(blocks: BlockList) -> Windows:
    """Return what to read of a peer's generations: what lies between runs too, where a window more costs more."""
    firsts = blocks.remote[blocks.starts]
    if len(firsts) == 1:
        return Windows(firsts, blocks.counts, int(blocks.counts[0]))
    ends = firsts + blocks.counts
    jumps = np.flatnonzero(firsts[1:] - ends[:-1] > GAP_BLOCKS_MAX)
    firsts = np.concatenate((firsts[:1], firsts[jumps + 1]))
    counts = np.concatenate((ends[jumps], ends[-1:])) - firsts
    return Windows(firsts, counts, int(counts.sum()))


def descriptors(blocks: BlockList, piece: Piece, remote_base: int, local_base: int) -> tuple[Descriptors, Descriptors]:
    """Return what to read, remote and local side: one row a block, or one a run where whole blocks are neighbours.

    Runs matter: one of 2,000 blocks is read in 0.6 ms, 2,000 single blocks in 7 ms (`benchmarks/transfer.py`).
    """
    count = len(blocks.remote)
    if piece.words < BLOCK_WORDS:
        starts, counts = np.arange(count), np.ones(count, dtype=np.int64)
    elif count <= RUN_BLOCKS_MAX:
        starts, counts = blocks.starts, blocks.counts
    else:
        starts, counts = _cut(blocks)
    sizes = counts * (piece.words * WORD_BYTES)
    offset = piece.first * WORD_BYTES
    return (
        rows(remote_base + offset, blocks.remote[starts], BLOCK_BYTES, sizes),
        rows(local_base + offset, blocks.local[starts], BLOCK_BYTES, sizes),
    )


def _cut(blocks: BlockList) -> tuple[Blocks, Blocks]:
    """Return where descriptors begin, where runs do and every `RUN_BLOCKS_MAX` within one, and their lengths."""
    edges = [*blocks.starts.tolist(), len(blocks.remote)]
    starts = [at for begin, end in itertools.pairwise(edges) for at in range(begin, end, RUN_BLOCKS_MAX)]
    return np.array(starts), np.diff([*starts, edges[-1]])


def rows(base: int, places: Blocks, place_bytes: int, sizes: NDArray[np.int64]) -> Descriptors:
    """Return descriptors of `sizes` bytes at `places`, counted from `base` in steps of `place_bytes`."""
    found = np.zeros((len(places), 3), dtype=np.int64)
    found[:, 0] = base + places * place_bytes
    found[:, 1] = sizes
    return found.view(np.uint64)

"""The block pool: who holds which KV block, and which blocks hold a prefix that may be used again.

Invariants (catalogue S1, K1): a block with a reference is never handed out; every block is in exactly one of three
states: held (references > 0), cached (none, but its content is indexed), free.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol


class OutOfBlocks(Exception):
    """More blocks were asked for than are free or cached."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} KV blocks wanted, {available} available")


class Generations(Protocol):
    """One counter a block: a list, or an array in memory that peers read."""

    def __len__(self) -> int: ...

    def __getitem__(self, block: int, /) -> int: ...

    def __setitem__(self, block: int, count: int, /) -> None: ...


class BlockPool:
    """Hands out the blocks `0 .. blocks - 1` and finds cached prefixes by digest.

    `generation[b]` counts how often block b was handed out anew: a reader that remembers it notices a recycled block.
    It is raised before the new holder can write to the block. `generation` may be given, one counter a block.
    """

    def __init__(self, blocks: int, generation: Generations | None = None) -> None:
        if blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {blocks}")
        if generation is not None and len(generation) != blocks:
            raise ValueError(f"generation must have one counter for each of {blocks} blocks, got {len(generation)}")
        self.blocks = blocks
        self.generation: Generations = [0] * blocks if generation is None else generation
        self._references = [0] * blocks
        self._digest: list[bytes | None] = [None] * blocks
        self._index: dict[bytes, int] = {}
        self._free = deque(range(blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that can be handed out now: free ones and cached ones that nobody holds."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        """Blocks with a reference."""
        return self.blocks - self.available

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and whose content can be found again."""
        return len(self._cached)

    def references(self, block: int) -> int:
        """Return how many hold `block`."""
        return self._references[block]

    def find(self, digests: Sequence[bytes]) -> list[int] | None:
        """Return the blocks of a whole chain of digests, taking no reference; None if one of them is not here."""
        found = [self._index.get(digest, -1) for digest in digests]
        return None if -1 in found else found

    def drop(self, digests: Iterable[bytes]) -> None:
        """Forget what is known of some digests: a block that nobody holds is free, one that is held will be."""
        for digest in digests:
            block = self._index.pop(digest, None)
            if block is None:
                continue
            self._digest[block] = None
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def fits(self, digests: Sequence[bytes], count: int) -> bool:
        """Return whether `count` blocks can be had now: the longest cached prefix of `digests`, and new ones behind it.

        True means that `take_prefix(digests)` and then `allocate` of the rest cannot fail.
        """
        found = idle = 0
        for digest in digests:
            block = self._index.get(digest)
            if block is None:
                break
            found += 1
            idle += not self._references[block]
        return count - found <= self.available - idle

    def take_prefix(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `digests`, each with a reference more."""
        found = []
        for digest in digests:
            block = self._index.get(digest)
            if block is None:
                break
            found.append(block)
        for block in found:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
        return found

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks, each with one reference. Raises OutOfBlocks, taking none, if there are too few.

        Free blocks go first, then the cached ones longest unused.
        """
        if count > self.available:
            raise OutOfBlocks(count, self.available)
        taken = []
        for _ in range(count):
            block = self._free.popleft() if self._free else self._evict()
            self._references[block] = 1
            self.generation[block] += 1
            taken.append(block)
        taken.sort()  # neighbours stay together on both sides, and one transfer descriptor covers them
        return taken

    def seal(self, block: int, digest: bytes) -> None:
        """Say that `block`, which is held and full, holds the prefix with `digest`. A prefix already known stays."""
        if not self._references[block]:
            raise ValueError(f"block {block} is not held, so its content may change: it cannot be sealed")
        if self._digest[block] not in (None, digest):
            raise ValueError(f"block {block} is sealed with another digest: a full block never changes")
        if digest not in self._index:
            self._index[digest] = block
            self._digest[block] = digest

    def release(self, blocks: Iterable[int]) -> None:
        """Take one reference off each block; the last one leaves it cached if it is indexed, and free otherwise."""
        for block in blocks:
            if not self._references[block]:
                raise ValueError(f"block {block} is not held: it was released twice")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._digest[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def forget(self) -> None:
        """Drop the whole prefix index; cached blocks become free."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._index.clear()
        self._digest = [None] * self.blocks

    def audit(self) -> list[str]:
        """Return what breaks the conservation of blocks (K1): one line a breach, none if all is well."""
        free, cached = list(self._free), list(self._cached)
        held = [b for b in range(self.blocks) if self._references[b]]
        problems = []
        if sorted(free + cached + held) != list(range(self.blocks)):
            problems.append(f"{len(free)} free + {len(cached)} cached + {len(held)} held != {self.blocks} blocks")
        problems += [f"cached block {b} has no digest" for b in cached if self._digest[b] is None]
        problems += [f"index misnames block {b}" for d, b in self._index.items() if self._digest[b] != d]
        return problems

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._digest[block]
        if digest is not None:
            del self._index[digest]
        self._digest[block] = None
        return block

"""The block pool: conservation under any history, and the prefix index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reference_impl.rules.blocks import BlockPool, OutOfBlocks

BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """Requests come, seal, share prefixes and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.requests: list[list[int]] = []

    @rule(count=st.integers(0, BLOCKS + 2))
    def allocate(self, count: int) -> None:
        held_before = {b for r in self.requests for b in r}
        if count > self.pool.available:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not held_before & set(blocks), "a held block was handed out (S1)"
        self.requests.append(blocks)

    @precondition(lambda self: any(self.requests))
    @rule(data=st.data(), digest=st.integers(0, 5))
    def seal(self, data: st.DataObject, digest: int) -> None:
        request = data.draw(st.sampled_from([r for r in self.requests if r]))
        block = data.draw(st.sampled_from(request))
        if self.pool._digest[block] in (None, bytes([digest])):
            self.pool.seal(block, bytes([digest]))
            return
        with pytest.raises(ValueError, match="another digest"):
            self.pool.seal(block, bytes([digest]))

    @rule(digests=st.lists(st.integers(0, 5), max_size=4, unique=True))
    def share(self, digests: list[int]) -> None:
        self.requests.append(self.pool.take_prefix([bytes([d]) for d in digests]))

    @rule(digests=st.lists(st.integers(0, 5), max_size=4, unique=True), more=st.integers(0, BLOCKS))
    def share_and_allocate(self, digests: list[int], more: int) -> None:
        """`fits` says beforehand whether a prefix and new blocks behind it can be had."""
        names = [bytes([d]) for d in digests]
        count = len(digests) + more
        promised = self.pool.fits(names, count)
        prefix = self.pool.take_prefix(names)
        self.requests.append(prefix)
        missing = count - len(prefix)
        assert promised == (missing <= self.pool.available)
        if promised:
            self.requests.append(self.pool.allocate(missing))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))))

    @rule(digests=st.lists(st.integers(0, 5), max_size=3))
    def drop(self, digests: list[int]) -> None:
        names = [bytes([d]) for d in digests]
        before = self.pool.find(names)
        self.pool.drop(names)
        assert not names or self.pool.find(names) is None
        assert all(self.pool.find([name]) is None for name in names)
        if before is not None:
            assert all(self.pool._digest[block] is None for block in before)

    @rule(digests=st.lists(st.integers(0, 5), max_size=4, unique=True))
    def find(self, digests: list[int]) -> None:
        """Looking takes nothing, and finds what taking would."""
        names = [bytes([d]) for d in digests]
        references = list(self.pool._references)
        found = self.pool.find(names)
        assert self.pool._references == references
        taken = self.pool.take_prefix(names)
        assert found == (taken if len(taken) == len(names) else None)
        self.pool.release(reversed(taken))

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.pool.audit() == []
        assert self.pool.held == len({b for r in self.requests for b in r})
        named = [b for r in self.requests for b in r]
        assert [self.pool.references(b) for b in range(BLOCKS)] == [named.count(b) for b in range(BLOCKS)]


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_prefix_is_found_only_as_far_as_it_is_unbroken() -> None:
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    pool.seal(a, b"1")
    pool.seal(c, b"3")
    assert pool.take_prefix([b"1", b"2", b"3"]) == [a]
    assert b not in pool.take_prefix([b"3"])


def test_the_longest_unused_prefix_goes_first_and_leaves_the_index() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.seal(first, b"old")
    pool.seal(second, b"new")
    pool.release([first])
    pool.release([second])
    assert pool.allocate(1) == [first]
    assert pool.take_prefix([b"old"]) == []
    assert pool.take_prefix([b"new"]) == [second]


def test_a_block_handed_out_anew_has_another_generation() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    before = pool.generation[block]
    pool.release([block])
    pool.allocate(1)
    assert pool.generation[block] == before + 1


def test_generations_are_counted_where_peers_can_read_them() -> None:
    counters = np.zeros(3, np.uint64)
    pool = BlockPool(3, counters)
    taken = pool.allocate(2)
    assert counters.tolist() == [1, 1, 0]
    pool.release(taken)
    assert counters.tolist() == [1, 1, 0], "a block that nobody has got anew still holds what it held"
    pool.allocate(3)
    assert counters.tolist() == [2, 2, 1]


def test_counters_for_another_number_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="each of 3 blocks, got 2"):
        BlockPool(3, [0, 0])


def test_releasing_twice_and_sealing_what_is_not_held_are_refused() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(ValueError, match="released twice"):
        pool.release([block])
    with pytest.raises(ValueError, match="not held"):
        pool.seal(block, b"x")


def test_audit_catches_a_pool_that_loses_blocks() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool._free.popleft()  # the broken twin: a block that is in no state
    assert any("3 blocks" in problem for problem in pool.audit())


def test_a_chain_is_found_only_whole_and_wherever_it_is_broken_it_is_not() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    chain = [b"1", b"2", b"3"]
    for block, digest in zip(blocks, chain, strict=True):
        pool.seal(block, digest)
    assert pool.find(chain) == blocks
    assert pool.find([]) == []
    assert pool.find([*chain, b"4"]) is None
    pool.drop([b"2"])
    assert pool.find(chain) is None
    assert pool.find(chain[2:]) == blocks[2:], "what is behind the gap is still there by itself"


def test_what_is_dropped_is_free_at_once_or_when_its_last_holder_goes() -> None:
    pool = BlockPool(3)
    idle, used = pool.allocate(2)
    pool.seal(idle, b"idle")
    pool.seal(used, b"used")
    pool.release([idle])
    pool.drop([b"idle", b"used", b"unheard-of", b"used"])
    assert (pool.cached, pool.held, pool.available) == (0, 1, 2)
    assert pool.references(used) == 1
    pool.seal(used, b"another")  # nothing is known of it any more, so it may be said anew
    assert pool.find([b"another"]) == [used]
    pool.drop([b"another"])
    pool.release([used])
    assert (pool.cached, pool.held, pool.available) == (0, 0, 3)
    assert pool.audit() == []

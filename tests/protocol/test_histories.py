"""Thousands of random histories of a deployment, for all rank pairs: no invariant breaks, at any step or at the end.

`PDPROOF_HISTORIES` says how many (`make soak`: 50,000). A failure prints its seed; `histories.run(SEED, RANKS)` shows
it again.
"""

from __future__ import annotations

import os
from typing import Final

import pytest

from tests.protocol import histories
from tests.protocol.histories import RANKS
from tests.protocol.world import NO_FAULTS, Tally, World

HISTORIES: Final = int(os.environ.get("PDPROOF_HISTORIES", "2000"))
PARTS: Final = 20


def whole(world: World) -> Tally:
    """Fail if the history broke anything; return how its requests ended."""
    if world.broken:
        pytest.fail(world.history(), pytrace=False)
    return world.tally


@pytest.mark.rule("KVC-XFER-001")
@pytest.mark.rule("KVC-LEASE-010")
@pytest.mark.rule("KVC-REL-004")
@pytest.mark.rule("KVC-REL-005")
@pytest.mark.rule("KVC-XFER-003")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("ranks", RANKS, ids=lambda ranks: f"{ranks[0]}x{ranks[1]}")
def test_invariants_hold_in_any_history(ranks: tuple[int, int], part: int) -> None:
    size = -(-HISTORIES // (PARTS * len(RANKS)))
    start = (RANKS.index(ranks) * PARTS + part) * size
    for seed in range(start, start + size):
        whole(histories.run(seed, ranks))


def test_histories_reach_everything_that_can_happen() -> None:
    """A history in which nothing happens proves nothing."""
    seen = Tally()
    for seed in range(160):
        for name, count in vars(whole(histories.run(seed, RANKS[seed % 4]))).items():
            setattr(seen, name, getattr(seen, name) + count)
    assert [name for name, count in vars(seen).items() if count < 3] == []


@pytest.mark.rule("KVC-LEASE-005")
@pytest.mark.rule("KVC-REL-001")
@pytest.mark.rule("KVC-REL-003")
@pytest.mark.parametrize("seed", range(8))
def test_without_faults_no_lease_expires_and_no_load_fails(seed: int) -> None:
    """KVC-OBS-002; in two-turn mode a session may come too late, so it is off."""
    world = histories.run(seed, RANKS[seed % 4], NO_FAULTS, two_turns=False)
    tally = whole(world)
    assert tally.load_failed == tally.failed == 0
    assert all(engine.connector.producer.counts.expired == 0 for engine in world.engines)


@pytest.mark.rule("KVC-LEASE-010")
@pytest.mark.parametrize("seed", range(4))
def test_readers_that_queue_for_many_lease_lengths_keep_their_leases(seed: int) -> None:
    tally = whole(histories.run_samples(seed))
    assert tally.load_failed == 0

"""Two hours of random faults in virtual time, on the default terms, end with every block free."""

from __future__ import annotations

import msgspec
import pytest

from reference_impl.rules.terms import KvTerms
from tests.protocol.histories import happen
from tests.protocol.world import MS, PROFILE, STEP_MAX_NS, Faults, S, World

HOURS_NS = 2 * 3600 * S
FAULTS = Faults(
    lost=0.05, repeated=0.05, late=0.02, damaged=0.005, slow_reads=0.05, bad_reads=0.05, bad_handshakes=0.05, held=0.1,
    reused=0.1, rejected=0.05, crashes=0.002, frozen=0.002, aborts=0.02,
)  # fmt: skip
ARRIVALS = 0.02
"""Probability of a new client in one step."""


@pytest.mark.rule("KVC-LEASE-007")
@pytest.mark.rule("KVC-CLK-005")
@pytest.mark.rule("KVC-HSK-002")
@pytest.mark.parametrize("ranks", [(4, 1)])
def test_two_hours_of_faults_leave_nothing_behind(ranks: tuple[int, int]) -> None:
    world = World(
        2026, ranks=ranks, terms=KvTerms(bidirectional_kv_xfer=True), faults=FAULTS,
        profile=msgspec.structs.replace(PROFILE, kv_blocks=512, requests_max=8, reserve=False),
    )  # fmt: skip
    while world.network.now_ns < HOURS_NS and not world.broken:
        happen(world, ARRIVALS)
        world.step(world.between(220 * MS, STEP_MAX_NS))
    world.drain()
    if world.broken:
        pytest.fail(world.history(), pytrace=False)
    assert world.tally.answered > 1000
    assert min(world.tally.aborted, world.tally.lost, world.tally.turns, world.tally.load_failed) >= 10
    for engine in world.engines:
        assert engine.core.pool.available == engine.core.pool.blocks

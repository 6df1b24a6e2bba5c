"""Random histories of a deployment: what the clients do and what goes wrong, all out of one seed."""

from __future__ import annotations

import random

import msgspec

from reference_impl.rules.terms import LeaseDesign, LoadPolicy
from reference_impl.transport.memory import ReadPlan
from tests.protocol.world import (
    ANSWER_MAX,
    MS,
    NO_FAULTS,
    PROFILE,
    STEP_MAX_NS,
    TERMS,
    Faults,
    Leg,
    S,
    World,
    library,
)

RANKS = [(1, 1), (4, 1), (1, 4), (2, 2)]
TURNS_MIN, TURNS_MAX = 10, 36
"""Steps of a history before it is healed."""

LOSSY = Faults(lost=0.15, repeated=0.15, late=0.05, damaged=0.02, evictions=0.3)
BAD_DATA = Faults(slow_reads=0.15, bad_reads=0.15, aborts=0.05, evictions=0.5)
CLIENTS = Faults(held=0.2, reused=0.3, rejected=0.1, aborts=0.1, evictions=0.3)
CRASHES = Faults(crashes=0.05, bad_handshakes=0.15, reused=0.1, evictions=0.2)
FROZEN = Faults(frozen=0.1, slow_reads=0.2, evictions=0.5)
ALL = Faults(
    lost=0.08, repeated=0.08, late=0.04, damaged=0.01, slow_reads=0.08, bad_reads=0.08, bad_handshakes=0.08, held=0.1,
    reused=0.15, rejected=0.05, crashes=0.02, frozen=0.03, aborts=0.06,
    evictions=0.3,
)  # fmt: skip
TIGHT = msgspec.structs.replace(PROFILE, reserve=False, kv_blocks=20, requests_max=4)
"""Answers grow block by block, and there are too few: the newest is preempted."""
KINDS = [NO_FAULTS, LOSSY, BAD_DATA, CLIENTS, CRASHES, FROZEN, ALL, ALL]


def make(
    seed: int, ranks: tuple[int, int] = (1, 1), faults: Faults | None = None, *, two_turns: bool | None = None
) -> World:
    """Make the world of a seed: how many engines, which terms, what goes wrong."""
    chance = random.Random(seed ^ 0x5EED)
    terms = msgspec.structs.replace(
        TERMS,
        bidirectional_kv_xfer=chance.random() < 0.5 if two_turns is None else two_turns,
        design=LeaseDesign.SINGLE_TIMEOUT if two_turns is None and chance.random() < 0.1 else LeaseDesign.LEASE,
        kv_load_failure_policy=LoadPolicy.FAIL if chance.random() < 0.25 else LoadPolicy.RECOMPUTE,
    )
    profile = TIGHT if chance.random() < 0.25 else PROFILE
    drawn = chance.choice(KINDS)
    return World(
        seed, ranks=ranks, engines=(chance.choice([1, 2]), chance.choice([1, 2])), terms=terms, profile=profile,
        faults=drawn if faults is None else faults,
    )  # fmt: skip


def run(
    seed: int, ranks: tuple[int, int] = (1, 1), faults: Faults | None = None, *, two_turns: bool | None = None
) -> World:
    """Run a history to its end, or to the first broken invariant."""
    world = make(seed, ranks, faults, two_turns=two_turns)
    for _ in range(world.between(TURNS_MIN, TURNS_MAX)):
        happen(world)
        world.step(world.chance.choice([20 * MS, 50 * MS, 100 * MS, STEP_MAX_NS]))
        if world.broken:
            return world
    world.drain()
    return world


def happen(world: World, rate: float = 0.16) -> None:
    """Let clients and faults do something, or nothing."""
    faults = world.faults
    if world.happens(rate):
        readers, turns = world.chance.choice([1, 1, 1, 2, 3]), world.chance.choice([1, 2, 3])
        answer = world.between(1, 4) if world.profile.reserve else ANSWER_MAX
        world.arrive(world.chance.choice(library()), answer, readers=readers, turns=turns)
    if world.legs and world.happens(faults.aborts):
        leg: Leg = world.chance.choice(world.legs)
        world.abort(leg)
    if world.happens(faults.frozen):
        world.freeze(world.chance.choice(world.slots), world.between(300 * MS, 5000 * MS))
    if world.happens(faults.crashes):
        world.crash(world.chance.choice(world.slots), world.between(100 * MS, 3000 * MS))


def run_samples(seed: int, ranks: tuple[int, int] = (1, 1), faults: Faults | None = NO_FAULTS) -> World:
    """Run a history in which several samples of one prompt queue at one decode engine that takes one at a time."""
    profile = msgspec.structs.replace(PROFILE, requests_max=1)
    world = World(seed, ranks=ranks, engines=(1, 1), profile=profile, faults=faults or NO_FAULTS)
    for _ in range(world.between(2, 4)):
        prompt = world.chance.choice(library())
        world.arrive(prompt, 20, readers=world.between(2, 4))
    for _ in range(400):
        if world.happens(world.faults.frozen):
            world.freeze(world.prefills[0], world.between(300 * MS, 5000 * MS))
        world.step(world.between(20 * MS, STEP_MAX_NS))
        if world.broken or not (world.legs or world.open_jobs):
            break
    if not world.broken:
        world.drain()
    return world


def run_sessions(seed: int, ranks: tuple[int, int] = (1, 1), faults: Faults | None = NO_FAULTS) -> World:
    """Run a history of a few sessions of three turns, in which nothing is found in a cache."""
    terms = msgspec.structs.replace(TERMS, bidirectional_kv_xfer=True)
    faults = msgspec.structs.replace(faults or NO_FAULTS, evictions=1.0)
    world = World(seed, ranks=ranks, engines=(1, 1), terms=terms, faults=faults)
    for _ in range(4):
        world.arrive(world.chance.choice(library()), world.between(1, 4), turns=3)
    for _ in range(400):
        if world.happens(world.faults.frozen):
            world.freeze(world.chance.choice(world.slots), world.between(300 * MS, 5000 * MS))
        world.step(world.between(20 * MS, STEP_MAX_NS))
        if world.broken or not (world.legs or world.open_jobs):
            break
    if not world.broken:
        world.drain()
    return world


def run_stopped_reader(seed: int, ranks: tuple[int, int] = (1, 1), faults: Faults | None = NO_FAULTS) -> World:
    """Run a history in which the reader is stopped from the start of its read until long after the lease's end."""
    world = World(seed, ranks=ranks, engines=(1, 1), faults=faults or NO_FAULTS)
    world.calm = False
    world.network.read_policy = lambda _reader, _holder: ReadPlan(world.between(3500 * MS, 4500 * MS))
    world.arrive(world.chance.choice(library()), 4)
    for _ in range(200):
        world.step(20 * MS)
        reader = world.decodes[0].engine
        if world.broken or (reader is not None and reader.transport._reads):
            break
    world.freeze(world.decodes[0], 6 * S)
    for _ in range(70):
        world.step(100 * MS)
    if not world.broken:
        world.drain()
    return world

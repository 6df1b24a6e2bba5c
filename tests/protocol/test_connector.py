"""What one connector does for one request, in a small world where nothing else happens."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from reference_impl.content import BLOCK_TOKENS
from reference_impl.rules.events import EventKind
from reference_impl.rules.handoff import Asked, BadHandOff, HandOff, parse
from reference_impl.rules.messages import How
from reference_impl.rules.terms import KvTerms, LoadPolicy
from reference_impl.transport.base import ReadResult
from reference_impl.transport.memory import ReadPlan
from tests.protocol.world import HOST, MS, TERMS, Engine, Job, S, World, library, right_answer

TWO_TURNS = msgspec.structs.replace(TERMS, bidirectional_kv_xfer=True)
PROMPT = library()[1]


def small(terms: KvTerms = TERMS, seed: int = 5, engines_of: tuple[int, int] = (1, 1)) -> World:
    """One engine a side; requests are driven by hand, so leases may expire."""
    world = World(seed, engines=engines_of, terms=terms)
    world.calm = False
    return world


def engines(world: World) -> tuple[Engine, Engine]:
    prefill, decode = world.prefills[0].engine, world.decodes[0].engine
    assert prefill is not None
    assert decode is not None
    return prefill, decode


def pass_time(world: World, seconds: float) -> None:
    for _ in range(round(seconds * 20)):
        world.step(50 * MS)
    assert world.broken == [], world.history()


def said(world: World, kind: EventKind) -> list[tuple[str, dict[str, Any]]]:
    return [(subject, detail) for _, _, what, subject, detail in world.events if what == kind]


def prefilled(world: World, *, readers: int = 1) -> Job:
    """A job whose first leg is over, and whose hand-off the router holds."""
    job = Job("job", PROMPT, 4, readers, 0)
    world._hand_over = lambda leg, params: setattr(leg.job, "params", params)  # type: ignore[method-assign]
    world.prefill(job)
    pass_time(world, 0.3)
    assert job.params is not None
    return job


def decoded(world: World, job: Job, seconds: float = 3.0) -> None:
    """Run the second leg; the world compares its answer with the oracle's."""
    before = world.tally.answered
    world.decode(job)
    pass_time(world, seconds)
    assert world.tally.answered == before + 1


def load_of(params: dict[str, Any]) -> HandOff:
    load = parse(params, block_tokens=BLOCK_TOKENS, hosts=(HOST,)).load
    assert load is not None
    return load


@pytest.mark.rule("KVC-LEASE-001")
def test_a_prefill_for_a_remote_decode_is_kept_and_its_hand_off_is_complete() -> None:
    world = small()
    params = prefilled(world).params
    assert params is not None
    assert None not in [value for name, value in params.items() if name != "remote_blocks_expiry_time"]
    load = load_of(params)
    prefill, _ = engines(world)
    assert (load.engine_id, load.port, load.tokens) == (prefill.engine_id, 7000, len(PROMPT))
    assert prefill.core.pool.held == len(load.blocks) == -(-len(PROMPT) // BLOCK_TOKENS)
    assert said(world, EventKind.LEASE_GRANTED)[0][1]["duration_s"] == TERMS.kv_lease_duration


@pytest.mark.rule("KVC-LEASE-002")
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_prefill_that_ends_in_another_way_frees_at_once_and_hands_nothing_over(steps: int) -> None:
    world = small()
    world.prefill(job := Job("job", PROMPT, 4, 1, 0))
    for _ in range(steps):
        world.step(50 * MS)
    world.abort(world.legs[0])
    pass_time(world, 0.2)
    prefill, _ = engines(world)
    assert job.params is None
    assert prefill.core.pool.held == 0
    assert said(world, EventKind.LEASE_GRANTED) == []


@pytest.mark.rule("KVC-LEASE-005")
@pytest.mark.rule("KVC-LEASE-007")
def test_a_lease_that_nobody_renews_ends_on_an_idle_engine() -> None:
    world = small()
    prefilled(world)
    pass_time(world, 3.0)
    prefill, _ = engines(world)
    assert prefill.core.pool.held == 0
    assert prefill.connector.producer.counts.expired == 1
    assert not prefill.connector.busy


@pytest.mark.rule("KVC-XFER-001")
@pytest.mark.rule("KVC-REL-001")
def test_the_last_read_frees_the_holders_blocks_at_once() -> None:
    world = small()
    decoded(world, prefilled(world))
    prefill, decode = engines(world)
    assert [detail["how"] for _, detail in said(world, EventKind.LEASE_RELEASED)] == [How.READ]
    assert prefill.core.pool.held == decode.core.pool.held == 0
    assert decode.core.totals.recomputed_tokens == 0


@pytest.mark.rule("KVC-REL-003")
def test_a_prefix_that_is_here_is_not_read_again_and_the_holder_is_told() -> None:
    world = small()
    decoded(world, prefilled(world))
    decoded(world, prefilled(world))
    assert [detail["how"] for _, detail in said(world, EventKind.LEASE_RELEASED)] == [How.READ, How.HIT]
    assert len(said(world, EventKind.LOAD_DONE)) == 1


@pytest.mark.rule("KVC-REL-002")
def test_a_request_that_is_refused_at_the_door_lets_go_of_the_holders_blocks() -> None:
    world = small()
    job = prefilled(world)
    world.decode(job, 10_000)
    assert world.tally.refused == 1
    pass_time(world, 1.0)
    assert [detail["how"] for _, detail in said(world, EventKind.LEASE_RELEASED)] == [How.ABORT]


@pytest.mark.rule("KVC-REL-007")
def test_a_used_hand_off_is_recomputed() -> None:
    world = small()
    job = prefilled(world)
    decoded(world, job)
    prefill, decode = engines(world)
    decode.core.pool.forget()  # so that it has to be read
    decoded(world, job)
    assert decode.core.totals.recomputed_tokens == len(PROMPT)
    assert prefill.connector.producer.counts.late_claims == 1


@pytest.mark.rule("KVC-LEASE-011")
def test_a_hand_off_that_is_held_past_the_lease_is_recomputed() -> None:
    world = small()
    job = prefilled(world)
    pass_time(world, 4.0)
    decoded(world, job)
    assert [detail["reason"] for _, detail in said(world, EventKind.LOAD_FAILED)] == [
        "the holder refuses: no lease: it has ended, or never was"
    ]


@pytest.mark.rule("KVC-XFER-002")
@pytest.mark.parametrize("result", [ReadResult.TORN, ReadResult.FAILED])
def test_a_bad_read_is_recomputed_and_poisons_no_cache(result: ReadResult) -> None:
    world = small()
    world.network.read_policy = lambda _reader, _holder: ReadPlan(20 * MS, result)
    decoded(world, prefilled(world))
    decoded(world, prefilled(world))  # out of its own cache
    _, decode = engines(world)
    assert decode.connector.consumer.counts.failed_transfers == 1
    assert decode.connector.consumer.counts.torn == (result is ReadResult.TORN)


def test_by_policy_fail_a_bad_read_ends_its_request_with_the_reason() -> None:
    """R2."""
    world = small(msgspec.structs.replace(TERMS, kv_load_failure_policy=LoadPolicy.FAIL))
    world.network.read_policy = lambda _reader, _holder: ReadPlan(20 * MS, ReadResult.FAILED)
    job = prefilled(world)
    world.decode(job)
    leg = world.legs[-1]
    pass_time(world, 2.0)
    assert leg.end == "failed: the network failed"
    _, decode = engines(world)
    assert decode.core.pool.held == 0


@pytest.mark.rule("KVC-XFER-003")
@pytest.mark.rule("KVC-XFER-004")
def test_a_read_that_does_not_end_is_left_behind_with_its_blocks() -> None:
    world = small()
    world.network.read_policy = lambda _reader, _holder: ReadPlan(20 * S)
    decoded(world, prefilled(world), 5.0)
    _, decode = engines(world)
    assert decode.core.pool.held == -(-len(PROMPT) // BLOCK_TOKENS) + (len(PROMPT) % BLOCK_TOKENS > 12)
    pass_time(world, 20.0)
    assert decode.core.pool.held == 0


@pytest.mark.rule("KVC-HSK-003")
def test_nothing_is_read_of_a_holder_that_was_restarted_on_the_same_address() -> None:
    world = small()
    job = prefilled(world)
    world.crash(world.prefills[0], 10 * MS)
    decoded(world, job)
    failed = said(world, EventKind.LOAD_FAILED)
    assert [detail["reason"] for _, detail in failed] == ["no connection to p0.1: p0.2 lives there now"]


@pytest.mark.rule("KVC-HSK-004")
def test_a_reader_that_was_restarted_gets_service_again_without_touching_the_writer() -> None:
    world = small()
    first, second = prefilled(world), prefilled(world)
    world.decode(first)
    pass_time(world, 0.1)
    world.crash(world.decodes[0], 10 * MS)
    pass_time(world, 0.1)
    decoded(world, second)
    assert world.prefills[0].lives == 1
    assert len(said(world, EventKind.LOAD_DONE)) == 1
    pass_time(world, 4.0)
    assert engines(world)[0].core.pool.held == 0


@pytest.mark.rule("KVC-HB-009")
def test_a_dead_holder_delays_nobody_elses_reader() -> None:
    """L6."""
    world = small(engines_of=(2, 1))
    dead, well = prefilled(world), prefilled(world)
    while well.params and dead.params and well.params["remote_port"] == dead.params["remote_port"]:
        well = prefilled(world)
    assert dead.params is not None
    world.crash(next(s for s in world.prefills if s.port == dead.params["remote_port"]), 100 * S)
    for job in (dead, dead, well):
        world.decode(job)
    pass_time(world, 10)
    assert world.legs == []
    assert [detail["remote_engine_id"] for _, detail in said(world, EventKind.LOAD_DONE)] == [
        well.params["remote_engine_id"] if well.params else ""
    ]


def turn(world: World) -> HandOff:
    """The hand-off of a finished turn."""
    params: list[dict[str, Any]] = []
    world._think = lambda _leg, given: params.append(given)  # type: ignore[method-assign]
    job = prefilled(world)
    job.turns_left = 1
    decoded(world, job)
    return load_of(params[0])


def follow(load: HandOff) -> Job:
    """The request that goes on from a turn."""
    prompt = np.concatenate([PROMPT, np.array(right_answer(PROMPT, 4), np.int64), np.arange(20)])
    return Job("next", prompt, 4, 1, 0, load)


@pytest.mark.rule("KVC-CLK-001")
@pytest.mark.rule("KVC-CLK-005")
@pytest.mark.rule("KVC-CLK-008")
@pytest.mark.parametrize("ahead_s", [-5000, 0, 5000, 400_000])
def test_a_turn_is_handed_over_with_its_expiry_and_read_whatever_the_clocks_show(ahead_s: int) -> None:
    world = small(TWO_TURNS)
    world.decodes[0].clock._offset_ns = world.prefills[0].clock._offset_ns + ahead_s * S
    load = turn(world)
    prefill, decode = engines(world)
    assert load.turn
    assert load.tokens == len(PROMPT) + 3
    left = load.expiry_ns - decode.clock.now_ns()
    assert 0 < left <= TWO_TURNS.ttl_ns
    prefill.core.pool.forget()
    world.prefill(follow(load))
    pass_time(world, 1.0)
    judged = said(world, EventKind.TURN_JUDGED)
    assert [detail["live"] for _, detail in judged] == [True]
    assert prefill.connector.consumer.counts.loaded == 1
    assert decode.core.pool.held == 0, "the turn's only reader has come"


@pytest.mark.rule("KVC-CLK-004")
def test_an_expired_turn_is_recomputed_whatever_the_policy() -> None:
    world = small(msgspec.structs.replace(TWO_TURNS, kv_load_failure_policy=LoadPolicy.FAIL))
    load = turn(world)
    prefill, _ = engines(world)
    prefill.core.pool.forget()
    pass_time(world, 6.0)
    job = follow(load)
    world.prefill(job)
    pass_time(world, 1.0)
    assert job.params is not None
    assert world.tally.failed == 0
    assert prefill.connector.consumer.counts.expired_turns == 1


@pytest.mark.rule("KVC-CLK-007")
def test_a_client_that_keeps_its_session_alive_keeps_its_blocks() -> None:
    world = small(TWO_TURNS)
    load = turn(world)
    prefill, decode = engines(world)
    pass_time(world, 1.0)
    params = decode.connector.renew(load, decode.clock.now_ns())
    assert params is not None
    world.watch.renewed(leg := world_leg(decode, load))
    assert leg is not None
    renewed = load_of(params)
    assert renewed.expiry_ns > load.expiry_ns
    prefill.core.pool.forget()
    pass_time(world, 3.5)
    world.prefill(follow(renewed))
    pass_time(world, 1.0)
    assert prefill.connector.consumer.counts.loaded == 1
    pass_time(world, 6.0)
    assert decode.connector.renew(renewed, decode.clock.now_ns()) is None


def world_leg(engine: Engine, load: HandOff) -> Any:
    """What `Watch.renewed` wants to know of a leg that has ended."""
    return type("Leg", (), {"engine": engine, "request_id": load.request_id})()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine_id": "p0.1"}, "remote_engine_id"),
        ({"tokens": 16, "blocks": [1]}, "remote_num_tokens"),
        ({"tokens": 1600, "blocks": list(range(100))}, "remote_num_tokens"),
        ({"expiry_ns": S}, "remote_blocks_expiry_time"),
    ],
)
def test_a_hand_off_that_does_not_fit_the_request_is_refused_by_its_field(changes: dict[str, Any], field: str) -> None:
    world = small()
    prefill, _ = engines(world)
    whole = HandOff(
        engine_id="x", request_id="x/1", host=HOST, port=1, blocks=list(range(-(-len(PROMPT) // 16))),
        tokens=len(PROMPT), ranks=1,
    )  # fmt: skip
    asked = parse(msgspec.structs.replace(whole, **changes).params(), block_tokens=BLOCK_TOKENS, hosts=(HOST,))
    with pytest.raises(BadHandOff) as caught:
        prefill.connector.submit("r", PROMPT, 4, asked, 0)
    assert caught.value.param == f"kv_transfer_params.{field}"
    assert prefill.core.waiting == type(prefill.core.waiting)()


def test_what_is_to_be_said_keeps_an_idle_engine_looking() -> None:
    """L4, L5: an abort on an engine without other traffic is told at once."""
    world = small()
    job = prefilled(world)
    prefill, _ = engines(world)
    assert job.params is not None
    prefill.connector.producer.abort(load_of(job.params).request_id)
    assert prefill.connector.busy
    prefill.connector.poll(prefill.clock.now_ns())
    assert prefill.core.pool.held == 0
    assert not prefill.connector.busy


def test_a_holder_that_gives_up_on_an_engine_still_hears_it() -> None:
    """L2: in two-turn mode both sides read, and one that cannot reach the other as a reader is still its holder."""
    world = small(TWO_TURNS)
    prefill, decode = engines(world)
    job = prefilled(world)
    decoded(world, prefilled(world))
    prefill.connector.consumer.arrive("x", turn_of(decode), "", prefill.clock.now_ns())
    prefill.shaker._there = lambda engine_id, *_: prefill.shaker._fail(engine_id, False, "refused")  # type: ignore[method-assign]
    pass_time(world, 0.1)
    prefill.connector.consumer.lost(decode.engine_id, "refused")
    pass_time(world, 0.1)
    world.decode(job)
    pass_time(world, 2.0)
    assert prefill.transport.strangers == 0
    prefill.connector.consumer.abort("x")


def turn_of(engine: Engine) -> HandOff:
    """A hand-off of a turn that an engine may once have held."""
    return HandOff(
        engine_id=engine.engine_id, request_id=f"{engine.engine_id}/0", host=HOST, port=engine.slot.port, blocks=[1],
        tokens=16, ranks=1, expiry_ns=engine.clock.now_ns() + 5 * S,
    )  # fmt: skip


def test_a_prefill_that_answers_more_than_asked_hands_over_its_prompt_alone() -> None:
    world = small()
    prefill, _ = engines(world)
    connector = prefill.connector
    sequence = connector.submit("long", PROMPT, 40, Asked(keep=True), prefill.clock.now_ns())
    while not sequence.finished:
        prefill.core.step()
    params = connector.finished(sequence, prefill.clock.now_ns())
    assert params is not None
    assert len(load_of(params).blocks) == -(-len(PROMPT) // BLOCK_TOKENS)
    assert prefill.core.pool.held == len(load_of(params).blocks)


@pytest.mark.rule("KVC-CLK-007")
def test_a_renewal_with_other_blocks_than_those_kept_is_refused() -> None:
    world = small(TWO_TURNS)
    prefill, _ = engines(world)
    producer = prefill.connector.producer
    producer.grant_turn("turn", [1, 2], content="", now_ns=prefill.clock.now_ns())
    kept = HandOff(engine_id=prefill.engine_id, request_id="turn", host=HOST, port=1, blocks=[1, 2], tokens=32, ranks=1)
    forged = msgspec.structs.replace(kept, blocks=[3, 4])
    assert prefill.connector.renew(forged, prefill.clock.now_ns()) is None
    assert prefill.connector.renew(kept, prefill.clock.now_ns()) is not None
    assert said(world, EventKind.TURN_RENEWED)[0][0] == "turn"

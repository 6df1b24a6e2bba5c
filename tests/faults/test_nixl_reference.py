"""Faults inside the NIXL agents of a reference deployment: the protocol's rules, with messages that really get lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from faults.nixl.channel import FOLDER_VARIABLE, Desk, made
from faults.nixl.fault import NixlFault
from faults.nixl.orders import Action, Direction, Kind, Order, Report, Said, What
from reference_impl.rules.events import Event, EventKind
from reference_impl.transport.agent import WRAPPER_VARIABLE
from tests.deployment.split import Client, Split, eventually, prompt_of, split, under_way

pytestmark = [pytest.mark.nixl]
LEASE_S = 3
PROOF_S = 10.0
ANSWER = 5
KV_BLOCK_BYTES = 4096


class Bench(NamedTuple):
    served: Split
    desk: Desk


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("faulty")
    desk = Desk(made(folder / "faults"))
    desk.place(Order(id="first", what=What.HANDSHAKE, action=Action.FAIL, engine="d0", count=1))
    options = ["--prefill", "1", "--decode", "1", "--decode-slots", "1", "--kv-lease-duration", str(LEASE_S)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(desk.folder))
        patch.setenv(WRAPPER_VARIABLE, "faults.nixl.agent:wrapped_reference")
        with split(folder, *options) as served:
            yield Bench(served, desk)


@pytest_asyncio.fixture
async def client(bench: Bench) -> AsyncIterator[Client]:
    async with bench.served.client() as found:
        yield found
        await found.until_free("p0", "d0")
        await found.assert_serves(len(bench.desk.reports()))


@asynccontextmanager
async def acting(bench: Bench, order: Order) -> AsyncIterator[NixlFault]:
    """Have a fault act, prove it, and prove that it no longer does."""
    fault = NixlFault(bench.desk, order, within_s=PROOF_S)
    await fault.inject()
    try:
        yield fault
        evidence = await fault.prove()
        assert evidence.holds, evidence.shown_by
    finally:
        await fault.heal()
    evidence = await fault.prove_healed()
    assert evidence.holds, evidence.shown_by


async def end_of(bench: Bench, handoff: dict[str, Any]) -> Event:
    """Wait for the end of a hand-off's lease."""

    async def ended() -> Event | None:
        found = bench.served.events(EventKind.LEASE_RELEASED, EventKind.LEASE_EXPIRED)
        return next((event for event in found if event.subject == handoff["remote_request_id"]), None)

    event = await eventually(ended, 3 * LEASE_S, "the lease ends")
    assert event is not None
    return event


def about(desk: Desk, handoff: dict[str, Any], kind: Kind, said: Said, engine: str = "p0") -> list[Report]:
    whole = [r for r in desk.reports() if r.engine.startswith(engine) and (r.kind, r.said) == (kind, said)]
    return [r for r in whole if handoff["remote_request_id"] in r.requests]


async def test_the_first_handshake_fails_and_a_later_one_does_not(bench: Bench, client: Client) -> None:
    """Whoever heard of the peer first: the reader's own retry mends it, or the request is computed."""
    prompt = prompt_of(1, 200)
    answer = await client.decoded(prompt, ANSWER, await client.prefilled(prompt))
    assert answer.tokens == client.right(prompt, ANSWER)
    bench.desk.remove("first")
    handshakes = [r for r in bench.desk.reports() if r.what is What.HANDSHAKE and r.engine.startswith("d0")]
    assert handshakes[0].said is Said.STRUCK


async def test_only_the_lease_whose_heartbeats_are_lost_expires(bench: Bench, client: Client) -> None:
    """Both wait behind a request that takes longer than their leases; one shares heartbeats with the other."""
    lost_prompt, kept_prompt = prompt_of(2, 200), prompt_of(3, 200)
    async with under_way(client.complete(prompt_of(4, 50), 600)):  # takes six seconds
        await client.until_metric("d0", "vllm:num_requests_running", lambda n: n == 1, "it is busy")
        lost, kept = await client.prefilled(lost_prompt), await client.prefilled(kept_prompt)
        order = Order(
            id="lost", kind=Kind.HEARTBEAT, action=Action.DROP, request=lost["remote_request_id"], engine="p0"
        )
        async with (
            acting(bench, order),
            under_way(client.decoded(lost_prompt, ANSWER, lost)) as first,
            under_way(client.decoded(kept_prompt, ANSWER, kept)) as second,
        ):
            assert (await end_of(bench, lost)).kind is EventKind.LEASE_EXPIRED
            assert (await first).tokens == client.right(lost_prompt, ANSWER)
            assert (await second).tokens == client.right(kept_prompt, ANSWER)
    assert (await end_of(bench, kept)).kind is EventKind.LEASE_RELEASED
    assert about(bench.desk, kept, Kind.HEARTBEAT, Said.PASSED)
    assert not about(bench.desk, lost, Kind.HEARTBEAT, Said.PASSED)


@pytest.mark.parametrize(("engine", "direction"), [("d0", Direction.SENT), ("p0", Direction.RECEIVED)])
async def test_a_lost_completion_leaves_the_blocks_to_the_lease(
    bench: Bench, client: Client, engine: str, direction: Direction
) -> None:
    prompt = prompt_of(5, 200 + len(direction))
    handoff = await client.prefilled(prompt)
    order = Order(id=f"lost-{engine}", kind=Kind.COMPLETION, action=Action.DROP, direction=direction, engine=engine,
                  request=handoff["remote_request_id"])  # fmt: skip
    async with acting(bench, order):
        assert (await client.decoded(prompt, ANSWER, handoff)).tokens == client.right(prompt, ANSWER)
        assert (await end_of(bench, handoff)).kind is EventKind.LEASE_EXPIRED


async def test_a_completion_that_comes_twice_counts_once(bench: Bench, client: Client) -> None:
    prompt = prompt_of(6, 200)
    before = await client.metrics("p0")
    handoff = await client.prefilled(prompt)
    order = Order(id="twice", kind=Kind.COMPLETION, action=Action.REPEAT, request=handoff["remote_request_id"])
    async with acting(bench, order):
        assert (await client.decoded(prompt, ANSWER, handoff)).tokens == client.right(prompt, ANSWER)
        assert (await end_of(bench, handoff)).kind is EventKind.LEASE_RELEASED
    assert await client.grown("p0", before, "pdproof:leases_released_total") == [1]


async def test_a_completion_that_comes_late_ends_the_lease_late(bench: Bench, client: Client) -> None:
    prompt = prompt_of(7, 200)
    handoff = await client.prefilled(prompt)
    order = Order(id="late", kind=Kind.COMPLETION, action=Action.DELAY, direction=Direction.SENT, engine="d0",
                  request=handoff["remote_request_id"], seconds=0.5)  # fmt: skip
    async with acting(bench, order) as fault:
        await client.decoded(prompt, ANSWER, handoff)
        ended = await end_of(bench, handoff)
        assert ended.kind is EventKind.LEASE_RELEASED
        assert ended.t_ns - fault.struck()[0].t_ns >= 500_000_000


@pytest.mark.parametrize("kind", [Kind.CLAIM, Kind.ANSWER])
@pytest.mark.parametrize("action", [Action.DROP, Action.REPEAT, Action.DAMAGE, Action.GARBLE])
async def test_claims_and_grants_may_go_wrong_in_any_way(
    bench: Bench, client: Client, kind: Kind, action: Action
) -> None:
    seed = 100 * list(Kind).index(kind) + list(Action).index(action)  # each its own: a prefix that is here is not read
    prompt = prompt_of(1000 + seed, 200)
    handoff = await client.prefilled(prompt)
    order = Order(id=f"{kind}-{action}", kind=kind, action=action, request=handoff["remote_request_id"], count=1)
    async with acting(bench, order):
        assert (await client.decoded(prompt, ANSWER, handoff)).tokens == client.right(prompt, ANSWER)


async def test_a_read_that_fails_is_computed(bench: Bench, client: Client) -> None:
    prompt = prompt_of(9, 200)
    before = await client.metrics("d0")
    handoff = await client.prefilled(prompt)
    async with acting(bench, Order(id="fails", what=What.TRANSFER, action=Action.FAIL, engine="d0")):
        assert (await client.decoded(prompt, ANSWER, handoff)).tokens == client.right(prompt, ANSWER)
    assert await client.grown("d0", before, "vllm:nixl_num_failed_transfers_total") == [1]


async def test_a_read_that_takes_long_keeps_its_lease_until_it_gives_up(bench: Bench, client: Client) -> None:
    prompt = prompt_of(10, 200)
    handoff = await client.prefilled(prompt)
    async with acting(bench, Order(id="long", what=What.TRANSFER, action=Action.STALL, engine="d0", seconds=1)):
        assert (await client.decoded(prompt, ANSWER, handoff)).tokens == client.right(prompt, ANSWER)
    assert (await end_of(bench, handoff)).kind is EventKind.LEASE_RELEASED


@pytest.mark.parametrize("block", [0, 5, 11])
async def test_a_corrupted_block_shows_in_the_answer(bench: Bench, client: Client, block: int) -> None:
    """The negative control of the content oracle: no rule of the protocol can notice this."""
    prompt = prompt_of(11 + block, 200)
    handoff = await client.prefilled(prompt)
    order = Order(id=f"corrupt-{block}", what=What.TRANSFER, action=Action.CORRUPT, engine="d0", block=block,
                  block_bytes=KV_BLOCK_BYTES)  # fmt: skip
    async with acting(bench, order):
        assert (await client.decoded(prompt, ANSWER, handoff)).tokens != client.right(prompt, ANSWER)


async def test_an_order_for_a_request_that_never_comes_cannot_be_proved(bench: Bench, client: Client) -> None:
    fault = NixlFault(bench.desk, Order(id="never", action=Action.DROP, request="nobody"), within_s=0.5)
    await fault.inject()
    await client.assert_serves(12)
    assert not (await fault.prove()).holds
    await fault.heal()
    assert (await fault.prove_healed()).holds


def test_without_the_variable_agents_are_nixls_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reference_impl.transport.agent import NixlAgent

    monkeypatch.delenv(WRAPPER_VARIABLE, raising=False)
    agent = NixlAgent("plain")
    assert type(agent._nixl).__name__ == "nixl_agent"
    agent.close()

"""A client that goes away, at every stage of a request in two legs: what was kept for it is let go of (L4, K1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from reference_impl.realclock import now_ns
from reference_impl.rules.events import Event, EventKind
from tests.deployment.split import Client, Split, eventually, prompt_of, split, under_way

pytestmark = [pytest.mark.nixl]

LEASE_S = 4.5
PROMPT_S = 2.0
"""Less than an extension (3 s): what has gone by then was let go of, and did not run out."""
LONG = 2000
"""Tokens of an answer that takes twenty seconds."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    options = ["--prefill", "1", "--decode", "1", "--decode-slots", "1", "--kv-lease-duration", str(LEASE_S)]
    with split(tmp_path_factory.mktemp("aborts"), *options) as found:
        yield found


@pytest_asyncio.fixture
async def client(served: Split) -> AsyncIterator[Client]:
    async with served.client() as found:
        yield found
        await found.until_free("p0", "d0", timeout_s=PROMPT_S)
        await found.assert_serves(now_ns() % 99_991)
        await found.until_free("p0", "d0", timeout_s=PROMPT_S)


def leases_since(served: Split, began_ns: int) -> list[Event]:
    return [e for e in served.events(EventKind.LEASE_GRANTED) if e.t_ns >= began_ns]


def ends_of(served: Split, granted: list[Event]) -> list[str]:
    """How leases ended, in the order of their grants; "" for one that stands."""
    ends = {e.subject: e for e in served.events(EventKind.LEASE_RELEASED, EventKind.LEASE_EXPIRED)}
    return [str(ends[e.subject].detail.get("how", "expired")) if e.subject in ends else "" for e in granted]


@pytest.mark.rule("KVC-LEASE-002")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_while_it_is_prefilled(client: Client, served: Split, stream: bool) -> None:
    began_ns = now_ns()
    async with under_way(client.complete(prompt_of(1 + stream, 4000), 5, stream=stream)):
        await client.until_metric("p0", "vllm:num_requests_running", lambda n: n == 1, "it is prefilled")
    await client.until_free("p0", "d0", timeout_s=PROMPT_S)
    assert leases_since(served, began_ns) == []


async def test_between_the_legs(client: Client, served: Split) -> None:
    """Nobody can tell the holder, so its lease ends by itself, and the router counts a hand-off that nobody got."""
    began_ns = now_ns()
    await client.hold(60, 1)
    before = await client.metrics("p0")
    async with under_way(client.complete(prompt_of(3, 200), 5)):
        await client.until_metric("p0", "pdproof:leases_live", lambda n: n == 1, "it is prefilled")
        await client.until_metric("", "pdproof:router_handoffs_holding", lambda n: n == 1, "its hand-off is held")
    await client.until_metric(
        "", "pdproof:router_handoffs_holding", lambda n: n == 0, "it is not held any more", PROMPT_S
    )
    await client.until_free("p0", timeout_s=LEASE_S + 1)
    assert ends_of(served, leases_since(served, began_ns)) == ["expired"]
    assert await client.grown("p0", before, "vllm:nixl_num_kv_expired_reqs_total") == [1]
    assert (await client.metrics(""))["pdproof:router_handoffs_dropped_total"] == 1


@pytest.mark.rule("KVC-REL-002", "KVC-HB-004")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_while_it_is_queued_for_decoding(client: Client, served: Split, stream: bool) -> None:
    began_ns = now_ns()
    async with under_way(client.complete(prompt_of(10 + stream, 100), LONG)):
        await client.until_metric("d0", "vllm:num_requests_running", lambda n: n == 1, "the slot is taken")
        async with under_way(client.complete(prompt_of(12 + stream, 300), 5, stream=stream)):
            await client.until_metric("d0", "vllm:num_requests_waiting", lambda n: n == 1, "it is queued")
            await client.until_metric("p0", "pdproof:leases_live", lambda n: n == 1, "its blocks are kept")
        await client.until_metric("p0", "pdproof:leases_live", lambda n: n == 0, "they are not any more", PROMPT_S)
        await client.until_metric("d0", "vllm:num_requests_waiting", lambda n: n == 0, "nothing is queued", PROMPT_S)
        assert ends_of(served, leases_since(served, began_ns)) == ["read", "abort"]
        running = (await client.metrics("d0"))["vllm:num_requests_running"]
        assert running == 1, "the other one goes on"


@pytest.mark.rule("KVC-REL-002", "KVC-XFER-003")
async def test_while_it_loads(client: Client, served: Split) -> None:
    """The holder stands still, so the claim is not answered; when it goes on, it learns that nobody wants to read."""
    began_ns = now_ns()
    prompt = prompt_of(20, 300)
    await client.assert_serves(21)  # the two are connected
    params = await client.prefilled(prompt)
    with served.stopped("p0"):
        async with under_way(client.decoded(prompt, 5, params)):
            await client.until_metric("d0", "pdproof:loads_running", lambda n: n == 1, "it loads")
        await client.until_metric("d0", "pdproof:loads_running", lambda n: n == 0, "it does not any more", PROMPT_S)
        await client.until_free("d0", timeout_s=PROMPT_S)
    await client.until_free("p0", timeout_s=PROMPT_S)
    assert ends_of(served, leases_since(served, began_ns)[-1:]) == ["abort"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_while_it_decodes(client: Client, served: Split, stream: bool) -> None:
    began_ns = now_ns()
    async with under_way(client.complete(prompt_of(30 + stream, 300), LONG, stream=stream)):
        await client.until_metric("d0", "vllm:num_requests_running", lambda n: n == 1, "it decodes")
        await client.until_metric("p0", "pdproof:leases_live", lambda n: n == 0, "it has been read", PROMPT_S)
    await client.until_free("p0", "d0", timeout_s=PROMPT_S)
    assert ends_of(served, leases_since(served, began_ns)) == ["read"]


async def test_many_go_at_any_moment(client: Client, served: Split) -> None:
    """Forty requests, each broken off a little later than the one before: nothing of any of them stays."""

    async def ask(number: int) -> Any:
        try:
            async with asyncio.timeout(0.02 * number):
                return await client.complete(prompt_of(100 + number, 50 + 20 * number), 10)
        except TimeoutError:
            return None

    answers = await asyncio.gather(*(ask(number) for number in range(40)))
    for number, answer in enumerate(answers):
        if answer is not None:
            assert answer.tokens == client.right(prompt_of(100 + number, 50 + 20 * number), 10)

    async def free() -> bool:
        return not (await client.metrics("p0"))["pdproof:leases_live"]

    await eventually(free, LEASE_S + 1, "those broken off between the legs have run out")
    await client.until_free("p0", "d0", timeout_s=PROMPT_S)

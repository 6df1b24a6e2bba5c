"""Engines that die, stand still, and come back, with blocks kept for somebody: all over real NIXL and real signals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import aiohttp
import pytest

from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S
from reference_impl.rules.events import Event, EventKind
from tests.deployment.split import Answered, Client, Split, eventually, prompt_of, split, under_way

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

LEASE_S = 1.2
EXTENSION_S = LEASE_S * 2 / 3
STEP_S = 0.5
SLACK_S = 1.0
"""On a crowded machine a process may wait for its turn."""
LONG = 1250
"""Tokens of an answer that takes more than twelve seconds: ten lease lengths."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    options = ["--prefill", "1", "--decode", "2", "--decode-slots", "1", "--kv-lease-duration", str(LEASE_S)]
    with split(tmp_path_factory.mktemp("crashes"), *options) as found:
        yield found


async def occupied(stack: AsyncExitStack, client: Client, seed: int, worker_id: str) -> asyncio.Future[Answered]:
    """Take a decode engine's only slot with a long answer."""
    prompt = prompt_of(seed, 50)
    params = await client.prefilled(prompt)
    work = await stack.enter_async_context(under_way(client.decoded(prompt, LONG, params, worker_id)))
    await client.until_metric(worker_id, "vllm:num_requests_running", lambda n: n == 1, "its slot is taken")
    return work


async def queued(
    stack: AsyncExitStack, client: Client, seeds: range, worker_id: str
) -> tuple[list[asyncio.Future[Answered]], list[str]]:
    """Queue requests behind it, until their leases live by heartbeats; return them and their holder's ids."""
    works, ids = [], []
    for seed in seeds:
        params = await client.prefilled(prompt_of(seed, 300))
        ids.append(params["remote_request_id"])
        works.append(
            await stack.enter_async_context(under_way(client.decoded(prompt_of(seed, 300), 5, params, worker_id)))
        )
    await client.until_metric(worker_id, "vllm:num_requests_waiting", lambda n: n == len(seeds), "they are queued")
    before = (await client.metrics("p0"))["pdproof:leases_extended_total"]
    many = 2 * len(seeds)
    await client.until_metric("p0", "pdproof:leases_extended_total", lambda n: n >= before + many, "they are renewed")
    return works, ids


def ends_of(served: Split, ids: list[str], timeout_s: float) -> list[Event]:
    return [served.event_of(EventKind.LEASE_EXPIRED, request_id, timeout_s) for request_id in ids]


@pytest.mark.rule("KVC-LEASE-010", "KVC-HB-001")
async def test_a_reader_queued_for_ten_lease_lengths_keeps_its_lease(served: Split) -> None:
    async with served.client() as client, AsyncExitStack() as stack:
        before = await client.metrics("p0")
        began_ns = now_ns()
        first = await occupied(stack, client, 1, "d1")
        works, ids = await queued(stack, client, range(2, 5), "d1")
        assert (await first).tokens == client.right(prompt_of(1, 50), LONG)
        for seed, work in enumerate(works, 2):
            assert (await work).tokens == client.right(prompt_of(seed, 300), 5)
        assert now_ns() - began_ns > 10 * LEASE_S * NS_PER_S
        for request_id in ids:
            released = served.event_of(EventKind.LEASE_RELEASED, request_id)
            assert released.detail["how"] == "read"
            assert float(str(released.detail["held_ms"])) > 9 * LEASE_S * 1000
        assert await client.grown("p0", before, "vllm:nixl_num_kv_expired_reqs_total") == [0]
        await client.until_free("p0", "d1")


@pytest.mark.rule("KVC-LEASE-009", "KVC-HSK-004")
async def test_a_killed_readers_blocks_are_free_within_one_extension(served: Split) -> None:
    """And the other reader, and the dead one's successor, are served by the same holder."""
    async with served.client() as client, AsyncExitStack() as stack:
        holder = served.engine("p0").pid
        before = await client.metrics("p0")
        await occupied(stack, client, 10, "d0")
        works, ids = await queued(stack, client, range(11, 16), "d0")
        held = await client.metrics("p0")
        assert (held["pdproof:leases_live"], held["pdproof:lease_blocks_held"]) == (5, 5 * 19)
        killed_ns = await asyncio.to_thread(served.kill, "d0")
        ends = await asyncio.to_thread(ends_of, served, ids, EXTENSION_S + STEP_S + SLACK_S)
        last_s = max(e.t_ns - killed_ns for e in ends) / NS_PER_S
        assert last_s <= EXTENSION_S + STEP_S + SLACK_S
        await client.until_free("p0")
        assert await client.grown("p0", before, "vllm:nixl_num_kv_expired_reqs_total") == [5], "each once"
        for work in works:
            with pytest.raises(aiohttp.ClientError):  # the connection ended with the engine
                await work
        await client.assert_serves(17, 300, "d1")
        await client.assert_serves(18, 300, "d0")
        assert served.engine("p0").pid == holder
        await client.until_free("p0", "d0", "d1")


@pytest.mark.rule("KVC-XFER-002")
async def test_a_reader_that_stood_still_for_longer_than_its_lease_never_answers_wrongly(served: Split) -> None:
    """Its blocks are given to others meanwhile, all of them; it notices, and computes (S2)."""
    async with served.client() as client, AsyncExitStack() as stack:
        before = await client.metrics("d0")
        first = await occupied(stack, client, 20, "d0")
        works, ids = await queued(stack, client, range(21, 24), "d0")
        with served.stopped("d0"):
            ends = await asyncio.to_thread(ends_of, served, ids, 3 * LEASE_S)
            assert len(ends) == 3
            await asyncio.gather(*(client.complete(prompt_of(24 + n, 4000), 1, worker_id="p0") for n in range(5)))
        first.cancel()
        for seed, work in enumerate(works, 21):
            assert (await work).tokens == client.right(prompt_of(seed, 300), 5)
        assert await client.grown(
            "d0", before, "pdproof:loads_failed_total", "pdproof:recomputed_tokens_total"
        ) == [3, 900]  # fmt: skip
        late = [e.subject for e in served.events(EventKind.CLAIM_REFUSED)]
        assert set(ids) <= set(late)
        await client.until_free("p0", "d0")


@pytest.mark.rule("KVC-XFER-002", "KVC-XFER-004")
async def test_a_holder_that_stands_still_costs_its_readers_bounded_time(served: Split) -> None:
    """Connected, and silent: the claim is given up after the time that a read may take (L3)."""
    async with served.client() as client:
        await client.assert_serves(80, 300, "d1")
        prompt = prompt_of(81, 300)
        params = await client.prefilled(prompt)
        before = await client.metrics("d1")
        with served.stopped("p0"):
            began_ns = now_ns()
            assert (await client.decoded(prompt, 5, params, "d1")).tokens == client.right(prompt, 5)
            assert now_ns() - began_ns < (EXTENSION_S + SLACK_S) * NS_PER_S
        assert await client.grown("d1", before, "pdproof:loads_failed_total") == [1]
        await client.until_free("p0", "d1")
        await client.assert_serves(82, 300, "d1")


@pytest.mark.rule("KVC-HSK-003", "KVC-HSK-002", "KVC-HB-008")
async def test_a_restarted_holders_old_hand_offs_are_computed_and_its_new_ones_work(served: Split) -> None:
    async with served.client() as client, AsyncExitStack() as stack:
        await client.assert_serves(30, 300, "d1")
        old, waiting = prompt_of(31, 300), prompt_of(32, 300)
        params = await client.prefilled(old)
        first = await occupied(stack, client, 33, "d1")
        before = await client.metrics("d1")
        work = await stack.enter_async_context(
            under_way(client.decoded(waiting, 5, await client.prefilled(waiting), "d1"))
        )
        await client.until_metric("d1", "vllm:num_requests_waiting", lambda n: n == 1, "one is queued")
        await asyncio.to_thread(served.kill, "p0")
        new = await client.prefilled(old)
        assert new["remote_engine_id"] != params["remote_engine_id"]
        beats = "pdproof:heartbeats_failed_total"
        await client.until_metric("d1", beats, lambda n: n > before[beats], "a heartbeat is noticed not to leave")
        lost = await asyncio.to_thread(served.event_of, EventKind.PEER_LOST, params["remote_engine_id"])
        assert lost.detail["engine_id"] == served.engine("d1").name
        first.cancel()
        assert (await work).tokens == client.right(waiting, 5), "its holder died while it was queued"
        assert (await client.decoded(old, 5, params, "d1")).tokens == client.right(old, 5)
        (failed,) = await client.grown("d1", before, "pdproof:loads_failed_total")
        assert failed == 2
        fresh = prompt_of(34, 300)
        again = await client.metrics("d1")
        assert (await client.decoded(fresh, 5, await client.prefilled(fresh), "d1")).tokens == client.right(fresh, 5)
        assert await client.grown("d1", again, "pdproof:loads_done_total") == [1]
        await client.until_free("p0", "d1")


@pytest.mark.rule("KVC-HSK-004", "KVC-ROUT-002")
async def test_a_reader_restarted_under_load_gets_service_again(served: Split) -> None:
    """Requests in flight end in an answer or in an error, and each answer is right."""
    async with served.client() as client:
        holder = served.engine("p0").pid
        epochs = {w["worker_id"]: w["epoch"] for w in await client.health()}

        async def ask(number: int) -> Answered:
            return await client.complete(prompt_of(40 + number, 200), 30)

        asked = [asyncio.ensure_future(ask(number)) for number in range(20)]
        await client.until_metric("d0", "vllm:num_requests_running", lambda n: n == 1, "it is busy")
        await asyncio.to_thread(served.kill, "d0")
        for number, answer in enumerate(await asyncio.gather(*asked)):
            assert answer.status in (200, 502), answer.text
            if answer.status == 200:
                assert answer.tokens == client.right(prompt_of(40 + number, 200), 30)

        async def back() -> bool:
            return {w["worker_id"]: w["epoch"] for w in await client.health()}.get("d0", 0) > epochs["d0"]

        await eventually(back, 20, "d0 is registered again")
        await asyncio.gather(*(client.assert_serves(70 + number, 200) for number in range(4)))
        assert served.engine("p0").pid == holder
        await client.until_free("p0", "d0", "d1")


@pytest.mark.rule("KVC-SHDW-002", "KVC-HSK-004")
async def test_a_shadow_of_a_decode_engine_takes_over_with_ranks_and_kv_of_the_memory_service(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("shadowed")
    options = ["--prefill", "1", "--decode", "1", "--shadow", "--decode-ranks", "2", "--prefill-ranks", "4"]
    with split(folder, *options) as shadowed:
        async with shadowed.client() as client:
            await client.assert_serves(50)
            died = shadowed.engine("d0").name
            shadowed.kill("d0")
            await eventually(lambda: _registered_anew(client, died), 20, "its shadow serves")
            await client.assert_serves(51)
            assert (await client.metrics("d0"))["pdproof:loads_done_total"] == 1
            await client.until_free("p0", "d0")


async def _registered_anew(client: Client, died: str) -> bool:
    return any(w["worker_id"] == "d0" and w["engine_id"] != died for w in await client.health())

"""The breaker: CLOSED, OPEN, HALF_OPEN, and what callers do meanwhile (KVC-IDEM-014)."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from reference_impl.blockservice.breaker import Breaker, BreakerLimits, BreakerState
from reference_impl.blockservice.calls import CIRCUIT_OPEN, NotSent
from reference_impl.blockservice.client import BlockClient, Result
from reference_impl.blockservice.client_metrics import ClientMetrics
from reference_impl.rules.retries import RetryPolicy
from tests.blockservice.client_kit import UNAVAILABLE, answer, fail, never, pair, refuse
from tests.blockservice.test_client import Unbounded, idle, sample
from tests.waiting import until_async

pytestmark = pytest.mark.rule("KVC-IDEM-014")

CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN
ONCE = RetryPolicy(attempts_max=1, attempt_timeout_s=5)
SHORT = BreakerLimits(failures=3, open_s=0.2)
LONG = BreakerLimits(failures=3, open_s=60)


def down() -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


class Changes:
    """The breaker's states, as they were told."""

    def __init__(self) -> None:
        self.states: list[BreakerState] = [CLOSED]

    def __call__(self, before: BreakerState, after: BreakerState) -> None:
        assert before is self.states[-1]
        self.states.append(after)


def options(limits: BreakerLimits, changes: Changes | None = None, policy: RetryPolicy = ONCE) -> dict[str, Any]:
    return {"breaker": limits, "changed": changes, "policy": policy, "budget": Unbounded()}


async def get(client: BlockClient) -> Result:
    return await client.get_metadata("bg_1", timeout_s=5)


async def get_until_it_left(client: BlockClient) -> Result:
    """Return the first result of a call that was let through."""
    for _ in range(500):
        result = await get(client)
        if result.error_code != CIRCUIT_OPEN:
            return result
        await asyncio.sleep(0.01)
    raise AssertionError("the breaker lets nothing through")


async def test_it_opens_probes_and_closes() -> None:
    changes = Changes()
    async with pair(UNAVAILABLE, **options(SHORT, changes)) as (server, client):
        for _ in range(3):
            assert (await get(client)).error_code == "UNAVAILABLE"
        assert client.breaker.state is OPEN
        server.script = answer()
        assert (await get_until_it_left(client)).outcome == "ok"
        assert client.breaker.state is CLOSED
        assert (await get(client)).outcome == "ok"
    assert changes.states == [CLOSED, OPEN, HALF_OPEN, CLOSED]


async def test_a_probe_that_fails_opens_it_again() -> None:
    changes = Changes()
    async with pair(UNAVAILABLE, **options(SHORT, changes)) as (server, client):
        for _ in range(3):
            await get(client)
        assert (await get_until_it_left(client)).error_code == "UNAVAILABLE"
        assert client.breaker.state is OPEN
        assert (await get(client)).error_code == CIRCUIT_OPEN
        assert len(server.seen) == 4
    assert changes.states == [CLOSED, OPEN, HALF_OPEN, OPEN]


async def test_while_it_is_open_calls_fail_at_once_and_none_reaches_the_server() -> None:
    async with pair(UNAVAILABLE, **options(LONG)) as (server, client):
        for _ in range(3):
            await get(client)
        results = [await get(client) for _ in range(100)]
        assert len(server.seen) == 3
        assert client.breaker.refused == 100
    assert {(r.outcome, r.error_code, r.attempts, r.waited_ms) for r in results} == {("fail", CIRCUIT_OPEN, 0, 0.0)}


async def test_callers_fall_back_to_computing_anew() -> None:
    async def prefix(client: BlockClient) -> str:
        found = await get(client)
        return "fetched" if found.outcome == "ok" else "computed"

    async with pair(UNAVAILABLE, **options(LONG)) as (server, client):
        assert [await prefix(client) for _ in range(10)] == ["computed"] * 10
        assert len(server.seen) == 3  # the other seven cost the server nothing, and their callers no time


async def test_it_opens_in_the_middle_of_a_call() -> None:
    policy = RetryPolicy(attempts_max=10, initial_s=0.001)
    async with pair(UNAVAILABLE, **options(LONG, policy=policy)) as (server, client):
        result = await get(client)
    assert (result.outcome, result.error_code, result.attempts) == ("unknown", CIRCUIT_OPEN, 3)
    assert len(server.seen) == 3


async def test_only_failures_in_a_row_open_it() -> None:
    async with pair(UNAVAILABLE, **options(LONG)) as (server, client):
        for _ in range(5):
            server.script = UNAVAILABLE
            await get(client)
            await get(client)
            server.script = answer()
            await get(client)
        assert client.breaker.state is CLOSED


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED]
)
async def test_a_server_that_says_no_is_alive(code: grpc.StatusCode) -> None:
    async with pair(fail(code), **options(LONG)) as (server, client):
        for _ in range(10):
            await get(client)
        assert (client.breaker.state, len(server.seen)) == (CLOSED, 10)


async def test_a_refused_write_is_an_answer() -> None:
    async with pair(refuse("PINNED"), **options(LONG)) as (_, client):
        for n in range(10):
            await client.evict("bg_1", 7, operation_id=f"op-{n}", timeout_s=5)
        assert client.breaker.state is CLOSED


async def test_a_server_that_does_not_answer_is_down() -> None:
    policy = RetryPolicy(attempts_max=1, attempt_timeout_s=0.05)
    async with pair(never(), **options(LONG, policy=policy)) as (_, client):
        for _ in range(3):
            assert (await get(client)).error_code == "DEADLINE_EXCEEDED"
        assert (await get(client)).error_code == CIRCUIT_OPEN


async def test_few_probe_at_a_time() -> None:
    async with pair(UNAVAILABLE, **options(SHORT)) as (server, client):
        for _ in range(3):
            await get(client)
        server.script = never()
        await asyncio.sleep(SHORT.open_s + 0.05)
        probe = asyncio.create_task(get(client))
        await until_async(lambda: len(server.seen) == 4, 5, "the probe is at the server")
        assert client.breaker.state is HALF_OPEN
        results = [await get(client) for _ in range(20)]
        assert {r.error_code for r in results} == {CIRCUIT_OPEN}
        assert len(server.seen) == 4
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
        assert client.breaker.state is HALF_OPEN  # a probe that was given up says nothing
        assert idle(client)
        server.script = answer()
        assert (await get(client)).outcome == "ok"
        assert client.breaker.state is CLOSED


async def test_a_call_that_waited_for_its_place_while_it_opened_does_not_leave() -> None:
    policy = RetryPolicy(attempts_max=1, attempt_timeout_s=0.2)
    limits = BreakerLimits(failures=1, open_s=60)
    async with pair(never(), connections=1, calls_per_connection=1, **options(limits, policy=policy)) as (
        server,
        client,
    ):
        first, second = await asyncio.gather(get(client), get(client))
    assert (first.error_code, second.error_code) == ("DEADLINE_EXCEEDED", CIRCUIT_OPEN)
    assert (second.outcome, second.attempts) == ("fail", 0)
    assert second.waited_ms > 100
    assert len(server.seen) == 1


async def test_what_left_before_it_opened_has_no_say_while_it_probes() -> None:
    breaker = Breaker("node", BreakerLimits(failures=1, open_s=0.05))
    late, ended = asyncio.Event(), asyncio.Event()

    async def old_attempt() -> None:
        try:
            async with breaker.attempt():
                await late.wait()
                raise down()
        except grpc.aio.AioRpcError:
            ended.set()

    old = asyncio.create_task(old_attempt())
    await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AioRpcError):
        async with breaker.attempt():
            raise down()
    assert breaker.state is OPEN
    await asyncio.sleep(0.1)
    async with breaker.attempt():
        assert breaker.state is HALF_OPEN
        late.set()
        await ended.wait()
        assert breaker.state is HALF_OPEN
    assert breaker.state is CLOSED
    await old


async def test_what_did_not_leave_says_nothing() -> None:
    breaker = Breaker("node", BreakerLimits(failures=1))
    with pytest.raises(NotSent, match="no place"):
        async with breaker.attempt():
            raise NotSent("POOL_EXHAUSTED", "no place")
    assert breaker.state is CLOSED


async def test_its_state_is_a_metric() -> None:
    metrics = ClientMetrics()
    async with pair(UNAVAILABLE, metrics=metrics, **options(SHORT)) as (server, client):
        assert sample(metrics, "circuit_breaker_state") == 0
        for _ in range(3):
            await get(client)
        assert sample(metrics, "circuit_breaker_state") == 2
        server.script = never()
        await asyncio.sleep(SHORT.open_s + 0.05)
        probe = asyncio.create_task(get(client))
        await until_async(lambda: len(server.seen) == 4, 5, "the probe is at the server")
        assert sample(metrics, "circuit_breaker_state") == 1
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)


@pytest.mark.parametrize("name", ["failures", "open_s", "probes"])
def test_limits_that_cannot_be_meant_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        BreakerLimits(**{name: 0})

"""Deadlines: every attempt has one, none is later than what is left upstream (KVC-IDEM-012)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from reference_impl.blockservice.client import BlockClient, Result
from reference_impl.blockservice.deadline import remaining_s, within
from reference_impl.realclock import now_ns
from reference_impl.rules.retries import RetryPolicy
from tests.blockservice.client_kit import (
    APPLIED,
    UNAVAILABLE,
    Context,
    Seen,
    answer,
    calling,
    each,
    never,
    pair,
    serving,
)
from tests.blockservice.test_client import NEVER_OPEN, Unbounded

pytestmark = pytest.mark.rule("KVC-IDEM-012")

WIRE = 1.03
"""gRPC sends a length that it has sent before if that is at most 3 % longer; the caller's own timer is exact."""
ROUNDING_S = 0.002
GRACE_S = 0.5
"""For a busy machine. What is shown here differs by more."""


class ForgetsUpstream(BlockClient):
    """A twin: what is left upstream is not asked for."""

    def _limit_s(self, timeout_s: float) -> float:
        return timeout_s


class ForgetsTheCall(BlockClient):
    """A twin: each attempt gets the time of an attempt, whatever is left of the call's."""

    def _attempt_limit_s(self, call: Any) -> float:  # noqa: ARG002 # it is this that the twin forgets
        return self.policy.attempt_timeout_s


async def get(client: BlockClient, timeout_s: float) -> Result:
    return await client.get_metadata("bg_1", timeout_s=timeout_s)


async def timed_s(work: Awaitable[Result]) -> tuple[Result, float]:
    began_ns = now_ns()
    result = await work
    return result, (now_ns() - began_ns) / 1e9


def test_nobody_upstream_means_no_end() -> None:
    assert remaining_s() is None


def test_an_inner_end_is_never_the_later_one() -> None:
    with within(10):
        outer = remaining_s()
        assert outer is not None
        assert 9 < outer <= 10
        with within(60):
            inner = remaining_s()
            assert inner is not None
            assert inner <= outer
        with within(1):
            inner = remaining_s()
            assert inner is not None
            assert inner <= 1
        again = remaining_s()
        assert again is not None
        assert 1 < again <= outer
    assert remaining_s() is None


def test_what_is_over_stays_at_nothing() -> None:
    with within(0):
        assert remaining_s() == 0
    with within(-5):
        assert remaining_s() == 0


async def test_the_end_travels_with_the_tasks_that_a_handler_starts() -> None:
    async def ask() -> float | None:
        return remaining_s()

    with within(5):
        task = asyncio.create_task(ask())
    inside = await task
    assert inside is not None
    assert inside <= 5
    assert await ask() is None


async def test_every_attempt_carries_a_deadline_within_its_calls() -> None:
    policy = RetryPolicy(attempt_timeout_s=30, initial_s=0.05)
    async with pair(each(UNAVAILABLE, UNAVAILABLE, answer()), policy=policy) as (server, client):
        began_ns = now_ns()
        assert (await get(client, 2.0)).attempts == 3
    for seen in server.seen:
        left_s = 2.0 - (seen.at_ns - began_ns) / 1e9
        assert 0 < seen.left_s <= WIRE * left_s + ROUNDING_S + GRACE_S / 10
    lefts = [seen.left_s for seen in server.seen]
    assert lefts[2] < lefts[0] - 0.1  # two pauses of 50 and 100 ms lie between


async def test_an_attempt_that_hangs_leaves_time_for_the_next() -> None:
    policy = RetryPolicy(attempt_timeout_s=0.2)
    async with pair(each(never(), answer()), policy=policy) as (server, client):
        result = await get(client, 30)
    assert (result.outcome, result.attempts, result.timeouts) == ("ok", 2, 1)
    assert all(seen.left_s <= WIRE * 0.2 + ROUNDING_S for seen in server.seen)


async def check_total(make: type[BlockClient]) -> None:
    """Fail unless a call that nobody answers is over when its time is, in every place that it may hang in."""
    policy = RetryPolicy(attempt_timeout_s=2.0, attempts_max=100, initial_s=0.05, max_s=0.1)
    options: dict[str, Any] = {"policy": policy, "budget": Unbounded(), "breaker": NEVER_OPEN, "make": make}
    async with pair(never(), **options) as (server, client):
        result, took_s = await timed_s(get(client, 0.4))
        assert result.error_code == "DEADLINE_EXCEEDED"
        assert took_s <= 0.4 + GRACE_S
        server.script = UNAVAILABLE
        result, took_s = await timed_s(get(client, 0.4))
        assert (result.outcome, result.error_code) == ("unknown", "UNAVAILABLE")
        assert took_s <= 0.4 + GRACE_S
        assert result.attempts > 2


async def test_no_call_outlasts_its_time() -> None:
    await check_total(BlockClient)


async def test_a_client_that_forgets_the_calls_time_is_caught() -> None:
    with pytest.raises(AssertionError):
        await check_total(ForgetsTheCall)


async def test_a_pause_that_would_outlast_the_call_is_not_begun() -> None:
    policy = RetryPolicy(initial_s=5, max_s=5)
    async with pair(UNAVAILABLE, policy=policy) as (server, client):
        result, took_s = await timed_s(get(client, 3.0))
    assert (result.attempts, len(server.seen)) == (1, 1)
    assert took_s < 2


async def test_waiting_for_a_place_is_within_the_calls_time() -> None:
    async with pair(never(), connections=1, calls_per_connection=1) as (server, client):
        first = asyncio.create_task(get(client, 1.0))
        await asyncio.sleep(0)
        result, took_s = await timed_s(get(client, 0.2))
        assert (result.outcome, result.attempts) == ("fail", 0)
        assert took_s <= 0.2 + GRACE_S
        await first
    assert len(server.seen) == 1


async def test_with_nothing_left_upstream_nothing_is_sent() -> None:
    async with pair(answer()) as (server, client):
        with within(0):
            result = await get(client, 5)
    assert (result.outcome, result.error_code, result.attempts) == ("fail", "DEADLINE_EXCEEDED", 0)
    assert server.seen == []


async def nested(make: type[BlockClient], upstream_s: float, check: Callable[[list[Seen], list[Seen]], None]) -> None:
    """Run client -> A -> B, where A has worked for 200 ms before it asks B with 30 s to spare; `check` what arrived."""
    async with serving(answer()) as b, calling(b.target, make=make, policy=RetryPolicy(attempt_timeout_s=30)) as to_b:

        async def handler(seen: Seen, context: Context) -> Message:
            with within(context.time_remaining()):
                await asyncio.sleep(0.2)
                await get(to_b, 30)
            return APPLIED

        async with pair(handler, policy=RetryPolicy(attempt_timeout_s=30)) as (a, client):
            assert (await client.evict("bg_1", 7, operation_id="op-1", timeout_s=upstream_s)).outcome == "ok"
            check(a.seen, b.seen)


def inherits_less(above: list[Seen], below: list[Seen]) -> None:
    (upper,), (lower,) = above, below
    gone_s = (lower.at_ns - upper.at_ns) / 1e9
    assert gone_s >= 0.2
    assert lower.left_s <= WIRE * (upper.left_s - gone_s) + ROUNDING_S + GRACE_S / 10
    assert lower.left_s < upper.left_s


async def test_a_call_below_a_call_inherits_what_is_left() -> None:
    await nested(BlockClient, 4.0, inherits_less)


async def test_a_client_that_forgets_upstream_is_caught() -> None:
    with pytest.raises(AssertionError):
        await nested(ForgetsUpstream, 4.0, inherits_less)


async def test_the_work_below_ends_with_its_caller() -> None:
    async with serving(never()) as b, calling(b.target, policy=RetryPolicy(attempt_timeout_s=30)) as to_b:
        below: list[Result] = []

        async def handler(seen: Seen, context: Context) -> Message:
            with within(context.time_remaining()):
                result, _ = await timed_s(get(to_b, 30))
                below.append(result)
            return APPLIED

        async with pair(handler, policy=RetryPolicy(attempts_max=1)) as (_, client):
            result, took_s = await timed_s(get(client, 0.3))
        assert result.outcome == "unknown"
        assert took_s <= 0.3 + GRACE_S
        for _ in range(100):
            if to_b.stats.inflight == 0:
                break
            await asyncio.sleep(0.02)
        assert to_b.stats.inflight == 0
        assert to_b.pool.in_use == 0

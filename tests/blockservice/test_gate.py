"""The gate: one operation a group, a new engine alone, and nobody waits for somebody who has left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from reference_impl.blockservice.gate import Gate

KEY, OTHER = ("t", "g"), ("t", "h")


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def idle(gate: Gate) -> bool:
    return not (gate._operations or gate._closed or gate._inside or gate._wanting)


async def inside(gate: Gate, key: tuple[str, str], end: asyncio.Event, trace: list[str], name: str) -> None:
    async with gate.operation(key):
        trace.append(name)
        await end.wait()


async def test_operations_of_one_group_come_one_after_the_other_and_others_beside_them() -> None:
    gate, end, trace = Gate(), asyncio.Event(), []  # type: ignore[var-annotated]
    tasks = [asyncio.create_task(inside(gate, k, end, trace, n)) for k, n in ((KEY, "1"), (KEY, "2"), (OTHER, "3"))]
    await turns()
    assert trace == ["1", "3"]
    end.set()
    await asyncio.gather(*tasks)
    assert trace == ["1", "3", "2"]
    assert idle(gate)


async def test_alone_waits_for_those_inside_and_keeps_new_ones_out() -> None:
    gate, end, trace = Gate(), asyncio.Event(), []  # type: ignore[var-annotated]
    first = asyncio.create_task(inside(gate, KEY, end, trace, "first"))
    queued = asyncio.create_task(inside(gate, KEY, end, trace, "queued"))
    await turns()

    async def alone() -> None:
        async with gate.alone():
            trace.append("alone")
            await turns()
            trace.append("left")

    one, two = asyncio.create_task(alone()), asyncio.create_task(alone())
    await turns()
    late = asyncio.create_task(inside(gate, OTHER, end, trace, "late"))
    await turns()
    assert trace == ["first"]
    end.set()
    await asyncio.gather(first, queued, one, two, late)
    assert trace.index("queued") < trace.index("alone") < trace.index("late") or trace[-1] != "late"
    assert [t for t in trace if t in ("alone", "left")] == ["alone", "left"] * 2, "one alone at a time"
    assert idle(gate)


@pytest.mark.parametrize("times", [1, 2])
async def test_whoever_is_cancelled_leaves_nothing_and_wakes_the_others(times: int) -> None:
    """A caller may be cancelled twice: by its deadline, and again when its connection ends."""
    gate, end, trace = Gate(), asyncio.Event(), []  # type: ignore[var-annotated]
    holder = asyncio.create_task(inside(gate, KEY, end, trace, "holder"))
    waiter = asyncio.create_task(inside(gate, KEY, end, trace, "waiter"))
    await turns()
    done: list[str] = []

    async def alone() -> None:
        async with gate.alone():
            done.append("alone")

    lonely = asyncio.create_task(alone())
    await turns()
    for task in (waiter, holder):
        task.cancel()
        if times == 2:
            await asyncio.sleep(0)
            task.cancel()
    await asyncio.wait_for(lonely, 5)
    assert done == ["alone"]
    await asyncio.gather(holder, waiter, return_exceptions=True)
    assert idle(gate)


async def test_an_alone_that_is_cancelled_lets_the_others_in() -> None:
    gate, end, trace = Gate(), asyncio.Event(), []  # type: ignore[var-annotated]
    holder = asyncio.create_task(inside(gate, KEY, end, trace, "holder"))
    await turns()

    async def alone() -> None:
        async with gate.alone():
            await asyncio.Event().wait()

    waiting = asyncio.create_task(alone())
    await turns()
    late = asyncio.create_task(inside(gate, OTHER, end, trace, "late"))
    await turns()
    waiting.cancel()
    await turns()
    assert trace == ["holder", "late"]
    end.set()
    await asyncio.gather(holder, late)
    within = asyncio.create_task(alone())
    await turns()
    again = asyncio.create_task(inside(gate, KEY, end, trace, "again"))
    await turns()
    within.cancel()
    await asyncio.wait_for(again, 5)
    assert idle(gate)


@pytest.mark.rule("KVC-IDEM-006")
@pytest.mark.parametrize("seed", range(20))
async def test_no_history_of_comings_and_cancellations_locks_anybody_out(seed: int) -> None:
    chance, gate = random.Random(seed), Gate()
    inside_now: Counter[tuple[str, str]] = Counter()
    alone_now = 0

    async def operate(key: tuple[str, str]) -> None:
        async with gate.operation(key):
            inside_now[key] += 1
            try:
                assert inside_now[key] == 1
                assert not alone_now
                await turns(chance.randint(0, 3))
            finally:
                inside_now[key] -= 1

    async def alone() -> None:
        nonlocal alone_now
        async with gate.alone():
            alone_now += 1
            try:
                assert alone_now == 1
                assert not +inside_now
                await turns(chance.randint(0, 3))
            finally:
                alone_now -= 1

    tasks = []
    for _ in range(200):
        key = ("t", f"g{chance.randint(0, 3)}")
        tasks.append(asyncio.create_task(alone() if chance.random() < 0.1 else operate(key)))
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
        await turns(chance.randint(0, 2))
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    assert not [e for e in ended if isinstance(e, AssertionError)]
    assert idle(gate)

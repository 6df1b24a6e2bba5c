"""Token buckets: who floods one waits at his own, and nobody waits for ever or in a queue without an end."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from reference_impl.blockservice.buckets import Bucket, Buckets, How, Limit, Rate, RateLimited
from tests.waiting import until_async

SLOW = Limit(tenant=Rate(per_s=0.01, burst=2))
"""Two takes at once, and no third in the time of a test."""
READ = Bucket.REMOTE_READ_QPS


def counting(limits: dict[Bucket, Limit], **more: Any) -> tuple[Buckets, Counter[tuple[Bucket, How]]]:
    counts: Counter[tuple[Bucket, How]] = Counter()
    return Buckets(limits, limited=lambda bucket, how: counts.update([(bucket, how)]), **more), counts


@pytest.mark.rule("KVC-IDEM-015")
def test_the_buckets_have_the_documents_names() -> None:
    assert {b.value for b in Bucket} == {"migration_bytes_token", "remote_read_qps_token", "ssd_read_iops_token"}


async def test_a_burst_is_free_and_what_comes_after_is_refused_when_its_time_is_over() -> None:
    buckets, counts = counting({READ: SLOW})
    for _ in range(2):
        await buckets.take(READ, "a", timeout_s=0)
    with pytest.raises(RateLimited, match="remote_read_qps_token") as caught:
        await buckets.take(READ, "a", timeout_s=0.05)
    assert caught.value.bucket is READ
    assert counts == {(READ, How.DELAYED): 1, (READ, How.REFUSED): 1}


async def test_a_take_waits_for_its_tokens() -> None:
    buckets, counts = counting({READ: Limit(tenant=Rate(per_s=200, burst=1))})
    for _ in range(10):
        await buckets.take(READ, "a", timeout_s=20)
    assert 1 <= counts[READ, How.DELAYED] <= 9
    assert counts[READ, How.REFUSED] == 0


async def test_a_bucket_without_a_limit_is_never_empty() -> None:
    buckets, counts = counting({})
    for _ in range(1000):
        await buckets.take(Bucket.SSD_READ_IOPS, "a", 1e12, timeout_s=0)
    assert (counts, buckets.remembered) == ({}, 0)


async def test_more_than_a_burst_is_taken_in_pieces() -> None:
    buckets, _ = counting({Bucket.MIGRATION_BYTES: Limit(tenant=Rate(per_s=10_000, burst=100))})
    await buckets.take(Bucket.MIGRATION_BYTES, "a", 1000, timeout_s=20)
    with pytest.raises(RateLimited):
        await buckets.take(Bucket.MIGRATION_BYTES, "a", 1e9, timeout_s=0.05)
    with pytest.raises(ValueError, match="amount"):
        await buckets.take(Bucket.MIGRATION_BYTES, "a", -1, timeout_s=1)


@pytest.mark.rule("KVC-IDEM-015")
async def test_a_tenant_drinks_from_no_other_tenants_bucket() -> None:
    buckets, counts = counting({READ: SLOW})
    greedy = [asyncio.create_task(buckets.take(READ, "greedy", timeout_s=60)) for _ in range(50)]
    await until_async(lambda: counts[READ, How.DELAYED] == 48, 20, "the greedy one waits")
    for n in range(20):
        await buckets.take(READ, f"modest-{n}", timeout_s=0)
    assert sum(task.done() for task in greedy) == 2
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)


@pytest.mark.rule("KVC-IDEM-015")
async def test_all_tenants_together_take_no_more_than_the_node_gives() -> None:
    limit = Limit(tenant=Rate(per_s=1000, burst=2), node=Rate(per_s=0.01, burst=5))
    buckets, _ = counting({READ: limit})
    got = 0
    for n in range(10):
        try:
            await buckets.take(READ, f"t{n}", timeout_s=0.01)
            got += 1
        except RateLimited:
            pass
    assert got == 5


async def test_those_who_wait_are_bounded_in_number() -> None:
    buckets, counts = counting({READ: SLOW}, waiting_max=3)
    takes = [asyncio.create_task(buckets.take(READ, "a", timeout_s=60)) for _ in range(10)]
    await until_async(lambda: sum(task.done() for task in takes) == 7, 20, "two got tokens, five were refused")
    assert counts == {(READ, How.DELAYED): 3, (READ, How.REFUSED): 5}
    for task in takes:
        task.cancel()
    await asyncio.gather(*takes, return_exceptions=True)
    assert [await asyncio.gather(buckets.take(READ, "b", timeout_s=0))] == [[None]]


async def test_tenants_without_number_take_no_memory_without_end() -> None:
    buckets, _ = counting({READ: SLOW}, tenants_max=10)
    for n in range(1000):
        await buckets.take(READ, f"t{n}", timeout_s=0)
    assert buckets.remembered == 10


async def test_the_bucket_that_was_left_alone_for_longest_is_forgotten_first() -> None:
    buckets, _ = counting({READ: SLOW}, tenants_max=3)
    for name in ("a", "a", "b", "c", "a"):
        if name == "a" and buckets.remembered == 3:
            with pytest.raises(RateLimited):  # used again just now, so it is remembered, and empty
                await buckets.take(READ, "a", timeout_s=0.01)
            continue
        await buckets.take(READ, name, timeout_s=0)
    await buckets.take(READ, "d", timeout_s=0)  # b goes
    with pytest.raises(RateLimited):
        await buckets.take(READ, "a", timeout_s=0.01)


async def test_no_bucket_is_forgotten_at_which_somebody_waits() -> None:
    buckets, _ = counting({READ: SLOW}, tenants_max=2)
    waiting = [asyncio.create_task(buckets.take(READ, name, timeout_s=60)) for name in ("a", "b") for _ in range(3)]
    await until_async(lambda: sum(task.done() for task in waiting) == 4, 20, "one of each waits")
    with pytest.raises(RateLimited, match="takes waiting"):
        await buckets.take(READ, "c", timeout_s=0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await buckets.take(READ, "c", timeout_s=0)


@pytest.mark.parametrize(("per_s", "burst"), [(0, 1), (1, 0), (-1, 1), (float("nan"), 1)])
def test_a_bucket_that_could_never_fill_is_refused(per_s: float, burst: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Rate(per_s=per_s, burst=burst)


# A link that online reads and migrations share.


class Link:
    """A link on which one transfer goes at a time; each turn moves so many bytes."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.moved: Counter[str] = Counter()

    async def move(self, what: str, size_bytes: int) -> None:
        async with self.turn:
            for _ in range(size_bytes // 1024):
                await asyncio.sleep(0)
            self.moved[what] += size_bytes


READ_BYTES, CHUNK_BYTES, READS = 4 * 1024, 64 * 1024, 100


async def share_of_reads(limits: dict[Bucket, Limit], *, floods: int) -> float:
    """Return what part of the link's bytes went to the online reads, until READS of them were done."""
    buckets, link = Buckets(limits, waiting_max=64), Link()

    async def flood() -> None:
        while True:
            await buckets.take(Bucket.MIGRATION_BYTES, "background", CHUNK_BYTES, timeout_s=60)
            await link.move("migration", CHUNK_BYTES)

    async def read() -> None:
        for _ in range(READS):
            await buckets.take(READ, "online", timeout_s=60)
            await link.move("read", READ_BYTES)

    background = [asyncio.create_task(flood()) for _ in range(floods)]
    await read()
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    return link.moved["read"] / link.moved.total()


@pytest.mark.rule("KVC-IDEM-015")
async def test_online_reads_keep_their_share_while_migrations_flood_their_bucket() -> None:
    """In one run: alone, against a flood without a bucket, and against one with."""
    rationed = {
        READ: Limit(tenant=Rate(per_s=1e6, burst=1e6)),
        Bucket.MIGRATION_BYTES: Limit(tenant=Rate(per_s=CHUNK_BYTES / 10, burst=CHUNK_BYTES)),
    }
    alone = await share_of_reads(rationed, floods=0)
    flooded = await share_of_reads({}, floods=8)
    kept = await share_of_reads(rationed, floods=8)
    assert alone == 1.0
    assert flooded < 0.05
    assert kept > 0.5
    assert kept > 10 * flooded

"""Block groups of real engines: what is pinned stays, what is lent is read elsewhere, what moves has one owner."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice.client import BlockClient, CallOutcome, Credentials, Result
from reference_impl.blockservice.credentials import credential
from reference_impl.blockservice.node import TENANT
from reference_impl.blockservice.peers import read_address
from reference_impl.content import BLOCK_BYTES
from reference_impl.failover.worker import ProcessInfo, read_status, status_path
from reference_impl.realclock import wall_ns
from reference_impl.rules.clock import NS_PER_MS
from reference_impl.rules.events import EventKind
from reference_impl.rules.transfer_tokens import issue, node_key
from tests.deployment.split import LIMIT_S, TOKEN, Client, Split, eventually, prompt_of, split
from tests.waiting import until

pytestmark = [pytest.mark.nixl]

CALL_S: Final = 10.0
SMALL: Final = """
name = "small pool"
about = "for tests: a pool that a few prompts fill"
prefill_tokens_per_s = 80000
decode_base_s = 0.001
decode_per_request_s = 0.0001
requests_max = 16
context_tokens_max = 2048
kv_blocks = 160
weights_mib = 4
"""
_numbers = itertools.count(1)
_seeds = itertools.count(100)


def new_id() -> str:
    return f"op-{next(_numbers)}"


class Node:
    """One worker's block service, as a client sees it."""

    def __init__(self, served: Split, worker_id: str, tenant: str = TENANT) -> None:
        self.served, self.worker_id = served, worker_id
        self.client = BlockClient(
            served.said.blocks[worker_id], Credentials(tenant, credential(TOKEN.encode(), tenant))
        )  # fmt: skip

    async def do(self, method: str, *arguments: Any, operation_id: str = "", **more: Any) -> Result:
        call = getattr(self.client, method)
        return await call(*arguments, operation_id=operation_id or new_id(), timeout_s=CALL_S, **more)  # type: ignore[no-any-return]

    async def answer(self, method: str, *arguments: Any, **more: Any) -> pb.Answer:
        result = await self.do(method, *arguments, **more)
        assert isinstance(result.reply, pb.Answer), (method, result)
        return result.reply

    async def groups(self, state: str = "RESIDENT") -> dict[str, pb.Metadata]:
        listed = await self.client.list_groups(state=state, timeout_s=CALL_S)
        assert isinstance(listed.reply, pb.ListGroupsReply), listed
        return {group.block_group_id: group for group in listed.reply.groups}

    async def metadata(self, name: str) -> pb.Metadata | None:
        found = await self.client.get_metadata(name, timeout_s=CALL_S)
        return found.reply if isinstance(found.reply, pb.Metadata) else None

    async def new_group(self, client: Client, prompt: list[int]) -> pb.Metadata:
        """Have a prompt computed here, and nowhere else; return its new group."""
        before = set(await self.groups())
        answer = await client.complete(prompt, 1, worker_id=self.worker_id)
        assert answer.tokens == client.right(prompt, 1)

        async def found() -> pb.Metadata | None:
            now = await self.groups()
            return next((group for name, group in now.items() if name not in before), None)

        group = await eventually(found, LIMIT_S, f"{self.worker_id} has a new group")
        assert group is not None
        return group

    async def until_moved(self, operation_id: str) -> pb.Migration:
        async def ended() -> pb.Migration | None:
            found = await self.client.get_migrate_status(operation_id, timeout_s=CALL_S)
            reply = found.reply
            return reply if isinstance(reply, pb.Migration) and reply.status not in ("PENDING", "RUNNING") else None

        migration = await eventually(ended, LIMIT_S, f"{operation_id} has ended")
        assert migration is not None
        return migration

    def process(self) -> ProcessInfo:
        def found() -> ProcessInfo | None:
            status = read_status(status_path(Path(self.served.said.run_dir), self.worker_id))
            return next((p for p in status.processes if p.role == "block-service"), None) if status else None

        info = until(found, LIMIT_S, f"{self.worker_id} has a block service")
        assert info is not None
        return info

    def kill(self) -> None:
        pid = self.process().pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.process().pid != pid, LIMIT_S, "another one has come")


@asynccontextmanager
async def nodes(served: Split, *names: str) -> AsyncIterator[list[Node]]:
    made = [Node(served, name) for name in names]
    try:
        yield made
    finally:
        for node in made:
            await node.client.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    options = ["--prefill", "1", "--decode", "1", "--blocks", "--fail-points", "--kv-lease-duration", "6"]
    with split(tmp_path_factory.mktemp("blocks"), *options, profile="tiny") as found:
        yield found


async def test_a_prompt_becomes_a_group_of_its_full_blocks(served: Split) -> None:
    async with served.client() as client, nodes(served, "p0") as [p]:
        group = await p.new_group(client, prompt_of(next(_seeds), 1000))
        assert (group.token_start, group.token_end, group.size_bytes) == (0, 992, 62 * BLOCK_BYTES)
        assert (group.location, group.epoch, group.pins) == ("p0", 1, 0)
        assert len(group.checksum) == 32


@pytest.mark.rule("KVC-IDEM-009", "KVC-IDEM-010")
async def test_a_pinned_group_outlives_its_pool_and_an_unpinned_one_may_not(
    tmp_path: Path,
) -> None:
    """The pool is filled several times over; what is pinned is found again, what is not is told as evicted."""
    with split(tmp_path, "--prefill", "1", "--decode", "1", "--blocks", profile=SMALL) as served:
        async with served.client() as client, nodes(served, "p0") as [p]:
            kept_prompt, other_prompt = prompt_of(1, 500), prompt_of(2, 500)
            kept, other = await p.new_group(client, kept_prompt), await p.new_group(client, other_prompt)
            pinned = await p.answer("pin", kept.block_group_id, kept.epoch, "r1")
            assert (pinned.disposition, pinned.pins) == (pb.APPLIED, 1)
            for seed in range(3, 15):
                prompt = prompt_of(seed, 1000)
                assert (await client.complete(prompt, 2)).tokens == client.right(prompt, 2)

            async def gone() -> bool:
                found = await p.metadata(other.block_group_id)
                return found is not None and found.state == "EVICTED"

            await eventually(gone, LIMIT_S, "the other group is told as evicted")
            found = await p.metadata(kept.block_group_id)
            assert found is not None
            assert (found.state, found.epoch, found.pins) == ("RESIDENT", kept.epoch, 1)
            again = await client.prefilled(kept_prompt)
            assert again["remote_num_tokens"] == 500
            hits = await client.metrics("p0")
            assert hits["vllm:prefix_cache_hits_total"] >= 496
            late = await p.answer("pin", other.block_group_id, other.epoch, "r2")
            assert late.refusal == "STALE_EPOCH"


@pytest.mark.rule("KVC-IDEM-010")
async def test_evicting_waits_for_pins_and_leases_and_frees_the_blocks(served: Split) -> None:
    async with served.client() as client, nodes(served, "p0") as [p]:
        prompt = prompt_of(next(_seeds), 640)
        group = await p.new_group(client, prompt)
        name, epoch = group.block_group_id, group.epoch
        params = await client.prefilled(prompt)  # a lease stands on its blocks from here on
        refused = await p.answer("evict", name, epoch)
        assert (refused.disposition, refused.refusal) == (pb.REFUSED, "LEASED")
        await client.decoded(prompt, 2, params)
        await client.until_free("p0")
        assert (await p.answer("pin", name, epoch, "r1")).disposition == pb.APPLIED
        assert (await p.answer("evict", name, epoch)).refusal == "PINNED"
        assert (await p.answer("unpin", name, epoch, "r1")).pins == 0
        before = await client.metrics("p0")
        evicted = await p.answer("evict", name, epoch)
        assert (evicted.disposition, evicted.state, evicted.epoch) == (pb.APPLIED, "EVICTED", epoch + 1)
        after = await client.metrics("p0")
        assert before["pdproof:kv_blocks_cached"] - after["pdproof:kv_blocks_cached"] == 40
        again = await p.answer("evict", name, epoch)
        assert (again.disposition, again.epoch) == (pb.APPLIED, epoch + 1)
        back = await p.new_group(client, prompt)
        assert (back.block_group_id, back.epoch) == (name, epoch + 2)


@pytest.mark.rule("KVC-IDEM-016")
async def test_a_lent_group_is_read_by_another_engine_once(served: Split) -> None:
    async with served.client() as client, nodes(served, "p0") as [p]:
        prefix = prompt_of(next(_seeds), 800)
        group = await p.new_group(client, prefix)
        lent = await p.answer("prepare_get", group.block_group_id, group.epoch, "reader")
        place = lent.place
        assert (lent.disposition, place.size_bytes, place.checksum) == (pb.APPLIED, 50 * BLOCK_BYTES, group.checksum)
        assert len(lent.SerializeToString()) < 4096
        refused = await p.answer("evict", group.block_group_id, group.epoch)
        assert refused.refusal == "TRANSFERRING"

        longer = prefix + prompt_of(next(_seeds), 205)
        before = await client.metrics("d0")
        answer = await client.decoded(longer, 5, json.loads(place.handoff))
        assert answer.tokens == client.right(longer, 5)
        assert await client.grown("d0", before, "pdproof:loads_done_total") == [1]

        async def free() -> bool:
            return (await p.answer("evict", group.block_group_id, group.epoch)).disposition == pb.APPLIED

        await eventually(free, LIMIT_S, "the loan is over")
        other = prompt_of(next(_seeds), 100)
        used = await client.decoded(prefix + other, 5, json.loads(place.handoff))
        assert used.tokens == client.right(prefix + other, 5), "a token that is used up costs a recompute, no more"
        await client.until_free("p0", "d0")


@pytest.mark.rule("KVC-IDEM-016")
@pytest.mark.parametrize(
    ("case", "reason"),
    [("forged", "forged"), ("late", "expired"), ("other blocks", "another text"), ("other group's", "another text")],
)
async def test_a_token_that_is_not_right_reads_nothing_and_says_why(served: Split, case: str, reason: str) -> None:
    async with served.client() as client, nodes(served, "p0") as [p]:
        prompt = prompt_of(next(_seeds), 320)
        group, other = await p.new_group(client, prompt), await p.new_group(client, prompt_of(next(_seeds), 320))
        lent = await p.answer("prepare_get", group.block_group_id, group.epoch, "reader")
        theirs = await p.answer("prepare_get", other.block_group_id, other.epoch, "reader")
        params = json.loads(lent.place.handoff)
        named = {"block_group_id": group.block_group_id, "epoch": group.epoch, "nonce": "0" * 16}
        match case:
            case "forged":
                token = issue(node_key(b"another secret", "p0"), expires_ms=2**41, **named)
            case "late":
                token = issue(node_key(TOKEN.encode(), "p0"), expires_ms=1, **named)
            case "other blocks":
                token = lent.place.transfer_token
                params["remote_block_ids"] = json.loads(theirs.place.handoff)["remote_block_ids"]
            case _:
                token = theirs.place.transfer_token
        longer = prompt + prompt_of(next(_seeds), 50)
        answer = await client.decoded(longer, 3, {**params, "remote_request_id": token})
        assert answer.tokens == client.right(longer, 3)
        assert reason in str(served.event_of(EventKind.CLAIM_REFUSED, token).detail["reason"])


@pytest.mark.rule("KVC-IDEM-014", "KVC-IDEM-016")
async def test_the_router_borrows_a_prefix_and_without_a_loan_it_is_computed(tmp_path: Path) -> None:
    options = ["--prefill", "2", "--decode", "1", "--blocks", "--kv-lease-duration", "6"]
    with split(tmp_path, *options, profile="tiny") as served:
        async with served.client() as client, nodes(served, "p0", "p1") as both:
            first = prompt_of(next(_seeds), 1000)
            answer = await client.complete(first, 4)
            at = answer.headers["x-pdproof-prefill-worker"].partition("/")[0]
            other = "p1" if at == "p0" else "p0"

            async def listed() -> bool:
                async with client.session.get(client.url + "/metrics") as response:
                    return f'router_prefixes_known{{node="{at}"}} 1' in await response.text()

            await eventually(listed, LIMIT_S, "the router knows of it")
            before = await client.metrics(other)
            longer = first + prompt_of(next(_seeds), 300)
            told = await client.complete(longer, 4)
            assert told.headers["x-pdproof-prefill-worker"].partition("/")[0] == other
            assert told.tokens == client.right(longer, 4)
            assert await client.grown(other, before, "pdproof:loads_done_total") == [1]
            for node in both:
                os.kill(node.process().pid, signal.SIGSTOP)  # they answer nothing: no loans any more
            try:
                prompt = prompt_of(next(_seeds), 700)
                for _ in range(3):
                    answer = await client.complete(prompt, 4)
                    assert answer.tokens == client.right(prompt, 4)
            finally:
                for node in both:
                    os.kill(node.process().pid, signal.SIGCONT)


@pytest.mark.rule("KVC-IDEM-011")
async def test_a_group_moves_to_another_node_and_has_one_owner(served: Split) -> None:
    async with served.client() as client, nodes(served, "p0", "d0") as [p, d]:
        prompt = prompt_of(next(_seeds), 900)
        group = await p.new_group(client, prompt)
        name = group.block_group_id
        move = new_id()
        made_ms = wall_ns() // NS_PER_MS
        first = await p.answer(
            "start_migrate", name, group.epoch, "p0", "d0", operation_id=move, issued_ms=made_ms
        )  # fmt: skip
        assert (first.disposition, first.migration.status) == (pb.APPLIED, "PENDING")
        again = await p.answer(
            "start_migrate", name, group.epoch, "p0", "d0", operation_id=move, issued_ms=made_ms
        )  # fmt: skip
        assert (again.disposition, again.migration.operation_id) == (pb.REPLAYED, move)
        ended = await p.until_moved(move)
        assert (ended.status, ended.reason) == ("SUCCEEDED", "")

        async def owned() -> bool:
            found = await d.metadata(name)
            return found is not None and found.state == "RESIDENT"

        await eventually(owned, LIMIT_S, "d0 has it")
        there, here = await d.metadata(name), await p.metadata(name)
        assert there is not None
        assert here is not None
        assert (there.location, there.epoch, there.checksum) == ("d0", group.epoch + 1, group.checksum)
        assert (here.state, here.location, here.epoch) == ("MOVED", "d0", group.epoch + 1)
        assert (await p.answer("pin", name, group.epoch + 1, "r1")).refusal == "NOT_RESIDENT"
        assert (await d.answer("pin", name, there.epoch, "r1")).disposition == pb.APPLIED
        assert (await d.answer("unpin", name, there.epoch, "r1")).disposition == pb.APPLIED
        await client.until_free("p0", "d0")
        back = await d.answer("start_migrate", name, there.epoch, "d0", "p0")
        assert (await d.until_moved(back.migration.operation_id)).status == "SUCCEEDED"


@pytest.mark.rule("KVC-IDEM-011")
async def test_a_prompt_that_comes_back_where_its_group_left_is_another_group(served: Split) -> None:
    async with served.client() as client, nodes(served, "p0", "d0") as [p, d]:
        prompt = prompt_of(next(_seeds), 320)
        group = await p.new_group(client, prompt)
        started = await p.answer("start_migrate", group.block_group_id, group.epoch, "p0", "d0")
        assert (await p.until_moved(started.migration.operation_id)).status == "SUCCEEDED"
        again = await p.new_group(client, prompt)
        assert again.block_group_id != group.block_group_id
        assert again.block_group_id.rpartition(".")[2] == group.block_group_id.rpartition(".")[2]
        assert (await p.answer("pin", again.block_group_id, again.epoch, "r")).disposition == pb.APPLIED
        assert (await p.answer("unpin", again.block_group_id, again.epoch, "r")).disposition == pb.APPLIED
        there = await d.metadata(group.block_group_id)
        assert there is not None
        assert there.location == "d0"


@pytest.mark.rule("KVC-IDEM-011")
async def test_a_migration_can_be_cancelled_until_it_is_decided(served: Split) -> None:
    async with served.client() as client, nodes(served, "p0", "d0") as [p, d]:
        group = await p.new_group(client, prompt_of(next(_seeds), 320))
        name = group.block_group_id
        with served.stopped("d0"):  # its engine copies nothing meanwhile
            started = await p.answer("start_migrate", name, group.epoch, "p0", "d0")
            move = started.migration.operation_id
            assert (await p.answer("pin", name, group.epoch, "r1")).refusal == "MIGRATING"
            cancelled = await p.answer("cancel_migrate", name, group.epoch, move)
            assert (cancelled.disposition, cancelled.migration.status) == (pb.APPLIED, "CANCELLED")
            assert (cancelled.state, cancelled.epoch) == ("RESIDENT", group.epoch)

        async def given_back() -> bool:
            return await d.metadata(name) is None

        await eventually(given_back, LIMIT_S, "d0 has given its copy back")
        assert (await p.until_moved(move)).status == "CANCELLED"
        assert (await p.answer("evict", name, group.epoch)).disposition == pb.APPLIED
        await client.until_free("p0", "d0")


@pytest.mark.rule("KVC-IDEM-001", "KVC-IDEM-003")
async def test_the_service_comes_back_at_its_port_with_pins_and_answers(served: Split) -> None:
    async with served.client() as client, nodes(served, "p0") as [p]:
        group = await p.new_group(client, prompt_of(next(_seeds), 320))
        name, pin = group.block_group_id, new_id()
        issued_ms = wall_ns() // NS_PER_MS
        first = await p.do("pin", name, group.epoch, "r1", operation_id=pin, issued_ms=issued_ms)
        before = read_address(Path(served.said.run_dir), "p0")
        p.kill()
        assert before is not None
        found = await p.metadata(name)
        assert found is not None
        assert (found.pins, found.state) == (1, "RESIDENT")
        after = read_address(Path(served.said.run_dir), "p0")
        assert after is not None
        assert after.port == before.port
        assert first.outcome is CallOutcome.OK
        again = await p.answer("pin", name, group.epoch, "r1", operation_id=pin, issued_ms=issued_ms)
        assert (again.disposition, again.pins) == (pb.REPLAYED, 1)
        refused = await p.answer("evict", name, group.epoch)
        assert refused.refusal == "PINNED"
        assert (await p.answer("unpin", name, group.epoch, "r1")).disposition == pb.APPLIED
        assert (await p.answer("evict", name, group.epoch)).disposition == pb.APPLIED


async def test_an_engines_death_evicts_its_groups_and_the_service_lives(served: Split) -> None:
    async with served.client() as client, nodes(served, "p0") as [p]:
        group = await p.new_group(client, prompt_of(next(_seeds), 320))
        await p.answer("pin", group.block_group_id, group.epoch, "r1")
        pid = p.process().pid
        served.kill("p0")

        async def gone() -> bool:
            found = await p.metadata(group.block_group_id)
            return found is not None and found.state == "EVICTED" and found.pins == 0

        await eventually(gone, LIMIT_S, "its group is told as evicted")
        assert p.process().pid == pid
        await client.at("p0")
        await p.new_group(client, prompt_of(next(_seeds), 320))


async def test_another_tenant_sees_nothing_of_it(served: Split) -> None:
    async with served.client() as client, nodes(served, "p0") as [p]:
        group = await p.new_group(client, prompt_of(next(_seeds), 320))
        stranger = Node(served, "p0", tenant="stranger")
        assert await stranger.groups() == {}
        refused = await stranger.answer("evict", group.block_group_id, group.epoch)
        assert (refused.refusal, refused.field) == ("UNKNOWN_GROUP", "block_group_id")
        await stranger.client.close()

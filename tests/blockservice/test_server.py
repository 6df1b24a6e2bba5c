"""What the server makes of calls: answers, errors with a rule and a field, and no work for callers who have gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice import wire
from reference_impl.blockservice.buckets import Bucket, Buckets, Limit, Rate, RateLimited
from reference_impl.blockservice.credentials import DEPLOYMENT, credential
from reference_impl.blockservice.deadline import remaining_s
from reference_impl.blockservice.engine_link import NoEngine
from reference_impl.blockservice.failpoints import Action, FailPoints, Order, Point
from reference_impl.blockservice.metrics import RpcMetrics
from reference_impl.blockservice.node import CallerGone
from reference_impl.blockservice.rpc_log import RpcLog
from reference_impl.blockservice.server import BlockServer
from reference_impl.blockservice.store import Done, Store, StoreError, wall_ms
from reference_impl.blockservice.wire import AcceptOrder, Copy, Known, SettleOrder
from reference_impl.blockservice.writer import QueueFull
from reference_impl.rules.blockgroups import (
    CancelMigrate,
    Evict,
    Group,
    GroupState,
    MigrationStatus,
    Pin,
    PrepareGet,
    Refusal,
    Request,
    Reserve,
    StartMigrate,
)
from tests.blockservice.server_kit import GROUP, NODE, OTHER, SECRET, TENANT, Failed, StoreNode, serving
from tests.waiting import until_async

RESERVE = Reserve(block_group_id="bg_1", epoch=7, slots=1)
SHORT_S = 0.3
"""Of calls that are to run into their deadline."""


class GateNode(StoreNode):
    """A node whose writes wait, before they are queued for commit, until the test opens the gate."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.gate = asyncio.Event()
        self.arrived = 0
        self.stopped = 0
        self.left_s: list[float | None] = []

    async def write(self, tenant: str, operation_id: str, issued_ms: int, request: Request) -> Done:
        self.arrived += 1
        self.left_s.append(remaining_s())
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        return await super().write(tenant, operation_id, issued_ms, request)


async def test_a_write_is_applied_then_replayed_and_another_with_its_id_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as here:
        caller = here.caller()
        first, replayed = await caller.write("op-1", RESERVE)
        assert first.applied
        assert not replayed
        assert await caller.write("op-1", RESERVE, attempt=2) == (first, True)
        refused, _ = await caller.write("op-1", msgspec.structs.replace(RESERVE, slots=2))
        assert refused.refusal is Refusal.ID_REUSED
        stale, replayed = await caller.write("op-2", msgspec.structs.replace(RESERVE, epoch=6))
        assert (stale.refusal, stale.epoch, replayed) == (Refusal.STALE_EPOCH, 7, False)
        assert await caller.write("op-2", msgspec.structs.replace(RESERVE, epoch=6)) == (stale, True)
        assert [f.group.reserved for f in (await here.held()).finals] == [1]


async def test_reads_tell_what_is_there_and_not_found_what_is_not(tmp_path: Path) -> None:
    async with serving(tmp_path) as here:
        caller = here.caller()
        await caller.write("op-1", Pin(block_group_id="bg_1", epoch=7, request_id="r"))
        found = await caller.call("GetMetadata", pb.GetMetadataRequest(block_group_id="bg_1"))
        assert wire.metadata_of(found) == (GROUP, 1)
        with pytest.raises(Failed) as caught:
            await caller.call("GetMetadata", pb.GetMetadataRequest(block_group_id="bg_2"))
        assert (caught.value.code, caught.value.field) == (grpc.StatusCode.NOT_FOUND, "block_group_id")
        assert caught.value.rule == "UNKNOWN_GROUP"


async def test_a_list_is_as_long_as_one_message_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    groups = [msgspec.structs.replace(GROUP, block_group_id=f"bg_{n:03}") for n in range(60)]
    async with serving(tmp_path, groups=groups, message_bytes_max=2000) as here:
        caller, found, pages = here.caller(), [], 0
        after = ""
        while True:
            reply = await caller.call("ListGroups", pb.ListGroupsRequest(after=after))
            assert reply.ByteSize() <= 2000
            if not reply.groups:
                break
            found += [wire.metadata_of(entry)[0] for entry in reply.groups]
            after, pages = found[-1].block_group_id, pages + 1
        assert found == groups
        assert pages > 2
        few = await caller.call("ListGroups", pb.ListGroupsRequest(limit=2, state="RESIDENT"))
        assert len(few.groups) == 2
        assert not (await caller.call("ListGroups", pb.ListGroupsRequest(state="MOVED"))).groups


async def test_a_migration_is_told_of_by_the_operation_that_started_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as here:
        caller = here.caller()
        answer, _ = await caller.write("m-1", StartMigrate(block_group_id="bg_1", epoch=7, src=NODE, dst="node-2"))
        asked = pb.GetOperationRequest(operation=pb.Operation(operation_id="m-1"))
        assert wire.migration_of(await caller.call("GetMigrateStatus", asked)) == answer.migration
        answer, _ = await caller.write("c-1", CancelMigrate(block_group_id="bg_1", epoch=7, migration_id="m-1"))
        status = wire.migration_of(await caller.call("GetMigrateStatus", asked)).status
        assert status is MigrationStatus.CANCELLED
        with pytest.raises(Failed, match="UNKNOWN_OPERATION") as caught:
            await caller.call("GetMigrateStatus", pb.GetOperationRequest(operation=pb.Operation(operation_id="m-2")))
        assert caught.value.field == "operation.operation_id"


@pytest.mark.rule("KVC-IDEM-019")
async def test_an_operation_can_be_asked_for_by_its_id(tmp_path: Path) -> None:
    async with serving(tmp_path, node=GateNode) as here:
        assert isinstance(here.node, GateNode)
        caller, now_ms = here.caller(), wall_ms()

        async def known(operation_id: str, issued_ms: int = now_ms) -> tuple[Known, Any]:
            operation = pb.Operation(operation_id=operation_id, issued_ms=issued_ms)
            return wire.state_of(await caller.call("GetOperation", pb.GetOperationRequest(operation=operation)))

        assert await known("op-1") == (Known.UNKNOWN, None)
        under_way = asyncio.create_task(caller.write("op-1", RESERVE))
        await until_async(lambda: isinstance(here.node, GateNode) and here.node.arrived == 1, 20, "the write arrived")
        assert await known("op-1") == (Known.IN_PROGRESS, None)
        here.node.gate.set()
        answer, _ = await under_way
        assert await known("op-1") == (Known.DONE, answer)
        refused, _ = await caller.write("op-2", Evict(block_group_id="bg_9", epoch=1))
        assert await known("op-2") == (Known.DONE, refused)
        assert await known("op-3", now_ms - 3_600_000) == (Known.EXPIRED, None)
        other = here.caller(OTHER)
        asked = pb.GetOperationRequest(operation=pb.Operation(operation_id="op-1", issued_ms=now_ms))
        assert wire.state_of(await other.call("GetOperation", asked)) == (Known.UNKNOWN, None)


# Deadlines.


@pytest.mark.rule("KVC-IDEM-012")
async def test_a_handler_has_what_its_caller_has_left_and_no_more(tmp_path: Path) -> None:
    async with serving(tmp_path, node=GateNode) as here:
        assert isinstance(here.node, GateNode)
        here.node.gate.set()
        for timeout_s in (3.001, 7.7, 20.0, 33.33, 599.0):  # gRPC rounds some of them up
            await here.caller().write(f"op-{timeout_s}", RESERVE, timeout_s=timeout_s)
            left_s = here.node.left_s.pop()
            assert left_s is not None
            assert timeout_s / 2 < left_s <= timeout_s


@pytest.mark.rule("KVC-IDEM-012")
async def test_no_work_goes_on_for_longer_than_ten_minutes(tmp_path: Path) -> None:
    async with serving(tmp_path, node=GateNode) as here:
        assert isinstance(here.node, GateNode)
        here.node.gate.set()
        await here.caller().write("op-1", RESERVE, timeout_s=86_400)
        assert 500 < (here.node.left_s[0] or 0) <= 600


@pytest.mark.rule("KVC-IDEM-012")
@pytest.mark.parametrize("how", ["deadline", "hang up"])
async def test_work_whose_caller_has_gone_stops_before_it_is_queued(tmp_path: Path, how: str) -> None:
    async with serving(tmp_path, node=GateNode) as here:
        node = here.node
        assert isinstance(node, GateNode)
        before = (await here.held()).state()
        call = asyncio.create_task(
            here.caller().write("op-1", RESERVE, timeout_s=SHORT_S if how == "deadline" else 60)
        )  # fmt: skip
        await until_async(lambda: node.arrived == 1 or call.done(), 20, "the write arrived")
        if how == "deadline":
            with pytest.raises(Failed) as caught:
                await call
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
        await until_async(lambda: node.stopped == node.arrived, 20, "the work stopped")
        node.gate.set()
        await until_async(lambda: not here.metrics.inflight, 20, "the call has ended")
        assert (await here.held()).state() == before
        assert not (await here.caller().write("op-1", RESERVE, attempt=2))[1], "it had not run before"


@pytest.mark.rule("KVC-IDEM-012")
async def test_a_commit_that_has_begun_goes_on_and_is_found_by_the_retry(tmp_path: Path) -> None:
    points = FailPoints(lambda *_: None)
    async with serving(tmp_path, points=points) as here:
        caller = here.caller()
        points.arm(Order(point=Point.BEFORE_COMMIT, action=Action.DELAY, seconds=3 * SHORT_S))
        with pytest.raises(Failed, match="DEADLINE_EXCEEDED"):
            await caller.write("op-1", RESERVE, timeout_s=SHORT_S)
        answer, replayed = await caller.write("op-1", RESERVE, attempt=2)
        assert answer.applied
        assert replayed == bool(points.acted), "if the first attempt got as far as its commit, it ran"
        assert [f.group.reserved for f in (await here.held()).finals] == [1]


async def test_a_call_in_time_is_not_delayed_by_one_that_is_stuck(tmp_path: Path) -> None:
    async with serving(tmp_path, node=GateNode) as here:
        assert isinstance(here.node, GateNode)
        caller = here.caller()
        stuck = asyncio.create_task(caller.write("op-1", RESERVE))
        for _ in range(20):
            await caller.call("GetMetadata", pb.GetMetadataRequest(block_group_id="bg_1"))
        assert not stuck.done()
        here.node.gate.set()
        await stuck


# Limits.


async def test_more_calls_than_there_is_room_for_are_refused_and_harm_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path, node=GateNode, calls_max=3) as here:
        node = here.node
        assert isinstance(node, GateNode)
        caller = here.caller()
        running = [asyncio.create_task(caller.write(f"op-{n}", RESERVE)) for n in range(3)]
        await until_async(lambda: node.arrived == 3, 20, "three calls are worked on")
        with pytest.raises(Failed) as caught:
            await caller.call("GetMetadata", pb.GetMetadataRequest(block_group_id="bg_1"))
        assert (caught.value.code, caught.value.rule) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
        node.gate.set()
        assert all(answer.applied for answer, _ in await asyncio.gather(*running))
        await caller.call("GetMetadata", pb.GetMetadataRequest(block_group_id="bg_1"))


async def test_a_reader_without_a_token_is_told_while_he_can_still_do_something_else(tmp_path: Path) -> None:
    limits = {Bucket.REMOTE_READ_QPS: Limit(tenant=Rate(per_s=0.01, burst=1))}
    async with serving(tmp_path, limits=limits) as here:
        caller, get = here.caller(), PrepareGet(block_group_id="bg_1", epoch=7, request_id="r")
        assert (await caller.write("op-1", get))[0].applied
        with pytest.raises(Failed) as caught:
            await caller.write("op-2", get, timeout_s=4 * SHORT_S)
        assert (caught.value.code, caught.value.rule) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED")
        assert caught.value.field == "remote_read_qps_token"
        assert (await caller.write("op-3", RESERVE))[0].applied, "what takes no token needs none"
        assert not [r for r in (await here.held()).records if r.operation_id == "op-2"]


# Errors.


class FailingNode(StoreNode):
    """A node whose writes raise what the test says."""

    error: Exception = RuntimeError()

    async def write(self, *_: Any) -> Done:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "rule"),
    [
        (StoreError("full", "/a/path"), grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL"),
        (StoreError("locked", "/a/path"), grpc.StatusCode.UNAVAILABLE, "STORE_LOCKED"),
        (StoreError("damaged", "/a/path"), grpc.StatusCode.INTERNAL, "STORE_DAMAGED"),
        (StoreError("damaged", "/a/path", retry=True), grpc.StatusCode.UNAVAILABLE, "STORE_FAILING"),
        (QueueFull("1024"), grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
        (NoEngine("/a/path"), grpc.StatusCode.UNAVAILABLE, "NO_ENGINE"),
        (CallerGone("gone"), grpc.StatusCode.DEADLINE_EXCEEDED, "TIMED_OUT"),
        (RateLimited(Bucket.MIGRATION_BYTES, "empty"), grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED"),
    ],
)
async def test_each_error_of_a_node_has_its_code_and_its_rule(
    tmp_path: Path, error: Exception, code: grpc.StatusCode, rule: str
) -> None:
    async with serving(tmp_path, node=FailingNode) as here:
        FailingNode.error = error
        with pytest.raises(Failed) as caught:
            await here.caller().write("op-1", RESERVE)
        assert (caught.value.code, caught.value.rule) == (code, rule)
        assert "/a/path" not in caught.value.details
        assert here.metrics.broken == 0


async def test_a_handler_that_breaks_ends_neither_the_server_nor_its_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, node=FailingNode) as here:
        FailingNode.error = KeyError("something private")
        caller = here.caller()
        for n in range(3):
            with pytest.raises(Failed) as caught, caplog.at_level(logging.ERROR):
                await caller.write(f"op-{n}", RESERVE)
            assert (caught.value.code, caught.value.rule) == (grpc.StatusCode.INTERNAL, "BROKEN")
            assert "private" not in caught.value.details
            assert "\n" not in caught.value.details
        assert here.metrics.broken == 3
        assert "something private" in caplog.text, "the node's own log says how"
        assert await caller.call("GetMetadata", pb.GetMetadataRequest(block_group_id="bg_1"))


class LongNode(StoreNode):
    """A node whose hand-offs are longer than a message may be."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.lends = msgspec.structs.replace(self.lends, handoff="x" * 5000)


@pytest.mark.rule("KVC-IDEM-016")
async def test_no_reply_is_longer_than_a_message_may_be(tmp_path: Path) -> None:
    async with serving(tmp_path, node=LongNode, message_bytes_max=4000) as here:
        with pytest.raises(Failed) as caught:
            await here.caller().write("op-1", PrepareGet(block_group_id="bg_1", epoch=7, request_id="r"))
        assert (caught.value.code, caught.value.rule) == (grpc.StatusCode.INTERNAL, "REPLY_TOO_LARGE")


@pytest.mark.rule("KVC-IDEM-016")
async def test_a_prepared_get_tells_place_size_checksum_token_and_expiry(tmp_path: Path) -> None:
    async with serving(tmp_path) as here:
        now_ms = wall_ms()
        answer, _ = await here.caller().write("op-1", PrepareGet(block_group_id="bg_1", epoch=7, request_id="r"))
        place = answer.place
        assert place is not None
        assert (place.node, place.size_bytes, place.checksum) == (NODE, 1, "ab" * 16)
        assert place.transfer_token == "token-op-1"
        assert place.expires_ms > now_ms


# Other services.


async def test_another_node_hands_a_group_over_with_the_deployments_credential(tmp_path: Path) -> None:
    async with serving(tmp_path) as here:
        peer, arriving = here.caller(DEPLOYMENT), Group(block_group_id="bg_2", location="node-2", epoch=3)
        place = msgspec.structs.replace(here.node.lends, node="node-2")
        order = AcceptOrder(operation_id="m-1", tenant=TENANT, group=arriving, digests=(b"0" * 16,), place=place)
        for _ in range(2):
            reply = wire.accepted_of(await peer.call("Accept", wire.accept_pb(order)))
            assert reply == (Copy.COPIED, "")
        settle = SettleOrder(operation_id="m-1", tenant=TENANT, status=MigrationStatus.SUCCEEDED)
        for _ in range(2):
            assert wire.accepted_of(await peer.call("Settle", wire.settle_pb(settle))) == (Copy.SETTLED, "")
        found = await here.caller().call("GetMetadata", pb.GetMetadataRequest(block_group_id="bg_2"))
        assert (found.location, found.epoch, found.state) == (NODE, 4, GroupState.RESIDENT)


@pytest.mark.parametrize("method", ["Accept", "Settle", "Arm", "Report"])
async def test_what_is_the_deployments_is_no_tenants(tmp_path: Path, method: str) -> None:
    async with serving(tmp_path, points=FailPoints(lambda *_: None)) as here:
        shapes = {"Accept": pb.AcceptRequest, "Settle": pb.SettleRequest, "Arm": pb.ArmRequest}
        for caller in (here.caller(), here.caller(DEPLOYMENT, key=credential(SECRET, TENANT))):
            with pytest.raises(Failed) as caught:
                await caller.call(method, shapes.get(method, pb.ReportRequest)())
            assert (caught.value.code, caught.value.rule) == (grpc.StatusCode.UNAUTHENTICATED, "WRONG_CREDENTIAL")


# Start and stop.


def bare(calls: Callable[[], Any] = dict, **more: Any) -> BlockServer:
    made: dict[str, Any] = {
        "points": None, "buckets": Buckets({}), "metrics": RpcMetrics(), "log": RpcLog(None), **calls(), **more,
    }  # fmt: skip
    secret = made.pop("secret", SECRET)
    return BlockServer(None, secret, **made)  # type: ignore[arg-type] # no call comes


async def test_credentials_do_not_leave_the_machine() -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        with pytest.raises(ValueError, match="loopback"):
            await bare().start(host, 0)


async def test_a_port_that_is_taken_is_an_error_and_the_start_can_be_tried_again() -> None:
    first, second = bare(), bare()
    port = await first.start("127.0.0.1", 0)
    with pytest.raises(RuntimeError):
        await second.start("127.0.0.1", port)
    await first.stop(0)
    assert await second.start("127.0.0.1", 0)
    await second.stop(0)


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        bare(secret=b"short")


async def test_a_server_that_stops_lets_calls_end_first(tmp_path: Path) -> None:
    async with serving(tmp_path, node=GateNode) as here:
        node = here.node
        assert isinstance(node, GateNode)
        call = asyncio.create_task(here.caller().write("op-1", RESERVE))
        await until_async(lambda: node.arrived == 1, 20, "the write arrived")
        stopping = asyncio.create_task(here.server.stop(20))
        node.gate.set()
        assert (await call)[0].applied
        await stopping

"""Nothing that a caller can send changes anything that it may not, ends the server, or goes without a reason."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf.message import DecodeError, Message

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice import wire
from reference_impl.blockservice.calls import METHODS
from reference_impl.blockservice.credentials import CREDENTIAL_KEY, DEPLOYMENT, TENANT_KEY, credential
from reference_impl.blockservice.failpoints import FailPoints
from reference_impl.blockservice.store import wall_ms
from reference_impl.rules.blockgroups import Evict, Pin, Refusal, Request, Reserve, StartMigrate
from tests.blockservice.server_kit import NODE, OTHER, SECRET, TENANT, Caller, Failed, Serving, serving

INVALID = grpc.StatusCode.INVALID_ARGUMENT
AT = {"block_group_id": "bg_1", "epoch": 7}
OURS = {"Accept", "Settle", "Arm", "Report"}


@contextlib.asynccontextmanager
async def unharmed(folder: Path, **more: Any) -> AsyncIterator[Serving]:
    """Serve, and see in the end that the store is as it was, and that the server serves."""
    async with serving(folder, points=FailPoints(lambda *_: None), **more) as here:
        before = (await here.held()).state()
        yield here
        assert (await here.held()).state() == before
        assert here.metrics.broken == 0
        assert (await here.caller().write("good", Pin(request_id="r", **AT)))[0].applied


async def refused(caller: Caller, method: str, message: Any, **more: Any) -> Failed:
    with pytest.raises(Failed) as caught:
        await caller.call(method, message, **more)
    assert "\n" not in caught.value.details
    assert len(caught.value.details) < 1000
    return caught.value


MALFORMED = [b"\xff", b"\xff\xff\xff\xff", b"\x0a\xff\x01", b"\x12\x02\xc3\x28", b"\x00" * 100, b"{}", b"\x0a" * 5000]


def is_one(data: bytes, shape: type[Message]) -> bool:
    try:
        shape.FromString(data)
    except DecodeError:
        return False
    return True


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message_are_refused_on_every_method(tmp_path: Path, method: str) -> None:
    async with unharmed(tmp_path) as here:
        caller = here.caller(DEPLOYMENT if method in OURS else TENANT)
        for data in MALFORMED:
            if method in ("Report", "ListGroups") and is_one(data, METHODS[method].request):
                continue  # every field may be left out, and unknown ones are allowed
            with pytest.raises(Failed) as caught:
                await caller.raw(METHODS[method].path, data)
            assert caught.value.code is INVALID
            assert caught.value.field, "each names what is at fault"


async def test_an_empty_message_misses_its_first_field(tmp_path: Path) -> None:
    async with unharmed(tmp_path) as here:
        for method in wire.WRITES:
            error = await refused(here.caller(), method, wire.WRITES[method][0]())
            assert (error.code, error.field) == (INVALID, "operation.operation_id")


@pytest.mark.parametrize("size", [(1 << 20) + 1, 3 << 20])
async def test_a_message_that_is_too_long_is_refused(tmp_path: Path, size: int) -> None:
    async with unharmed(tmp_path) as here:
        message = pb.GetMetadataRequest(block_group_id="x" * size)
        error = await refused(here.caller(), "GetMetadata", message)
        if size > 2 << 20:  # gRPC does not even read it
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        else:
            assert (error.code, error.field) == (INVALID, "message")


LONG = "x" * 100_000
BAD: list[tuple[str, dict[str, Any], str]] = [
    *[("Evict", {"block_group_id": bad}, "block_group_id") for bad in ("", LONG, "bg 1", "bg_1\n", "\x00", "gruppe-ä")],
    *[("Pin", {"request_id": bad}, "request_id") for bad in ("", LONG, "r\x1b[2J")],
    *[("Evict", {"epoch": bad}, "epoch") for bad in (-1, -(1 << 63), 1 << 53)],
    *[("Reserve", {"slots": bad}, "slots") for bad in (0, -5, 1 << 40)],
    *[("Evict", {"operation_id": bad}, "operation.operation_id") for bad in ("", LONG, "op\x7f", "日本")],
    *[("Evict", {"issued_ms": bad}, "operation.issued_ms") for bad in (0, -1, 1 << 62)],
    ("StartMigrate", {"src": ""}, "src"),
    ("StartMigrate", {"dst": "x\ny"}, "dst"),
    ("CancelMigrate", {"migration_id": LONG}, "migration_id"),
]


@pytest.mark.parametrize(("method", "fields", "field"), BAD)
async def test_a_value_out_of_bounds_is_refused_by_its_name(
    tmp_path: Path, method: str, fields: dict[str, Any], field: str
) -> None:
    right = {
        "Reserve": {"slots": 1}, "Pin": {"request_id": "r"}, "StartMigrate": {"src": NODE, "dst": "node-2"},
    }.get(method, {})  # fmt: skip
    named = {"operation_id": "bad", "issued_ms": wall_ms()} | {
        k: v for k, v in fields.items() if k in ("operation_id", "issued_ms")
    }
    others = {k: v for k, v in fields.items() if k not in named}
    async with unharmed(tmp_path) as here:
        message = wire.WRITES[method][0](operation=pb.Operation(**named), **(AT | right | others))
        error = await refused(here.caller(), method, message)
        assert (error.code, error.field, error.rule) == (INVALID, field, "BAD_REQUEST")


REFUSED: list[tuple[Request, Refusal, str]] = [
    (Evict(block_group_id="bg_2", epoch=7), Refusal.UNKNOWN_GROUP, "block_group_id"),
    (Evict(block_group_id="bg_1", epoch=8), Refusal.FUTURE_EPOCH, "epoch"),
    (Evict(block_group_id="bg_1", epoch=(1 << 53) - 1), Refusal.FUTURE_EPOCH, "epoch"),
    (Evict(block_group_id="bg_1", epoch=6), Refusal.STALE_EPOCH, "epoch"),
    (Evict(block_group_id="bg_1", epoch=0), Refusal.STALE_EPOCH, "epoch"),
    (Reserve(block_group_id="bg_1", epoch=7, slots=(1 << 20)), Refusal.NONE, ""),
    (StartMigrate(src="node-9", dst="node-2", **AT), Refusal.WRONG_SOURCE, "src"),
    (StartMigrate(src=NODE, dst="node-9", **AT), Refusal.WRONG_TARGET, "dst"),
]


@pytest.mark.parametrize(("request_", "refusal", "field"), REFUSED)
async def test_what_the_rules_refuse_is_an_answer_with_its_field(
    tmp_path: Path, request_: Request, refusal: Refusal, field: str
) -> None:
    async with serving(tmp_path) as here:
        before = await here.held()
        answer, replayed = await here.caller().write("op", request_)
        assert (answer.refusal, answer.field, replayed) == (refusal, field, False)
        after = await here.held()
        assert len(after.records) == 1
        if refusal:
            assert (after.effects, after.finals) == (before.effects, before.finals)


async def test_an_operation_from_another_time_is_not_run(tmp_path: Path) -> None:
    async with unharmed(tmp_path) as here:
        for issued_ms, refusal in (
            (wall_ms() - 3_600_000, Refusal.ID_EXPIRED),
            (wall_ms() + 3_600_000, Refusal.FROM_THE_FUTURE),
        ):
            answer, _ = await here.caller().write("op", Evict(**AT), issued_ms=issued_ms)
            assert (answer.refusal, answer.field) == (refusal, "issued_ms")


async def test_another_tenants_group_is_an_unknown_one_and_his_ids_are_not_ours(tmp_path: Path) -> None:
    async with serving(tmp_path) as here:
        ours, other = here.caller(), here.caller(OTHER)
        applied, _ = await ours.write("op", Reserve(slots=1, **AT))
        before = (await here.held()).effects
        answer, replayed = await other.write("op", Reserve(slots=1, **AT))
        assert (answer.refusal, replayed) == (Refusal.UNKNOWN_GROUP, False)
        assert answer.epoch == 0, "not even its epoch is told"
        assert (
            await refused(other, "GetMetadata", pb.GetMetadataRequest(block_group_id="bg_1"))
        ).rule == "UNKNOWN_GROUP"
        assert not (await other.call("ListGroups", pb.ListGroupsRequest())).groups
        assert (await here.held()).effects == before
        assert await ours.write("op", Reserve(slots=1, **AT)) == (applied, True)


WHO: list[tuple[str, str]] = [
    (TENANT, credential(SECRET, OTHER)),
    (TENANT, credential(SECRET, DEPLOYMENT)),
    (TENANT, credential(b"some other deployment's secret", TENANT)),
    (TENANT, ""),
    (TENANT, "x" * 4000),
    (TENANT, credential(SECRET, TENANT)[:-1]),
    (TENANT, credential(SECRET, TENANT).upper()),
    (DEPLOYMENT, credential(SECRET, DEPLOYMENT)),
    ("tenant a", credential(SECRET, "tenant a")),
    ("x" * 200, credential(SECRET, "x" * 200)),
]


@pytest.mark.parametrize(("tenant", "key"), WHO)
async def test_who_cannot_prove_a_tenants_name_gets_nothing(tmp_path: Path, tenant: str, key: str) -> None:
    async with unharmed(tmp_path) as here:
        stranger = here.caller(tenant, key=key)
        named = wire.Named("op", wall_ms())
        messages = [("Evict", wire.write_pb(named, Evict(**AT))), ("ListGroups", pb.ListGroupsRequest())]
        told = {str(await refused(stranger, method, message)) for method, message in messages}
        assert len(told) == 1, "every wrong answer reads the same"
        assert "UNAUTHENTICATED WRONG_CREDENTIAL authorization" in told.pop()


async def test_who_does_not_say_his_name_or_says_it_twice_gets_nothing(tmp_path: Path) -> None:
    async with unharmed(tmp_path) as here:
        caller = here.caller()
        whole = caller.metadata
        for pairs in (
            (), [p for p in whole if p[0] != TENANT_KEY], [p for p in whole if p[0] != CREDENTIAL_KEY],
            (*whole, (TENANT_KEY, OTHER)), (*whole, (CREDENTIAL_KEY, "Bearer x")),
            [(k, v.removeprefix("Bearer ")) for k, v in whole],
        ):  # fmt: skip
            caller.metadata = tuple(pairs)
            error = await refused(caller, "Evict", wire.write_pb(wire.Named("op", wall_ms()), Evict(**AT)))
            assert error.code is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.rule("KVC-IDEM-012")
@pytest.mark.parametrize("method", METHODS)
async def test_a_call_without_a_deadline_is_refused_on_every_method(tmp_path: Path, method: str) -> None:
    async with unharmed(tmp_path) as here:
        caller = here.caller(DEPLOYMENT if method in OURS else TENANT)
        error = await refused(caller, method, METHODS[method].request(), timeout_s=None)
        assert (error.code, error.rule, error.field) == (INVALID, "NO_DEADLINE", "deadline")


@pytest.mark.parametrize("attempt", ["0", "-1", "1.5", "one", "1001", "9" * 30, ""])
async def test_an_attempt_that_is_no_number_is_refused(tmp_path: Path, attempt: str) -> None:
    async with unharmed(tmp_path) as here:
        message = pb.GetMetadataRequest(block_group_id="bg_1")
        error = await refused(here.caller(), "GetMetadata", message, more=[("x-pdproof-attempt", attempt)])
        assert (error.code, error.field) == (INVALID, "x-pdproof-attempt")


async def test_metadata_without_end_is_refused(tmp_path: Path) -> None:
    async with unharmed(tmp_path) as here:
        message = pb.GetMetadataRequest(block_group_id="bg_1")
        for more in ([("x-pdproof-request-id", "r" * 100_000)], [(f"x-{n}", "y" * 100) for n in range(200)]):
            error = await refused(here.caller(), "GetMetadata", message, more=more)
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_request_id_may_be_anything_and_does_no_harm(tmp_path: Path) -> None:
    async with unharmed(tmp_path) as here:
        message = pb.GetMetadataRequest(block_group_id="bg_1")
        for text in ("r" * 4000, '{"a": "b"}', "\\x1b[2J"):
            await here.caller().call("GetMetadata", message, more=[("x-pdproof-request-id", text)])
        await here.caller().call(
            "GetMetadata", message, more=[("x-pdproof-request-id", "a"), ("x-pdproof-request-id", "b")]
        )
    lines = here.log_path.read_bytes().splitlines()
    assert [len(msgspec.json.decode(line)["request_id"]) for line in lines[:4]] == [128, 10, 7, 0]


async def test_a_method_that_does_not_exist_is_none(tmp_path: Path) -> None:
    async with unharmed(tmp_path) as here:
        for path in ("/pdproof.blocks.v1.BlockGroups/Delete", "/Evict", "/x/y"):
            with pytest.raises(Failed) as caught:
                await here.caller().raw(path, b"")
            assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED

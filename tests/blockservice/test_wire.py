"""What travels comes out as it went in; what is out of bounds is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice import wire
from reference_impl.blockservice.failpoints import Action, Order, Point
from reference_impl.blockservice.wire import AcceptOrder, BadRequest, Copy, Known, Named, SettleOrder
from reference_impl.rules.blockgroups import (
    Answer,
    CancelMigrate,
    Evict,
    Group,
    GroupState,
    Migration,
    MigrationStatus,
    Outcome,
    Pin,
    Place,
    PrepareGet,
    Refusal,
    Request,
    Reserve,
    StartMigrate,
    Unpin,
)

NAMED = Named("op-1", 1_700_000_000_000)
AT = {"block_group_id": "bg_1", "epoch": 7}
REQUESTS: list[Request] = [
    Reserve(slots=3, **AT), Pin(request_id="r", **AT), Unpin(request_id="r", **AT), Evict(**AT),
    PrepareGet(request_id="r", **AT), StartMigrate(src="a", dst="b", **AT), CancelMigrate(migration_id="m", **AT),
]  # fmt: skip
PLACE = Place(
    node="n", handoff='{"blocks": [1]}', size_bytes=1 << 40, checksum="0f" * 16, transfer_token="xfer-1", expires_ms=9
)
MIGRATION = Migration(
    operation_id="op", block_group_id="bg", src="a", dst="b", epoch=3, status=MigrationStatus.FAILED, reason="no room"
)
GROUP = Group(
    block_group_id="bg", state=GroupState.MIGRATING_OUT, location="n", epoch=(1 << 53) - 1, size_bytes=5,
    token_start=16, token_end=32, checksum="ff" * 16, reserved=2,
)  # fmt: skip
ANSWERS = [
    Answer(outcome=Outcome.APPLIED, epoch=7, state=GroupState.RESIDENT, location="n", reserved=4, pins=2),
    Answer(outcome=Outcome.APPLIED, epoch=7, migration=MIGRATION, place=PLACE),
    Answer(outcome=Outcome.REFUSED, refusal=Refusal.STALE_EPOCH, message="epoch 6 is over", field="epoch", epoch=7),
    Answer(outcome=Outcome.REFUSED, refusal=Refusal.TOO_LATE, field="migration_id", migration=MIGRATION),
]
ACCEPT = AcceptOrder(operation_id="op", tenant="t", group=GROUP, digests=(b"0" * 16, b"1" * 16), place=PLACE)


def sent(message: Message) -> Any:
    """Return a message as its receiver has it."""
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_every_write_comes_out_as_it_went_in(request_: Request) -> None:
    message = sent(wire.write_pb(NAMED, request_))
    assert wire.write_of(wire.METHODS[type(request_)], message) == (NAMED, request_)


def test_every_request_of_the_rules_has_a_method() -> None:
    assert set(wire.METHODS) == {type(request) for request in REQUESTS}


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: a.refusal or "applied")
@pytest.mark.parametrize("replayed", [False, True])
def test_every_answer_comes_out_as_it_went_in(answer: Answer, replayed: bool) -> None:
    message = sent(wire.answer_pb(answer, replayed=replayed))
    assert wire.answer_of(message) == (answer, replayed)
    expected = pb.REFUSED if not answer.applied else pb.REPLAYED if replayed else pb.APPLIED
    assert message.disposition == expected


@pytest.mark.rule("KVC-IDEM-016")
def test_a_place_says_where_how_much_with_which_checksum_and_until_when() -> None:
    message = sent(wire.place_pb(PLACE))
    assert wire.place_of(message) == PLACE
    assert (message.node, message.size_bytes, message.checksum) == ("n", 1 << 40, "0f" * 16)
    assert (message.transfer_token, message.expires_ms) == ("xfer-1", 9)


def test_everything_else_comes_out_as_it_went_in() -> None:
    assert wire.metadata_of(sent(wire.metadata_pb(GROUP, 3))) == (GROUP, 3)
    assert wire.migration_of(sent(wire.migration_pb(MIGRATION))) == MIGRATION
    assert wire.accept_of(sent(wire.accept_pb(ACCEPT))) == ACCEPT
    settle = SettleOrder(operation_id="op", tenant="t", status=MigrationStatus.SUCCEEDED)
    assert wire.settle_of(sent(wire.settle_pb(settle))) == settle
    for copy in Copy:
        assert wire.accepted_of(sent(wire.accepted_pb(copy, "why"))) == (copy, "why")
    for known in Known:
        answer = ANSWERS[0] if known is Known.DONE else None
        assert wire.state_of(sent(wire.state_pb(known, answer))) == (known, answer)


def test_what_the_source_alone_knows_of_a_migration_does_not_travel() -> None:
    told = msgspec.structs.replace(MIGRATION, told=True)
    assert wire.migration_of(wire.migration_pb(told)) == MIGRATION


def write(method: str, operation: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Read a write that is right but for what is given."""
    named = {"operation_id": "op", "issued_ms": 1} | (operation or {})
    right = {
        "Reserve": {"slots": 1}, "Pin": {"request_id": "r"}, "StartMigrate": {"src": "a", "dst": "b"},
        "CancelMigrate": {"migration_id": "m"},
    }.get(method, {})  # fmt: skip
    message = wire.WRITES[method][0](operation=pb.Operation(**named), **({**AT, **right} | fields))
    return wire.write_of(method, sent(message))


LONG = "x" * 129
BAD_IDS = ["", LONG, "x" * 1_000_000, "a b", "a\n", "\x00", "a\x7f", "köln", "日本", "a\u200b"]
WRONG = [
    *[("Evict", {"block_group_id": bad}, "block_group_id") for bad in BAD_IDS],
    *[("Pin", {"request_id": bad}, "request_id") for bad in BAD_IDS],
    *[("Evict", {"operation": {"operation_id": bad}}, "operation.operation_id") for bad in BAD_IDS],
    *[("Evict", {"operation": {"issued_ms": bad}}, "operation.issued_ms") for bad in (0, -1, 1 << 53, -(1 << 63))],
    *[("Evict", {"epoch": bad}, "epoch") for bad in (-1, 1 << 53, -(1 << 63), (1 << 63) - 1)],
    *[("Reserve", {"slots": bad}, "slots") for bad in (0, -1, (1 << 20) + 1, (1 << 63) - 1)],
    ("StartMigrate", {"src": ""}, "src"),
    ("StartMigrate", {"dst": LONG}, "dst"),
    ("CancelMigrate", {"migration_id": ""}, "migration_id"),
]


@pytest.mark.parametrize(("method", "fields", "field"), WRONG)
def test_what_is_out_of_bounds_is_refused_by_its_name(method: str, fields: dict[str, Any], field: str) -> None:
    write(method)
    with pytest.raises(BadRequest) as caught:
        write(method, **fields)
    assert caught.value.field == field
    given = str(next(iter(fields.values())))
    assert len(str(caught.value)) < 200
    assert given not in str(caught.value) or len(given) < 3  # nothing a caller wrote is echoed


def place(**fields: Any) -> pb.Place:
    message = wire.place_pb(PLACE)
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def group(**fields: Any) -> pb.Metadata:
    message = wire.metadata_pb(GROUP, 0)
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def accept(**fields: Any) -> pb.AcceptRequest:
    right = {"operation_id": "op", "tenant": "t", "group": group(), "place": place()}
    return pb.AcceptRequest(**(right | fields))


@pytest.mark.parametrize(
    ("read", "field"),
    [
        (lambda: wire.named_of(pb.Operation()), "operation.operation_id"),
        (lambda: wire.listing_of(pb.ListGroupsRequest(state="ASLEEP")), "state"),
        (lambda: wire.listing_of(pb.ListGroupsRequest(limit=-1)), "limit"),
        (lambda: wire.listing_of(pb.ListGroupsRequest(after=LONG)), "after"),
        (lambda: wire.block_group_id_of(pb.GetMetadataRequest()), "block_group_id"),
        (lambda: wire.accept_of(accept(digests=[b"0" * 15])), "digests"),
        (lambda: wire.accept_of(accept(digests=[b"0" * 16, b"0" * 4096])), "digests"),
        (lambda: wire.accept_of(accept(tenant="")), "tenant"),
        (lambda: wire.accept_of(accept(group=group(size_bytes=-1))), "group.size_bytes"),
        (lambda: wire.accept_of(accept(group=group(state=""))), "group.state"),
        (lambda: wire.accept_of(accept(group=group(checksum="zz" * 16))), "group.checksum"),
        (lambda: wire.accept_of(accept(group=group(token_end=1))), "group.token_end"),
        (lambda: wire.accept_of(accept(place=place(expires_ms=-1))), "place.expires_ms"),
        (lambda: wire.accept_of(accept(place=place(handoff="x" * (wire.HANDOFF_CHARS_MAX + 1)))), "place.handoff"),
        (lambda: wire.settle_of(pb.SettleRequest(operation_id="o", tenant="t", status="RUNNING")), "status"),
        (lambda: wire.settle_of(pb.SettleRequest(operation_id="o", tenant="t", status="WON")), "status"),
        (lambda: wire.accepted_of(pb.Accepted()), "copy"),
        (lambda: wire.accepted_of(sent(pb.Accepted(copy=9))), "copy"),
        (lambda: wire.state_of(pb.OperationState()), "known"),
        (lambda: wire.answer_of(pb.Answer()), "disposition"),
        (lambda: wire.answer_of(pb.Answer(disposition=pb.IN_PROGRESS)), "disposition"),
        (lambda: wire.answer_of(pb.Answer(disposition=pb.APPLIED, refusal="BORED")), "refusal"),
        (lambda: wire.answer_of(pb.Answer(disposition=pb.APPLIED, state="ASLEEP")), "state"),
        (lambda: wire.answer_of(pb.Answer(disposition=pb.APPLIED, place=pb.Place())), "place.node"),
        (lambda: wire.parsed(b"\xff\xff", pb.EvictRequest), "message"),
        (lambda: wire.parsed(b"\x12\x02\xff\xfe", pb.EvictRequest), "message"),  # a text that is no UTF-8
        (lambda: wire.order_of(pb.ArmRequest(point="nowhere", action="exit", times=1)), "point"),
        (lambda: wire.order_of(pb.ArmRequest(point="received", action="explode", times=1)), "action"),
        (lambda: wire.order_of(pb.ArmRequest(point="received", action="exit")), "times"),
        (lambda: wire.order_of(pb.ArmRequest(point="after_reply", action="drop", times=1)), "action"),
        (lambda: wire.order_of(pb.ArmRequest(point="received", action="delay", times=1)), "seconds"),
    ],
)  # fmt: skip
def test_each_other_message_names_its_field_at_fault(read: Any, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read()
    assert caught.value.field == field


def test_a_list_has_a_limit_even_if_none_is_asked_for() -> None:
    assert wire.listing_of(pb.ListGroupsRequest()) == wire.Listing(None, wire.LIST_MAX, "")
    assert wire.listing_of(pb.ListGroupsRequest(limit=1 << 40)).limit == wire.LIST_MAX
    listing = wire.listing_of(pb.ListGroupsRequest(state="MOVED", limit=3, after="bg"))
    assert listing == wire.Listing(GroupState.MOVED, 3, "bg")


def test_an_order_for_a_fail_point_is_read() -> None:
    message = pb.ArmRequest(point="received", action="delay", times=2, skip=3, seconds=0.5, method="Pin")
    expected = Order(point=Point.RECEIVED, action=Action.DELAY, times=2, skip=3, seconds=0.5, method="Pin")
    assert wire.order_of(message) == expected
    assert wire.point_of(pb.ArmRequest()) is None


def read_or_refused(method: str, data: bytes) -> tuple[Request | None, str]:
    """Return what is read, or None and the field at fault."""
    try:
        return wire.write_of(method, wire.parsed(data, wire.WRITES[method][0]))[1], ""
    except BadRequest as error:
        return None, error.field


@given(st.text(max_size=300), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(1 << 63), (1 << 63) - 1))
def test_whatever_is_read_is_within_bounds_or_refused(text: str, epoch: int, slots: int) -> None:
    try:
        data = pb.ReserveRequest(
            operation=pb.Operation(operation_id="op", issued_ms=1), block_group_id=text, epoch=epoch, slots=slots
        ).SerializeToString()
    except ValueError:  # surrogates are no text
        return
    request, field = read_or_refused("Reserve", data)
    if request is None:
        assert field in {"block_group_id", "epoch", "slots"}
        return
    assert isinstance(request, Reserve)
    assert 0 < len(request.block_group_id) <= 128
    assert request.block_group_id.isascii()
    assert 0 <= request.epoch < 1 << 53
    assert 1 <= request.slots <= 1 << 20


@given(st.binary(max_size=200))
def test_no_bytes_at_all_do_more_than_be_refused(data: bytes) -> None:
    for method in wire.WRITES:
        request, field = read_or_refused(method, data)
        assert (request is None) == bool(field)


def fields_of_all_messages() -> list[tuple[str, FieldDescriptor]]:
    return [(m.name, f) for m in pb.DESCRIPTOR.message_types_by_name.values() for f in m.fields]


@pytest.mark.rule("KVC-IDEM-016")
def test_no_message_has_room_for_kv_but_only_for_digests_of_sixteen_bytes() -> None:
    with_bytes = [(m, f.name) for m, f in fields_of_all_messages() if f.type == FieldDescriptor.TYPE_BYTES]
    assert with_bytes == [("AcceptRequest", "digests")]
    wire.accept_of(accept(digests=[b"0" * wire.DIGEST_BYTES]))
    for size in (0, 15, 17, 32, 65536):
        with pytest.raises(BadRequest, match="digests"):
            wire.accept_of(accept(digests=[b"0" * size]))


@pytest.mark.rule("KVC-IDEM-016")
def test_no_text_of_a_reply_has_room_for_kv_either() -> None:
    """Every text that a reply can hold has a bound: 128 or 4096 characters, the checksum 32, a hand-off 256 KiB."""
    free = "x" * (wire.HANDOFF_CHARS_MAX + 1)
    read = {
        "Metadata": (wire.metadata_of, wire.metadata_pb(GROUP, 0)),
        "Place": (wire.place_of, wire.place_pb(PLACE)),
        "Migration": (wire.migration_of, wire.migration_pb(MIGRATION)),
        "Answer": (wire.answer_of, wire.answer_pb(ANSWERS[0], replayed=False)),
        "Accepted": (wire.accepted_of, wire.accepted_pb(Copy.COPIED, "")),
    }
    tried = 0
    for name, (of, message) in read.items():
        of(message)
        for field in pb.DESCRIPTOR.message_types_by_name[name].fields:
            if field.type == FieldDescriptor.TYPE_STRING:
                too_much = sent(message)
                setattr(too_much, field.name, free)
                with pytest.raises(BadRequest, match=field.name):
                    of(too_much)
                tried += 1
    assert tried == 20

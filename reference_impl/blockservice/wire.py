"""Protobuf messages and the rules' own words, one to the other, with every bound checked on the way in.

`..._of` reads a message and raises BadRequest, which names the protobuf field at fault by its path ("epoch",
"operation.issued_ms", "group.size_bytes"); no text that is read is echoed. `..._pb` makes one. Both directions are
there for everything that travels, for a checker reads the answers too. Source: KVC-IDEM-004, -005, -016; issue 4, bad
input.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice.failpoints import Order, Point
from reference_impl.rules.blockgroups import (
    Answer,
    CancelMigrate,
    Epoch,
    Evict,
    Group,
    GroupState,
    Id,
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

DIGEST_BYTES: Final = 16
HANDOFF_CHARS_MAX: Final = 256 * 1024
"""Of a place: a hand-off names blocks, about eight characters each, and holds none."""
LIST_MAX: Final = 1000
"""Groups in one reply, at most; fewer if they would not fit in one message."""

WriteMessage: TypeAlias = (
    pb.ReserveRequest | pb.PinRequest | pb.EvictRequest | pb.PrepareGetRequest | pb.StartMigrateRequest
    | pb.CancelMigrateRequest
)  # fmt: skip
WRITES: Final[Mapping[str, tuple[type[WriteMessage], type[Request]]]] = {
    "Reserve": (pb.ReserveRequest, Reserve),
    "Pin": (pb.PinRequest, Pin),
    "Unpin": (pb.PinRequest, Unpin),
    "Evict": (pb.EvictRequest, Evict),
    "PrepareGet": (pb.PrepareGetRequest, PrepareGet),
    "StartMigrate": (pb.StartMigrateRequest, StartMigrate),
    "CancelMigrate": (pb.CancelMigrateRequest, CancelMigrate),
}
"""What each method that writes takes, in both languages."""
METHODS: Final[Mapping[type[Request], str]] = {request: method for method, (_, request) in WRITES.items()}

_Amount = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_IssuedMs = Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
_TEXT_CHARS_MAX: Final = 4096
_Text = Annotated[str, msgspec.Meta(max_length=_TEXT_CHARS_MAX)]
"""What is written for people; longer ones are cut off when they are sent."""
_Checksum = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
_Handoff = Annotated[str, msgspec.Meta(max_length=HANDOFF_CHARS_MAX)]
_MaybeId = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[!-~]*\Z")]
_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)


class BadRequest(Exception):
    """A message that cannot be used. `field` is the path of the protobuf field at fault, "message" if it is none."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class Known(enum.StrEnum):
    """What is known of an operation (KVC-IDEM-019)."""

    UNKNOWN = "UNKNOWN"
    """It has not run so far; a request that is on its way may run it yet."""
    IN_PROGRESS = "IN_PROGRESS"
    DONE = "DONE"
    EXPIRED = "EXPIRED"
    """Too old to tell."""


class Copy(enum.StrEnum):
    """How far a target is with the copy of a migration."""

    ARRIVING = "ARRIVING"
    COPIED = "COPIED"
    FAILED = "FAILED"
    SETTLED = "SETTLED"


class Named(msgspec.Struct, frozen=True):
    """An operation's name: its caller's id, and when he chose it (ms of the wall clock)."""

    operation_id: Id
    issued_ms: _IssuedMs


class Listing(msgspec.Struct, frozen=True):
    """Which groups are asked for. `limit` is at most LIST_MAX."""

    state: GroupState | None
    limit: int
    after: str


class AcceptOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a source tells the target of a migration: the group, its blocks' digests in order, where the bytes are."""

    operation_id: str
    tenant: str
    group: Group
    digests: tuple[bytes, ...]
    place: Place


class SettleOrder(msgspec.Struct, frozen=True, kw_only=True):
    """How a migration has ended."""

    operation_id: str
    tenant: str
    status: MigrationStatus


# Reading.


def parsed(data: bytes, shape: type[_M]) -> _M:
    """Return the message in `data`. Raises BadRequest if there is none."""
    try:
        return shape.FromString(data)
    except DecodeError:
        raise BadRequest("message", f"these {len(data)} bytes are no {shape.DESCRIPTOR.name}") from None


def is_id(text: str) -> bool:
    """Return whether a text can be anybody's id, such as a tenant's name."""
    try:
        msgspec.convert(text, Id)
    except msgspec.ValidationError:
        return False
    return True


def named_of(message: pb.Operation) -> Named:
    """Return an operation's name."""
    return _checked({"operation_id": message.operation_id, "issued_ms": message.issued_ms}, Named, "operation.")


def operation_id_of(message: pb.Operation) -> str:
    """Return an operation's id alone, where the moment of its issue does not matter."""
    operation_id: str = _value(message.operation_id, Id, "operation.operation_id")
    return operation_id


def write_of(method: str, message: WriteMessage) -> tuple[Named, Request]:
    """Return which operation a write is, and what it asks."""
    shape = WRITES[method][1]
    fields = {name: getattr(message, name) for name in shape.__struct_fields__}
    return named_of(message.operation), _checked(fields, shape)


def block_group_id_of(message: pb.GetMetadataRequest) -> str:
    """Return the group that is asked for."""
    block_group_id: str = _value(message.block_group_id, Id, "block_group_id")
    return block_group_id


def listing_of(message: pb.ListGroupsRequest) -> Listing:
    """Return which groups are asked for: a limit of 0, or one too high, is as many as one reply may hold."""
    state = _value(message.state, GroupState, "state") if message.state else None
    limit = _value(message.limit, _Amount, "limit")
    return Listing(state, min(limit or LIST_MAX, LIST_MAX), _value(message.after, _MaybeId, "after"))


def metadata_of(message: pb.Metadata, prefix: str = "") -> tuple[Group, int]:
    """Return a group, and how many requests pin it. Its `migration` does not travel."""
    read = _read(message, _Metadata, prefix)
    if read.token_start > read.token_end:
        raise BadRequest(f"{prefix}token_end", "must not lie before token_start")
    group = Group(
        block_group_id=read.block_group_id, state=read.state, location=read.location, epoch=read.epoch,
        size_bytes=read.size_bytes, token_start=read.token_start, token_end=read.token_end, checksum=read.checksum,
        reserved=read.reserved,
    )  # fmt: skip
    return group, read.pins


def place_of(message: pb.Place, prefix: str = "place.") -> Place:
    """Return where bytes can be read."""
    read = _read(message, _Place, prefix)
    return Place(
        node=read.node, handoff=read.handoff, size_bytes=read.size_bytes, checksum=read.checksum,
        transfer_token=read.transfer_token, expires_ms=read.expires_ms,
    )  # fmt: skip


def migration_of(message: pb.Migration, prefix: str = "") -> Migration:
    """Return a migration. Whether its target has been told is its source's own affair, and does not travel."""
    read = _read(message, _Migration, prefix)
    return Migration(
        operation_id=read.operation_id, block_group_id=read.block_group_id, src=read.src, dst=read.dst,
        epoch=read.epoch, status=read.status, reason=read.reason,
    )  # fmt: skip


def answer_of(message: pb.Answer, prefix: str = "") -> tuple[Answer, bool]:
    """Return what a write was answered, and whether it had been answered so before."""
    outcome = {pb.APPLIED: Outcome.APPLIED, pb.REPLAYED: Outcome.APPLIED, pb.REFUSED: Outcome.REFUSED}
    if message.disposition not in outcome:
        raise BadRequest(f"{prefix}disposition", f"{message.disposition} is no final answer")
    read = _read(message, _Answer, prefix)
    answer = Answer(
        outcome=outcome[message.disposition], refusal=read.refusal, message=read.message, field=read.field,
        epoch=read.epoch, location=read.location, reserved=read.reserved, pins=read.pins,
        state=_value(message.state, GroupState, f"{prefix}state") if message.state else None,
        migration=migration_of(message.migration, f"{prefix}migration.") if message.HasField("migration") else None,
        place=place_of(message.place, f"{prefix}place.") if message.HasField("place") else None,
    )  # fmt: skip
    return answer, message.replayed


def state_of(message: pb.OperationState) -> tuple[Known, Answer | None]:
    """Return what is known of an operation, and its answer if it is DONE."""
    known = _value(_name(pb.OperationState.Known, message.known), Known, "known")
    if known is not Known.DONE:
        return known, None
    return known, answer_of(message.answer, "answer.")[0]


def accept_of(message: pb.AcceptRequest) -> AcceptOrder:
    """Return what a migration's source tells its target."""
    if any(len(digest) != DIGEST_BYTES for digest in message.digests):
        raise BadRequest("digests", f"each must have {DIGEST_BYTES} bytes")
    return AcceptOrder(
        operation_id=_value(message.operation_id, Id, "operation_id"), tenant=_value(message.tenant, Id, "tenant"),
        group=metadata_of(message.group, "group.")[0], digests=tuple(message.digests), place=place_of(message.place),
    )  # fmt: skip


def settle_of(message: pb.SettleRequest) -> SettleOrder:
    """Return how a migration has ended."""
    status = _value(message.status, MigrationStatus, "status")
    if not status.ended:
        raise BadRequest("status", f"must be that of a migration that has ended, got {status}")
    operation_id = _value(message.operation_id, Id, "operation_id")
    return SettleOrder(operation_id=operation_id, tenant=_value(message.tenant, Id, "tenant"), status=status)


def accepted_of(message: pb.Accepted) -> tuple[Copy, str]:
    """Return how far a target is, and why it failed."""
    return _value(_name(pb.Accepted.Copy, message.copy), Copy, "copy"), _value(message.reason, _Text, "reason")


def order_of(message: pb.ArmRequest) -> Order:
    """Return what is to happen at a fail point."""
    order = _read(message, Order, "")
    field, why = order.problem()
    if field:
        raise BadRequest(field, why)
    return order


def point_of(message: pb.ArmRequest) -> Point | None:
    """Return the point that is to be disarmed; None: all of them."""
    point: Point | None = _value(message.point, Point, "point") if message.point else None
    return point


# Writing.


def write_pb(named: Named, request: Request) -> WriteMessage:
    """Return the message of a write."""
    message = WRITES[METHODS[type(request)]][0](operation=operation_pb(named))
    for name in request.__struct_fields__:
        setattr(message, name, getattr(request, name))
    return message


def operation_pb(named: Named) -> pb.Operation:
    """Return the message of an operation's name."""
    return pb.Operation(operation_id=named.operation_id, issued_ms=named.issued_ms)


def metadata_pb(group: Group, pins: int) -> pb.Metadata:
    """Return the message of a group."""
    return pb.Metadata(
        block_group_id=group.block_group_id, state=group.state, location=group.location, epoch=group.epoch,
        size_bytes=group.size_bytes, token_start=group.token_start, token_end=group.token_end, checksum=group.checksum,
        pins=pins, reserved=group.reserved,
    )  # fmt: skip


def place_pb(place: Place) -> pb.Place:
    """Return the message of a place."""
    return pb.Place(
        node=place.node, handoff=place.handoff, size_bytes=place.size_bytes, checksum=place.checksum,
        transfer_token=place.transfer_token, expires_ms=place.expires_ms,
    )  # fmt: skip


def migration_pb(migration: Migration) -> pb.Migration:
    """Return the message of a migration."""
    return pb.Migration(
        operation_id=migration.operation_id, block_group_id=migration.block_group_id, src=migration.src,
        dst=migration.dst, epoch=migration.epoch, status=migration.status, reason=migration.reason[:_TEXT_CHARS_MAX],
    )  # fmt: skip


def answer_pb(answer: Answer, *, replayed: bool) -> pb.Answer:
    """Return the message of an answer; `replayed`: it has been given before."""
    done = pb.REPLAYED if replayed else pb.APPLIED
    return pb.Answer(
        disposition=done if answer.applied else pb.REFUSED, replayed=replayed, refusal=answer.refusal,
        message=answer.message[:_TEXT_CHARS_MAX], field=answer.field, epoch=answer.epoch, state=answer.state or "",
        location=answer.location, reserved=answer.reserved, pins=answer.pins,
        migration=None if answer.migration is None else migration_pb(answer.migration),
        place=None if answer.place is None else place_pb(answer.place),
    )  # fmt: skip


def state_pb(known: Known, answer: Answer | None) -> pb.OperationState:
    """Return the message of what is known of an operation."""
    told = None if answer is None else answer_pb(answer, replayed=True)
    return pb.OperationState(known=str(known), answer=told)


def accept_pb(order: AcceptOrder) -> pb.AcceptRequest:
    """Return the message of a migration's beginning."""
    return pb.AcceptRequest(
        operation_id=order.operation_id, tenant=order.tenant, group=metadata_pb(order.group, 0), digests=order.digests,
        place=place_pb(order.place),
    )  # fmt: skip


def settle_pb(order: SettleOrder) -> pb.SettleRequest:
    """Return the message of a migration's end."""
    return pb.SettleRequest(operation_id=order.operation_id, tenant=order.tenant, status=order.status)


def accepted_pb(copy: Copy, reason: str) -> pb.Accepted:
    """Return the message of how far a target is."""
    return pb.Accepted(copy=str(copy), reason=reason[:_TEXT_CHARS_MAX])


# What travels besides requests, with its bounds: the rules make these themselves, and so do not check them.


class _Metadata(msgspec.Struct, frozen=True):
    block_group_id: Id
    state: GroupState
    location: Id
    epoch: Epoch
    size_bytes: _Amount
    token_start: _Amount
    token_end: _Amount
    checksum: _Checksum
    pins: _Amount
    reserved: _Amount


class _Place(msgspec.Struct, frozen=True):
    node: Id
    handoff: _Handoff
    size_bytes: _Amount
    checksum: _Checksum
    transfer_token: Id
    expires_ms: _Amount


class _Migration(msgspec.Struct, frozen=True):
    operation_id: Id
    block_group_id: Id
    src: Id
    dst: Id
    epoch: Epoch
    status: MigrationStatus
    reason: _Text


class _Answer(msgspec.Struct, frozen=True):
    refusal: Refusal
    message: _Text
    field: _Text
    epoch: Epoch
    location: _MaybeId
    reserved: _Amount
    pins: _Amount


def _read(message: Message, shape: type[_T], prefix: str) -> _T:
    """Return the fields of a message that `shape` names."""
    fields: tuple[str, ...] = shape.__struct_fields__  # type: ignore[attr-defined]
    return _checked({name: getattr(message, name) for name in fields}, shape, prefix)


def _checked(fields: dict[str, Any], shape: type[_T], prefix: str = "") -> _T:
    try:
        return msgspec.convert(fields, shape)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise BadRequest(prefix + path.rstrip("`"), reason) from None


def _value(value: object, kind: Any, field: str) -> Any:
    """Return one value, if it is within the bounds of its kind."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(field, str(error)) from None


def _name(kind: Any, number: int) -> str:
    """Return the name of a protobuf enum's value; numbers that we do not know travel as well."""
    return str(kind.Name(number)) if number in kind.values() else str(number)

"""Block groups: what a node's control plane knows of the KV that it holds, and what may be done to it.

A group is the full blocks of a prefix. Every write names the epoch that its caller has seen; what makes others'
knowledge wrong (an eviction, a move, a return) raises it. Pins are sets of request ids, never counters, and remember
who has left (KVC-IDEM-009). Nothing is evicted or moved while a pin, a lease or a transfer stands (KVC-IDEM-010).

`decide` is a function: a request, what is known of its group, and what the engine says in; an answer and the changes
out. Who calls it writes both in one transaction. Source: RPC document; KVC-IDEM-004, -005, -009 to -011, -016.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, TypeAlias

import msgspec

ID_CHARS_MAX: Final = 128
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=ID_CHARS_MAX, pattern=r"^[!-~]+\Z")]
Epoch = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Slots = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]

PINS_MAX: Final = 4096
"""Requests that may pin one group."""


class GroupState(enum.StrEnum):
    """Where a group's bytes are, as far as this node has a say."""

    RESIDENT = "RESIDENT"
    MIGRATING_OUT = "MIGRATING_OUT"
    """Still here and still ours; a copy is on its way."""
    MIGRATING_IN = "MIGRATING_IN"
    """A copy arrives; the group is another node's until that node says otherwise."""
    MOVED = "MOVED"
    """It is another node's: `location` says whose."""
    EVICTED = "EVICTED"


class Outcome(enum.StrEnum):
    """What became of a write; final, but for the refusals at the door (`operations.NOT_KEPT`), which decide nothing."""

    APPLIED = "APPLIED"
    REFUSED = "REFUSED"


class Refusal(enum.StrEnum):
    """Why a write was refused."""

    NONE = ""
    ID_REUSED = "ID_REUSED"
    ID_EXPIRED = "ID_EXPIRED"
    FROM_THE_FUTURE = "FROM_THE_FUTURE"
    UNKNOWN_GROUP = "UNKNOWN_GROUP"
    STALE_EPOCH = "STALE_EPOCH"
    FUTURE_EPOCH = "FUTURE_EPOCH"
    NOT_RESIDENT = "NOT_RESIDENT"
    MIGRATING = "MIGRATING"
    PINNED = "PINNED"
    LEASED = "LEASED"
    TRANSFERRING = "TRANSFERRING"
    UNPINNED_BEFORE = "UNPINNED_BEFORE"
    TOO_MANY_PINS = "TOO_MANY_PINS"
    NO_ROOM = "NO_ROOM"
    WRONG_SOURCE = "WRONG_SOURCE"
    WRONG_TARGET = "WRONG_TARGET"
    UNKNOWN_OPERATION = "UNKNOWN_OPERATION"
    TOO_LATE = "TOO_LATE"


class MigrationStatus(enum.StrEnum):
    """How far a migration is (RPC document's words)."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        """Whether it changes no more."""
        return self in (MigrationStatus.SUCCEEDED, MigrationStatus.FAILED, MigrationStatus.CANCELLED)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One group, as one node knows it. Tokens `token_start .. token_end` of a prompt; sizes in bytes."""

    block_group_id: str
    state: GroupState = GroupState.RESIDENT
    location: str
    """The node whose group it is."""
    epoch: int = 1
    size_bytes: int = 0
    token_start: int = 0
    token_end: int = 0
    checksum: str = ""
    """blake2b-128 of the bytes, block after block, in hexadecimal."""
    reserved: int = 0
    """Slots set aside for it: blocks that it may still grow by."""
    migration: str = ""
    """The operation that moves it now, or moved it last."""


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """A move of a group, as its source knows it: the source alone decides how it ends."""

    operation_id: str
    block_group_id: str
    src: str
    dst: str
    epoch: int
    """The group's, when it started."""
    status: MigrationStatus = MigrationStatus.PENDING
    reason: str = ""
    told: bool = False
    """Whether the target knows how it ended."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a group's bytes can be read by the data plane, once, until `expires_ms` (wall clock of the node).

    `handoff` is what a reading engine needs, as JSON (vLLM's `kv_transfer_params`): no KV bytes (KVC-IDEM-016).
    """

    node: str
    handoff: str
    size_bytes: int
    checksum: str
    transfer_token: str
    expires_ms: int


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a write is answered; what was decided is kept, and given again to every retry."""

    outcome: Outcome
    refusal: Refusal = Refusal.NONE
    message: str = ""
    field: str = ""
    """The parameter at fault, of a refusal."""
    epoch: int = 0
    """The group's now; of a refusal too, so that its caller need not ask for it."""
    state: GroupState | None = None
    location: str = ""
    reserved: int = 0
    pins: int = 0
    migration: Migration | None = None
    place: Place | None = None

    @property
    def applied(self) -> bool:
        """Whether the effect is there."""
        return self.outcome is Outcome.APPLIED


# What may be asked. Every one names its group and the epoch that its caller has seen.


class _Write(msgspec.Struct, frozen=True, kw_only=True):
    block_group_id: Id
    epoch: Epoch


class Reserve(_Write, frozen=True, kw_only=True, tag="reserve"):
    """Set `slots` blocks aside for a group to grow by; given back when it is evicted or moves."""

    slots: Slots


class Pin(_Write, frozen=True, kw_only=True, tag="pin"):
    """Keep a group for a request."""

    request_id: Id


class Unpin(_Write, frozen=True, kw_only=True, tag="unpin"):
    """Keep it for that request no longer; a pin of the same request that comes later is refused."""

    request_id: Id


class Evict(_Write, frozen=True, kw_only=True, tag="evict"):
    """Give a group's blocks back. Evicting what is evicted succeeds."""


class PrepareGet(_Write, frozen=True, kw_only=True, tag="prepare_get"):
    """Lend a group to a reader: the answer's `place` says where its bytes are, and for how long."""

    request_id: Id


class StartMigrate(_Write, frozen=True, kw_only=True, tag="start_migrate"):
    """Start to move a group; returns at once. The operation's id names the migration from then on."""

    src: Id
    dst: Id


class CancelMigrate(_Write, frozen=True, kw_only=True, tag="cancel_migrate"):
    """End a migration, if it is not decided yet. A caller's timeout is no cancel (KVC-IDEM-011)."""

    migration_id: Id


Request: TypeAlias = Reserve | Pin | Unpin | Evict | PrepareGet | StartMigrate | CancelMigrate


class PinState(enum.StrEnum):
    """Of one request and one group."""

    PINNED = "PINNED"
    UNPINNED = "UNPINNED"
    """It has left, or left before it came."""


class EngineSays(msgspec.Struct, frozen=True, kw_only=True):
    """What the node's engine answered when it was asked for this request, before the transaction.

    It holds the blocks from then on (Pin), keeps others from taking them (Evict, StartMigrate), or has lent them out
    (PrepareGet). What comes of the request is told to it afterwards; after a crash it is told the whole state.
    """

    here: bool = True
    """Whether the blocks are in its pool."""
    leased: bool = False
    """Whether a lease stands on one of them."""
    place: Place | None = None


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when a request is decided, all of one moment."""

    node: str
    group: Group | None
    pins: int = 0
    """Requests that pin the group."""
    pin: PinState | None = None
    """Of the request that pins or unpins."""
    transfers: int = 0
    """Transfers of the group that stand."""
    migration: Migration | None = None
    """That the request names."""
    reserved_total: int = 0
    """Slots reserved at this node, for all groups."""
    slots_max: int = 1 << 20
    """Slots that the node has for reservations."""
    nodes: frozenset[str] = frozenset()
    """Those that a group may move to."""
    engine: EngineSays = EngineSays()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, and what is to be written with it; None: left as it is."""

    answer: Answer
    group: Group | None = None
    pin: PinState | None = None
    migration: Migration | None = None
    transfer: bool = False
    """Whether a transfer starts: it is named by the answer's place."""
    forget_pins: bool = False
    """Whether what is remembered of the group's pins goes: its epoch is over."""


def decide(request: Request, operation_id: str, view: View) -> Decision:
    """Return what becomes of a request that has not run before. Raises nothing for any request that could be made."""
    group = view.group
    if group is None:
        return _refuse(view, Refusal.UNKNOWN_GROUP, f"no block group {request.block_group_id} here", "block_group_id")
    if request.epoch > group.epoch:
        message = f"epoch {request.epoch} has not begun; it is {group.epoch}"
        return _refuse(view, Refusal.FUTURE_EPOCH, message, "epoch")
    match request:
        case Unpin():
            return _stale(request, view, group) or _unpin(view, group)
        case CancelMigrate():
            return _cancel(request, view, group)
        case Evict() if group.state is GroupState.EVICTED:
            return Decision(answer=_answer(view, group))  # what was asked for is so (KVC-IDEM-010)
        case _:
            return _stale(request, view, group) or _not_resident(view, group) or _do(request, operation_id, view, group)


def _do(
    request: Reserve | Pin | Evict | PrepareGet | StartMigrate, operation_id: str, view: View, group: Group
) -> Decision:  # fmt: skip
    """Decide what needs a group that is here, by its epoch."""
    match request:
        case Reserve():
            return _reserve(request, view, group)
        case Pin():
            return _pin(request, view, group)
        case Evict():
            return _evict(view, group)
        case PrepareGet():
            return _prepare(view, group)
        case StartMigrate():
            return _start(request, operation_id, view, group)


def _stale(request: Request, view: View, group: Group) -> Decision | None:
    if request.epoch == group.epoch:
        return None
    return _refuse(view, Refusal.STALE_EPOCH, f"epoch {request.epoch} is over; it is {group.epoch}", "epoch")


def _reserve(request: Reserve, view: View, group: Group) -> Decision:
    if view.reserved_total + request.slots > view.slots_max:
        left = view.slots_max - view.reserved_total
        return _refuse(view, Refusal.NO_ROOM, f"{request.slots} slots wanted, {left} are left", "slots")
    grown = msgspec.structs.replace(group, reserved=group.reserved + request.slots)
    return Decision(answer=_answer(view, grown), group=grown)


def _pin(request: Pin, view: View, group: Group) -> Decision:
    if view.pin is PinState.UNPINNED:
        message = f"request {request.request_id} has unpinned it: a pin that comes after its unpin is late"
        return _refuse(view, Refusal.UNPINNED_BEFORE, message, "request_id")
    if view.pin is PinState.PINNED:
        return Decision(answer=_answer(view, group))
    if not view.engine.here:
        return _gone(view, group)
    if view.pins >= PINS_MAX:
        return _refuse(view, Refusal.TOO_MANY_PINS, f"{PINS_MAX} requests pin it already", "request_id")
    return Decision(answer=_answer(view, group, pins=view.pins + 1), pin=PinState.PINNED)


def _unpin(view: View, group: Group) -> Decision:
    """Unpin in whatever state, so that nobody is kept from leaving.

    With an epoch that is over it is refused like all else (KVC-IDEM-005): the pins of that epoch went with it, and one
    of the same request that stands now is another, which a late unpin must not take away.
    """
    if view.pin is PinState.UNPINNED:
        return Decision(answer=_answer(view, group))
    left = view.pins - (view.pin is PinState.PINNED)
    return Decision(answer=_answer(view, group, pins=left), pin=PinState.UNPINNED)


def _evict(view: View, group: Group) -> Decision:
    problem = _in_use(view)
    if problem is not None:
        return problem
    gone = evicted(group)
    return Decision(answer=_answer(view, gone, pins=0), group=gone, forget_pins=True)


def _prepare(view: View, group: Group) -> Decision:
    if not view.engine.here:
        return _gone(view, group)
    if view.engine.place is None:
        return _refuse(view, Refusal.NOT_RESIDENT, "no engine of this node lends it now", "block_group_id")
    answer = msgspec.structs.replace(_answer(view, group), place=view.engine.place)
    return Decision(answer=answer, transfer=True)


def _start(request: StartMigrate, operation_id: str, view: View, group: Group) -> Decision:
    if request.src != group.location:
        return _refuse(view, Refusal.WRONG_SOURCE, f"it is at {group.location}, not at {request.src}", "src")
    if request.dst == view.node or request.dst not in view.nodes:
        others = ", ".join(sorted(view.nodes - {view.node})) or "none"
        return _refuse(view, Refusal.WRONG_TARGET, f"{request.dst} is no other node of ours ({others})", "dst")
    problem = _in_use(view)
    if problem is not None:
        return problem
    if not view.engine.here:
        return _gone(view, group)
    migration = Migration(
        operation_id=operation_id, block_group_id=group.block_group_id, src=request.src, dst=request.dst,
        epoch=group.epoch,
    )  # fmt: skip
    leaving = msgspec.structs.replace(group, state=GroupState.MIGRATING_OUT, migration=operation_id)
    answer = msgspec.structs.replace(_answer(view, leaving), migration=migration)
    return Decision(answer=answer, group=leaving, migration=migration)


def _cancel(request: CancelMigrate, view: View, group: Group) -> Decision:
    migration = view.migration
    if migration is None or migration.block_group_id != group.block_group_id:
        message = f"no migration {request.migration_id} of this group"
        return _refuse(view, Refusal.UNKNOWN_OPERATION, message, "migration_id")
    if migration.status is MigrationStatus.CANCELLED:
        return Decision(answer=msgspec.structs.replace(_answer(view, group), migration=migration))
    if migration.status.ended:
        message = f"it has ended: {migration.status}"
        return _refuse(view, Refusal.TOO_LATE, message, "migration_id", migration=migration)
    ended, back = end_migration(migration, group, MigrationStatus.CANCELLED, "cancelled by its caller")
    answer = msgspec.structs.replace(_answer(view, back), migration=ended)
    return Decision(answer=answer, group=back, migration=ended)


def end_migration(
    migration: Migration, group: Group, status: MigrationStatus, reason: str = ""
) -> tuple[Migration, Group]:
    """Return a migration that ends, and its group at the source: this is the moment at which the owner changes.

    SUCCEEDED: the group is the target's from now on, with the next epoch. Otherwise it stays, as it was.
    """
    ended = msgspec.structs.replace(migration, status=status, reason=reason)
    if status is MigrationStatus.SUCCEEDED:
        moved = msgspec.structs.replace(
            group, state=GroupState.MOVED, location=migration.dst, epoch=migration.epoch + 1, reserved=0
        )  # fmt: skip
        return ended, moved
    return ended, msgspec.structs.replace(group, state=GroupState.RESIDENT)


def evicted(group: Group) -> Group:
    """Return a group whose blocks are given back: nothing is reserved for it, and its epoch is over."""
    return msgspec.structs.replace(group, state=GroupState.EVICTED, epoch=group.epoch + 1, reserved=0)


def published(known: Group | None, new: Group, epoch_floor: int = 0) -> Group | None:
    """Return a group that an engine says it holds, None if what is known stays: one that returns starts its next epoch.

    `epoch_floor` is the highest epoch of the groups that the node has forgotten: one that is new to it may be one of
    those, so it starts above, and whatever anybody knew of an earlier life is stale (KVC-IDEM-005).

    None as well of a group that is known as MOVED. Its blocks are here again under the id of a group that another node
    owns: two owners of one id there must not be, so the engine is to give them another name.
    """
    if known is None:
        return msgspec.structs.replace(new, epoch=max(new.epoch, epoch_floor + 1))
    if known.state is GroupState.EVICTED:
        return msgspec.structs.replace(new, epoch=known.epoch + 1)
    return None


def _not_resident(view: View, group: Group) -> Decision | None:
    match group.state:
        case GroupState.RESIDENT:
            return None
        case GroupState.EVICTED:
            return _refuse(view, Refusal.NOT_RESIDENT, "it is evicted", "block_group_id")
        case GroupState.MOVED:
            return _refuse(view, Refusal.NOT_RESIDENT, f"it has moved to {group.location}", "block_group_id")
        case GroupState.MIGRATING_OUT | GroupState.MIGRATING_IN:
            return _refuse(view, Refusal.MIGRATING, "it is being moved: ask again", "block_group_id")


def _in_use(view: View) -> Decision | None:
    if view.pins:
        return _refuse(view, Refusal.PINNED, f"{view.pins} requests pin it", "block_group_id")
    if view.transfers:
        return _refuse(view, Refusal.TRANSFERRING, f"{view.transfers} readers have it on loan", "block_group_id")
    if view.engine.leased:
        return _refuse(view, Refusal.LEASED, "a lease stands on its blocks", "block_group_id")
    return None


def _gone(view: View, group: Group) -> Decision:
    """Refuse, and write down what the engine says: it has used the blocks for something else."""
    gone = evicted(group)
    now = msgspec.structs.replace(view, group=gone, pins=0)
    refused = _refuse(now, Refusal.NOT_RESIDENT, "its blocks have been used for something else", "block_group_id")
    return msgspec.structs.replace(refused, group=gone, forget_pins=True)


def _answer(view: View, group: Group, *, pins: int | None = None) -> Answer:
    return Answer(
        outcome=Outcome.APPLIED, epoch=group.epoch, state=group.state, location=group.location,
        reserved=group.reserved, pins=view.pins if pins is None else pins,
    )  # fmt: skip


def _refuse(
    view: View, rule: Refusal, message: str, field: str, *, migration: Migration | None = None
) -> Decision:  # fmt: skip
    group = view.group
    return Decision(
        answer=Answer(
            outcome=Outcome.REFUSED, refusal=rule, message=message, field=field, epoch=group.epoch if group else 0,
            state=group.state if group else None, location=group.location if group else "", pins=view.pins,
            reserved=group.reserved if group else 0, migration=migration,
        )
    )  # fmt: skip

"""What is to go wrong inside an engine's NIXL agent (`Order`), and what an agent says of it (`Report`).

Words only: `channel` carries them, `agent` acts on them, `fault` proves them.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec


class What(enum.StrEnum):
    """What an order strikes."""

    NOTIFICATION = "notification"
    TRANSFER = "transfer"
    """A one-sided read or write that this engine posts."""
    HANDSHAKE = "handshake"
    """This engine getting to know a peer (`add_remote_agent`)."""


class Kind(enum.StrEnum):
    """What a notification says, in whatever dialect."""

    ANY = "any"
    HEARTBEAT = "heartbeat"
    COMPLETION = "completion"
    """The reader needs the blocks no longer."""
    CLAIM = "claim"
    ANSWER = "answer"
    REGISTRATION = "registration"
    """A reader asks its holder to write to it (push mode)."""
    UNKNOWN = "unknown"
    """None that the dialect knows; only `ANY` strikes it."""


class Direction(enum.StrEnum):
    """Seen from the engine whose agent it is."""

    SENT = "sent"
    RECEIVED = "received"


class Action(enum.StrEnum):
    """What is done to what is struck."""

    DROP = "drop"
    REPEAT = "repeat"
    """It comes twice."""
    DELAY = "delay"
    """It comes `seconds` later."""
    REORDER = "reorder"
    """It comes after the next one of its direction; without a next one, after `seconds` (0: when the order goes)."""
    DAMAGE = "damage"
    """One bit of it, in its middle, comes over wrong: text remains text."""
    GARBLE = "garble"
    """Every byte comes over with its highest bit set: no text, and no message of any protocol."""
    FAIL = "fail"
    """A transfer: it is never posted, and its state is an error. A handshake: it raises."""
    STALL = "stall"
    """A transfer: it is posted only after `seconds` (0: when the order goes), and seems under way until then."""
    CORRUPT = "corrupt"
    """A transfer that reads: when it has ended, one block of its destination is overwritten with zeros."""


ACTIONS: Final = {
    What.NOTIFICATION: frozenset(
        {Action.DROP, Action.REPEAT, Action.DELAY, Action.REORDER, Action.DAMAGE, Action.GARBLE}
    ),
    What.TRANSFER: frozenset({Action.FAIL, Action.STALL, Action.CORRUPT}),
    What.HANDSHAKE: frozenset({Action.FAIL, Action.DELAY}),
}
SECONDS_MAX: Final = 3600.0
TEXT_CHARS_MAX: Final = 200
"""Of a message, in a report."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to go wrong. Every agent counts for itself. Raises ValueError if it makes no sense.

    A heartbeat for several requests is struck for those that `request` names, and comes over for the others.
    """

    id: str
    """Unique in its deployment; reports name it."""
    action: Action
    what: What = What.NOTIFICATION
    kind: Kind = Kind.ANY
    """Of a notification."""
    direction: Direction = Direction.RECEIVED
    """Of a notification."""
    request: str = ""
    """Part of the id, as its holder knows it, of the request; "" is any. A reference transfer names none."""
    engine: str = ""
    """Part of the name of the engine (see `Report.engine`); "" is any."""
    skip: int = 0
    """So many that fit are let through first."""
    count: int = 0
    """So many are struck then; 0: all."""
    seconds: float = 0.0
    block: int = 0
    """Which block of a transfer's destination is corrupted; negative ones count from its end."""
    block_bytes: int = 0
    """How long a block is; 0: each descriptor of the transfer is one (vLLM: the keys, or values, of one block)."""

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("an order needs an id")
        if self.action not in ACTIONS[self.what]:
            raise ValueError(f"a {self.what} cannot {self.action}; it can {', '.join(sorted(ACTIONS[self.what]))}")
        if self.what is not What.NOTIFICATION and self.kind is not Kind.ANY:
            raise ValueError(f"a {self.what} has no kind, got {self.kind}")
        if self.what is What.HANDSHAKE and self.request:
            raise ValueError(f"a handshake is of no request, got {self.request!r}")
        if min(self.skip, self.count, self.block_bytes) < 0:
            raise ValueError(
                f"skip, count and block_bytes must not be negative, got {self.skip}, {self.count}, {self.block_bytes}"
            )
        if not 0.0 <= self.seconds <= SECONDS_MAX:
            raise ValueError(f"seconds must be 0 to {SECONDS_MAX:g}, got {self.seconds}")
        if self.action is Action.DELAY and self.seconds == 0.0:
            raise ValueError("a delay needs seconds above 0")


class Said(enum.StrEnum):
    """What a report is about."""

    HELLO = "hello"
    """An agent is there, and from now on looks at the orders."""
    UNFIT = "unfit"
    """This engine's software is none that can be struck; it runs on as if nothing had been asked. See `detail`."""
    READ = "read"
    """The orders have changed, and these stand now (`orders`)."""
    REFUSED = "refused"
    """The orders are none: those before stand. See `detail`."""
    PASSED = "passed"
    """Something came over as it was."""
    STRUCK = "struck"
    """An order was carried out."""
    LET_GO = "let_go"
    """Something that an order kept back goes on now."""
    MISSED = "missed"
    """Something fitted an order and could not be struck. See `detail`."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent saw and did."""

    t_ns: int
    """The host's monotonic clock."""
    pid: int
    agent: str
    """NIXL's name of it."""
    engine: str
    """The name its environment gives it (`channel.NAME_VARIABLE`); without one, the agent's: in the reference the
    engine's id and rank."""
    said: Said
    what: What | None = None
    kind: Kind = Kind.ANY
    direction: Direction | None = None
    peer: str = ""
    """NIXL's name of the other side."""
    requests: tuple[str, ...] = ()
    text: str = ""
    """A message, shortened; what is not printable is escaped."""
    order: str = ""
    action: Action | None = None
    detail: str = ""
    orders: tuple[str, ...] = ()
    """Ids of the orders that stand (`READ`, `HELLO`)."""
    start_ticks: int = 0
    """With the pid, this names the process for good (`HELLO`)."""
    clock_ns: int = 0
    """What this process itself takes for the monotonic clock (`HELLO`)."""
    versions: dict[str, str] = {}
    """(`HELLO`, `UNFIT`.)"""

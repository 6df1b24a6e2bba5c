"""What a node's block service and its engine say to each other, over a private socket of the node.

The service asks, the engine answers; each may end and come back at any time. Every question says what is to be so, and
not what is to be changed (hold, do not hold), so that it may be asked again; after a break the engine introduces itself
and is told everything (`Sync`). What the engine says by itself (`Publish`, `Gone`, `Ended`) may be repeated as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Any, Final, Generic, TypeVar

import msgspec

from reference_impl.rules.blockgroups import Group

FRAME_BYTES_MAX: Final = 32 << 20
UNSENT_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""What may wait for a peer that does not read; with more he is let go, and told everything when he comes back."""
_HEADER: Final = struct.Struct("!I")


# The service asks.


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Keep a group's blocks, or keep them no longer."""

    block_group_id: str
    held: bool


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Say whether a group is here, and whether anybody uses its blocks."""

    block_group_id: str


class Lend(msgspec.Struct, frozen=True, tag="lend"):
    """Lease a group's blocks to the bearer of a token."""

    block_group_id: str
    token: str


class TakeBack(msgspec.Struct, frozen=True, tag="take_back"):
    """End a loan that nobody has begun to read."""

    token: str


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Forget a group: its blocks are free once nobody uses them."""

    block_group_id: str


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Have a copy of another node's group here, and keep it. Asked again, it tells how far that is."""

    migration: str
    group: Group
    digests: list[bytes]
    """Of each block, in order."""
    handoff: str
    """`kv_transfer_params` as JSON."""


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """Know that a published group is written down; until then nobody means it by its name."""

    block_group_id: str


class Elsewhere(msgspec.Struct, frozen=True, tag="elsewhere"):
    """Publish a group under another name: it went to another node under this one, which is that node's now."""

    block_group_id: str


class Known(msgspec.Struct, frozen=True):
    """A group that is to be here."""

    block_group_id: str
    held: bool


class Sync(msgspec.Struct, frozen=True, tag="sync"):
    """All that is to be so: whatever else the engine keeps for this service, it keeps no longer."""

    groups: list[Known]
    loans: list[str]
    """Tokens of loans that stand."""


Question = Hold | Look | Lend | TakeBack | Drop | Fetch | Noted | Elsewhere | Sync


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question; its number comes back with the answer."""

    number: int
    question: Question


# The engine answers, and says.


class Copy(msgspec.Struct, frozen=True):
    """How far a fetch is: ARRIVING, COPIED or FAILED."""

    state: str
    reason: str = ""


class Said(msgspec.Struct, frozen=True, tag="said", omit_defaults=True):
    """An answer. `here`: the group is in the pool (held, if that was asked)."""

    number: int
    here: bool = False
    in_use: bool = False
    """Somebody else has a reference on one of its blocks: a lease, or a running request."""
    handoff: str = ""
    digests: list[bytes] = []
    copy: Copy | None = None
    problem: str = ""
    """The engine could not do it, and why."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """An engine that wakes, or comes back to a service that was away."""

    incarnation: str
    groups: list[Group]
    """All that are here and were never acknowledged: new to the service."""
    known: list[str]
    """All that are here and were."""
    loans: list[str]


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """A new group is in the pool."""

    group: Group


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """These groups' blocks have been used for something else; they may be here again by the time this is heard."""

    block_group_ids: list[str]


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """These loans have ended."""

    loans: list[str]


FromEngine = Hello | Publish | Gone | Ended | Said
M = TypeVar("M")


class LinkBroken(Exception):
    """The other side has gone, or says what nobody understands."""


class Stream(Generic[M]):
    """Frames over a stream: four bytes of length (big endian), one msgpack message. `kind`: what may come in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = msgspec.msgpack.Decoder(kind)

    def send(self, message: Ask | FromEngine) -> None:
        """Send a message; what does not leave is noticed by `receive`."""
        if self._writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._writer.transport.abort()
            return
        body = msgspec.msgpack.encode(message)
        self._writer.write(_HEADER.pack(len(body)) + body)

    async def receive(self) -> M:
        """Return the next message. Raises LinkBroken at the end of the stream, or when it is damaged."""
        try:
            (size,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            if not 0 < size <= FRAME_BYTES_MAX:
                raise LinkBroken(f"a frame announces {size} bytes; it may have 1 to {FRAME_BYTES_MAX}")
            message: M = self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LinkBroken("the other side has gone") from error
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise LinkBroken(f"a frame that nobody understands: {error}") from error
        return message

    def part(self) -> None:
        """End the connection at once; `receive` says so on both sides."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close the connection. Harmless when it is closed; what has not left by then never will."""
        self._writer.close()
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

"""What the holder of KV blocks and their reader say to each other, as notifications between head agents.

Every message names the request by its holder's id (C1) and every time as a length, never as a moment (C2): a length
means the same on both clocks, and a message that is late only makes a lease end later (KVC-LEASE-012).
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, TypeAlias

import msgspec

MAGIC: Final = b"PDP1"
MESSAGE_BYTES_MAX: Final = 64 * 1024
HEARTBEAT_IDS_MAX: Final = 512
"""Ids in one heartbeat: 512 of 80 characters stay below the limit."""
ID_CHARS_MAX: Final = 120
_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=ID_CHARS_MAX)]
_Slot = Annotated[int, msgspec.Meta(ge=-1, le=1023)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=86_400_000_000_000)]


class BadMessage(Exception):
    """A notification that is none of ours, or damaged. Dropped and counted (KVC-REL-006)."""


class How(enum.StrEnum):
    """How a reader came to need the blocks no longer."""

    READ = "read"
    HIT = "hit"
    """Its own prefix cache held everything (KVC-REL-003)."""
    ABORT = "abort"
    """Aborted, or rejected at its front door (KVC-REL-002)."""
    FAILED = "failed"
    """It gave up reading and recomputes or fails."""


class Heartbeat(msgspec.Struct, frozen=True, tag="hb", array_like=True):
    """Reader to holder: keep these leases (KVC-HB-002)."""

    requests: Annotated[list[_Id], msgspec.Meta(min_length=1, max_length=HEARTBEAT_IDS_MAX)]


class Claim(msgspec.Struct, frozen=True, tag="claim", array_like=True):
    """Reader to holder: I am about to read, and shall have ended within `within_ns` of sending this (the fence)."""

    request: _Id
    reader: _Id
    within_ns: _Length
    content: Annotated[str, msgspec.Meta(max_length=64)]
    """Fingerprint of the tokens whose KV the reader expects: the holder compares, so no foreign KV is ever read."""
    slot: _Slot = -1
    """Which of several expected readers this is; -1: the hand-off names no places."""


class Answer(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """Holder to reader: the claim is granted, or why not."""

    request: _Id
    reader: _Id
    granted: bool
    reason: str = ""


class Report(msgspec.Struct, frozen=True, tag="report", array_like=True):
    """Reader to holder: I no longer need the blocks. May be repeated; a reader counts once (S3, S4)."""

    request: _Id
    reader: _Id
    how: How
    slot: _Slot = -1


Message: TypeAlias = Heartbeat | Claim | Answer | Report
_DECODER: Final = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return MAGIC + msgspec.msgpack.encode(message)


def decode(data: bytes) -> Message:
    """Return the message in `data`. Raises BadMessage, whatever the bytes are."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise BadMessage(f"a notification of {len(data)} bytes exceeds {MESSAGE_BYTES_MAX}")
    if not data.startswith(MAGIC):
        raise BadMessage("a notification of another protocol or version")
    try:
        return _DECODER.decode(data[len(MAGIC) :])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"a damaged notification: {error}") from error

"""Frames between client and service: four bytes of length (big endian), then one msgpack message.

One request at a time: a client sends the next only after the answer. Descriptors travel beside an answer, never beside
a request, by SCM_RIGHTS.
"""

from __future__ import annotations

import array
import os
import socket
import struct

import msgspec

from reference_impl.memory_service.errors import ProtocolError
from reference_impl.rules.sessions import METADATA_BYTES_MAX, Figures, Layout, Mode, Reason, Tag

REQUEST_BYTES_MAX = METADATA_BYTES_MAX + 65_536
REPLY_BYTES_MAX = 32 << 20  # a layout of 65,536 allocations with long names
DESCRIPTORS_MAX = 128  # an answer; the kernel takes 253
_HEADER = struct.Struct("!I")


class Open(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """Open this connection's session. Waits up to `wait_s` while it is WRITER_BUSY or NOTHING_COMMITTED."""

    tag: Tag
    mode: Mode
    engine_id: str
    epoch: int
    wait_s: float


class Allocate(msgspec.Struct, frozen=True, tag="allocate", forbid_unknown_fields=True):
    """Allocate memory. Waits up to `wait_s` while there is none."""

    name: str
    size_bytes: int
    wait_s: float


class Commit(msgspec.Struct, frozen=True, tag="commit", forbid_unknown_fields=True):
    """Publish what the session has allocated."""

    commit_id: str
    metadata: bytes


class GetLayout(msgspec.Struct, frozen=True, tag="layout", forbid_unknown_fields=True):
    """Ask for the session's layout, or (`current`) for the newest of its tag."""

    current: bool


class Export(msgspec.Struct, frozen=True, tag="export", forbid_unknown_fields=True):
    """Ask for descriptors, at most `DESCRIPTORS_MAX`."""

    names: tuple[str, ...]


class CommitStatus(msgspec.Struct, frozen=True, tag="commit_status", forbid_unknown_fields=True):
    """Ask what a commit published. Needs no session."""

    commit_id: str


class GetFigures(msgspec.Struct, frozen=True, tag="figures", forbid_unknown_fields=True):
    """Ask what the service holds. Needs no session."""


class Close(msgspec.Struct, frozen=True, tag="close", forbid_unknown_fields=True):
    """End the session; the answer says that it has ended."""


Request = Open | Allocate | Commit | GetLayout | Export | CommitStatus | GetFigures | Close


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The session is open. `layout` is what a reader reads."""

    session: int
    service: str
    layout: Layout | None


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Allocated, or closed."""


class Published(msgspec.Struct, frozen=True, tag="published"):
    """A layout, or that there is none."""

    layout: Layout | None


class Exported(msgspec.Struct, frozen=True, tag="exported"):
    """The frame brings `count` descriptors in the order asked for."""

    count: int


class FiguresAre(msgspec.Struct, frozen=True, tag="figures_are"):
    """What the service holds."""

    figures: Figures


class RefusedWith(msgspec.Struct, frozen=True, tag="refused"):
    """The request was refused."""

    reason: Reason
    message: str


Reply = Opened | Done | Published | Exported | FiguresAre | RefusedWith

_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def frame(message: Request | Reply) -> bytes:
    """Return a message as it goes over the wire."""
    body = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(body)) + body


def decode_request(body: bytes) -> Request:
    """Return the request in a frame. Raises `ProtocolError`."""
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame of {len(body)} bytes is no request: {error}") from None


def decode_reply(body: bytes) -> Reply:
    """Return the reply in a frame. Raises `ProtocolError`."""
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame of {len(body)} bytes is no reply: {error}; is this a memory service?") from None


class FrameReader:
    """Collects bytes until a frame is whole. `bytes_max` bounds a frame's body."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """Whether a frame has begun and is not whole."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    def take(self) -> bytes | None:
        """Return the next whole frame's body, or None. Raises `ProtocolError` for a frame that is empty or too long."""
        if len(self._buffer) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._buffer)
        if not 0 < size <= self._bytes_max:
            raise ProtocolError(f"a frame announces {size} bytes; it may have 1 to {self._bytes_max}")
        if len(self._buffer) < _HEADER.size + size:
            return None
        body = bytes(self._buffer[_HEADER.size : _HEADER.size + size])
        del self._buffer[: _HEADER.size + size]
        return body


def rights(descriptors: list[int]) -> list[tuple[int, int, bytes]]:
    """Return the control message that carries descriptors."""
    if not descriptors:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())]


def receive(sock: socket.socket, size: int, into: list[int]) -> tuple[bytes, bool]:
    """Receive bytes, and descriptors `into` a list whose owner closes them.

    The second value tells that the kernel had to drop some, for want of room here or of free descriptors. An array
    that came cut short is still closed in whole numbers.
    """
    room = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)
    data, control, flags, _ = sock.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
            into.extend(numbers)
    return data, bool(flags & socket.MSG_CTRUNC)


def close_all(descriptors: list[int]) -> None:
    """Close descriptors and forget them."""
    while descriptors:
        os.close(descriptors.pop())

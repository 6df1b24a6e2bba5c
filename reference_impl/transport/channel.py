"""Parent and rank process: length-prefixed msgpack over a socket pair, without blocking the parent."""

from __future__ import annotations

import socket
import struct
from typing import Any, Final, Generic, TypeVar

import msgspec

from reference_impl.transport.base import RankAddress

FRAME_BYTES_MAX: Final = 16 << 20
QUEUE_BYTES_MAX: Final = 32 << 20
"""Bytes waiting for the other side; with more it is not reading, and broken."""
_RECEIVE_BYTES: Final = 1 << 18
_HEADER: Final = struct.Struct("!I")


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Parent to rank: map the pool of `blocks` blocks, whose descriptor comes along (SCM_RIGHTS), and offer it."""

    blocks: int


class AddPeer(msgspec.Struct, frozen=True, tag="add"):
    """Parent to rank: know these ranks of a peer."""

    engine_id: str
    addresses: list[RankAddress]


class RemovePeer(msgspec.Struct, frozen=True, tag="remove"):
    """Parent to rank: forget a peer."""

    engine_id: str


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Parent to rank: read your words of these blocks."""

    read_id: int
    engine_id: str
    remote_blocks: list[int]
    local_blocks: list[int]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Parent to rank: start no further part of a read."""

    read_id: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Rank to parent: the pool is mapped and registered."""

    address: RankAddress


class PartEnded(msgspec.Struct, frozen=True, tag="ended"):
    """Rank to parent: our words of a read have ended; `error` is "" if they stand in the pool."""

    read_id: int
    error: str


ToRank = Start | AddPeer | RemovePeer | Read | Cancel
ToParent = Ready | PartEnded
M = TypeVar("M")


class ChannelBroken(Exception):
    """The other side has ended, does not read, or says nonsense; the message says which."""


class Channel(Generic[M]):
    """One side of the pair. `kind` is the union of the messages that come in."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._in = bytearray()
        self._out = bytearray()
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait on."""
        return self._sock.fileno()

    @property
    def sending(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._out)

    def send(self, message: ToRank | ToParent, descriptors: list[int] | None = None) -> None:
        """Queue a message and send what can be sent. Raises `ChannelBroken`."""
        body = msgspec.msgpack.encode(message)
        if len(self._out) + len(body) > QUEUE_BYTES_MAX:
            raise ChannelBroken(f"{len(self._out)} bytes wait and are not read")
        self._out += _HEADER.pack(len(body)) + body
        self._descriptors += descriptors or []
        self.flush()

    def flush(self) -> None:
        """Send on. Raises `ChannelBroken`."""
        while self._out:
            try:
                sent = socket.send_fds(self._sock, [self._out], self._descriptors, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelBroken(f"it does not take our messages: {error.strerror}") from None
            self._descriptors.clear()
            del self._out[:sent]

    def receive(self) -> tuple[list[M], list[int]]:
        """Return the messages that have come, and descriptors, now the caller's. Raises `ChannelBroken`."""
        descriptors: list[int] = []
        messages: list[M] = []
        try:
            while True:
                data, found, _, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, 4)
                descriptors += found
                if not data:
                    raise ChannelBroken("it has closed its end")
                self._in += data
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelBroken(f"its end is gone: {error.strerror}") from None
        while len(self._in) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._in)
            if size > FRAME_BYTES_MAX:
                raise ChannelBroken(f"a frame announces {size} bytes")
            if len(self._in) < _HEADER.size + size:
                break
            body = self._in[_HEADER.size : _HEADER.size + size]
            try:
                messages.append(self._decoder.decode(body))
            except msgspec.DecodeError as error:
                raise ChannelBroken(f"a message makes no sense: {error}") from error
            del self._in[: _HEADER.size + size]
        return messages, descriptors

    def close(self) -> None:
        """Close our end."""
        self._sock.close()

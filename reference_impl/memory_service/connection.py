"""One peer of the service: bytes in, one answer out, and how long it may take for either."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from reference_impl.memory_service.errors import ProtocolError, ServiceGone
from reference_impl.memory_service.wire import REQUEST_BYTES_MAX, FrameReader, Reply, Request, close_all, frame, rights
from reference_impl.rules.sessions import Refused

RECEIVE_BYTES = 65_536
_SO_PEERPIDFD = 77  # not in Python's socket yet


@dataclass(frozen=True)
class Parked:
    """A request that waits for room or for its turn, and what to answer when the wait is over."""

    request: Request
    until_ns: int
    refusal: Refused


class Connection:
    """A peer's socket, non-blocking. `deadline_ns` is when the service gives it up; None is never."""

    def __init__(self, sock: socket.socket, deadline_ns: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.deadline_ns: int | None = deadline_ns
        self.session: int | None = None
        self.parked: Parked | None = None
        self._reader = FrameReader(REQUEST_BYTES_MAX)
        self._out = memoryview(b"")
        self._out_descriptors: list[int] = []

    @property
    def sending(self) -> bool:
        """Whether an answer is still on its way."""
        return bool(self._out)

    @property
    def mid_frame(self) -> bool:
        """Whether a request has begun and is not whole."""
        return self._reader.partial

    def receive(self) -> bytes | None:
        """Read what is there and return a request's body once it is whole.

        Raises `ServiceGone` when the peer has closed, `ProtocolError` when it breaks the protocol.
        """
        try:
            # No room for control messages: the kernel itself discards every descriptor that a peer sends.
            data, _, flags, _ = self.sock.recvmsg(RECEIVE_BYTES, 0)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ServiceGone(f"peer gone: {error.strerror}") from None
        if not data:
            raise ServiceGone("peer gone" if not self._reader.partial else "peer gone within a frame")
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("a request came with descriptors; the service takes none")
        self._reader.feed(data)
        body = self._reader.take()
        if body is not None and (self._reader.partial or self.parked or self.sending):
            raise ProtocolError("a request came before the last was answered; send one at a time")
        return body

    def send(self, reply: Reply, descriptors: list[int]) -> None:
        """Answer. Takes the descriptors over and closes them once they are on their way."""
        self._out, self._out_descriptors = memoryview(frame(reply)), descriptors
        self.flush()

    def flush(self) -> None:
        """Send on, as far as the peer reads. Raises `ServiceGone` when it cannot."""
        while self._out:
            try:
                sent = self.sock.sendmsg([self._out], rights(self._out_descriptors), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                raise ServiceGone(f"peer gone: {error.strerror}") from None
            close_all(self._out_descriptors)
            self._out = self._out[sent:]

    def close(self) -> None:
        """Close the socket and what was not sent."""
        close_all(self._out_descriptors)
        self._out = memoryview(b"")
        self.sock.close()

    def peer_pidfd(self) -> int | None:
        """Return a pidfd of the process that connected, which the caller closes; None if it has ended already."""
        try:
            return int.from_bytes(self.sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4), sys.byteorder)
        except OSError:
            pass  # before Linux 6.5, or the process was reaped
        credentials = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        try:
            return os.pidfd_open(int.from_bytes(credentials[:4], sys.byteorder))
        except OSError:
            return None

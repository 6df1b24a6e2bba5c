"""The service's loop: one thread that waits for peers and for time, and never touches the memory itself."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from dataclasses import dataclass

from reference_impl.memory_service import wire
from reference_impl.memory_service.connection import Connection, Parked
from reference_impl.memory_service.errors import ProtocolError, ServiceGone
from reference_impl.memory_service.requests import Desk
from reference_impl.rules.clock import NS_PER_S, Clock, s_to_ns
from reference_impl.rules.sessions import WAITABLE, Reason, Refused


@dataclass(frozen=True)
class Limits:
    """What one peer may cost. `handshake_s` until it has a session, `frame_s` for a frame either way."""

    handshake_s: float = 5.0
    frame_s: float = 5.0
    wait_s_max: float = 600.0
    connections: int = 256


class Service:
    """Serves a desk at a listening socket, until `stop_fd` turns readable. Owns the socket, not `stop_fd`."""

    def __init__(
        self, listener: socket.socket, desk: Desk, clock: Clock, stop_fd: int, limits: Limits | None = None
    ) -> None:
        listener.setblocking(False)
        self._listener, self._stop_fd = listener, stop_fd
        self._desk, self._clock, self._limits = desk, clock, limits or Limits()
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, Connection] = {}

    def run(self) -> None:
        """Serve until told to stop, then close every connection."""
        for ready in (self._listener, self._desk.reaper, self._stop_fd):
            self._selector.register(ready, selectors.EVENT_READ)
        while True:
            for key, mask in self._selector.select(self._patience_s()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._desk.reaper:
                    self._desk.collect()
                elif key.fileobj == self._stop_fd:
                    self._shut()
                    return
                elif key.fd in self._connections:
                    self._serve(self._connections[key.fd], mask)
            self._expire()
            while self._desk.changed:
                self._desk.changed = False
                self._retry()

    def _shut(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection, "service stopped")
        self._selector.close()
        self._listener.close()

    # Peers come, speak, and go.

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # the peer has given up already
        if len(self._connections) >= self._limits.connections and not self._make_room():
            sock.close()
            return
        self._connections[sock.fileno()] = Connection(sock, self._in(self._limits.handshake_s))
        self._selector.register(sock, selectors.EVENT_READ)

    def _make_room(self) -> bool:
        """Drop the oldest peer without a session, if there is one: those with a session are never dropped."""
        for connection in self._connections.values():
            if connection.session is None and connection.parked is None:
                self._drop(connection, "too many connections")
                return True
        return False

    def _serve(self, connection: Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                connection.flush()
                if not connection.sending:
                    self._rearm(connection)
            if mask & selectors.EVENT_READ:
                was_mid_frame = connection.mid_frame
                body = connection.receive()
                if body is not None:
                    self._ask(connection, wire.decode_request(body))
                elif connection.mid_frame and not was_mid_frame and not connection.parked:
                    # From the first byte on: a peer that sends a byte now and then wins no time.
                    connection.deadline_ns = self._in(self._limits.frame_s)
        except ProtocolError as error:
            self._refuse_and_drop(connection, str(error))
        except ServiceGone as error:
            self._drop(connection, str(error))

    def _refuse_and_drop(self, connection: Connection, why: str) -> None:
        if not connection.sending:
            with suppress(ServiceGone):  # it will not hear why
                connection.send(wire.RefusedWith(Reason.BAD_REQUEST, why), [])
        self._drop(connection, f"protocol: {why}")

    def _drop(self, connection: Connection, why: str) -> None:
        del self._connections[connection.sock.fileno()]
        self._selector.unregister(connection.sock)
        if connection.session is not None:
            self._desk.break_off(connection.session, why, connection.peer_pidfd)
        connection.close()

    # Time.

    def _in(self, seconds: float) -> int:
        return self._clock.now_ns() + s_to_ns(seconds)

    def _patience_s(self) -> float | None:
        deadlines = [c.deadline_ns for c in self._connections.values() if c.deadline_ns is not None]
        if not deadlines:
            return None
        return max(0.0, (min(deadlines) - self._clock.now_ns()) / NS_PER_S)

    def _rearm(self, connection: Connection) -> None:
        """Set what a connection waits for now, and how long it may."""
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.sending else 0)
        self._selector.modify(connection.sock, interest)
        if connection.sending or connection.mid_frame:
            connection.deadline_ns = self._in(self._limits.frame_s)
        elif connection.parked is not None:
            connection.deadline_ns = connection.parked.until_ns
        else:
            connection.deadline_ns = self._in(self._limits.handshake_s) if connection.session is None else None

    def _expire(self) -> None:
        now_ns = self._clock.now_ns()
        for connection in list(self._connections.values()):
            if connection.deadline_ns is None or connection.deadline_ns > now_ns:
                continue
            if connection.parked is not None:
                parked, connection.parked = connection.parked, None
                self._refuse(connection, parked.request, parked.refusal)
            else:
                self._drop(connection, "too slow")

    # Requests, at once or after a wait.

    def _ask(self, connection: Connection, request: wire.Request) -> None:
        """Answer a request, or park it while its wait lasts."""
        asked_s: float = getattr(request, "wait_s", 0.0)
        wait_s = min(asked_s, self._limits.wait_s_max) if asked_s > 0 else 0.0  # NaN is no wait
        self._try(connection, request, self._in(wait_s))

    def _retry(self) -> None:
        """Try what is parked again, in the order of the connections, for something has changed."""
        for connection in list(self._connections.values()):
            if connection.parked is not None:
                parked, connection.parked = connection.parked, None
                self._try(connection, parked.request, parked.until_ns)

    def _try(self, connection: Connection, request: wire.Request, until_ns: int) -> None:
        try:
            answer = self._desk.apply(connection.session, request)
        except Refused as refusal:
            if refusal.reason in WAITABLE and until_ns > self._clock.now_ns():
                connection.parked = Parked(request, until_ns, refusal)
                self._rearm(connection)
            else:
                self._refuse(connection, request, refusal)
            return
        connection.session = answer.session
        self._answer(connection, answer.reply, answer.descriptors)

    def _refuse(self, connection: Connection, request: wire.Request, refusal: Refused) -> None:
        self._desk.note_refusal(connection.session, request, refusal)
        self._answer(connection, wire.RefusedWith(refusal.reason, refusal.message), [])

    def _answer(self, connection: Connection, reply: wire.Reply, descriptors: list[int]) -> None:
        try:
            connection.send(reply, descriptors)
            self._rearm(connection)
        except ServiceGone as error:
            self._drop(connection, str(error))

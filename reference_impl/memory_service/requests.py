"""What each request does: to the rules, to the memory, and to the history."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from reference_impl.event_log import EventLog
from reference_impl.memory_service import wire
from reference_impl.memory_service.backend import Access, Backend, Memory
from reference_impl.memory_service.errors import BackendError
from reference_impl.memory_service.reaper import Reaper
from reference_impl.rules.events import EventKind, Scalar
from reference_impl.rules.sessions import Holding, Mode, Reason, Refused, Sessions


@dataclass
class Answer:
    """A reply, the descriptors that go with it, and the session that the connection has afterwards."""

    reply: wire.Reply
    session: int | None
    descriptors: list[int] = field(default_factory=list)


class Desk:
    """Applies requests to one device's rules, makes memory, and has it freed beside the loop.

    `changed` turns True when something that was refused might now be granted.
    """

    def __init__(self, device: str, rules: Sessions, backend: Backend, events: EventLog) -> None:
        self.reaper = Reaper(backend)
        self.changed = False
        self._device, self._rules, self._backend, self._events = device, rules, backend, events
        self._memories: dict[int, dict[str, Memory]] = {}
        self._exported: set[int] = set()  # sessions that were given descriptors

    def apply(self, session: int | None, request: wire.Request) -> Answer:
        """Apply one request of a connection whose session is `session`. Raises `Refused`."""
        match request:
            case wire.Open():
                return self._open(session, request)
            case wire.CommitStatus():
                return Answer(wire.Published(self._rules.commit_status(request.commit_id)), session)
            case wire.GetFigures():
                return Answer(wire.FiguresAre(self._rules.figures()), session)
            case _ if session is None:
                raise Refused(Reason.BAD_REQUEST, "no session is open on this connection; open one first")
            case _:
                return self._apply_in(session, request)

    def _apply_in(
        self, session: int, request: wire.Allocate | wire.Commit | wire.GetLayout | wire.Export | wire.Close
    ) -> Answer:
        match request:
            case wire.Allocate():
                return self._allocate(session, request)
            case wire.Commit():
                return self._commit(session, request)
            case wire.GetLayout():
                current = self._rules.current(self._rules.session(session).tag)
                layout = current if request.current else self._rules.layout(session)
                return Answer(wire.Published(layout), session)
            case wire.Export():
                return self._export(session, request)
            case wire.Close():
                # The client says that it has let go of the memory; what it kept against its word is its own loss.
                self._end(session, "closed")
                return Answer(wire.Done(), None)

    def _open(self, session: int | None, request: wire.Open) -> Answer:
        if session is not None:
            raise Refused(Reason.BAD_REQUEST, "a session is open on this connection; a connection has one")
        opened = self._rules.open(request.tag, request.mode, request.engine_id, request.epoch)
        self._say(
            EventKind.SESSION_OPENED,
            session=opened.id,
            tag=opened.tag,
            mode=opened.mode,
            engine_id=opened.engine_id,
            epoch=opened.epoch,
        )
        return Answer(wire.Opened(opened.id, self._rules.figures().service, opened.holding.layout), opened.id)

    def _allocate(self, session: int, request: wire.Allocate) -> Answer:
        holding = self._rules.allocate(session, request.name, request.size_bytes)
        try:
            memory = self._backend.create(request.size_bytes, request.name)
        except BackendError as error:
            self._rules.take_back(session, request.name)
            raise Refused(Reason.SHORT_OF_MEMORY, str(error)) from error
        self._memories.setdefault(holding.id, {})[request.name] = memory
        return Answer(wire.Done(), session)

    def _commit(self, session: int, request: wire.Commit) -> Answer:
        committed = self._rules.commit(session, request.commit_id, request.metadata)
        layout = committed.layout
        if not committed.repeated:
            self._say(
                EventKind.LAYOUT_COMMITTED,
                session=session,
                tag=layout.tag,
                generation=layout.generation,
                hash=layout.hash,
                bytes=layout.size_bytes,
                allocations=len(layout.entries),
            )
            self._free(committed.freed)
            self.changed = True
        return Answer(wire.Published(layout), session)

    def _export(self, session: int, request: wire.Export) -> Answer:
        if not 0 < len(request.names) <= wire.DESCRIPTORS_MAX:
            raise Refused(
                Reason.BAD_REQUEST, f"export takes 1 to {wire.DESCRIPTORS_MAX} names, got {len(request.names)}"
            )
        exporting = self._rules.export(session, request.names)
        access = Access.WRITE if exporting.mode is Mode.WRITER else Access.READ
        memories = self._memories[exporting.holding.id]
        descriptors: list[int] = []
        try:
            for name in request.names:
                descriptors.append(self._backend.export(memories[name], access))
        except BackendError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise Refused(Reason.SHORT_OF_HANDLES, str(error)) from error
        self._exported.add(session)
        return Answer(wire.Exported(len(descriptors)), session, descriptors)

    def break_off(self, session_id: int, why: str, peer_pidfd: Callable[[], int | None]) -> None:
        """End a session whose connection is gone, and keep its memory while its process may still use it."""
        if session_id in self._exported:
            pidfd = peer_pidfd()
            if pidfd is not None:
                self.reaper.watch(self._rules.session(session_id).holding, pidfd)
        self._end(session_id, why)

    def _end(self, session_id: int, why: str) -> None:
        self._exported.discard(session_id)
        session = self._rules.session(session_id)
        freed = self._rules.close(session_id)
        self._say(
            EventKind.SESSION_CLOSED,
            session=session.id,
            tag=session.tag,
            mode=session.mode,
            engine_id=session.engine_id,
            reason=why,
            allocations=len(session.holding.sizes),
        )
        self._free(freed)
        self.changed = True

    def _free(self, holdings: tuple[Holding, ...]) -> None:
        for holding in holdings:
            self.reaper.free(holding, self._memories.pop(holding.id, {}).values())

    def collect(self) -> None:
        """Give back the capacity of what the reaper has freed."""
        for holding in self.reaper.collect():
            self._rules.freed(holding)
            self.changed = True

    def note_refusal(self, session_id: int | None, request: wire.Request, refusal: Refused) -> None:
        """Enter into the history that an engine was turned away: at the door, or by the fence."""
        if isinstance(request, wire.Open):
            tag, mode, engine_id = request.tag, request.mode, request.engine_id[:200]
        elif refusal.reason is Reason.FENCED and session_id is not None:
            session = self._rules.session(session_id)
            tag, mode, engine_id = session.tag, session.mode, session.engine_id
        else:
            return
        self._say(EventKind.SESSION_REFUSED, tag=tag, mode=mode, engine_id=engine_id, reason=refusal.reason)

    def _say(self, kind: EventKind, **detail: Scalar) -> None:
        """Write an event. A full disk must not cost the engines their memory, so that it is only complained of."""
        try:
            self._events.say(kind, self._device, **detail)
        except OSError as error:
            sys.stderr.write(f"memory service: event {kind} was not written: {error.strerror}; free disk space\n")

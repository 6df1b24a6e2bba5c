"""An actor's own event file: one JSON line an event, written at once, so that SIGKILL loses none of the past."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from reference_impl.realclock import host_ns, wall_ns
from reference_impl.rules.events import Event, EventKind, Scalar


class EventLog:
    """Appends events to `path` (created 0600) in the name of `actor`. With `path=None` events go nowhere."""

    def __init__(self, path: Path | None, actor: str) -> None:
        self.actor = actor
        self._fd = -1 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def say(self, kind: EventKind, subject: str, **detail: Scalar) -> Event:
        """Write one event, stamped now, and return it. All processes of a host stamp on one base."""
        return self.say_at(host_ns(), kind, subject, **detail)

    def say_at(self, t_ns: int, kind: EventKind, subject: str, **detail: Scalar) -> Event:
        """Write one event that happened at `t_ns` (the host's clock), and return it.

        One `write` a line: lines never interleave.
        """
        event = Event(t_ns, wall_ns(), self.actor, kind, subject, detail)
        if self._fd >= 0:
            os.write(self._fd, msgspec.json.encode(event) + b"\n")
        return event

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

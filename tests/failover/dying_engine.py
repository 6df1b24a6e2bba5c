"""An engine that kills itself with SIGKILL at a named moment: the reference engine, with a deadly event log.

`PDPROOF_TEST_DIE_AT` is `EVENT[:NAME]`: the kind of event, and for phases their name. The first engine of a worker that
is about to say it dies instead; `PDPROOF_TEST_DIED` names the file by which the others know that one has.
"""

from __future__ import annotations

import os
import signal

from reference_impl.engine import process
from reference_impl.event_log import EventLog
from reference_impl.memory_service.client import MemoryClient
from reference_impl.rules.events import Event, EventKind, Scalar
from reference_impl.rules.sessions import Layout

_KIND, _, _NAME = os.environ["PDPROOF_TEST_DIE_AT"].partition(":")


def _die() -> None:
    try:
        os.close(os.open(os.environ["PDPROOF_TEST_DIED"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class DeadlyLog(EventLog):
    """Dies instead of saying the chosen event."""

    def say_at(self, t_ns: int, kind: EventKind, subject: str, **detail: Scalar) -> Event:
        if kind == _KIND and (not _NAME or detail.get("name") == _NAME):
            _die()
        return super().say_at(t_ns, kind, subject, **detail)


class DeadlyClient(MemoryClient):
    """Dies just before, or just after, its commit."""

    def commit(self, metadata: bytes = b"") -> Layout:
        if _KIND == "before-commit":
            _die()
        layout = super().commit(metadata)
        if _KIND == "after-commit":
            _die()
        return layout


if __name__ == "__main__":
    process.EventLog = DeadlyLog  # type: ignore[misc]
    from reference_impl.engine import memory

    memory.MemoryClient = DeadlyClient  # type: ignore[misc]
    process.main()

"""What a reader renews, at whom, and when (KVC-HB-001 to -004).

Requests are tracked from the moment they enter the scheduler and grouped by the engine that holds their blocks. Readers
that share one lease are counted: it is renewed until the last of them is done.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from reference_impl.rules.messages import HEARTBEAT_IDS_MAX


class Beat(NamedTuple):
    """One heartbeat that is due: whom to send it to, and the requests it renews, by their holder's ids (C1)."""

    engine_id: str
    requests: list[str]


class HeartbeatTracker:
    """The requests whose leases this engine keeps alive."""

    def __init__(self) -> None:
        self._readers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._next_ns: dict[str, int] = {}

    def track(self, engine_id: str, request_id: str) -> None:
        """Count one reader more of a lease."""
        self._readers[engine_id][request_id] += 1

    def untrack(self, engine_id: str, request_id: str) -> None:
        """Count one reader less; harmless if there is none."""
        readers = self._readers.get(engine_id)
        if readers is None or request_id not in readers:
            return
        readers[request_id] -= 1
        if not readers[request_id]:
            del readers[request_id]
        if not readers:
            del self._readers[engine_id]

    def drop(self, engine_id: str) -> None:
        """Forget an engine and everything tracked at it."""
        self._readers.pop(engine_id, None)
        self._next_ns.pop(engine_id, None)

    @property
    def engines(self) -> list[str]:
        """The engines at which something is tracked."""
        return list(self._readers)

    def tracked(self, engine_id: str) -> list[str]:
        """Return the requests tracked at an engine."""
        return list(self._readers.get(engine_id, ()))

    def due(self, engine_id: str, now_ns: int, interval_ns: int) -> list[Beat]:
        """Return the heartbeat for an engine if its interval has passed, [] otherwise (KVC-HB-003).

        It is one message unless so many requests are tracked that it would exceed a notification's size.
        """
        readers = self._readers.get(engine_id)
        if not readers or now_ns < self._next_ns.get(engine_id, now_ns):
            return []
        self._next_ns[engine_id] = now_ns + interval_ns
        ids = list(readers)
        return [Beat(engine_id, ids[i : i + HEARTBEAT_IDS_MAX]) for i in range(0, len(ids), HEARTBEAT_IDS_MAX)]

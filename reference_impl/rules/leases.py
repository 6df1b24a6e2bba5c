"""Leases on KV blocks: a request, not an instance, is what a lease is of.

Granted when a prefill (or a turn) ends, extended to max(old, new), ended exactly once: by the last distinct reader's
report, by an abort, or at its deadline (S3, S4, L1, KVC-LEASE-001 to -006). The table keeps no order by arrival: its
heap looks at the earliest deadline of all, so a renewed lease in front hides none behind it (KVC-LEASE-006), and a look
that finds none expired costs the same however many there are.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

NO_SLOT: Final = -1
"""A reader that names no place: it counts by its own id."""


@dataclass(slots=True, eq=False)
class Lease:
    """One lease. `readers` is how many distinct readers must report before it ends by reports."""

    request_id: str
    blocks: list[int]
    readers: int
    granted_ns: int
    deadline_ns: int
    content: str = ""
    """Fingerprint of the tokens whose KV the blocks hold."""
    turn: bool = False
    """Decode-side blocks, kept for a next turn: no heartbeats, only the client renews them (KVC-CLK-001, -007)."""
    reported: set[str] = field(default_factory=set)
    reading: set[str] = field(default_factory=set)
    """Readers whose claim was granted and who have not reported: one may be reading now."""
    heard_from: str = ""
    """The engine that last renewed or claimed it: whose reader it is, as far as the holder knows."""
    ended: bool = False

    @property
    def done(self) -> bool:
        """Whether all expected readers have reported, and no other one reads."""
        return len(self.reported) >= self.readers and not self.reading


class LeaseTable:
    """The live leases of one engine, whatever its number of ranks."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._due: list[tuple[int, int, Lease]] = []
        self._granted = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def held(self) -> dict[str, list[int]]:
        """The blocks of each live lease by its request; two leases may share some."""
        return {name: lease.blocks for name, lease in self._leases.items()}

    @property
    def blocks(self) -> list[list[int]]:
        """The blocks of each live lease; two leases may share some."""
        return [lease.blocks for lease in self._leases.values()]

    def get(self, request_id: str) -> Lease | None:
        """Return the live lease of a request, None if there is none."""
        return self._leases.get(request_id)

    def grant(
        self,
        request_id: str,
        blocks: list[int],
        *,
        readers: int,
        now_ns: int,
        length_ns: int,
        content: str = "",
        turn: bool = False,
    ) -> Lease:
        """Start a lease. Raises ValueError for a request that has one, or for no readers."""
        if request_id in self._leases:
            raise ValueError(f"request {request_id} holds a lease already")
        if readers < 1:
            raise ValueError(f"readers must be at least 1, got {readers}")
        lease = Lease(request_id, blocks, readers, now_ns, now_ns + length_ns, content, turn)
        self._leases[request_id] = lease
        self._granted += 1
        heapq.heappush(self._due, (lease.deadline_ns, self._granted, lease))
        return lease

    def extend(self, request_id: str, until_ns: int, heard_from: str = "") -> bool:
        """Move a deadline to `until_ns`, never back (KVC-LEASE-003); false, and nothing made, without a lease."""
        lease = self._leases.get(request_id)
        if lease is None:
            return False
        lease.deadline_ns = max(lease.deadline_ns, until_ns)
        lease.heard_from = heard_from or lease.heard_from
        return True

    def claim(self, request_id: str, reader: str, until_ns: int, *, slot: int = NO_SLOT, heard_from: str = "") -> bool:
        """Let a reader read until `until_ns`: the lease does not end before, unless it reports; false without a lease.

        A reader that nobody expected (a hand-off used twice at once) is waited for all the same (S1). One that takes an
        expected place again (a retry) is expected again.
        """
        lease = self._leases.get(request_id)
        if lease is None:
            return False
        lease.reading.add(reader)
        if slot != NO_SLOT:
            lease.reported.discard(_place(reader, slot))
        return self.extend(request_id, until_ns, heard_from)

    def report(self, request_id: str, reader: str, slot: int = NO_SLOT) -> Lease | None:
        """Note that a reader needs the blocks no longer; return the lease if that was the last one it waited for.

        Readers are counted, not messages: one that reports twice counts once. With several readers each takes a place
        (`slot`, below `readers`), so that a retry does not use up the place of another (S3).
        """
        lease = self._leases.get(request_id)
        if lease is None:
            return None
        lease.reading.discard(reader)
        if slot < lease.readers:
            lease.reported.add(_place(reader, slot))
        return self.end(request_id) if lease.done else None

    def end(self, request_id: str) -> Lease | None:
        """End a lease now and return it; None if there is none."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            lease.ended = True  # its entry in the heap goes when its time comes
        return lease

    def expire(self, now_ns: int) -> list[Lease]:
        """End every lease whose deadline has come, and return them. O(1) if none has, O(log n) each otherwise."""
        due = self._due
        if not due or due[0][0] > now_ns:
            return []
        expired = []
        while due and due[0][0] <= now_ns:
            _, order, lease = heapq.heappop(due)
            if lease.ended:
                continue
            if lease.deadline_ns > now_ns:  # extended since it was put here
                heapq.heappush(due, (lease.deadline_ns, order, lease))
                continue
            self.end(lease.request_id)
            expired.append(lease)
        return expired


def _place(reader: str, slot: int) -> str:
    """Return what a reader counts as."""
    return reader if slot == NO_SLOT else f"place {slot}"

"""The side that holds blocks for a reader: the prefill engine, and in two-turn mode the decode engine as well.

It grants leases, listens to heartbeats, claims and reports, and says when blocks are free. It owns no pool and sends
nothing itself: `take` returns what to do. One table serves all ranks of an engine, so whatever happens to a lease
happens, and is counted, once (O1).

The fence (S1): a reader claims before it reads and says how long its read may take; a granted claim keeps the lease at
least that long from now. So blocks are not given away under a read that keeps its own deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from reference_impl.rules.clock import NS_PER_S
from reference_impl.rules.leases import Lease, LeaseTable
from reference_impl.rules.messages import (
    Answer,
    BadMessage,
    Claim,
    Heartbeat,
    How,
    Message,
    Report,
    decode,
    encode,
)
from reference_impl.rules.terms import KvTerms
from reference_impl.rules.transfer_tokens import is_token


class Send(msgspec.Struct, frozen=True):
    """Send a notification to an engine."""

    engine_id: str
    message: Message

    @property
    def data(self) -> bytes:
        """The notification's bytes."""
        return encode(self.message)


class Freed(msgspec.Struct, frozen=True):
    """A lease has ended: its blocks are to be released, now. `how` is None if it expired."""

    lease: Lease
    how: How | None


class Refused(msgspec.Struct, frozen=True):
    """A claim was refused: its reader came too late, or with a hand-off that is used or foreign."""

    request_id: str
    reader: str
    reason: str


class Extended(msgspec.Struct, frozen=True):
    """A heartbeat extended so many leases; `unknown` ids held none (KVC-LEASE-004)."""

    engine_id: str
    leases: int
    unknown: int


Action: TypeAlias = Send | Freed | Refused | Extended


class HolderCounts(msgspec.Struct):
    """Counters over the holder's life; each event counts once."""

    granted: int = 0
    extended: int = 0
    released: int = 0
    expired: int = 0
    heartbeats_received: int = 0
    claims_refused: int = 0
    late_claims: int = 0
    """Refused because no lease was left: reads after expiry that were not allowed to happen."""
    malformed: int = 0


class Producer:
    """The leases of one engine and what its peers say about them."""

    def __init__(self, terms: KvTerms) -> None:
        self.terms = terms
        self.leases = LeaseTable()
        self.counts = HolderCounts()
        self.explain: Callable[[str], str] = lambda _: ""
        """Says more of an id that has no lease, "" if there is no more to say."""
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """Return what is to be done, in order, and forget it."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def pending(self) -> bool:
        """Whether `take` has something."""
        return bool(self._actions)

    def grant(self, request_id: str, blocks: list[int], *, readers: int, content: str, now_ns: int) -> Lease:
        """Start the lease of a prefill that has just ended (KVC-LEASE-001)."""
        self.counts.granted += 1
        return self.leases.grant(
            request_id, blocks, readers=readers, now_ns=now_ns, length_ns=self.terms.first_ns, content=content
        )

    def grant_turn(self, request_id: str, blocks: list[int], *, content: str, now_ns: int) -> Lease:
        """Start the lease of a decode that has just ended, for a next turn's prefill (KVC-CLK-001)."""
        self.counts.granted += 1
        return self.leases.grant(
            request_id, blocks, readers=1, now_ns=now_ns, length_ns=self.terms.ttl_ns, content=content, turn=True
        )

    def renew(self, request_id: str, now_ns: int) -> Lease | None:
        """Keep a turn's blocks for another whole time to live (KVC-CLK-007); None if they are gone."""
        lease = self.leases.get(request_id)
        if lease is None or not lease.turn:
            return None
        self.leases.extend(request_id, now_ns + self.terms.ttl_ns)
        self.counts.extended += 1
        return lease

    def abort(self, request_id: str) -> None:
        """End a lease because nobody will come; harmless without one. One that is being read ends by its reader."""
        lease = self.leases.get(request_id)
        if lease is not None and not lease.reading:
            self._free(self.leases.end(request_id), How.ABORT)

    def step(self, inbox: list[tuple[str, bytes]], now_ns: int) -> list[tuple[str, Answer]]:
        """Read every message that waits, and only then judge expiry (KVC-LEASE-008).

        Return the answers among them: those are for the reader's side of this engine.
        """
        answers = []
        for engine_id, data in inbox:
            answer = self._receive(engine_id, data, now_ns)
            if answer is not None:
                answers.append((engine_id, answer))
        for lease in self.leases.expire(now_ns):
            self.counts.expired += 1
            self._actions.append(Freed(lease, None))
        return answers

    def _receive(self, engine_id: str, data: bytes, now_ns: int) -> Answer | None:
        try:
            message = decode(data)
        except BadMessage:
            self.counts.malformed += 1
            return None
        match message:
            case Heartbeat():
                self._heartbeat(engine_id, message, now_ns)
            case Claim():
                self._claim(engine_id, message, now_ns)
            case Report():
                self._free(self.leases.report(message.request, message.reader, message.slot), message.how)
            case Answer():
                return message
        return None

    def _heartbeat(self, engine_id: str, beat: Heartbeat, now_ns: int) -> None:
        self.counts.heartbeats_received += 1
        if not self.terms.renews:
            return
        until_ns = now_ns + self.terms.extension_ns
        extended = sum(self.leases.extend(request_id, until_ns, engine_id) for request_id in beat.requests)
        self.counts.extended += extended
        self._actions.append(Extended(engine_id, extended, len(beat.requests) - extended))

    def _claim(self, engine_id: str, claim: Claim, now_ns: int) -> None:
        reason = self._why_not(claim)
        if reason:
            self.counts.claims_refused += 1
            self._actions.append(Refused(claim.request, claim.reader, reason))
        else:
            until_ns = now_ns + claim.within_ns
            self.leases.claim(claim.request, claim.reader, until_ns, slot=claim.slot, heard_from=engine_id)
        answer = Answer(claim.request, claim.reader, not reason, reason)
        self._actions.append(Send(engine_id, answer))

    def _why_not(self, claim: Claim) -> str:
        """Return why a claim cannot be granted, "" if it can."""
        lease = self.leases.get(claim.request)
        if lease is None:
            self.counts.late_claims += 1
            return self.explain(claim.request) or "no lease: it has ended, or never was"
        if claim.slot >= lease.readers:
            return f"only {lease.readers} readers are expected, so there is no place {claim.slot}"
        if claim.reader in lease.reported:
            return "this reader has reported already"
        if claim.content != lease.content:
            return "the blocks hold another text"
        if claim.within_ns > self.terms.read_limit_ns:
            return f"a read may take {self.terms.read_limit_ns / NS_PER_S:g} s, not {claim.within_ns / NS_PER_S:g}"
        used = is_token(claim.request) and lease.reading - {claim.reader}
        return "the transfer token is another reader's: it works once" if used else ""

    def _free(self, lease: Lease | None, how: How) -> None:
        if lease is not None:
            self.counts.released += 1
            self._actions.append(Freed(lease, how))

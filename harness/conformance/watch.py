"""Looks at a world from outside, at every step, and notes which invariants it sees broken. It touches nothing.

It judges by what an engine says of itself (`subject.Engine`), by what went over the network, and by the times that the
terms allow: from when a lease may end, and until when it must have.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from faults.nixl.dialects import Meaning
from faults.nixl.orders import Kind
from harness.conformance.subject import Capability, Ending, How
from reference_impl.rules.clock import NS_PER_MS, NS_PER_S, s_to_ns

if TYPE_CHECKING:
    from harness.conformance.world import Leg, Life, World

DRIFT: Final = 400e-6
"""What two clocks may differ by, as a share of a time."""
SLACK_NS: Final = 10 * NS_PER_MS
BREACHES_MAX: Final = 20


class Breach(msgspec.Struct, frozen=True, kw_only=True):
    """An invariant or a rule that was seen broken, and when."""

    rule: str
    what: str
    t_ns: int
    where: str = ""
    """Of what kind it is, among the breaches of its rule: so that a search can tell one from another."""


@dataclass
class Grant:
    """What is known of a lease or of a kept turn. Times are true ones."""

    leg: Leg
    turn: bool
    earliest_ns: int
    """Before that it may not end by time."""
    latest_ns: int
    """After that it must have ended."""
    reports: set[str] = field(default_factory=set)
    """Whose reports of a read have arrived."""
    reported_ns: int = 0
    """When the first did."""
    aborted: bool = False


@dataclass(frozen=True)
class Sent:
    """A message that left an engine."""

    t_ns: int
    sender: str
    receiver: str
    meaning: Meaning
    data: bytes
    arrives: int
    """How often."""
    number: int = 0
    """Among all of a world's messages."""


class Watch:
    """See above. `expects_release`: whether one report is to end a lease (off where several readers are expected)."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.breaches: list[Breach] = []
        self.grants: dict[tuple[str, str], Grant] = {}
        """Live ones, by holder and request."""
        self.expired: dict[str, int] = defaultdict(int)
        """Leases and turns that were seen to end by time, by holder."""
        self.messages: list[Sent] = []
        self.expects_release = True
        self.excused: set[str] = set()
        """Requests of which it does not matter to the case what becomes in the end."""
        self._ids: dict[str, set[str]] = defaultdict(set)
        self._longest_step_ns = 0
        self._before_ns = 0

    def breach(self, rule: str, what: str, where: str = "") -> None:
        """Note that a rule is broken. A world gone wrong says so again and again: only the first ones are kept."""
        if len(self.breaches) < BREACHES_MAX:
            t_ns = self._world.timeline[-1].t_ns if self._world.timeline else 0
            self.breaches.append(Breach(rule=rule, what=what, t_ns=t_ns, where=where))
            self._world.note("watch", "breach", rule, found=what[:400])

    def sent_by(self, sender: str, kind: Kind) -> list[Sent]:
        """Return an engine's messages of a kind, in order."""
        return [m for m in self.messages if m.sender == sender and m.meaning.kind is kind]

    # What the world tells.

    def sent(self, sender: Life, receiver: Life, meaning: Meaning, data: bytes, delays: list[int], number: int) -> None:
        """See a message leave: it names what its holder knows (C1)."""
        now = self._world.network.now_ns
        self.messages.append(Sent(now, sender.name, receiver.name, meaning, data, len(delays), number))
        # A registration asks the holder to write, and says whom for.
        holder = sender if meaning.kind in (Kind.ANSWER, Kind.REGISTRATION) else receiver
        known = self._ids[holder.name]
        strange = [request for request in meaning.requests if request not in known]
        if meaning.kind is not Kind.UNKNOWN and strange:
            route = f"from {sender.name} to {receiver.name}"
            self.breach("C1", f"a {meaning.kind} {route} names {strange}: {holder.name} has no such request",
                        meaning.kind)  # fmt: skip

    def arrived(self, receiver: Life, sender: Life, meaning: Meaning, data: bytes, number: int) -> None:  # noqa: ARG002
        """See a message arrive: what it may do to a lease. `number` is 0 for bytes that nobody sent like that."""
        now = self._world.network.now_ns
        for request in meaning.requests:
            grant = self.grants.get((receiver.name, request))
            if grant is None:
                continue
            if meaning.kind is Kind.COMPLETION:
                grant.reports.add(sender.name)
                grant.reported_ns = grant.reported_ns or now
            if grant.turn:
                continue
            terms = receiver.spec.terms
            extension_ns = s_to_ns(terms.extension_s)
            if meaning.kind in (Kind.HEARTBEAT, Kind.CLAIM):
                grant.latest_ns = max(grant.latest_ns, now + self._late(extension_ns))
            if meaning.kind is Kind.HEARTBEAT and receiver.runs:
                grant.earliest_ns = max(grant.earliest_ns, now + self._early(extension_ns))

    def submitted(self, leg: Leg) -> None:
        """See a request arrive."""
        self._ids[leg.life.name].add(leg.name)

    def unsent(self, life: Life, meaning: Meaning) -> None:
        """See a message that could not leave."""

    def reading(self, life: Life) -> None:
        """See a read begin."""

    def asking(self, life: Life) -> None:
        """See a question leave."""

    def moved(self, life: Life) -> None:
        """See a transfer end well that an engine began: one that pushes knows by itself that it is done."""
        if Capability.PUSH in self._world.subject.capabilities:
            for (holder, _), grant in self.grants.items():
                if holder == life.name:
                    grant.reports.add(life.name)

    def ended(self, leg: Leg, end: Ending) -> None:
        """See a request end: what it answered (S2), and what it keeps."""
        if end.right is False:
            self.breach("S2", f"{leg.name} was answered from KV that is not its prompt's")
        if end.how is How.ANSWERED and end.hand_off and Capability.LEASES in self._world.subject.capabilities:
            params = leg.request.params or {}
            turn = not params.get("do_remote_decode")
            terms = leg.life.spec.terms
            length_ns = s_to_ns(terms.ttl_s if turn else terms.lease_s)
            now = self._world.network.now_ns
            self.grants[leg.life.name, leg.name] = Grant(
                leg, turn, now + self._early(length_ns), now + self._late(length_ns)
            )

    def aborted(self, leg: Leg) -> None:
        """See a client go away."""
        grant = self.grants.get((leg.life.name, leg.name))
        if grant is not None:
            grant.aborted = True

    def renewed(self, leg: Leg) -> None:
        """See a turn renewed."""
        grant = self.grants.get((leg.life.name, leg.name))
        if grant is not None:
            length_ns, now = s_to_ns(leg.life.spec.terms.ttl_s), self._world.network.now_ns
            grant.earliest_ns = max(grant.earliest_ns, now + self._early(length_ns))
            grant.latest_ns = max(grant.latest_ns, now + self._late(length_ns))

    def died(self, life: Life) -> None:
        """Forget an engine's leases: its memory is gone."""
        self.grants = {key: grant for key, grant in self.grants.items() if key[0] != life.name}

    def thawed(self, life: Life) -> None:
        """See an engine go on: what has waited in its inbox counts from now."""
        now = self._world.network.now_ns
        for (holder, _), grant in self.grants.items():
            if holder == life.name:
                grant.latest_ns = max(grant.latest_ns, now + self._late(s_to_ns(life.spec.terms.extension_s)))

    def _early(self, length_ns: int) -> int:
        return round(length_ns * (1 - DRIFT)) - 2 * self._longest_step_ns - SLACK_NS

    def _late(self, length_ns: int) -> int:
        return round(length_ns * (1 + DRIFT)) + 3 * self._longest_step_ns + SLACK_NS

    # What it sees by itself.

    def step(self) -> None:
        """Look at every lease after a step."""
        now = self._world.network.now_ns
        if self._before_ns:
            self._longest_step_ns = max(self._longest_step_ns, now - self._before_ns)
        self._before_ns = now
        for life in self._world.living():
            if life.frozen or not any(holder == life.name for holder, _ in self.grants):
                continue
            held = self._world.held(life)
            for key in [key for key in self.grants if key[0] == life.name]:
                self._looked(life, key[1], self.grants[key], still=key[1] in held)

    def _looked(self, life: Life, request: str, grant: Grant, *, still: bool) -> None:
        now = self._world.network.now_ns
        kind = "turn" if grant.turn else "lease"
        if still:
            if now > grant.latest_ns:
                self.breach("L1", f"{life.name} holds {request} {(now - grant.latest_ns) / NS_PER_S:.2f} s after its "
                            f"{kind} had to end", kind)  # fmt: skip
                grant.latest_ns = now + 3_600 * NS_PER_S  # said once
            late_ns = now - grant.reported_ns - 3 * self._longest_step_ns
            if grant.reported_ns and late_ns > SLACK_NS and self.expects_release and self._one_rank():
                self.breach("L4", f"{life.name} still holds {request}, which was reported as read")
                grant.reported_ns = 0
            return
        del self.grants[life.name, request]
        if grant.reports or grant.aborted:
            return
        self.expired[life.name] += 1
        if now < grant.earliest_ns:
            self.breach("L2", f"{life.name} gave {request} up {(grant.earliest_ns - now) / NS_PER_S:.2f} s before its "
                        f"{kind} could end, and nobody had reported a read")  # fmt: skip

    def _one_rank(self) -> bool:
        return all(life.spec.ranks == 1 for life in self._world.lives.values())

    def rest(self) -> None:
        """Look at a world that has come to rest: nobody waits (L3), nothing is held (K1)."""
        for life in self._world.living():
            for name in life.legs.keys() - self.excused:
                self.breach("L3", f"{name} at {life.name} never came to an end")
            for request, blocks in self._world.held(life).items():
                if request not in life.legs and request not in self.excused:
                    self.breach("K1", f"{life.name} holds {len(blocks)} blocks of {request} when all is over")

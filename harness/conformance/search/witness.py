"""The watch of a generated history: it expects nothing in particular, and so judges more than that of a fixed case.

It accuses nobody where a subject may rightly do otherwise. What makes it lenient is said at each place; in short:

- **Faults.** That a waiting reader's lease lives, and that no read and no handshake fails, is asked only of a calm
  history: one in which nothing went wrong until then.
- **Forged messages.** Bytes that nobody sent may be taken for real, or dropped because their sender is a stranger. They
  may end a lease (nobody is accused of that), and need not (nobody is accused of that either).
- **Unequal terms.** Two sides may refuse each other; then nobody renews, and the request is computed anew.
- **Unexpected readers.** More requests may come for a hand-off than its holder was told of. It may wait for them.
- **Times.** A lease's end is known to within some steps and 400 ppm (`watch`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from faults.nixl.dialects import Meaning
from faults.nixl.orders import Kind
from harness.conformance.subject import (
    BAD_MESSAGES,
    DECLINED,
    EXPIRED,
    FAILED_HANDSHAKES,
    FAILED_READS,
    LATE,
    UNSENT_HEARTBEATS,
    Capability,
    Ending,
    How,
    Policy,
)
from harness.conformance.watch import SLACK_NS, Grant, Watch
from reference_impl.rules.clock import NS_PER_MS, NS_PER_S, s_to_ns

if TYPE_CHECKING:
    from harness.conformance.subject import Params
    from harness.conformance.world import Leg, Life, World

Key = tuple[str, str]
"""A holder and its request."""
TURN_MARGIN_NS: Final = 6 * NS_PER_S
"""What a reader may keep clear of a turn's end: vLLM's five seconds, and what it does not know of the other clock."""
FIRST_BEAT_NS: Final = 20 * NS_PER_MS
"""A handshake's four hops, and a heartbeat's one, with nothing in their way; the steps in between come on top."""


@dataclass(frozen=True)
class Over:
    """A lease or turn that has ended."""

    t_ns: int
    by_time: bool


class Witness(Watch):
    """See above."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        claims = world.subject.capabilities
        self._counts = Capability.METRICS in claims
        self._fenced = Capability.FENCE in claims
        self._pushes = Capability.PUSH in claims
        self.quiet = True
        """Nothing has gone wrong so far."""
        self.alike = True
        """Everybody's terms and models are alike."""
        self.seen: Counter[str] = Counter()
        """What happened to requests and leases, by name: so that a search that did nothing can be told."""
        self._legs: dict[Key, Leg] = {}
        self._given: defaultdict[Key, list[Leg]] = defaultdict(list)
        """Who was given which hand-off."""
        self._arrived: defaultdict[Key, set[int]] = defaultdict(set)
        """Numbers of the reports that arrived. A reader sends one or more, so they are as many as readers, or more."""
        self._readers: defaultdict[Key, set[tuple[str, bytes]]] = defaultdict(set)
        """Reports by what they say: as many as readers, or fewer."""
        self._told: Counter[tuple[str, str, str]] = Counter()
        """Reports that left, by sender, holder and request."""
        self._renewed: set[Key] = set()
        """What was named in a heartbeat."""
        self._forged: set[Key] = set()
        """What was named in bytes that nobody sent."""
        self._over: dict[Key, Over] = {}
        self._died: dict[str, int] = {}
        self._expired_least: Counter[str] = Counter()
        self._expired_most: Counter[str] = Counter()
        self._asked: defaultdict[str, list[str]] = defaultdict(list)
        """Whose reports and claims have arrived since the last look, by holder."""
        self._may_be_late: Counter[str] = Counter()
        self._may_be_declined: Counter[str] = Counter()
        self._noise: Counter[str] = Counter()
        self._unsent: Counter[str] = Counter()
        self._reads: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()
        self._questions: Counter[str] = Counter()
        self._shapes: dict[str, dict[str, int]] = {}
        self._first_step_ns = 0

    # What the world tells.

    def submitted(self, leg: Leg) -> None:
        """See a request arrive."""
        super().submitted(leg)
        self._legs[leg.life.name, leg.name] = leg
        if leg.source is not None:
            self._given[leg.source.life.name, leg.source.name].append(leg)
            self._loads[leg.life.name] += 1
            self._may_be_declined[leg.life.name] += _is_turn(leg.source)

    def sent(self, sender: Life, receiver: Life, meaning: Meaning, data: bytes, delays: list[int], number: int) -> None:
        """See a message leave."""
        super().sent(sender, receiver, meaning, data, delays, number)
        for request in meaning.requests:
            if meaning.kind is Kind.COMPLETION:
                self._told[sender.name, receiver.name, request] += 1
            elif meaning.kind is Kind.HEARTBEAT:
                self._renewed.add((receiver.name, request))

    def unsent(self, life: Life, meaning: Meaning) -> None:
        """See a message that could not leave."""
        self._unsent[life.name] += meaning.kind is Kind.HEARTBEAT

    def reading(self, life: Life) -> None:
        """See a read begin."""
        self._reads[life.name] += 1
        self.seen["reads"] += 1

    def asking(self, life: Life) -> None:
        """See a question leave."""
        self._questions[life.name] += 1

    def arrived(self, receiver: Life, sender: Life, meaning: Meaning, data: bytes, number: int) -> None:
        """See a message arrive."""
        if not number:
            self._ids[receiver.name].update(meaning.requests)  # it may answer by the names that it was asked by
        if not number or meaning.kind is Kind.UNKNOWN:
            self._noise[receiver.name] += 1
        else:
            super().arrived(receiver, sender, meaning, data, number)
        for request in meaning.requests:
            key = receiver.name, request
            if meaning.kind in (Kind.COMPLETION, Kind.CLAIM):
                self._asked[receiver.name].append(request)
            grant = self.grants.get(key)
            if not number:
                self._forged.add(key)
            elif meaning.kind is Kind.COMPLETION:
                self._arrived[key].add(number)
                self._readers[key].add((sender.name, data))
            if grant is not None and (not number or (grant.turn and meaning.kind is Kind.CLAIM)):
                # What is forged may keep a lease; so does a claim that is granted, of a turn as well.
                now = self._world.network.now_ns
                grant.latest_ns = max(grant.latest_ns, now + self._late(s_to_ns(receiver.spec.terms.extension_s)))

    def ended(self, leg: Leg, end: Ending) -> None:
        """See a request end."""
        super().ended(leg, end)
        self.seen[f"{end.how}"] += 1
        self.seen["loaded"] += end.loaded > 0
        self.seen["kept turns"] += bool(end.hand_off) and _is_turn(leg)
        source = leg.source
        if source is None:
            return
        if _is_turn(source):
            self._turn_used(leg, source)
        # A request whose KV cannot be had is computed anew, where the policy says so.
        if end.how is How.FAILED and leg.life.alive and leg.life.spec.terms.policy is Policy.RECOMPUTE:
            self.breach("R2", f"{leg.name} failed, and its engine is to compute anew: {end.error[:200]}", "failed")
        if end.loaded:
            self._used(leg, source)

    def _turn_used(self, leg: Leg, source: Leg) -> None:
        """A turn that had time left to the very end need not have been declined at any moment before."""
        grant = self.grants.get((source.life.name, source.name))
        now = self._world.network.now_ns
        if grant is not None and grant.earliest_ns - now > TURN_MARGIN_NS:
            self._may_be_declined[leg.life.name] -= 1

    def _used(self, leg: Leg, source: Leg) -> None:
        """Whether a request used KV of which its holder had let go before it even came."""
        holder = source.life.name
        died_ns = self._died.get(holder)
        over = self._over.get((holder, source.name))
        if died_ns is not None and died_ns <= leg.sent_ns:
            self.breach("S5", f"{leg.name} used KV of {holder}, which had died before it came", "dead holder")
        elif over is None or over.t_ns > leg.sent_ns:
            return
        elif over.by_time and _is_turn(source):
            late_s = (leg.sent_ns - over.t_ns) / NS_PER_S
            self.breach("C2", f"{leg.name} came {late_s:.2f} s after its turn had expired, and used it", "late use")
        elif self._fenced:  # who claims no fence notices it only by content (S2)
            self.breach("S1", f"{leg.name} used KV of {source.name}, of which {holder} had let go before", "late use")

    def died(self, life: Life) -> None:
        """See an engine die."""
        super().died(life)
        self._died[life.name] = self._world.network.now_ns

    # What it sees by itself.

    def step(self) -> None:
        """Look at every engine after a step."""
        now = self._world.network.now_ns
        if self._before_ns:
            self._longest_step_ns = max(self._longest_step_ns, now - self._before_ns)
            self._first_step_ns = self._first_step_ns or self._longest_step_ns
        self._before_ns = now
        for life in self._world.living():
            if life.frozen:
                continue
            held = self._world.held(life)
            if not life.alive:
                continue
            name = life.name
            if self.grants:
                for key in [key for key in self.grants if key[0] == name]:
                    self._looked(life, key[1], self.grants[key], still=key[1] in held)
            if held:
                self._held(life, held)
            asked = self._asked.pop(name, None)
            if asked:
                self._may_be_late[name] += sum((name, request) not in self.grants for request in asked)

    def _held(self, life: Life, held: dict[str, list[int]]) -> None:
        shape = {request: len(blocks) for request, blocks in held.items()}
        if self._shapes.get(life.name) == shape:
            return
        self._shapes[life.name] = shape
        owners: dict[int, str] = {}
        for request, blocks in held.items():
            if (life.name, request) in self._over:
                self.breach("S4", f"{life.name} holds {request} again, whose lease had ended", "held again")
                del self._over[life.name, request]  # said once
            for block in blocks:
                other = owners.setdefault(block, request)
                if other != request:
                    self._shared(life, block, other, request)

    def _shared(self, life: Life, block: int, one: str, other: str) -> None:
        """Two hold a block: rightly if it is of a beginning that both have; fresh prompts differ in their first."""
        legs = [self._legs.get((life.name, request)) for request in (one, other)]
        first, second = legs
        if first is None or second is None or first.request.prompt[0] == second.request.prompt[0]:
            return
        landing = any(leg is not None and leg.end is not None and not self._kept(leg) for leg in legs)
        rule, where = ("S6", "destination") if landing else ("S1", "given away")
        self.breach(rule, f"{life.name} has given block {block} of {one} to {other}, whose text is another", where)

    def _kept(self, leg: Leg) -> bool:
        return (leg.life.name, leg.name) in self.grants

    def _looked(self, life: Life, request: str, grant: Grant, *, still: bool) -> None:
        if still:
            self._still(life, request, grant)
        else:
            del self.grants[life.name, request]
            self._gone(life, request, grant)

    def _still(self, life: Life, request: str, grant: Grant) -> None:
        now, key = self._world.network.now_ns, (life.name, request)
        # The world may go in longer steps than when the lease began.
        longer_ns = 3 * (self._longest_step_ns - self._first_step_ns)
        if now > grant.latest_ns + longer_ns:
            what = "turn" if grant.turn else "lease"
            late_s = (now - grant.latest_ns - longer_ns) / NS_PER_S
            self.breach("L1", f"{life.name} holds {request} {late_s:.2f} s after its {what} had to end", what)
            grant.latest_ns = now + 3_600 * NS_PER_S  # said once
        if not grant.reported_ns or not self._one_rank() or key in self._forged:
            return
        # Everybody who was given it has reported, and so many as were expected.
        if len(self._readers[key]) < max(_readers(grant.leg), len(self._given[key])):
            grant.reported_ns = now
        elif now - grant.reported_ns > 3 * self._longest_step_ns + SLACK_NS:
            self.breach("L4", f"{life.name} still holds {request}, which all its readers have reported as read", "held")
            grant.reported_ns = 0

    def _gone(self, life: Life, request: str, grant: Grant) -> None:
        now, key = self._world.network.now_ns, (life.name, request)
        wanted, came = _readers(grant.leg), len(self._arrived[key])
        released = came >= wanted or (self._pushes and bool(grant.reports))
        doubtful = grant.aborted or key in self._forged
        self._over[key] = Over(now, by_time=not released and not doubtful)
        if released or doubtful:
            # It may have been time all the same: one reader can send two reports, a client can go too late.
            self._expired_most[life.name] += now >= grant.earliest_ns
            self.seen["released"] += released
            return
        what = "turn" if grant.turn else "lease"
        if now < grant.earliest_ns:
            early_s = (grant.earliest_ns - now) / NS_PER_S
            told = f"{came} of {wanted} readers" if came else "nobody"
            self.breach("S3" if came else "L2", f"{life.name} gave {request} up {early_s:.2f} s before its {what} "
                        f"could end, and {told} had reported a read", what)  # fmt: skip
            return
        self.seen["expired"] += 1
        self._expired_least[life.name] += 1
        self._expired_most[life.name] += 1
        if not grant.turn:
            self._starved(life, request, key)

    def _starved(self, life: Life, request: str, key: Key) -> None:
        """A lease has expired: nobody may have waited for it for longer than a heartbeat takes to come."""
        # Sides with unlike terms may refuse each other. If heartbeats came, they have not.
        if not self.quiet or not (self.alike or key in self._renewed):
            return
        now = self._world.network.now_ns
        needed_ns = s_to_ns(life.spec.terms.interval_s) + 5 * self._longest_step_ns + FIRST_BEAT_NS
        for reader in {leg.life.name: leg.life for leg in self._given[key]}.values():
            given = [leg for leg in self._given[key] if leg.life is reader]
            if self._told[reader.name, life.name, request] >= len(given):
                continue
            open_legs = reader.legs.values()  # one that was refused at the door is not among them
            waits = [leg for leg in given if leg in open_legs and reader.runs and now - leg.sent_ns > needed_ns]
            if waits:
                waited_s = (now - waits[0].sent_ns) / NS_PER_S
                self.breach("L2", f"the lease of {request} at {life.name} expired, and {waits[0].name} has waited at "
                            f"{reader.name} for {waited_s:.2f} s, with nothing in its way", "starved")  # fmt: skip
                return

    # The end.

    def rest(self) -> None:
        """Look at a world that has come to rest."""
        super().rest()
        if self._counts:
            for life in self._world.living():
                self._counters(life)

    def _counters(self, life: Life) -> None:
        """Each counter has a least and a most, from what was seen; None: nobody can tell (O1, C2)."""
        name = life.name
        healthy = 0 if self.quiet and self.alike else None
        bounds: dict[str, tuple[int, int | None]] = {
            EXPIRED: (self._expired_least[name], self._expired_most[name]),
            LATE: (0, self._may_be_late[name] + self._noise[name]),  # of noise it may take some for a report
            DECLINED: (0, self._may_be_declined[name]),
            # A read of an engine that has gone may fail before the network sees it.
            FAILED_READS: (0, self._reads[name] + self._loads[name] if healthy is None else healthy),
            FAILED_HANDSHAKES: (0, self._questions[name] if healthy is None else healthy),
            UNSENT_HEARTBEATS: (self._unsent[name], None),
            BAD_MESSAGES: (0, self._noise[name]),
        }  # fmt: skip
        for counter, value in self._world.metrics(life).items():
            least, most = bounds.get(counter, (0, None))
            if value < least or (most is not None and value > most):
                told = f"{name} counts {value:g} of {counter!r}; at least {least} were seen"
                told += "" if most is None else f", at most {most}"
                self.breach("C2" if counter == DECLINED else "O1", told, counter)


def _is_turn(leg: Leg) -> bool:
    """Whether what a request hands over is a finished turn, and not a prefill."""
    params: Params = leg.request.params or {}
    return not params.get("do_remote_decode")


def _readers(leg: Leg) -> int:
    """How many readers a request's holder was told to expect."""
    params: Params = leg.request.params or {}
    return int(params.get("remote_readers", 1))

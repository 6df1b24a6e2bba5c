"""The catalogue's invariants as checks on a world, at every step and at the end. A breach is one line with its id."""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from reference_impl.engine.core import audit
from reference_impl.rules.clock import NS_PER_MS, NS_PER_S
from reference_impl.rules.consumer import CANCEL_GRACE_NS, TURN_MARGIN_NS, Stage
from reference_impl.rules.events import EventKind, Scalar
from reference_impl.rules.messages import Answer, BadMessage, Claim, Heartbeat, Report, decode
from reference_impl.rules.peers import Link
from reference_impl.rules.terms import LoadPolicy

if TYPE_CHECKING:
    from tests.protocol.world import Engine, Leg, World

S, MS = NS_PER_S, NS_PER_MS
AUDIT_EVERY = 8
"""Steps between two audits of a pool; it is also audited at the end."""


@dataclass
class _Grant:
    """What the watch knows of a live lease."""

    readers: int
    turn: bool
    ends_by_ns: int
    """True time by which it is over, from all that its holder has been told."""
    generations: list[int]
    blocks: list[int]
    told: dict[str, int] = field(default_factory=dict)
    """Readers, and when their first report arrives."""
    aborted: bool = False


@dataclass
class _Reading:
    """What the watch knows of a running read."""

    local: list[int]
    generations: list[int]


class Watch:
    """Looks at a world, never touches it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.broken: list[str] = []
        self._grants: defaultdict[str, dict[str, _Grant]] = defaultdict(dict)
        """By holder and request."""
        self._early_reports: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        self._reads: dict[tuple[str, int], _Reading] = {}
        self._read_ends: dict[tuple[str, str], int] = {}
        """By reader and its request: when its read ends."""
        self._lease_ends: dict[tuple[str, str], int] = {}
        self._loading: dict[tuple[str, str], int] = {}
        self._trouble: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._up: dict[tuple[str, str], int] = {}
        self._heard: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._bad: Counter[str] = Counter()
        self._handed_out: dict[str, int] = {}
        self._steps = 0
        self._drift_ns = world.terms.ttl_ns // 2500 + 10 * MS
        """What 400 ppm make of the longest time that is compared here."""

    def breach(self, rule: str, what: str, error: Exception | None = None) -> None:
        """Note that a rule is broken."""
        trace = "".join(traceback.format_exception(error)) if error else ""
        self.broken.append(f"{rule}: {what}\n{trace}".strip())

    # What the world tells.

    def sent(self, sender: str, receiver: str, message: bytes, delays: list[int]) -> None:
        """See a message leave: who is named (C1), what it may extend (L1), whom a release waits for (S3)."""
        from tests.protocol.world import PROMPT_DELAY_NS, STEP_MAX_NS

        terms, now = self._world.terms, self._world.network.now_ns
        if not delays or max(delays) > PROMPT_DELAY_NS:
            self._trouble[sender, receiver] = now + max(delays, default=0)
        try:
            told = decode(message)
        except BadMessage as error:
            self.breach("C3", f"{sender} sent what {receiver} cannot read: {error}")
            return
        named = told.requests if isinstance(told, Heartbeat) else [told.request]
        holder = sender if isinstance(told, Answer) else receiver
        if any(not request.startswith(f"{holder}/") for request in named):
            self.breach("C1", f"a {type(told).__name__} from {sender} to {receiver} names {named}")
        if isinstance(told, Claim | Report | Answer):
            reader = receiver if isinstance(told, Answer) else sender
            if not told.reader.startswith(f"{reader}/"):
                self.breach("C1", f"a {type(told).__name__} from {sender} to {receiver} has the reader {told.reader}")
        for delay in delays:
            arrives = now + delay + STEP_MAX_NS
            for request in named:
                grant = self._grants[holder].get(request)
                if isinstance(told, Heartbeat) and grant:
                    grant.ends_by_ns = max(grant.ends_by_ns, arrives + terms.extension_ns)
                elif isinstance(told, Claim):
                    if told.within_ns > terms.read_limit_ns:
                        self.breach("C2", f"{sender} claims for {told.within_ns} ns")
                    if grant:
                        grant.ends_by_ns = max(grant.ends_by_ns, arrives + told.within_ns)
                elif isinstance(told, Report):
                    reports = grant.told if grant else self._early_reports[holder, request]
                    reports[told.reader] = min(reports.get(told.reader, now + delay), now + delay)

    def damaged(self, receiver: str) -> None:
        """See noise on its way to an engine."""
        self._bad[receiver] += 1

    def died(self, engine: Engine) -> None:
        """Forget an engine's leases: its memory is gone."""
        self._counters(engine)
        self._reads = {key: read for key, read in self._reads.items() if key[0] != engine.engine_id}
        self._grants.pop(engine.engine_id, None)
        self._loading = {key: at for key, at in self._loading.items() if key[0] != engine.engine_id}

    def thawed(self, engine: Engine) -> None:
        """See an engine go on after a while: what has waited in its inbox counts from now."""
        from tests.protocol.world import STEP_MAX_NS

        now, terms = self._world.network.now_ns, self._world.terms
        for grant in self._grants[engine.engine_id].values():
            longest = max(terms.extension_ns, terms.read_limit_ns)
            grant.ends_by_ns = max(grant.ends_by_ns, now + longest + STEP_MAX_NS)
        for key in self._loading:
            if key[0] == engine.engine_id:
                self._loading[key] = now

    def aborted(self, leg: Leg) -> None:
        """See a client go away."""
        self._loading.pop((leg.engine.engine_id, leg.request_id), None)

    def answered(self, leg: Leg, expected: list[int]) -> None:
        """Compare every answer with the oracle's (S2, S5, XFER-001)."""
        sequence = leg.sequence
        got = sequence.tokens[sequence.prompt_tokens : sequence.known_tokens].tolist()
        if got != expected:
            self.breach("XFER-001", f"{leg.request_id} answered {got}, and {expected} is right")

    def renewed(self, leg: Leg) -> None:
        """See a turn kept alive by its client."""
        grant = self._grants[leg.engine.engine_id].get(leg.request_id)
        self._heard[leg.engine.engine_id]["renewed"] += 1
        if grant:
            grant.ends_by_ns = max(grant.ends_by_ns, self._world.network.now_ns + self._world.terms.ttl_ns)

    def heard(self, engine: Engine, kind: EventKind, subject: str, detail: dict[str, Scalar]) -> None:
        """Take an event that an engine says."""
        now = self._world.network.now_ns
        self._heard[engine.engine_id][kind] += 1
        match kind:
            case EventKind.LEASE_GRANTED:
                self._granted(engine, subject)
            case EventKind.LEASE_RELEASED | EventKind.LEASE_EXPIRED:
                self._lease_over(engine, subject, expired=kind is EventKind.LEASE_EXPIRED, how=str(detail.get("how")))
            case EventKind.LEASE_EXTENDED:
                self._heard[engine.engine_id]["extended"] += int(detail["leases"] or 0)
            case EventKind.PEER_CONNECTED:
                self._up[engine.engine_id, subject] = now
            case EventKind.TURN_JUDGED:
                self._judged(subject, live=bool(detail["live"]), error_ms=float(detail["error_ms"] or 0))
            case EventKind.LOAD_DONE:
                self._compare_blocks(engine, subject)
            case EventKind.LOAD_FAILED:
                self._load_failed(detail)
            case _:
                pass

    def _granted(self, engine: Engine, request_id: str) -> None:
        """A lease starts: its blocks are its own from here on."""
        lease = engine.connector.producer.leases.get(request_id)
        key = engine.engine_id, request_id
        grants = self._grants[engine.engine_id]
        if lease is None or request_id in grants:
            self.breach("S4", f"{request_id} is granted, and {'has one already' if lease else 'has no lease'}")
            return
        terms = self._world.terms
        length = terms.ttl_ns if lease.turn else terms.first_ns
        grants[request_id] = _Grant(
            lease.readers, lease.turn, self._world.network.now_ns + length,
            [int(engine.generations[b]) for b in lease.blocks], list(lease.blocks), dict(self._early_reports[key]),
        )  # fmt: skip

    def _lease_over(self, engine: Engine, request_id: str, *, expired: bool, how: str) -> None:
        """A lease ends: once (S4), by all its readers (S3), and not while one of them queues (L2)."""
        now = self._world.network.now_ns
        self._lease_ends[engine.engine_id, request_id] = now
        grant = self._grants[engine.engine_id].pop(request_id, None)
        if grant is None:
            self.breach("S4", f"{request_id} ends, and held no lease")
            return
        if not expired:
            told = [reader for reader, at in grant.told.items() if at <= now]
            if len(told) < grant.readers and not (how == "abort" and grant.aborted):
                self.breach("S3", f"{request_id} is released ({how}) by {told}; {grant.readers} readers were expected")
        elif not grant.turn and self._world.terms.renews:
            self._queued_in_vain(engine, request_id)
            if self._world.calm:
                self.breach("L4", f"{request_id} expired, and nothing went wrong: its readers' reports were missing")

    def _queued_in_vain(self, holder: Engine, request_id: str) -> None:
        """A lease has expired: nobody may have been there, connected and heard, for as long as a heartbeat takes."""
        from tests.protocol.world import PROMPT_DELAY_NS, STEP_MAX_NS

        world, now = self._world, self._world.network.now_ns
        needed = world.terms.interval_ns + 4 * STEP_MAX_NS + PROMPT_DELAY_NS
        for leg in world.legs:
            load = leg.load
            if load is None or (load.engine_id, load.request_id) != (holder.engine_id, request_id) or load.turn:
                continue
            consumer, link = leg.engine.connector.consumer, (leg.engine.engine_id, holder.engine_id)
            if leg.engine.slot.frozen:
                continue
            peer = consumer.peers.get(holder.engine_id)
            waits = consumer.stage(leg.request_id) in (Stage.ARRIVED, Stage.CONNECTING, Stage.CLAIMING, Stage.READING)
            if peer is None or peer.link is not Link.UP or not waits:
                continue
            thawed = leg.engine.slot.thawed_ns
            well_since = max(self._trouble[link], self._up.get(link, now), leg.arrived_ns, thawed)
            if now - well_since > needed:
                self.breach("L2", f"{request_id} expired; {leg.request_id} waits, connected and heard for "
                            f"{(now - well_since) / S:.2f} s")  # fmt: skip

    def _judged(self, request_id: str, *, live: bool, error_ms: float) -> None:
        """A turn is judged: neither used late nor declined early (C2, KVC-CLK-005)."""
        leg = next((leg for leg in self._world.legs if leg.request_id == request_id), None)
        if leg is None or leg.load is None:
            return
        slot = next(s for s in self._world.slots if s.name == leg.load.engine_id.partition(".")[0])
        left = leg.load.expiry_ns - slot.clock.now_ns()
        slack = 2 * round(error_ms * MS) + TURN_MARGIN_NS + MS
        if live and left <= 0:
            self.breach("C2", f"{request_id} judges its turn live, and it expired {-left / S:.3f} s ago")
        if not live and left > slack:
            self.breach("C2", f"{request_id} declines a turn that has {left / S:.3f} s left")

    def _compare_blocks(self, engine: Engine, request_id: str) -> None:
        """What was loaded is word for word what the holder has (XFER-001); an answer does not read every word."""
        leg = engine.legs.get(request_id)
        if leg is None or leg.load is None:
            return
        read_ns = self._read_ends.get((engine.engine_id, request_id), 0)
        over_ns = self._lease_ends.get((leg.load.engine_id, leg.load.request_id), read_ns)
        if over_ns < read_ns:
            self.breach("S2", f"{request_id} uses what it read {(read_ns - over_ns) / S:.3f} s after the lease's end")
        grant = self._grants[leg.load.engine_id].get(leg.load.request_id)
        holder = next((e for e in self._world.engines if e.engine_id == leg.load.engine_id), None)
        if grant is None or holder is None:
            return
        blocks = slice(leg.sequence.load_from, leg.sequence.load_to)
        here, there = engine.transport.kv[leg.sequence.blocks[blocks]], holder.transport.kv[leg.load.blocks[blocks]]
        if not np.array_equal(here, there):
            self.breach("XFER-001", f"what {request_id} has loaded differs from what {leg.load.request_id} holds")

    def _load_failed(self, detail: dict[str, Scalar]) -> None:
        """A failed load ends as the policy says (R2)."""
        policy = self._world.terms.kv_load_failure_policy
        wanted = LoadPolicy.RECOMPUTE if detail["expired"] else policy
        if detail["policy"] != wanted:
            self.breach("R2", f"a load failed by policy {detail['policy']}, and {wanted} is set")

    # What it sees by itself.

    def step(self) -> None:
        """Look at every engine after a step."""
        self._steps += 1
        for number, engine in enumerate(self._world.engines):
            self._running_reads(engine)
            if engine.slot.frozen:
                continue
            self._leases(engine)
            self._waiting(engine)
            if (self._steps + number) % AUDIT_EVERY == 0:
                self._audit(engine)

    def _leases(self, engine: Engine) -> None:
        """S1: a leased block is nobody else's. L1: no lease outlives what its holder was told. L4: none is done."""
        from tests.protocol.world import STEP_MAX_NS

        now, who = self._world.network.now_ns, engine.engine_id
        leases = engine.connector.producer.leases
        handed_out = int(engine.generations.sum())
        unchanged, self._handed_out[who] = self._handed_out.get(who) == handed_out, handed_out
        for request_id, grant in self._grants[who].items():
            lease = leases.get(request_id)
            if lease is None:
                continue  # it is over, and said so, or will in the next look
            if not unchanged and [int(engine.generations[b]) for b in grant.blocks] != grant.generations:
                self.breach("S1", f"blocks of {request_id} were given away under its lease")
            if now > grant.ends_by_ns + STEP_MAX_NS + self._drift_ns:
                late = (now - grant.ends_by_ns) / S
                self.breach("L1", f"the lease of {request_id} is {late:.3f} s older than anything that renewed it")
            if lease.done:
                self.breach("L4", f"all readers of {request_id} have reported, and its lease lives")

    def _running_reads(self, engine: Engine) -> None:
        """S1: what is read stays its holder's. S6: what is written stays its reader's."""
        transport, consumer = engine.transport, engine.connector.consumer
        running = transport._reads
        for read_id, reading in running.items():
            known = self._reads.get((engine.engine_id, read_id))
            local = [int(b) for b in reading.blocks.local]
            generations = [int(engine.generations[b]) for b in local]
            if known is None:
                self._reads[engine.engine_id, read_id] = _Reading(local, generations)
                load = consumer._reads.get(read_id)
                ends_ns = self._world.network.now_ns + reading.plan.takes_ns
                self._read_ends[engine.engine_id, load.request_id if load else ""] = ends_ns
            elif generations != known.generations:
                self.breach("S6", f"a destination of read {read_id} of {engine.engine_id} was given to another request")
            if any(not engine.core.pool.references(b) for b in local):
                self.breach("S6", f"a destination of read {read_id} of {engine.engine_id} is free while it is read")
            load = consumer._reads.get(read_id)
            if load is None:
                self.breach("S6", f"{engine.engine_id} has forgotten its running read {read_id}")
                continue
            holder = next((e for e in self._world.engines if e.engine_id == reading.holder), None)
            in_time = engine.clock.now_ns() < consumer._read_deadline_ns(load)
            if holder is None or not in_time or load.stage is not Stage.READING:
                continue
            if holder.connector.producer.leases.get(load.handoff.request_id) is None:
                self.breach("S1", f"the lease of {load.handoff.request_id} has ended under read {read_id}")

    def _waiting(self, engine: Engine) -> None:
        """L3: no request waits for remote KV longer than its limit."""
        from tests.protocol.world import STEP_MAX_NS

        terms, now = self._world.terms, self._world.network.now_ns
        limit = round(terms.load_limit * S) + CANCEL_GRACE_NS + 3 * STEP_MAX_NS + self._drift_ns
        for sequence in engine.core.loading.values():
            since = self._loading.setdefault((engine.engine_id, sequence.request_id), now)
            if now - since > limit:
                self.breach("L3", f"{sequence.request_id} has waited for its KV for {(now - since) / S:.2f} s")

    def _audit(self, engine: Engine) -> None:
        """K1, at any moment: every block has as many references as it has holders."""
        elsewhere = list(engine.connector.blocks_elsewhere)
        elsewhere += [b for sequence in engine.made for b in sequence.held_blocks]
        for problem in audit(engine.core, elsewhere=elsewhere):
            self.breach("K1", f"{engine.engine_id}: {problem}")

    # The end.

    def end(self) -> None:
        """Look at a world that was healed and came to rest: nothing is left, everything was counted."""
        for leg in self._world.legs:
            self.breach("L3", f"{leg.request_id} never ended ({leg.engine.connector.consumer.stage(leg.request_id)})")
        for engine in self._world.engines:
            self._audit(engine)
            self._nothing_left(engine)
            self._counters(engine)

    def _nothing_left(self, engine: Engine) -> None:
        """K1: all blocks are free or cached, every map is empty."""
        connector, core = engine.connector, engine.core
        left = {
            "held blocks": core.pool.held, "loading": len(core.loading), "running": len(core.running),
            "waiting": len(core.waiting), "leases": len(connector.producer.leases), "loads": len(connector.consumer),
            "busy": int(connector.busy), "tracked engines": len(connector.consumer.heartbeats.engines),
            "asked": len(connector._asked), "sequences": len(connector._sequences), "failed": len(connector.failed),
            "draining": len(connector._draining), "reads": len(engine.transport._reads),
        }  # fmt: skip
        if any(left.values()):
            what = ", ".join(f"{count} {name}" for name, count in left.items() if count)
            self.breach("K1", f"{engine.engine_id} is at rest with {what}")

    def _counters(self, engine: Engine) -> None:
        """O1: a counter counts what its name says, once an event."""
        heard = self._heard[engine.engine_id]
        holder, reader = engine.connector.producer.counts, engine.connector.consumer.counts
        live = len(engine.connector.producer.leases)
        pending = len(engine.connector.producer._actions) + len(engine.connector.consumer._actions)
        if pending:
            return  # it died in the middle of a step
        pairs = {
            "granted": (holder.granted, heard[EventKind.LEASE_GRANTED]),
            "released": (holder.released, heard[EventKind.LEASE_RELEASED]),
            "expired": (holder.expired, heard[EventKind.LEASE_EXPIRED]),
            "granted and ended": (holder.granted, holder.released + holder.expired + live),
            "extended": (holder.extended, heard["extended"] + heard["renewed"]),
            "claims refused": (holder.claims_refused, heard[EventKind.CLAIM_REFUSED]),
            "loaded": (reader.loaded, heard[EventKind.LOAD_DONE]),
            "failed or expired loads": (reader.failed + reader.expired_turns, heard[EventKind.LOAD_FAILED]),
        }
        for name, (counted, seen) in pairs.items():
            if counted != seen:
                self.breach("O1", f"{engine.engine_id} counts {counted} {name}, and {seen} were seen")
        if holder.malformed > self._bad[engine.engine_id]:
            self.breach("O1", f"{engine.engine_id} counts {holder.malformed} damaged messages too many")

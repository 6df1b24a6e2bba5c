"""Broken twins: the reference implementation with one thing done wrong, as engines and connectors have done it.

Each is put into its classes for the time of one trial. A case is worth something only if it catches its twins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import msgspec

from harness.conformance.network import ASK_LIMIT_NS
from harness.conformance.subject import LATE, UNSENT_HEARTBEATS, Misuse
from harness.conformance.subjects.reference import HostShaker, HostTransport, ReferenceEngine
from reference_impl.content import BLOCK_WORDS
from reference_impl.engine.connector import Connector
from reference_impl.engine.core import Sequence
from reference_impl.rules import agreement, clocksync, consumer
from reference_impl.rules.clocksync import ClockSync, Estimate
from reference_impl.rules.consumer import Consumer, Failed
from reference_impl.rules.handoff import HandOff
from reference_impl.rules.heartbeat import Beat, HeartbeatTracker
from reference_impl.rules.leases import Lease, LeaseTable
from reference_impl.rules.messages import BadMessage, Claim, Heartbeat, How, Report, decode
from reference_impl.rules.producer import Freed, Producer, Send
from reference_impl.rules.terms import KvTerms, LoadPolicy
from reference_impl.transport.base import ReadResult
from reference_impl.transport.plan import Piece, pieces

Patches: TypeAlias = list[tuple[Any, str, Any]]
FOREVER_NS: Final = 10**18


class Broken(Misuse):
    """What a defect raises where the connector that it stands for would."""


DEFECTS: Final[dict[str, Callable[[], Patches]]] = {}
"""By name. A defect's docstring says what it does wrong."""


def _defect(make: Callable[[], Patches]) -> Callable[[], Patches]:
    DEFECTS[make.__name__] = make
    return make


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Put a defect into the reference implementation for a while. Raises KeyError for a name that is not known."""
    patches = DEFECTS[name]() if name else []
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in patches]
    for owner, attribute, value in patches:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)


# -- the holder's side ----------------------------------------------------------------------------------------------


@_defect
def no_lease() -> Patches:
    """A prefill's blocks are freed when it hands them over."""
    finished = Connector.finished

    def free_at_once(self: Connector, sequence: Sequence, now_ns: int) -> Any:
        params = finished(self, sequence, now_ns)
        self.producer.abort(sequence.request_id)
        return params

    return [(Connector, "finished", free_at_once)]


@_defect
def hand_off_lacks_port() -> Patches:
    """The hand-off does not say where to shake hands."""
    params = HandOff.params
    return [(HandOff, "params", lambda self: {k: v for k, v in params(self).items() if k != "remote_port"})]


@_defect
def abort_leaks() -> Patches:
    """An aborted request's blocks are not freed."""

    def forget(self: ReferenceEngine, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            vars(self).setdefault("_leaked", []).append(sequence)

    holds = ReferenceEngine.holds

    def held(self: ReferenceEngine) -> dict[str, list[int]]:
        return holds(self) | {s.request_id: list(s.blocks) or [0] for s in getattr(self, "_leaked", [])}

    return [(ReferenceEngine, "abort", forget), (ReferenceEngine, "holds", held)]


@_defect
def extend_back() -> Patches:
    """A heartbeat sets the deadline, also to an earlier one."""

    def extend(self: LeaseTable, request_id: str, until_ns: int, _heard_from: str = "") -> bool:
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return False
        lease.ended = True
        again = self.grant(
            request_id, lease.blocks, readers=lease.readers, now_ns=lease.granted_ns, content=lease.content,
            length_ns=until_ns - lease.granted_ns, turn=lease.turn,
        )  # fmt: skip
        again.reported, again.reading = lease.reported, lease.reading
        return True

    return [(LeaseTable, "extend", extend)]


@_defect
def heartbeat_creates() -> Patches:
    """A heartbeat for what holds no lease makes one."""
    extend = LeaseTable.extend

    def create(self: LeaseTable, request_id: str, until_ns: int, heard_from: str = "") -> bool:
        if self.get(request_id) is None:
            self.grant(request_id, [], readers=1, now_ns=until_ns, length_ns=0)
        return extend(self, request_id, until_ns, heard_from)

    return [(LeaseTable, "extend", create)]


@_defect
def expiry_twice() -> Patches:
    """An expiry is counted twice."""
    step = Producer.step

    def count(self: Producer, inbox: Any, now_ns: int) -> Any:
        before = self.counts.expired
        answers = step(self, inbox, now_ns)
        self.counts.expired += self.counts.expired - before
        return answers

    return [(Producer, "step", count)]


@_defect
def lease_forever() -> Patches:
    """Leases do not expire."""
    return [(LeaseTable, "expire", lambda _self, _now_ns: [])]


@_defect
def first_only() -> Patches:
    """Expiry looks at the oldest lease alone (vLLM before 0.32)."""

    def expire(self: LeaseTable, now_ns: int) -> list[Lease]:
        first = next(iter(self._leases.values()), None)
        if first is None or first.deadline_ns > now_ns:
            return []
        self.end(first.request_id)
        return [first]

    return [(LeaseTable, "expire", expire)]


@_defect
def expiry_first() -> Patches:
    """Expiry is judged before the inbox is read."""
    step = Producer.step

    def hasty(self: Producer, inbox: Any, now_ns: int) -> Any:
        step(self, [], now_ns)
        return step(self, inbox, now_ns)

    return [(Producer, "step", hasty)]


@_defect
def report_ignored() -> Patches:
    """Reports of reads are not looked at."""
    return [(LeaseTable, "report", lambda *_, **__: None)]


@_defect
def counts_messages() -> Patches:
    """Messages are counted where readers should be."""
    report = LeaseTable.report

    def count(self: LeaseTable, request_id: str, reader: str, slot: int = -1) -> Lease | None:
        lease = self.get(request_id)
        if lease is not None:
            lease.reported.add(f"{reader} {len(lease.reported)}")
        return report(self, request_id, reader, slot)

    return [(LeaseTable, "report", count)]


@_defect
def first_report_releases() -> Patches:
    """The first reader's report ends a lease, whoever else is expected."""

    def report(self: LeaseTable, request_id: str, _reader: str, _slot: int = -1) -> Lease | None:
        return self.end(request_id)

    return [(LeaseTable, "report", report)]


@_defect
def late_report_ends() -> Patches:
    """A report for what holds no lease ends the engine."""
    report = LeaseTable.report

    def strict(self: LeaseTable, request_id: str, reader: str, slot: int = -1) -> Lease | None:
        if self.get(request_id) is None:
            raise Broken(f"no lease of {request_id}")
        return report(self, request_id, reader, slot)

    return [(LeaseTable, "report", strict)]


@_defect
def early_report_lost() -> Patches:
    """A report that comes before the holder has looked at its new lease is lost."""
    report = LeaseTable.report

    def deaf(self: LeaseTable, request_id: str, reader: str, slot: int = -1) -> Lease | None:
        lease = self.get(request_id)
        if lease is not None and not lease.heard_from:
            return None
        return report(self, request_id, reader, slot)

    return [(LeaseTable, "report", deaf)]


@_defect
def damaged_ends() -> Patches:
    """A message that cannot be decoded ends the engine."""
    from reference_impl.rules import producer

    def strict(data: bytes) -> Any:
        try:
            return decode(data)
        except BadMessage as error:
            raise Broken(str(error)) from error

    return [(producer, "decode", strict)]


@_defect
def late_uncounted() -> Patches:
    """Readers that come too late are not counted."""
    metrics = ReferenceEngine.metrics
    return [(ReferenceEngine, "metrics", lambda self: metrics(self) | {LATE: 0.0})]


@_defect
def idle_sleeps() -> Patches:
    """An engine without requests does nothing, and so ends no lease."""
    step = ReferenceEngine.step

    def sleep(self: ReferenceEngine) -> None:
        if self._sequences or self._made or self.core.has_work:
            step(self)

    return [(ReferenceEngine, "step", sleep)]


@_defect
def turn_forever() -> Patches:
    """A finished turn's blocks are kept for ever."""

    def grant(self: Producer, request_id: str, blocks: list[int], *, content: str, now_ns: int) -> Lease:
        lease = self.leases.grant(request_id, blocks, readers=1, now_ns=now_ns, length_ns=FOREVER_NS, content=content,
                                  turn=True)  # fmt: skip
        lease.deadline_ns = now_ns + self.terms.ttl_ns  # what is handed over is as agreed
        return lease

    return [(Producer, "grant_turn", grant)]


@_defect
def no_expiry() -> Patches:
    """A finished turn is handed over without its expiry."""
    params = HandOff.params
    return [(HandOff, "params", lambda self: params(self) | {"remote_blocks_expiry_time": None})]


@_defect
def takes_successor() -> Patches:
    """Whoever lives at an address is taken for the one who lived there before."""

    def answers(self: ReferenceEngine, question: bytes) -> bytes | None:
        try:
            asked = msgspec.msgpack.decode(question)
            asked["wanted"] = self._spec.name
        except (msgspec.DecodeError, TypeError):
            return None
        return answer(self, msgspec.msgpack.encode(asked))

    def add(self: HostTransport, engine_id: str, addresses: Any) -> None:
        self._peers[engine_id] = addresses

    def real(self: HostTransport, engine_id: str) -> str:
        return str(self._peers[engine_id][0].metadata.decode()) if engine_id in self._peers else engine_id

    def to_real(self: HostTransport, engine_id: str, message: bytes) -> bool:
        return self._host.send(real(self, engine_id), message)

    def from_real(self: HostTransport, sender: str, message: bytes) -> None:
        names = [name for name in self._peers if real(self, name) == sender] or [sender]
        self._inbox += [(name, message) for name in names]

    def read_real(self: HostTransport, read_id: int, engine_id: str, remote: Any, local: Any) -> None:
        name = real(self, engine_id)
        self._peers.setdefault(name, self._peers.get(engine_id, []))
        read(self, read_id, name, remote, local)

    answer, read = ReferenceEngine.answer, HostTransport.read
    return [
        (ReferenceEngine, "answer", answers), (HostTransport, "add_peer", add), (HostTransport, "send", to_real),
        (HostTransport, "arrived", from_real), (HostTransport, "read", read_real),
        (Producer, "_why_not", lambda *_: ""),
    ]  # fmt: skip


# -- the reader's side ----------------------------------------------------------------------------------------------


@_defect
def no_renewal() -> Patches:
    """No heartbeats are sent."""
    return [(HeartbeatTracker, "due", lambda *_: [])]


@_defect
def own_interval() -> Patches:
    """The reader renews by its own terms, and nobody compares them (vLLM 0.32)."""
    connected = Consumer.connected

    def own(self: Consumer, engine_id: str, _interval_ns: int, samples: Any, now_ns: int) -> None:
        connected(self, engine_id, self.terms.interval_ns, samples, now_ns)

    names = tuple(n for n in agreement.AGREED_TERMS if n not in ("kv_lease_duration", "read_limit"))
    return [
        (Consumer, "connected", own), (agreement, "AGREED_TERMS", names),
        (KvTerms, "read_limit_ns", property(lambda _self: 3 * 10**9)),  # else a claim would be refused for its length
    ]  # fmt: skip


@_defect
def comma_ids() -> Patches:
    """Heartbeats are lists of ids with commas between them (vLLM 0.32)."""
    take = Consumer.take

    def joined(self: Consumer) -> Any:
        actions = take(self)
        return [
            msgspec.structs.replace(a, message=Heartbeat(",".join(a.message.requests).split(",")))
            if isinstance(a, Send) and isinstance(a.message, Heartbeat) else a
            for a in actions
        ]  # fmt: skip

    return [(Consumer, "take", joined)]


@_defect
def tracked_when_scheduled() -> Patches:
    """A request is renewed only from when it is scheduled."""
    admit = Consumer.admit
    track = Consumer._track

    def late(self: Consumer, request_id: str, *of: Any) -> None:
        track(self, self._loads[request_id])
        admit(self, request_id, *of)

    return [(Consumer, "_track", lambda *_: None), (Consumer, "admit", late)]


@_defect
def handshake_when_scheduled() -> Patches:
    """The handshake starts only when a request is scheduled."""

    def wanted(self: Consumer, engine_id: str) -> bool:
        return any(load.handoff.engine_id == engine_id for load in self._admitted.values())

    return [(Consumer, "_wanted", wanted)]


@_defect
def one_message_each() -> Patches:
    """Each request gets a heartbeat of its own."""
    due = HeartbeatTracker.due

    def each(self: HeartbeatTracker, *of: Any) -> list[Beat]:
        return [Beat(beat.engine_id, [request]) for beat in due(self, *of) for request in beat.requests]

    return [(HeartbeatTracker, "due", each)]


@_defect
def no_pacing() -> Patches:
    """A heartbeat leaves at every step."""
    due = HeartbeatTracker.due
    return [(HeartbeatTracker, "due", lambda self, engine_id, now_ns, _interval_ns: due(self, engine_id, now_ns, 0))]


@_defect
def never_untracked() -> Patches:
    """What was read or aborted is renewed for ever."""
    return [(Consumer, "_untrack", lambda *_: None)]


@_defect
def readers_share_tracking() -> Patches:
    """A set where a count belongs: the first sample that is read stops the renewal for all."""

    def track(self: HeartbeatTracker, engine_id: str, request_id: str) -> None:
        self._readers[engine_id][request_id] = 1

    return [(HeartbeatTracker, "track", track)]


@_defect
def one_handshake_at_a_time() -> Patches:
    """Handshakes wait for each other, also for those with the dead (vLLM 0.32)."""
    go = HostShaker._go

    def queue(self: HostShaker, engine_id: str, port: int, *, measured: bool) -> None:
        free_ns = max(self._host.now_ns(), getattr(self, "_free_ns", 0))
        self._free_ns = free_ns + ASK_LIMIT_NS  # type: ignore[attr-defined]
        self._host.later(free_ns - self._host.now_ns(), lambda: go(self, engine_id, port, measured=measured))

    return [(HostShaker, "_go", queue), (Consumer, "connect_failed", _never_hopeless(Consumer.connect_failed))]


def _never_hopeless(connect_failed: Any) -> Any:
    def again(self: Consumer, engine_id: str, reason: str, now_ns: int) -> None:
        connect_failed(self, engine_id, reason, now_ns)
        peer = self.peers.get(engine_id)
        if peer is not None:
            peer.try_at_ns = now_ns

    return again


@_defect
def unsent_uncounted() -> Patches:
    """Heartbeats that cannot be sent are not counted (vLLM 0.32)."""
    metrics = ReferenceEngine.metrics
    return [(ReferenceEngine, "metrics", lambda self: metrics(self) | {UNSENT_HEARTBEATS: 0.0})]


@_defect
def abort_tells_nobody() -> Patches:
    """An abort is not told to the holder."""
    leave = Consumer._leave

    def silent(self: Consumer, load: Any, how: How) -> None:
        if how is How.ABORT:
            self._untrack(load)
        else:
            leave(self, load, how)

    return [(Consumer, "_leave", silent)]


@_defect
def refusal_tells_nobody() -> Patches:
    """A refusal at the door is not told to the holder."""
    return [(Connector, "reject", lambda *_: None)]


@_defect
def hit_tells_nobody() -> Patches:
    """A full hit in the own cache is not told to the holder."""

    def silent(self: Consumer, request_id: str) -> None:
        load = self._loads.get(request_id)
        if load is not None:
            self._remove(load)
            self._untrack(load)

    return [(Consumer, "spare", silent)]


@_defect
def no_fence() -> Patches:
    """Nobody asks whether the blocks are still there, and nobody compares generations (vLLM 0.32)."""
    poll = HostTransport.poll

    def blind(self: HostTransport) -> Any:
        return [
            msgspec.structs.replace(e, result=ReadResult.DONE, reason="") if e.result is ReadResult.TORN else e
            for e in poll(self)
        ]

    return [(Producer, "_why_not", lambda *_: ""), (HostTransport, "poll", blind)]


@_defect
def reads_wrong_block() -> Patches:
    """Of several blocks the last is read into the place of the first."""
    read = HostTransport.read

    def turned(self: HostTransport, read_id: int, engine_id: str, remote: Any, local: Any) -> None:
        read(self, read_id, engine_id, list(remote)[::-1], list(local))

    return [(HostTransport, "read", turned)]


@_defect
def failed_read_counts_as_done() -> Patches:
    """A read that failed is taken for one that ended well."""
    ended = Consumer.ended

    def careless(self: Consumer, read_id: int, _problem: str, now_ns: int, *, torn: bool = False) -> None:
        ended(self, read_id, "", now_ns, torn=torn)

    return [(Consumer, "ended", careless)]


@_defect
def always_recomputes() -> Patches:
    """The policy `fail` is not looked at."""
    load_over = Connector._load_over

    def recompute(self: Connector, over: Any) -> None:
        terms, self.terms = self.terms, msgspec.structs.replace(self.terms, kv_load_failure_policy=LoadPolicy.RECOMPUTE)
        load_over(self, over)
        self.terms = terms

    return [(Connector, "_load_over", recompute)]


@_defect
def destination_free_at_abort() -> Patches:
    """Destination blocks are free at an abort, though the transfer can still land in them."""
    abort = Consumer.abort

    def free(self: Consumer, request_id: str) -> bool:
        abort(self, request_id)
        return True

    return [(Consumer, "abort", free)]


@_defect
def no_read_limit() -> Patches:
    """A read without an end is waited for without an end (vLLM 0.32)."""
    return [(Consumer, "_watch", lambda *_: None)]


@_defect
def impatient() -> Patches:
    """A read is given up after a second."""
    return [(Consumer, "_read_deadline_ns", lambda _self, load: load.claimed_ns + 10**9)]


@_defect
def handshake_once() -> Patches:
    """A peer whose handshake failed is never tried again."""
    failed = Consumer.connect_failed

    def give_up(self: Consumer, engine_id: str, reason: str, now_ns: int) -> None:
        failed(self, engine_id, reason, now_ns)
        peer = self.peers.get(engine_id)
        if peer is not None:
            peer.try_at_ns = FOREVER_NS

    return [(Consumer, "connect_failed", give_up), (consumer, "FORGET_IDLE_NS", FOREVER_NS)]


@_defect
def question_ends() -> Patches:
    """A question at the side channel that cannot be decoded ends the engine (vLLM 0.32)."""
    answer = ReferenceEngine.answer

    def strict(self: ReferenceEngine, question: bytes) -> bytes | None:
        try:
            msgspec.msgpack.decode(question, type=dict)
        except msgspec.DecodeError as error:
            raise Broken(str(error)) from error
        return answer(self, question)

    return [(ReferenceEngine, "answer", strict)]


@_defect
def no_correction() -> Patches:
    """Clocks of two machines are compared as they are."""

    def raw(_self: Consumer, load: Any, _peer: Any, now_ns: int) -> bool:
        live: bool = load.handoff.expiry_ns > now_ns
        return live

    return [(Consumer, "_in_time", raw), (Producer, "_why_not", lambda *_: "")]


@_defect
def clock_sign() -> Patches:
    """The clock's offset is applied with the wrong sign."""
    estimate = clocksync._estimate

    def wrong(*of: Any) -> Estimate:
        right = estimate(*of)
        return Estimate(-right.offset_ns, right.error_ns)

    return [(clocksync, "_estimate", wrong), (Producer, "_why_not", lambda *_: "")]


@_defect
def expired_hangs() -> Patches:
    """An expired turn is declined and never computed (vLLM 0.32, policy recompute)."""
    fail = Consumer._fail

    def hang(self: Consumer, load: Any, reason: str, *, expired: bool = False, report: bool = True) -> None:
        fail(self, load, reason, expired=expired, report=report)
        if expired:
            self._actions = [
                a for a in self._actions if not (isinstance(a, Failed) and a.request_id == load.request_id)
            ]

    return [(Consumer, "_fail", hang)]


@_defect
def expired_fails() -> Patches:
    """An expired turn is refused, as a failed transfer would be (vLLM 0.32, policy fail)."""
    load_over = Connector._load_over

    def refuse(self: Connector, over: Any) -> None:
        if isinstance(over, Failed) and over.expired:
            over = msgspec.structs.replace(over, expired=False)
        load_over(self, over)

    return [(Connector, "_load_over", refuse)]


@_defect
def first_late() -> Patches:
    """The first heartbeat leaves two intervals after it could."""
    due = HeartbeatTracker.due

    def late(self: HeartbeatTracker, engine_id: str, now_ns: int, interval_ns: int) -> list[Beat]:
        first = vars(self).setdefault("_first_ns", now_ns)
        return due(self, engine_id, now_ns, interval_ns) if now_ns >= first + 2 * interval_ns else []

    return [(HeartbeatTracker, "due", late)]


@_defect
def ranks_swapped() -> Patches:
    """Each rank reads its part into the place of the next one's."""

    def swapped(mine: int, theirs: int) -> list[Piece]:
        return [p._replace(first=(p.first + p.words) % BLOCK_WORDS) for p in pieces(mine, theirs)]

    def land(self: HostTransport, holder: HostTransport, blocks: Any, ranks: int) -> None:
        for read, put in zip(pieces(self._spec.ranks, ranks), swapped(self._spec.ranks, ranks), strict=True):
            words, place = slice(read.first, read.first + read.words), slice(put.first, put.first + put.words)
            self.kv[blocks.local, place] = holder.kv[blocks.remote, words]

    return [(HostTransport, "_land", land)]


@_defect
def shaking_blocks() -> Patches:
    """The engine stands still until a handshake has been answered."""
    go, back, step = HostShaker._go, HostShaker._back, ReferenceEngine.step

    def begin(self: HostShaker, engine_id: str, port: int, *, measured: bool) -> None:
        vars(self)["_shaking"] = True
        go(self, engine_id, port, measured=measured)

    def end(self: HostShaker, *of: Any) -> None:
        vars(self)["_shaking"] = False
        back(self, *of)

    def stand(self: ReferenceEngine) -> None:
        if not vars(self._shaker).get("_shaking"):
            step(self)

    return [(HostShaker, "_go", begin), (HostShaker, "_back", end), (ReferenceEngine, "step", stand)]


@_defect
def anybody_suits() -> Patches:
    """Nobody looks whether the two sides suit each other."""
    from harness.conformance.subjects import reference

    return [(reference, "incompatible", lambda *_: "")]


@_defect
def no_margin() -> Patches:
    """The estimate's error is not taken off, and there is no margin."""

    def bold(_self: Consumer, load: Any, peer: Any, now_ns: int) -> bool:
        estimate = peer.clock.estimate(now_ns)
        return estimate is not None and bool(load.handoff.expiry_ns - estimate.offset_ns > now_ns)

    return [(Consumer, "_in_time", bold), (Producer, "_why_not", lambda *_: "")]


@_defect
def measured_once() -> Patches:
    """A clock is measured at the first handshake, and never again; the estimate does not age."""
    add = ClockSync.add

    def first(self: ClockSync, sample: Any) -> bool:
        return True if self._best else add(self, sample)

    def ageless(self: ClockSync, _now_ns: int) -> Estimate | None:
        return clocksync._estimate(self._best, self._best.received_ns) if self._best else None

    return [
        (ClockSync, "add", first), (ClockSync, "estimate", ageless), (ClockSync, "stale", lambda *_: False),
        (consumer, "FORGET_IDLE_NS", FOREVER_NS), (Producer, "_why_not", lambda *_: ""),
    ]  # fmt: skip


@_defect
def renewal_ignored() -> Patches:
    """A renewal is answered, and changes nothing."""

    def nothing(self: Producer, request_id: str, _now_ns: int) -> Lease | None:
        return self.leases.get(request_id)

    return [(Producer, "renew", nothing)]


# -- for the search alone: no case has one of these for a twin ------------------------------------------------------


@_defect
def early_free() -> Patches:
    """A lease ends when its reader begins to read."""
    claim = Producer._claim

    def end(self: Producer, engine_id: str, wish: Claim, now_ns: int) -> None:
        claim(self, engine_id, wish, now_ns)
        self._free(self.leases.end(wish.request), How.READ)

    return [(Producer, "_claim", end)]


@_defect
def wrong_id() -> Patches:
    """Heartbeats name the reader's own request, and not its holder's."""

    def track(self: Consumer, load: Any) -> None:
        if not load.tracked and not load.handoff.turn:
            load.tracked = True
            self.heartbeats.track(load.handoff.engine_id, load.request_id)

    def untrack(self: Consumer, load: Any) -> None:
        if load.tracked:
            load.tracked = False
            self.heartbeats.untrack(load.handoff.engine_id, load.request_id)

    return [(Consumer, "_track", track), (Consumer, "_untrack", untrack)]


@_defect
def stale_generation() -> Patches:
    """A read is compared with the blocks' generations at its end, not at its beginning; nobody else asks."""
    poll = HostTransport.poll

    def compare(self: HostTransport) -> Any:
        for reading in self._reads:
            reading.before = reading.holder.generations[reading.blocks.remote].copy()
        return poll(self)

    return [(HostTransport, "poll", compare), (Producer, "_why_not", lambda *_: "")]


@_defect
def shared_freed() -> Patches:
    """A lease that ends frees its blocks, also those that another one shares."""
    freed = Connector._freed

    def free(self: Connector, what: Freed, now_ns: int) -> None:
        for block in what.lease.blocks:
            self.core.pool._references[block] = 1
        freed(self, what, now_ns)

    return [(Connector, "_freed", free)]


@_defect
def abort_ends_for_all() -> Patches:
    """The abort of one reader ends a lease that others wait for."""
    receive = Producer._receive

    def hasty(self: Producer, engine_id: str, data: bytes, now_ns: int) -> Any:
        try:
            message = decode(data)
        except BadMessage:
            message = None
        if isinstance(message, Report) and message.how is How.ABORT:
            self._free(self.leases.end(message.request), message.how)
        return receive(self, engine_id, data, now_ns)

    return [(Producer, "_receive", hasty)]


@_defect
def offset_sign() -> Patches:
    """The clock's offset is applied with the wrong sign; what is used too late, the holder refuses all the same."""
    estimate = clocksync._estimate

    def wrong(*of: Any) -> Estimate:
        right = estimate(*of)
        return Estimate(-right.offset_ns, right.error_ns)

    return [(clocksync, "_estimate", wrong)]


@_defect
def claim_again_reopens() -> Patches:
    """A claim that arrives again, behind its reader's report, is waited for once more."""
    why_not = Producer._why_not

    def why(self: Producer, claim: Claim) -> str:
        reason = why_not(self, claim)
        return "" if reason == "this reader has reported already" else reason

    return [(Producer, "_why_not", why)]


SEEDED: Final = (
    "early_free", "abort_leaks", "idle_sleeps", "wrong_id", "expiry_twice", "offset_sign", "stale_generation",
    "shared_freed", "abort_ends_for_all", "claim_again_reopens",
)  # fmt: skip
"""Ten faults that a search must find; no fixed case catches one of the last three."""

"""The side that reads blocks: the decode engine, and in two-turn mode the prefill engine as well.

A load goes: arrived (heartbeats from here on, KVC-HB-001), admitted (destination blocks are there), claimed, reading,
ended. It ends in exactly one of: loaded, failed with a reason, aborted; and it does so within `load_limit` (L3).
The consumer sends and reads nothing itself: `take` returns what to do.

Destination blocks are not reused while a transfer can still land in them (S6): an aborted load says `Drained` only when
its read has ended, and a read that neither ends nor can be cancelled is left behind with its blocks (`Abandoned`).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from reference_impl.rules.clock import NS_PER_MS, NS_PER_S, s_to_ns
from reference_impl.rules.clocksync import Estimate, Sample, left_ns
from reference_impl.rules.handoff import HandOff
from reference_impl.rules.heartbeat import HeartbeatTracker
from reference_impl.rules.messages import Answer, Claim, Heartbeat, How, Report
from reference_impl.rules.peers import FORGET_IDLE_NS, MEASURE_PAUSE_NS, Link, Peer
from reference_impl.rules.producer import Send
from reference_impl.rules.terms import KvTerms

CLAIM_AGAIN_NS: Final = NS_PER_S // 4
"""A claim without an answer is repeated: either may have been lost."""
CANCEL_GRACE_NS: Final = NS_PER_S
TURN_MARGIN_NS: Final = 50 * NS_PER_MS
"""A turn with less left than this is not worth a claim: it would come too late."""
_DRIFT_SHARE: Final = 1000
"""A reader ends its read a thousandth early: whatever drift there is, the holder's count ends later."""


class Stage(enum.StrEnum):
    """Where a load stands."""

    ARRIVED = "arrived"
    CONNECTING = "connecting"
    CLAIMING = "claiming"
    READING = "reading"
    CANCELLING = "cancelling"
    ABANDONED = "abandoned"


class Connect(msgspec.Struct, frozen=True):
    """Shake hands with an engine, in the background."""

    engine_id: str
    host: str
    port: int


class Measure(msgspec.Struct, frozen=True):
    """Take new clock samples of a connected engine, in the background."""

    engine_id: str
    host: str
    port: int


class Forget(msgspec.Struct, frozen=True):
    """Drop an engine: nothing is wanted of it, or it cannot be reached."""

    engine_id: str
    reason: str


class Read(msgspec.Struct, frozen=True):
    """Start reading."""

    read_id: int
    engine_id: str
    remote_blocks: Collection[int]
    local_blocks: Collection[int]


class Cancel(msgspec.Struct, frozen=True):
    """Ask a read to end."""

    read_id: int


class Loaded(msgspec.Struct, frozen=True):
    """A request's blocks are there, and are what they should be."""

    request_id: str
    waited_ns: int
    """From admission to the start of the read."""
    read_ns: int
    blocks: int


class Failed(msgspec.Struct, frozen=True):
    """A request's blocks will not come. No transfer can land any more."""

    request_id: str
    reason: str
    expired: bool = False
    """Too late for a turn: that is no failure, and is always recomputed (KVC-CLK-004)."""


class Abandoned(msgspec.Struct, frozen=True):
    """As Failed, but the read may still land: its destination must be left alone until `Drained`."""

    request_id: str
    reason: str


class Drained(msgspec.Struct, frozen=True):
    """The destination of an aborted or abandoned load may be used again."""

    request_id: str


class Judged(msgspec.Struct, frozen=True):
    """A turn's expiry, corrected to our clock."""

    request_id: str
    live: bool
    left_ns: int
    error_ns: int


Action: TypeAlias = (
    Send | Connect | Measure | Forget | Read | Cancel | Loaded | Failed | Abandoned | Drained | Judged
)  # fmt: skip


class ReaderCounts(msgspec.Struct):
    """Counters over the reader's life."""

    loads: int = 0
    loaded: int = 0
    failed: int = 0
    expired_turns: int = 0
    failed_transfers: int = 0
    torn: int = 0
    heartbeats_sent: int = 0
    notifications_failed: int = 0
    heartbeats_failed: int = 0
    handshakes_failed: int = 0


@dataclass(slots=True)
class _Load:
    request_id: str
    handoff: HandOff
    content: str
    stage: Stage = Stage.ARRIVED
    tracked: bool = False
    local_blocks: Collection[int] = ()
    remote_blocks: Collection[int] = ()
    admitted_ns: int = 0
    give_up_ns: int = 0
    claimed_ns: int = 0
    claim_again_ns: int = 0
    read_id: int = 0
    read_ns: int = 0
    aborted: bool = False
    why: str = ""


class Consumer:
    """The loads of one engine and the peers they come from."""

    def __init__(self, terms: KvTerms) -> None:
        self.terms = terms
        self.counts = ReaderCounts()
        self.heartbeats = HeartbeatTracker()
        self.peers: dict[str, Peer] = {}
        self._loads: dict[str, _Load] = {}
        self._admitted: dict[str, _Load] = {}
        """Those of them that have deadlines: a request that waits for admission costs a step nothing."""
        self._loads_from: Counter[str] = Counter()
        """How many loads there are of each peer."""
        self._reads: dict[int, _Load] = {}
        self._read_ids = 0
        self._actions: list[Action] = []

    def __len__(self) -> int:
        return len(self._loads)

    def take(self) -> list[Action]:
        """Return what is to be done, in order, and forget it."""
        actions, self._actions = self._actions, []
        return actions

    def stage(self, request_id: str) -> Stage | None:
        """Return where a load stands, None if there is none."""
        load = self._loads.get(request_id)
        return load.stage if load else None

    # What happens to a request.

    def arrive(self, request_id: str, handoff: HandOff, content: str, now_ns: int) -> None:
        """Note a request that has entered the scheduler: its lease is kept alive from now on."""
        load = self._loads[request_id] = _Load(request_id, handoff, content)
        self._loads_from[handoff.engine_id] += 1
        self.counts.loads += 1
        if handoff.engine_id not in self.peers:
            self.peers[handoff.engine_id] = Peer(
                handoff.engine_id, handoff.host, handoff.port, try_at_ns=now_ns, wanted_ns=now_ns
            )  # fmt: skip
            for waiting in self._loads.values():  # those that its loss left behind are kept alive again (L2)
                if waiting.handoff.engine_id == handoff.engine_id:
                    self._track(waiting)
        self._track(load)

    def admit(
        self, request_id: str, remote_blocks: Collection[int], local_blocks: Collection[int], now_ns: int
    ) -> None:
        """Start a load: its destination is there. The blocks are those still missing, in the same order.

        They come back in `Read` as they are: the caller may give them in the form that its transport reads best.
        """
        load = self._admitted[request_id] = self._loads[request_id]
        load.remote_blocks, load.local_blocks = remote_blocks, local_blocks
        load.admitted_ns, load.give_up_ns = now_ns, now_ns + s_to_ns(self.terms.load_limit)
        load.stage = Stage.CONNECTING
        self._proceed(load, now_ns)

    @property
    def idle(self) -> bool:
        """Whether nothing is loaded, and nothing waits to be done or sent."""
        return not (self._loads or self._reads or self._actions or any(peer.outbox for peer in self.peers.values()))

    def spare(self, request_id: str) -> None:
        """Note a full local hit: the holder is told, nothing is read (KVC-REL-003)."""
        load = self._loads.get(request_id)
        if load is not None:
            self._remove(load)
            self._leave(load, How.HIT)

    def abort(self, request_id: str) -> bool:
        """Note that nobody wants a request any more; true if its destination is free now, else `Drained` will tell."""
        load = self._loads.get(request_id)
        if load is None or load.stage is Stage.ABANDONED:
            return True
        if load.stage in (Stage.READING, Stage.CANCELLING):
            if load.stage is Stage.READING:
                self._actions.append(Cancel(load.read_id))
            load.stage, load.aborted = Stage.CANCELLING, True
            self._untrack(load)
            return False
        self._remove(load)
        self._leave(load, How.ABORT)
        return True

    # What happens to a peer.

    def connected(self, engine_id: str, interval_ns: int, samples: Iterable[Sample], now_ns: int) -> None:
        """Note a handshake that succeeded. `interval_ns`: between heartbeats, by the peer's own terms; 0: none."""
        peer = self.peers.get(engine_id)
        if peer is None:
            return
        peer.link, peer.failures, peer.interval_ns = Link.UP, 0, interval_ns
        for sample in samples:
            peer.clock.add(sample)
        peer.measuring = False
        self._actions += [Send(engine_id, report) for report in peer.outbox]
        peer.outbox = []
        for load in self._waiting(engine_id):
            self._proceed(load, now_ns)

    def measured(self, engine_id: str, samples: Iterable[Sample], now_ns: int) -> None:
        """Take clock samples of a peer; none if the measurement failed: then it is connected anew when it is wanted."""
        peer = self.peers.get(engine_id)
        if peer is None:
            return
        peer.measuring = False
        taken = [peer.clock.add(sample) for sample in samples]
        if not taken and peer.link is Link.UP:
            self._doubt(peer, now_ns)

    def connect_failed(self, engine_id: str, reason: str, now_ns: int) -> None:
        """Note a handshake that failed: what waits for it fails, once; a later one is tried with back-off."""
        peer = self.peers.get(engine_id)
        if peer is None:
            return
        self.counts.handshakes_failed += 1
        peer.failed(now_ns)
        for load in self._waiting(engine_id):
            self._fail(load, f"no connection to {engine_id}: {reason}")
        if peer.hopeless:
            self.lost(engine_id, f"unreachable: {reason}")

    def lost(self, engine_id: str, reason: str) -> None:
        """Note that a peer has gone for good: whatever is loaded from it fails; its running reads end by themselves."""
        if self.peers.pop(engine_id, None) is None:
            return
        self.heartbeats.drop(engine_id)
        for load in [x for x in self._loads.values() if x.handoff.engine_id == engine_id]:
            load.tracked = False
            if load.stage in (Stage.CONNECTING, Stage.CLAIMING):
                self._fail(load, f"{engine_id} is lost: {reason}")
        self._actions.append(Forget(engine_id, reason))

    def sent(self, send: Send, now_ns: int, *, ok: bool) -> None:
        """Note whether a notification left. One that did not is counted, and the peer is connected anew (O2)."""
        if ok:
            return
        self.counts.notifications_failed += 1
        self.counts.heartbeats_failed += isinstance(send.message, Heartbeat)
        peer = self.peers.get(send.engine_id)
        if peer is None:
            return
        if isinstance(send.message, Report):
            peer.keep(send.message)
        if isinstance(send.message, Claim):
            self._unclaim(send.message)
        if peer.link is Link.UP:
            self._doubt(peer, now_ns)

    def _unclaim(self, claim: Claim) -> None:
        """A claim that did not leave waits for the connection: if that fails, so does the load, at once."""
        load = self._loads.get(claim.reader)
        if load is not None and load.stage is Stage.CLAIMING:
            load.stage = Stage.CONNECTING

    # What comes back.

    def answered(self, engine_id: str, answer: Answer, now_ns: int) -> None:
        """Take the answer to a claim. One that nobody waits for (late, repeated, foreign) changes nothing."""
        load = self._loads.get(answer.reader)
        if load is None or load.stage is not Stage.CLAIMING:
            return
        if (load.handoff.engine_id, load.handoff.request_id) != (engine_id, answer.request):
            return
        if not answer.granted:
            self._fail(load, f"the holder refuses: {answer.reason}", expired=load.handoff.turn, report=False)
            return
        self._read_ids += 1
        load.stage, load.read_id, load.read_ns = Stage.READING, self._read_ids, now_ns
        self._reads[load.read_id] = load
        self._actions.append(
            Read(load.read_id, engine_id, load.remote_blocks, load.local_blocks)
        )  # fmt: skip

    def ended(self, read_id: int, problem: str, now_ns: int, *, torn: bool = False) -> None:
        """Take the end of a read; `problem` is "" if every block arrived and was the holder's to the end."""
        load = self._reads.pop(read_id, None)
        if load is None:
            return
        if not problem and now_ns >= self._read_deadline_ns(load):
            problem = "the read did not end within its limit"  # the holder need not have waited for it (S2)
        if problem and not load.aborted:
            self.counts.failed_transfers += 1
            self.counts.torn += torn
        if load.aborted or load.stage is Stage.ABANDONED:
            self._remove(load)
            self._leave(load, How.ABORT if load.aborted else How.FAILED)
            self._actions.append(Drained(load.request_id))
        elif problem or load.stage is Stage.CANCELLING:
            self._fail(load, load.why or problem)
        else:
            self._remove(load)
            self.counts.loaded += 1
            self._leave(load, How.READ)
            waited_ns = load.read_ns - load.admitted_ns
            self._actions.append(
                Loaded(load.request_id, waited_ns, now_ns - load.read_ns, len(load.local_blocks))
            )  # fmt: skip

    def tick(self, now_ns: int) -> None:
        """Do what time demands: connect, measure, renew, claim again, give up."""
        for peer in list(self.peers.values()):
            self._tend(peer, now_ns)
        for load in list(self._admitted.values()):
            self._watch(load, now_ns)

    def _tend(self, peer: Peer, now_ns: int) -> None:
        wanted = self._wanted(peer.engine_id)
        if wanted:
            peer.wanted_ns = now_ns
        elif now_ns - peer.wanted_ns > FORGET_IDLE_NS:
            self.lost(peer.engine_id, "nothing has been wanted of it for long")
            return
        if wanted and peer.link is Link.WANTED and now_ns >= peer.try_at_ns:
            peer.link = Link.TRYING
            self._actions.append(Connect(peer.engine_id, peer.host, peer.port))
        if peer.link is not Link.UP:
            return
        measurable = self.terms.bidirectional_kv_xfer and not peer.measuring and now_ns >= peer.measure_at_ns
        if measurable and peer.clock.stale(now_ns):
            peer.measuring, peer.measure_at_ns = True, now_ns + MEASURE_PAUSE_NS
            self._actions.append(Measure(peer.engine_id, peer.host, peer.port))
        if peer.interval_ns:
            for beat in self.heartbeats.due(peer.engine_id, now_ns, peer.interval_ns):
                self.counts.heartbeats_sent += 1
                self._actions.append(Send(beat.engine_id, Heartbeat(beat.requests)))

    def _wanted(self, engine_id: str) -> bool:
        return bool(self._loads_from[engine_id] or self.peers[engine_id].outbox)

    def _remove(self, load: _Load) -> None:
        """Forget a load that has ended. Harmless when it has been forgotten."""
        if self._loads.pop(load.request_id, None) is None:
            return
        self._admitted.pop(load.request_id, None)
        self._loads_from[load.handoff.engine_id] -= 1
        if not self._loads_from[load.handoff.engine_id]:
            del self._loads_from[load.handoff.engine_id]

    def _doubt(self, peer: Peer, now_ns: int) -> None:
        """Shake hands anew with a peer that was connected, and is not heard or cannot be reached."""
        peer.failed(now_ns)
        if peer.hopeless:
            self.lost(peer.engine_id, "it is connected, and cannot be reached")

    def _watch(self, load: _Load, now_ns: int) -> None:
        """Keep a load's own deadlines."""
        match load.stage:
            case Stage.CONNECTING:
                if now_ns >= load.give_up_ns:
                    self._fail(load, "no connection within the load's limit")
            case Stage.CLAIMING:
                if now_ns >= min(load.give_up_ns, self._read_deadline_ns(load)):
                    self._fail(load, "the holder does not answer")
                    peer = self.peers.get(load.handoff.engine_id)
                    if peer is not None and peer.link is Link.UP:
                        self._doubt(peer, now_ns)
                elif now_ns >= load.claim_again_ns:
                    self._claim(load, now_ns)
            case Stage.READING if now_ns >= min(load.give_up_ns, self._read_deadline_ns(load)):
                load.stage, load.why = Stage.CANCELLING, "the read did not end within its limit"
                load.claim_again_ns = now_ns + CANCEL_GRACE_NS
                self._actions.append(Cancel(load.read_id))
            case Stage.CANCELLING if not load.aborted and now_ns >= load.claim_again_ns:
                load.stage = Stage.ABANDONED
                self.counts.failed += 1
                self._untrack(load)
                self._actions.append(Abandoned(load.request_id, load.why))
            case _:
                pass

    def _read_deadline_ns(self, load: _Load) -> int:
        limit_ns = self.terms.read_limit_ns
        return load.claimed_ns + limit_ns - limit_ns // _DRIFT_SHARE

    def _proceed(self, load: _Load, now_ns: int) -> None:
        """Claim, if the holder is connected and a turn has time left."""
        peer = self.peers.get(load.handoff.engine_id)
        if peer is None:
            self._fail(load, f"{load.handoff.engine_id} is lost")
            return
        if peer.link is not Link.UP:
            return
        if load.handoff.turn and not self._in_time(load, peer, now_ns):
            self._fail(load, "the turn's blocks have expired", expired=True)
            return
        load.stage, load.claimed_ns = Stage.CLAIMING, now_ns
        self._claim(load, now_ns)

    def _claim(self, load: _Load, now_ns: int) -> None:
        load.claim_again_ns = now_ns + CLAIM_AGAIN_NS
        within_ns = load.claimed_ns + self.terms.read_limit_ns - now_ns
        claim = Claim(load.handoff.request_id, load.request_id, within_ns, load.content, load.handoff.slot)
        self._actions.append(Send(load.handoff.engine_id, claim))

    def _in_time(self, load: _Load, peer: Peer, now_ns: int) -> bool:
        """Whether a turn's blocks will still be there when our claim arrives (C2, KVC-CLK-002)."""
        estimate = peer.clock.estimate(now_ns) if self.terms.clock_correction else Estimate(0, 0)
        if estimate is None:
            return False
        left = left_ns(load.handoff.expiry_ns, estimate, now_ns)
        live = left > TURN_MARGIN_NS
        self._actions.append(Judged(load.request_id, live, left, estimate.error_ns))
        return live

    def _waiting(self, engine_id: str) -> list[_Load]:
        return [
            load
            for load in self._admitted.values()
            if load.handoff.engine_id == engine_id and load.stage is Stage.CONNECTING
        ]

    def _fail(self, load: _Load, reason: str, *, expired: bool = False, report: bool = True) -> None:
        """End a load without its KV. A holder that refused needs no `report`: it might end another reader's lease."""
        self._remove(load)
        self.counts.failed += not expired
        self.counts.expired_turns += expired
        if report:
            self._leave(load, How.FAILED)
        else:
            self._untrack(load)
        self._actions.append(Failed(load.request_id, reason, expired))

    def _leave(self, load: _Load, how: How) -> None:
        """Stop renewing, and tell the holder that this reader needs its blocks no longer (L4)."""
        self._untrack(load)
        peer = self.peers.get(load.handoff.engine_id)
        if peer is None:
            return
        report = Report(load.handoff.request_id, load.request_id, how, load.handoff.slot)
        if peer.link is Link.UP:
            self._actions.append(Send(peer.engine_id, report))
        else:
            peer.keep(report)

    def _track(self, load: _Load) -> None:
        """Keep a lease alive; a turn's is not renewed (KVC-CLK-001)."""
        if not load.tracked and not load.handoff.turn:
            load.tracked = True
            self.heartbeats.track(load.handoff.engine_id, load.handoff.request_id)

    def _untrack(self, load: _Load) -> None:
        if load.tracked:
            load.tracked = False
            self.heartbeats.untrack(load.handoff.engine_id, load.handoff.request_id)

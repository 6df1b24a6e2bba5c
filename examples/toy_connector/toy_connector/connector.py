"""A lease-based KV connector: blocks are kept for a reader who keeps saying that it will come.

The holder keeps a finished prefill's blocks under a lease. The reader shakes hands with it, renews the lease from when
its request enters the queue, reads the blocks, and reports. Blocks that were given to others meanwhile show by their
generations, which the hand-off tells and the read compares.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import msgspec

from faults.nixl.dialects import Meaning
from faults.nixl.orders import Kind
from harness.conformance.simple_connector import Memory, Progress, Reading
from harness.conformance.simple_engine import SimpleSubject
from harness.conformance.simple_pool import BLOCK_TOKENS
from harness.conformance.subject import (
    BAD_MESSAGES,
    EXPIRED,
    FAILED_HANDSHAKES,
    FAILED_READS,
    LATE,
    UNSENT_HEARTBEATS,
    Capability,
    EngineSpec,
    Host,
    Misuse,
    Params,
    ReadState,
    Refused,
    Request,
)

NS_PER_S = 10**9
RETRY_NS = 2 * NS_PER_S
"""A failed handshake is tried again after so long, if anything is wanted of that engine."""


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """Keep these requests' blocks. Ids are always their holder's."""

    requests: list[str]


class Report(msgspec.Struct, tag="report"):
    """A reader needs these blocks no longer, read or not."""

    request: str
    reader: str


class Hello(msgspec.Struct):
    """What engines say of themselves in a handshake."""

    engine_id: str
    model: str
    lease_s: float


class HandOff(msgspec.Struct):
    """What a client carries from the prefill to the decode engine."""

    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: list[int]
    remote_generations: list[int]
    remote_tokens: int
    remote_port: int
    remote_host: str = "127.0.0.1"
    tp_size: int = 1
    do_remote_prefill: bool = True
    do_remote_decode: bool = False


MESSAGES = msgspec.json.Decoder(Heartbeat | Report)


class Stage(enum.Enum):
    """Where a load stands."""

    QUEUED = enum.auto()
    CONNECTING = enum.auto()
    """It has its blocks, and waits for the handshake."""
    READING = enum.auto()
    ABANDONED = enum.auto()
    """It goes on without its KV; what was read may still land."""


@dataclass
class Load:
    """A request that has something to read."""

    request_id: str
    hand_off: HandOff
    stage: Stage = Stage.QUEUED
    first: int = 0
    """Of its blocks, the first that is to be read."""
    blocks: list[int] = field(default_factory=list)
    reading: Reading | None = None
    until_ns: int = 0
    aborted: bool = False


class Link(enum.Enum):
    """How we stand with another engine."""

    WANTED = enum.auto()
    ASKED = enum.auto()
    UP = enum.auto()


@dataclass
class Peer:
    """An engine that holds blocks for us."""

    engine_id: str
    port: int
    link: Link = Link.WANTED
    failed: bool = False
    """Whether the last handshake did."""
    try_at_ns: int = 0
    lease_s: float = 0.0
    """Its own: it is its lease that is renewed."""
    beat_at_ns: int = 0
    reports: list[Report] = field(default_factory=list)
    """Those that wait for the handshake."""


class ToyConnector:
    """One engine's side, or both."""

    def __init__(self, spec: EngineSpec, host: Host, memory: Memory) -> None:
        self.spec, self.host, self.memory = spec, host, memory
        self.hello = Hello(spec.name, spec.model, spec.terms.lease_s)
        self.leases: dict[str, int] = {}
        """Of finished requests: when they end, by our clock."""
        self.expired: deque[str] = deque(maxlen=1_000)
        self.loads: dict[str, Load] = {}
        self.peers: dict[str, Peer] = {}
        self.progress = Progress()
        self.counts = Counter(
            dict.fromkeys((EXPIRED, LATE, FAILED_READS, FAILED_HANDSHAKES, UNSENT_HEARTBEATS, BAD_MESSAGES), 0)
        )

    # The holder.

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, Params | None]:
        """Keep a prefill's blocks for whoever is sent for them."""
        if not (request.params or {}).get("do_remote_decode"):
            return False, None
        self.leases[request.request_id] = self.host.now_ns() + int(self.spec.terms.lease_s * NS_PER_S)
        hand_off = HandOff(
            remote_engine_id=self.spec.name, remote_request_id=request.request_id, remote_block_ids=blocks,
            remote_generations=self.memory.generations(blocks), remote_tokens=len(request.prompt),
            remote_port=self.spec.port,
        )  # fmt: skip
        return True, msgspec.to_builtins(hand_off)

    def message(self, sender: str, data: bytes) -> None:  # noqa: ARG002 # ids are enough
        """Renew leases, or end one."""
        try:
            message = MESSAGES.decode(data)
        except msgspec.DecodeError:
            self.counts[BAD_MESSAGES] += 1
            return
        if isinstance(message, Heartbeat):
            until_ns = self.host.now_ns() + int(self.spec.terms.extension_s * NS_PER_S)
            for request in message.requests:
                if request in self.leases:
                    self.leases[request] = max(self.leases[request], until_ns)
        elif message.request in self.leases:
            self.release(message.request)
        elif message.request in self.expired:
            self.counts[LATE] += 1

    def expire(self) -> None:
        """End every lease whose time has come."""
        now_ns = self.host.now_ns()
        for request in [request for request, end_ns in self.leases.items() if end_ns <= now_ns]:
            self.release(request)
            self.expired.append(request)
            self.counts[EXPIRED] += 1

    def release(self, request: str) -> None:
        """Give a lease's blocks back."""
        del self.leases[request]
        self.progress.released.append(request)

    def question(self, data: bytes) -> bytes | None:
        """Say who we are."""
        try:
            msgspec.json.decode(data, type=Hello)
        except msgspec.DecodeError:
            return None
        return msgspec.json.encode(self.hello)

    # The reader.

    def new_request(self, request: Request) -> None:
        """Remember what is to be read: it is renewed from now on."""
        if not (request.params or {}).get("do_remote_prefill"):
            return
        try:
            hand_off = msgspec.convert(request.params, HandOff)
        except msgspec.ValidationError as error:
            raise Refused(f"kv_transfer_params: {error}") from error
        self.loads[request.request_id] = Load(request.request_id, hand_off)
        holder = hand_off.remote_engine_id
        self.peers.setdefault(holder, Peer(holder, hand_off.remote_port))

    def scheduled(self, request: Request, blocks: list[int], cached: int) -> int:
        """Load what the own cache does not have, if the hand-off is of this prompt's length."""
        load = self.loads.get(request.request_id)
        if load is None:
            return 0
        missing = len(request.prompt) - cached
        if not missing or load.hand_off.remote_tokens != len(request.prompt):
            self.done(load)
            return 0
        load.first, load.blocks, load.stage = cached // BLOCK_TOKENS, blocks, Stage.CONNECTING
        return missing

    def aborted(self, request_id: str) -> None:
        """Stop at once; a read that runs is waited for, because it lands."""
        if request_id in self.leases:
            self.release(request_id)
        load = self.loads.get(request_id)
        if load is None:
            return
        load.aborted = True
        if load.stage is Stage.CONNECTING:
            self.progress.failed[request_id] = "aborted"
        if load.reading is None:
            self.done(load)

    def done(self, load: Load) -> None:
        """Tell the holder that we need its blocks no longer."""
        del self.loads[load.request_id]
        report = Report(load.hand_off.remote_request_id, load.request_id)
        self.peers[load.hand_off.remote_engine_id].reports.append(report)

    def watch(self, load: Load) -> None:
        """Move a load on: start its read, see its end, give it up."""
        peer = self.peers[load.hand_off.remote_engine_id]
        if load.stage is Stage.CONNECTING and peer.link is Link.UP:
            remote, local = load.hand_off.remote_block_ids, load.blocks
            try:
                load.reading = self.memory.read(peer.engine_id, remote[load.first :], local[load.first :])
            except Misuse as error:  # the client brought a hand-off that was never ours
                self.progress.failed[load.request_id] = str(error)
                self.done(load)
                return
            load.until_ns = self.host.now_ns() + int(peer.lease_s * NS_PER_S)
            load.stage = Stage.READING
        elif load.stage is Stage.CONNECTING and peer.failed:
            self.progress.failed[load.request_id] = "no connection"
            self.done(load)
        elif load.reading is not None:
            self.watch_reading(load, load.reading)

    def watch_reading(self, load: Load, reading: Reading) -> None:
        """See how a read stands."""
        ours = load.hand_off.remote_generations[load.first :]
        if reading.state is ReadState.RUNNING:
            if load.stage is Stage.READING and not load.aborted and self.host.now_ns() >= load.until_ns:
                self.counts[FAILED_READS] += 1
                self.progress.abandoned[load.request_id] = "the read takes too long"
                load.stage = Stage.ABANDONED
            return
        if load.stage is Stage.ABANDONED or load.aborted:
            self.progress.failed[load.request_id] = "the read has ended"
        elif reading.state is ReadState.FAILED:
            self.counts[FAILED_READS] += 1
            self.progress.failed[load.request_id] = "the read failed"
        elif reading.generations != ours:
            self.counts[FAILED_READS] += 1
            self.progress.declined[load.request_id] = "the blocks were given to others"
        else:
            self.progress.loaded.append(load.request_id)
        self.done(load)

    # What both do in time.

    def step(self) -> Progress:
        """Expire, connect, renew, report, read."""
        self.expire()
        for load in list(self.loads.values()):
            self.watch(load)
        for peer in list(self.peers.values()):
            self.tend(peer)
        progress, self.progress = self.progress, Progress()
        return progress

    def tend(self, peer: Peer) -> None:
        """Shake hands with an engine that we want something of; renew and report."""
        now_ns = self.host.now_ns()
        wanted = [load for load in self.loads.values() if load.hand_off.remote_engine_id == peer.engine_id]
        if peer.link is Link.WANTED and now_ns >= peer.try_at_ns:
            if not wanted and (peer.failed or not peer.reports):
                del self.peers[peer.engine_id]  # its leases end by themselves
                return
            peer.link, peer.failed = Link.ASKED, False
            self.host.ask(peer.port, msgspec.json.encode(self.hello), lambda *reply: self.shaken(peer, reply[0]))
        if peer.link is not Link.UP:
            return
        for report in peer.reports:
            self.host.send(peer.engine_id, msgspec.json.encode(report))
        peer.reports = []
        waiting = [
            load.hand_off.remote_request_id for load in wanted if not load.aborted and load.stage is not Stage.ABANDONED
        ]
        if waiting and now_ns >= peer.beat_at_ns:
            peer.beat_at_ns = now_ns + int(peer.lease_s / 6 * NS_PER_S)
            if not self.host.send(peer.engine_id, msgspec.json.encode(Heartbeat(waiting))):
                self.counts[UNSENT_HEARTBEATS] += 1

    def shaken(self, peer: Peer, reply: bytes | None) -> None:
        """Take the answer to a handshake: it must be the engine of the hand-off, and serve the same model."""
        try:
            hello = msgspec.json.decode(reply or b"", type=Hello)
        except msgspec.DecodeError:
            hello = None
        if hello is None or (hello.engine_id, hello.model) != (peer.engine_id, self.spec.model):
            self.counts[FAILED_HANDSHAKES] += 1
            peer.link, peer.failed, peer.try_at_ns = Link.WANTED, True, self.host.now_ns() + RETRY_NS
            return
        peer.link, peer.lease_s = Link.UP, hello.lease_s

    def metrics(self) -> dict[str, float]:
        """Return what is counted."""
        return dict[str, float](self.counts)


def meaning(data: bytes) -> Meaning:
    """Say what a message of ours is: for whoever watches."""
    try:
        message: Any = MESSAGES.decode(data)
    except msgspec.DecodeError:
        return Meaning(Kind.UNKNOWN)
    if isinstance(message, Heartbeat):
        return Meaning(Kind.HEARTBEAT, tuple(message.requests))
    return Meaning(Kind.COMPLETION, (message.request,))


def make_subject() -> SimpleSubject:
    """Return what `pdproof conform --connector toy_connector.connector:make_subject` tests."""
    return SimpleSubject(
        "toy", ToyConnector, meaning=meaning, versions={"toy-connector": version("toy-connector")},
        capabilities=(Capability.LEASES, Capability.PREFIX_HITS, Capability.METRICS),
    )  # fmt: skip

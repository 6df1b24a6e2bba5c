"""The KV connector: joins the pure rules to a core, a transport and a way of shaking hands. It never waits.

`poll` is called between steps, and while the core is idle (L5): it reads notifications, judges leases, renews, claims,
reads, and tells the core what has come. So heartbeats go out of the step loop and never block it (KVC-HB-009).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from reference_impl.content import BLOCK_TOKENS, Ints, block_digests
from reference_impl.engine.core import EngineCore, Sequence
from reference_impl.rules.blocks import OutOfBlocks
from reference_impl.rules.clock import NS_PER_MS
from reference_impl.rules.clocksync import Sample
from reference_impl.rules.consumer import (
    Abandoned,
    Cancel,
    Connect,
    Consumer,
    Drained,
    Failed,
    Forget,
    Judged,
    Loaded,
    Measure,
    Read,
)
from reference_impl.rules.events import EventKind, Scalar
from reference_impl.rules.handoff import Asked, BadHandOff, HandOff
from reference_impl.rules.leases import Lease
from reference_impl.rules.producer import Extended, Freed, Producer, Refused, Send
from reference_impl.rules.terms import KvTerms, LoadPolicy
from reference_impl.rules.transfer_tokens import is_token
from reference_impl.transport.base import PeerRefused, RankAddress, ReadResult, Transport

GUESTS_MAX: Final = 256
"""Peers that read from us and that we remember; a forgotten one shakes hands again when nobody answers it."""
ROUNDS_MAX: Final = 8
"""An action may lead to others (a message that does not leave, to a peer that is dropped); never to many rounds."""


class Shaken(msgspec.Struct, frozen=True, kw_only=True):
    """How a handshake, or a measurement of a clock, came out. `problem` is "" if well."""

    engine_id: str
    problem: str = ""
    measured: bool = False
    """A measurement only: the peer was connected before."""
    interval_ns: int = 0
    addresses: list[RankAddress] = []
    samples: list[Sample] = []
    took_ns: int = 0


class Shaker(Protocol):
    """Shakes hands in the background: a slow or dead peer delays nobody (L6)."""

    def connect(self, engine_id: str, host: str, port: int) -> None:
        """Start a handshake; `results` tells how it came out, once."""
        ...

    def measure(self, engine_id: str, host: str, port: int) -> None:
        """Start a measurement of a peer's clock; `results` tells."""
        ...

    def results(self) -> list[Shaken]:
        """Return what has come out since the last call."""
        ...


class Say(Protocol):
    """Writes an event of this engine."""

    def __call__(self, kind: EventKind, subject: str, **detail: Scalar) -> None:
        """Write one."""
        ...


def fingerprint(tokens: Ints, blocks: list[int]) -> str:
    """Return what names a text and the blocks of its KV: holder and reader compare it before anything is read.

    The blocks are a part of it because a hand-off passes through the client's hands: with another's block ids in it,
    another's KV would be read, and found again by everybody who sends that text.
    """
    digest = hashlib.blake2b(np.asarray(tokens, dtype="<u2").tobytes(), digest_size=16)
    digest.update(np.asarray(blocks, dtype="<u4").tobytes())
    return digest.hexdigest()


def group_fingerprint(last_digest: bytes, blocks: list[int]) -> str:
    """Return the same of a block group: the digest of its last block names all of its text."""
    digest = hashlib.blake2b(last_digest, digest_size=16, person=b"block group")
    digest.update(np.asarray(blocks, dtype="<u4").tobytes())
    return digest.hexdigest()


class Fetched(msgspec.Struct, frozen=True):
    """Blocks of another engine that have come, or not (`problem`). Those that came are the taker's to release."""

    fetch_id: str
    blocks: list[int]
    problem: str = ""


class Connector:
    """One engine's share in the movement of KV: it may hold, read, or both."""

    def __init__(
        self, core: EngineCore, terms: KvTerms, transport: Transport, shaker: Shaker, say: Say,
        *, engine_id: str, host: str, port: int, ranks: int = 1,
    ) -> None:  # fmt: skip
        self.core = core
        self.terms = terms
        self.producer = Producer(terms)
        self.consumer = Consumer(terms)
        self.failed: list[tuple[Sequence, str]] = []
        """Requests that end here by policy `fail`, with why; the step loop takes them."""
        self._transport = transport
        self._shaker = shaker
        self._say = say
        self._engine_id, self._host, self._port, self._ranks = engine_id, host, port, ranks
        self._sequences: dict[str, Sequence] = {}
        """Those that load or are to be kept, by request id."""
        self._asked: dict[str, Asked] = {}
        self.fetched: list[Fetched] = []
        """Fetches that have ended; whoever began them takes them off this list."""
        self.loans_ended: list[str] = []
        """Tokens of loans that have ended; whoever lent takes them off this list."""
        self._fetches: dict[str, list[int]] = {}
        """Destinations of fetches that are under way."""
        self._draining: dict[str, list[int]] = {}
        """Destinations that a transfer may still land in (S6)."""
        self._guests: OrderedDict[str, None] = OrderedDict()
        """Peers that have shaken hands with us, the one heard last at the end."""
        self._unreachable: set[str] = set()
        """Those of them that a message did not reach: they are made known anew when they shake hands again."""

    # Requests.

    def submit(self, request_id: str, prompt: Ints, output_tokens_max: int, asked: Asked, now_ns: int) -> Sequence:
        """Queue a request that loads its KV, or is kept for somebody. Raises BadHandOff or ValueError.

        A request that is refused for another reason than its hand-off lets go of the holder's blocks (KVC-REL-002).
        """
        load = asked.load
        content = ""
        if load is not None:
            try:
                self._check(load, len(prompt))
            except BadHandOff:
                if load.engine_id != self._engine_id:
                    self.reject(request_id, load, now_ns)
                raise
            content = self._content(load, prompt)
        try:
            sequence = self.core.sequence(
                request_id, prompt, output_tokens_max,
                remote_tokens=load.tokens if load else 0, hold=asked.keep or self._keeps_turn(asked),
            )  # fmt: skip
        except ValueError:
            if load is not None:
                self.reject(request_id, load, now_ns)
            raise
        self._sequences[request_id], self._asked[request_id] = sequence, asked
        if load is not None:
            self.consumer.arrive(request_id, load, content, now_ns)
        return sequence

    def _content(self, load: HandOff, prompt: Ints) -> str:
        if load.block_group:
            return group_fingerprint(block_digests(prompt[: load.tokens])[-1], load.blocks)
        return fingerprint(prompt[: load.tokens], load.blocks)

    def _keeps_turn(self, asked: Asked) -> bool:
        return self.terms.bidirectional_kv_xfer and asked.load is not None and not asked.keep

    def _check(self, load: HandOff, prompt_tokens: int) -> None:
        """Raise BadHandOff for one that this engine, or this prompt, can have no use for."""
        if load.engine_id == self._engine_id:
            raise BadHandOff("kv_transfer_params.remote_engine_id names this engine itself",
                             "kv_transfer_params.remote_engine_id")  # fmt: skip
        if load.turn and not self.terms.bidirectional_kv_xfer:
            raise BadHandOff(
                "kv_transfer_params.remote_blocks_expiry_time is of two-turn mode, which is off here",
                "kv_transfer_params.remote_blocks_expiry_time",
            )
        if load.block_group and load.tokens % BLOCK_TOKENS:
            raise BadHandOff(
                f"kv_transfer_params.remote_num_tokens of a block group is {load.tokens}: no full blocks",
                "kv_transfer_params.remote_num_tokens",
            )
        part = load.turn or load.block_group
        if load.tokens > prompt_tokens or (load.tokens < prompt_tokens and not part):
            raise BadHandOff(
                f"kv_transfer_params.remote_num_tokens is {load.tokens}, the prompt has {prompt_tokens} tokens",
                "kv_transfer_params.remote_num_tokens",
            )

    def reject(self, request_id: str, load: HandOff, now_ns: int) -> None:
        """Let go of the holder's blocks for a request that was refused at the door (KVC-REL-002)."""
        self.consumer.arrive(request_id, load, "", now_ns)
        self.consumer.abort(request_id)

    def abort(self, sequence: Sequence) -> None:
        """Give up on a request, wherever it stands. Harmless when it has ended."""
        request_id = sequence.request_id
        self._asked.pop(request_id, None)
        free = self.consumer.abort(request_id)
        if sequence.row >= 0 and sequence.row in self.core.loading:
            blocks = self.core.detach(sequence)
            if free:
                self.core.pool.release(reversed(blocks))  # of a cached prefix the end is evicted first
            else:
                self._draining[request_id] = blocks
        else:
            self.core.abort(sequence)
        self.producer.abort(request_id)
        if sequence.held_blocks and self.producer.leases.get(request_id) is None:
            self._let_go(sequence)
        self._sequences.pop(request_id, None)

    def finished(self, sequence: Sequence, now_ns: int) -> dict[str, Any] | None:
        """Start the lease of a request that has ended and is to be kept; return its `kv_transfer_params`, or None."""
        asked = self._asked.pop(sequence.request_id, None)
        self._sequences.pop(sequence.request_id, None)
        if asked is None:
            if sequence.held_blocks:  # aborted while its last step ran
                self._let_go(sequence)
            return None
        if not sequence.held_blocks:
            return None
        turn = not asked.keep
        tokens = sequence.prompt_tokens if asked.keep else sequence.prompt_tokens + sequence.output_tokens - 1
        blocks = sequence.held_blocks[: -(-tokens // BLOCK_TOKENS)]
        sequence.held_blocks = sequence.held_blocks[len(blocks) :]  # an answer of more than the one token asked for
        self._let_go(sequence)
        content = fingerprint(sequence.tokens[:tokens], blocks)
        if turn:
            lease = self.producer.grant_turn(sequence.request_id, blocks, content=content, now_ns=now_ns)
        else:
            lease = self.producer.grant(
                sequence.request_id, blocks, readers=asked.readers, content=content, now_ns=now_ns
            )  # fmt: skip
        self._say_granted(lease, now_ns)
        return self._hand_off(sequence.request_id, blocks, tokens, lease.deadline_ns if turn else 0).params()

    def _say_granted(self, lease: Lease, now_ns: int) -> None:
        self._say(
            EventKind.LEASE_GRANTED, lease.request_id, blocks=len(lease.blocks),
            duration_s=(lease.deadline_ns - now_ns) / 1e9, turn=lease.turn,
        )  # fmt: skip

    def renew(self, handoff: HandOff, now_ns: int) -> dict[str, Any] | None:
        """Keep a turn's blocks longer (KVC-CLK-007); return the new hand-off, None if the blocks are gone."""
        lease = self.producer.leases.get(handoff.request_id)
        if lease is None or lease.blocks != handoff.blocks or self.producer.renew(lease.request_id, now_ns) is None:
            return None
        self._say(EventKind.TURN_RENEWED, handoff.request_id, duration_s=(lease.deadline_ns - now_ns) / 1e9)
        return self._hand_off(handoff.request_id, lease.blocks, handoff.tokens, lease.deadline_ns).params()

    def _hand_off(self, request_id: str, blocks: list[int], tokens: int, expiry_ns: int, group: str = "") -> HandOff:
        return HandOff(
            engine_id=self._engine_id, request_id=request_id, host=self._host, port=self._port, blocks=blocks,
            tokens=tokens, ranks=self._ranks, expiry_ns=expiry_ns, block_group=group,
        )  # fmt: skip

    # Block groups.

    def lend(self, token: str, group: str, blocks: list[int], last_digest: bytes, now_ns: int) -> HandOff:
        """Lease a group's blocks, one reference on each of which becomes the lease's, to the bearer of a token.

        Raises ValueError if the token is lent on already.
        """
        content = group_fingerprint(last_digest, blocks)
        lease = self.producer.grant(token, blocks, readers=1, content=content, now_ns=now_ns)
        self._say_granted(lease, now_ns)
        return self._hand_off(token, blocks, len(blocks) * BLOCK_TOKENS, 0, group)

    def fetch(self, fetch_id: str, load: HandOff, digests: list[bytes], now_ns: int) -> None:
        """Read another engine's group into this pool; `fetched` tells how it came out. Raises OutOfBlocks."""
        blocks = self.core.pool.take_prefix(digests)
        start = len(blocks)
        try:
            blocks += self.core.pool.allocate(len(digests) - start)
        except OutOfBlocks:
            self.core.pool.release(reversed(blocks))
            raise
        self._fetches[fetch_id] = blocks
        self.consumer.arrive(fetch_id, load, group_fingerprint(digests[-1], load.blocks), now_ns)
        if start == len(digests):
            self.consumer.spare(fetch_id)
            self._fetch_over(fetch_id, "")
            return
        remote, local = (np.array(numbers[start:], np.int64) for numbers in (load.blocks, blocks))
        self.consumer.admit(fetch_id, remote, local, now_ns)

    def fetching(self, fetch_id: str) -> bool:
        """Whether a fetch of this id is under way, or may still land after it was given up: no other may be begun."""
        return fetch_id in self._fetches or fetch_id in self._draining

    def give_up_fetch(self, fetch_id: str) -> None:
        """Read for a fetch no longer. Harmless when it has ended."""
        if fetch_id in self._fetches:
            free = self.consumer.abort(fetch_id)
            self._fetch_over(fetch_id, "it was given up", still_landing=not free)

    def _fetch_over(self, fetch_id: str, problem: str, *, still_landing: bool = False) -> None:
        blocks = self._fetches.pop(fetch_id)
        if still_landing:
            self._draining[fetch_id] = blocks
        elif problem:
            self.core.pool.release(reversed(blocks))
        self.fetched.append(Fetched(fetch_id, [] if problem else blocks, problem))

    def _let_go(self, sequence: Sequence) -> None:
        self.core.pool.release(reversed(sequence.held_blocks))
        sequence.held_blocks = []

    # Peers.

    def welcome(self, engine_id: str, addresses: list[RankAddress]) -> None:
        """Take up a peer that has shaken hands with us, so that it can be answered. Raises PeerRefused."""
        if engine_id in self._unreachable:
            self._unreachable.discard(engine_id)
            self._transport.remove_peer(engine_id)  # what is known of it leads nowhere
        self._transport.add_peer(engine_id, addresses)
        self._heard(engine_id)
        while len(self._guests) > GUESTS_MAX:
            self._let_leave(self._guests.popitem(last=False)[0])

    def _heard(self, engine_id: str) -> None:
        self._guests[engine_id] = None
        self._guests.move_to_end(engine_id)

    def _let_leave(self, engine_id: str) -> None:
        """Forget a peer that reads from us, unless we read from it as well."""
        self._guests.pop(engine_id, None)
        self._unreachable.discard(engine_id)
        if engine_id not in self.consumer.peers:
            self._transport.remove_peer(engine_id)

    @property
    def busy(self) -> bool:
        """Whether there is something to poll for, even while the core has nothing to do."""
        holds = len(self.producer.leases) or self.producer.pending
        return bool(holds or not self.consumer.idle or self.core.load_wanted or self.core.load_spared)

    @property
    def strangers(self) -> int:
        """Notifications that came from engines which are no peers, and were dropped (O2)."""
        return self._transport.strangers

    @property
    def blocks_elsewhere(self) -> list[int]:
        """Blocks that are held for no running request, once for each reference: leased ones, and what still drains."""
        kept = (*self.producer.leases.blocks, *self._draining.values(), *self._fetches.values())
        return [block for blocks in kept for block in blocks]

    @property
    def draining(self) -> dict[str, list[int]]:
        """Destinations of requests that are over, in which a transfer may still land (S6)."""
        return self._draining

    # The step loop's calls.

    def poll(self, now_ns: int) -> None:
        """Take in what has happened, do what is due."""
        for shaken in self._shaker.results():
            self._take(shaken, now_ns)
        inbox = self._transport.receive()
        for sender, _ in inbox:
            if sender in self._guests:
                self._heard(sender)
        for engine_id, answer in self.producer.step(inbox, now_ns):
            self.consumer.answered(engine_id, answer, now_ns)
        for ended in self._transport.poll():
            problem = "" if ended.result is ReadResult.DONE else ended.reason or ended.result
            self.consumer.ended(ended.read_id, problem, now_ns, torn=ended.result is ReadResult.TORN)
        self._admit(now_ns)
        self.consumer.tick(now_ns)
        self._act(now_ns)

    def _take(self, shaken: Shaken, now_ns: int) -> None:
        engine_id = shaken.engine_id
        if shaken.measured:
            self.consumer.measured(engine_id, shaken.samples, now_ns)
            return
        problem = shaken.problem
        if not problem:
            try:
                self._transport.add_peer(engine_id, shaken.addresses)
            except PeerRefused as error:
                problem = str(error)
        if problem:
            self.consumer.connect_failed(engine_id, problem, now_ns)
            return
        self.consumer.connected(engine_id, shaken.interval_ns, shaken.samples, now_ns)
        peer = self.consumer.peers.get(engine_id)
        estimate = peer.clock.estimate(now_ns) if peer else None
        self._say(
            EventKind.PEER_CONNECTED, engine_id, handshake_ms=shaken.took_ns / NS_PER_MS,
            offset_ms=estimate.offset_ns / NS_PER_MS if estimate else None,
            offset_error_ms=estimate.error_ns / NS_PER_MS if estimate else None,
        )  # fmt: skip

    def _admit(self, now_ns: int) -> None:
        """Start the loads of requests that the core has given their destination."""
        wanted, self.core.load_wanted = self.core.load_wanted, []
        for sequence in wanted:
            asked = self._asked.get(sequence.request_id)
            if asked is None or asked.load is None:  # aborted meanwhile
                continue
            missing = slice(sequence.load_from, sequence.load_to)
            remote, local = (np.array(blocks[missing], np.int64) for blocks in (asked.load.blocks, sequence.blocks))
            self.consumer.admit(sequence.request_id, remote, local, now_ns)
        spared, self.core.load_spared = self.core.load_spared, []
        for sequence in spared:
            self.consumer.spare(sequence.request_id)

    def _act(self, now_ns: int) -> None:
        for _ in range(ROUNDS_MAX):
            actions = [*self.producer.take(), *self.consumer.take()]
            if not actions:
                return
            for action in actions:
                self._do(action, now_ns)

    def _do(self, action: object, now_ns: int) -> None:
        match action:
            case Send():
                sent = self._transport.send(action.engine_id, action.data)
                self.consumer.sent(action, now_ns, ok=sent)
                if not sent and action.engine_id in self._guests:
                    self._unreachable.add(action.engine_id)  # but still heard, if it speaks (L2)
            case Read():
                remote, local = np.asarray(action.remote_blocks), np.asarray(action.local_blocks)
                self._transport.read(action.read_id, action.engine_id, remote, local)
            case Cancel():
                self._transport.cancel(action.read_id)
            case Connect():
                self._shaker.connect(action.engine_id, action.host, action.port)
            case Measure():
                self._shaker.measure(action.engine_id, action.host, action.port)
            case Freed():
                self._freed(action, now_ns)
            case Loaded() | Failed() | Abandoned():
                self._load_over(action)
            case Drained():
                self.core.pool.release(reversed(self._draining.pop(action.request_id, [])))
            case _:
                self._note(action)

    def _freed(self, freed: Freed, now_ns: int) -> None:
        lease = freed.lease
        self.core.pool.release(reversed(lease.blocks))  # of a cached prefix the end is evicted first
        held_ms = (now_ns - lease.granted_ns) / NS_PER_MS
        told: dict[str, Scalar] = {
            "blocks": len(lease.blocks), "held_ms": held_ms, "turn": lease.turn, "heard_from": lease.heard_from,
        }  # fmt: skip
        if is_token(lease.request_id):
            self.loans_ended.append(lease.request_id)
        if freed.how is None:
            self._say(EventKind.LEASE_EXPIRED, lease.request_id, **told)
        else:
            self._say(EventKind.LEASE_RELEASED, lease.request_id, how=freed.how, **told)

    def _load_over(self, over: Loaded | Failed | Abandoned) -> None:
        if over.request_id in self._fetches:
            problem = "" if isinstance(over, Loaded) else over.reason
            self._fetch_over(over.request_id, problem, still_landing=isinstance(over, Abandoned))
            return
        sequence = self._sequences.get(over.request_id)
        if sequence is None or sequence.row not in self.core.loading:
            return
        if isinstance(over, Loaded):
            self.core.loaded(sequence)
            self._say_load(
                EventKind.LOAD_DONE, over.request_id, tokens=sequence.remote_tokens, blocks=over.blocks,
                waited_ms=over.waited_ns / NS_PER_MS, read_ms=over.read_ns / NS_PER_MS,
            )  # fmt: skip
            return
        expired = isinstance(over, Failed) and over.expired
        policy = LoadPolicy.RECOMPUTE if expired else self.terms.kv_load_failure_policy
        self._say_load(EventKind.LOAD_FAILED, over.request_id, reason=over.reason, policy=policy, expired=expired)
        if policy is LoadPolicy.FAIL:
            self._drop(sequence, still_landing=isinstance(over, Abandoned))
            self.failed.append((sequence, over.reason))
        elif isinstance(over, Abandoned):
            self._draining[over.request_id] = self.core.restart(sequence)
        else:
            self.core.load_failed(sequence)

    def _drop(self, sequence: Sequence, *, still_landing: bool) -> None:
        blocks = self.core.detach(sequence)
        if still_landing:
            self._draining[sequence.request_id] = blocks
        else:
            self.core.pool.release(reversed(blocks))
        self._sequences.pop(sequence.request_id, None)
        self._asked.pop(sequence.request_id, None)

    def _say_load(self, kind: EventKind, request_id: str, **detail: Scalar) -> None:
        asked = self._asked.get(request_id)
        load = asked.load if asked else None
        remote = {"remote_engine_id": load.engine_id, "remote_request_id": load.request_id} if load else {}
        self._say(kind, request_id, **remote, **detail)

    def _note(self, action: object) -> None:
        """Say what needs no more than to be said."""
        match action:
            case Extended():
                self._say(
                    EventKind.LEASE_EXTENDED, action.engine_id, leases=action.leases, unknown=action.unknown
                )  # fmt: skip
            case Refused():
                self._say(EventKind.CLAIM_REFUSED, action.request_id, reader=action.reader, reason=action.reason)
            case Judged():
                self._say_load(
                    EventKind.TURN_JUDGED, action.request_id, live=action.live, left_ms=action.left_ns / NS_PER_MS,
                    error_ms=action.error_ns / NS_PER_MS,
                )  # fmt: skip
            case Forget():
                if action.engine_id not in self._guests:  # else it reads from us, and is still to be heard (L2)
                    self._transport.remove_peer(action.engine_id)
                self._say(EventKind.PEER_LOST, action.engine_id, reason=action.reason)
            case _:
                raise TypeError(f"nobody does {action!r}")

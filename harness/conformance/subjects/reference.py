"""The reference implementation as a subject: its core, rules and connector, on a world's clocks and network."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from faults.nixl.dialects import Meaning, Reference
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
    Engine,
    EngineSpec,
    Flight,
    Host,
    How,
    Params,
    ReadState,
    Refused,
    Request,
)
from reference_impl.content import BLOCK_TOKENS, BLOCK_WORDS, weight_words
from reference_impl.engine.connector import Connector, Shaken
from reference_impl.engine.core import EngineCore, Sequence
from reference_impl.engine.profile import Profile
from reference_impl.oracle import Weights, expected_answers
from reference_impl.rules.agreement import Hello, incompatible
from reference_impl.rules.clocksync import Sample
from reference_impl.rules.events import EventKind, Scalar
from reference_impl.rules.handoff import BadHandOff, parse
from reference_impl.rules.terms import KvTerms, LoadPolicy
from reference_impl.transport.base import BlockNumbers, Ended, PeerRefused, RankAddress, ReadResult
from reference_impl.transport.plan import BlockList, block_list, pieces

HOST: Final = "127.0.0.1"
WEIGHTS: Final = Weights(seed=7, words=4096)
CONTEXT_TOKENS_MAX: Final = 1_024
PROMPTS_KEPT: Final = 4_096


@functools.cache
def _weight_words() -> NDArray[np.uint64]:
    return weight_words(WEIGHTS.seed, 0, WEIGHTS.words)


@functools.lru_cache(PROMPTS_KEPT)
def _right_answer(prompt: tuple[int, ...], count: int) -> list[int]:
    answer: list[int] = expected_answers([np.array(prompt, np.int64)], [count], WEIGHTS)[0].tolist()
    return answer


class ReferenceSubject:
    """See above."""

    name = "reference"
    capabilities = frozenset(Capability) - {Capability.PUSH}

    def __init__(self) -> None:
        self.versions = {"pdproof": version("pdproof")}
        self._dialect = Reference()
        self._engines: dict[str, ReferenceEngine] = {}

    def engine(self, spec: EngineSpec, host: Host) -> Engine:
        """Return a new engine."""
        engine = self._engines[spec.name] = ReferenceEngine(self, spec, host)
        return engine

    def memory_of(self, name: str) -> HostTransport | None:
        """Return an engine's memory, as its peers read it."""
        engine = self._engines.get(name)
        return engine.transport if engine is not None else None

    def forget(self, name: str) -> None:
        """An engine has ended."""
        self._engines.pop(name, None)

    def meaning(self, message: bytes) -> Meaning:
        """Return what a message says."""
        return self._dialect.meaning(message)

    def close(self) -> None:
        """There is nothing to give back."""


class ReferenceEngine:
    """One life of a reference engine."""

    def __init__(self, subject: ReferenceSubject, spec: EngineSpec, host: Host) -> None:
        self._subject, self._spec, self._host = subject, spec, host
        profile = Profile(
            name="world", prefill_tokens_per_s=1e6, decode_base_s=0.001, decode_per_request_s=0.0001, chunk_tokens=256,
            requests_max=spec.slots, context_tokens_max=CONTEXT_TOKENS_MAX, kv_blocks=spec.blocks, weights_mib=1,
        )  # fmt: skip
        kv = np.zeros((profile.kv_blocks, BLOCK_WORDS), np.uint64)
        generations = np.zeros(profile.kv_blocks, np.uint64)
        self.core = EngineCore(profile, generations).bind(kv, _weight_words())
        self.transport = HostTransport(subject, spec, host, kv, generations)
        self._shaker = HostShaker(host, self._hello)
        terms = spec.terms
        self.connector = Connector(
            self.core,
            KvTerms(
                kv_lease_duration=terms.lease_s, kv_load_failure_policy=LoadPolicy(terms.policy),
                bidirectional_kv_xfer=terms.two_turn, decoder_kv_blocks_ttl=terms.ttl_s,
            ),
            self.transport, self._shaker, self._say, engine_id=spec.name, host=HOST, port=spec.port, ranks=spec.ranks,
        )  # fmt: skip
        self._sequences: dict[str, Sequence] = {}
        self._loaded: dict[str, int] = {}
        self._made: list[Sequence] = []
        self._endings: list[Ending] = []

    def submit(self, request: Request) -> None:
        """Check what is asked, and queue it."""
        prompt = np.array(request.prompt, np.int64)
        try:
            asked = parse(request.params or {}, block_tokens=BLOCK_TOKENS, hosts=(HOST,))
            sequence = self.connector.submit(
                request.request_id, prompt, request.max_tokens, asked, self._host.now_ns()
            )  # fmt: skip
        except (BadHandOff, ValueError) as error:
            raise Refused(str(error)) from error
        self._sequences[request.request_id] = sequence

    def abort(self, request_id: str) -> None:
        """Give up on a request, or on what is kept of it."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            self.connector.producer.abort(request_id)
            return
        self.connector.abort(sequence)
        self._endings.append(Ending(request_id=request_id, how=How.ABORTED))

    def deliver(self, sender: str, message: bytes, rank: int, to_rank: int) -> None:  # noqa: ARG002 # head ranks talk
        """Put it into the inbox."""
        self.transport.arrived(sender, message)

    def answer(self, question: bytes) -> bytes | None:
        """Shake hands."""
        try:
            asked = msgspec.msgpack.decode(question, type=_Question)
        except msgspec.DecodeError:
            return None
        mine = self._hello()
        problem = "" if asked.wanted == self._spec.name else f"{self._spec.name} lives there now"
        if not problem and not asked.measured:
            problem = incompatible(mine, asked.hello)
        if not problem and not asked.measured:
            try:
                self.connector.welcome(asked.hello.engine_id, asked.hello.addresses)
            except PeerRefused as error:
                problem = str(error)
        return msgspec.msgpack.encode(_Answer(problem=problem, clock_ns=self._host.now_ns(), hello=mine))

    def _hello(self) -> Hello:
        return Hello(
            engine_id=self._spec.name, role=self._spec.role, model=self._spec.model, block_tokens=BLOCK_TOKENS,
            block_bytes=8 * BLOCK_WORDS, blocks=self._spec.blocks, ranks=self._spec.ranks, terms=self.connector.terms,
            addresses=self.transport.addresses(),
        )  # fmt: skip

    def step(self) -> None:
        """Hand out what the last step made, poll the connector, compute."""
        now_ns = self._host.now_ns()
        made, self._made = self._made, []
        for sequence in made:
            params = self.connector.finished(sequence, now_ns)
            if self._sequences.pop(sequence.request_id, None) is not None:
                self._endings.append(self._answered(sequence, params))
        self.connector.poll(now_ns)
        failed, self.connector.failed = self.connector.failed, []
        for sequence, reason in failed:
            self._sequences.pop(sequence.request_id, None)
            self._endings.append(Ending(request_id=sequence.request_id, how=How.FAILED, error=reason))
        if self.core.has_work:
            self._made = [s for s in self.core.step().produced if s.finished]

    def _answered(self, sequence: Sequence, params: dict[str, object] | None) -> Ending:
        got = sequence.tokens[sequence.prompt_tokens : sequence.known_tokens].tolist()
        prompt = tuple(sequence.tokens[: sequence.prompt_tokens].tolist())
        return Ending(
            request_id=sequence.request_id, how=How.ANSWERED, hand_off=params, answer=got,
            right=got == _right_answer(prompt, sequence.output_tokens_max),
            loaded=self._loaded.pop(sequence.request_id, 0),
        )  # fmt: skip

    def renew(self, hand_off: Params) -> Params | None:
        """Keep a turn alive."""
        load = parse(hand_off, block_tokens=BLOCK_TOKENS, hosts=(HOST,)).load
        return None if load is None else self.connector.renew(load, self._host.now_ns())

    def ended(self) -> list[Ending]:
        """Return what ended."""
        endings, self._endings = self._endings, []
        return endings

    def holds(self) -> dict[str, list[int]]:
        """Return running requests' blocks, leased ones, and destinations that something may still land in."""
        held = {name: list(s.blocks) for name, s in self._sequences.items() if s.blocks}
        held |= {s.request_id: list(s.held_blocks) for s in self._made if s.held_blocks}
        return held | self.connector.producer.leases.held | self.connector.draining

    def metrics(self) -> dict[str, float]:
        """Return its counters."""
        holder, reader = self.connector.producer.counts, self.connector.consumer.counts
        return {
            EXPIRED: holder.expired, LATE: holder.late_claims, DECLINED: reader.expired_turns,
            FAILED_READS: reader.failed_transfers, FAILED_HANDSHAKES: reader.handshakes_failed,
            UNSENT_HEARTBEATS: reader.heartbeats_failed, BAD_MESSAGES: holder.malformed,
        }  # fmt: skip

    def close(self) -> None:
        """End it."""
        self.transport.close()
        self._subject.forget(self._spec.name)

    def _say(self, kind: EventKind, subject: str, **detail: Scalar) -> None:
        if kind is EventKind.LOAD_DONE:
            self._loaded[subject] = int(detail["tokens"] or 0)


@dataclass
class _Reading:
    read_id: int
    flight: Flight
    holder: HostTransport
    blocks: BlockList
    before: NDArray[np.uint64]
    torn: bool = False


class HostTransport:
    """`reference_impl.transport.base.Transport` over a world's network. A read is copied in one moment."""

    def __init__(
        self, subject: ReferenceSubject, spec: EngineSpec, host: Host, kv: NDArray[np.uint64],
        generations: NDArray[np.uint64],
    ) -> None:  # fmt: skip
        self.kv, self.generations = kv, generations
        self.strangers = 0
        self.alive = True
        self._subject, self._spec, self._host = subject, spec, host
        self._peers: dict[str, list[RankAddress]] = {}
        self._inbox: list[tuple[str, bytes]] = []
        self._reads: list[_Reading] = []
        self._ended: list[Ended] = []

    def addresses(self) -> list[RankAddress]:
        """Return what a peer needs to reach each rank."""
        name = self._spec.name.encode()
        return [RankAddress(name, rank + 1, 0 if rank else 1, len(self.kv)) for rank in range(self._spec.ranks)]

    def add_peer(self, engine_id: str, addresses: list[RankAddress]) -> None:
        """Make a peer reachable. Raises PeerRefused."""
        if not addresses or addresses[0].metadata != engine_id.encode():
            raise PeerRefused(f"these are not the addresses of {engine_id}")
        self._peers[engine_id] = addresses

    def remove_peer(self, engine_id: str) -> None:
        """Forget a peer."""
        self._peers.pop(engine_id, None)

    def send(self, engine_id: str, message: bytes) -> bool:
        """Send to a peer."""
        return engine_id in self._peers and self._host.send(engine_id, message)

    def receive(self) -> list[tuple[str, bytes]]:
        """Return what has arrived."""
        arrived, self._inbox = self._inbox, []
        return arrived

    def arrived(self, sender: str, message: bytes) -> None:
        """Take a message in."""
        if sender in self._peers:
            self._inbox.append((sender, message))
        else:
            self.strangers += 1

    def read(self, read_id: int, engine_id: str, remote_blocks: BlockNumbers, local_blocks: BlockNumbers) -> None:
        """Start a read."""
        holder = self._subject.memory_of(engine_id)
        try:
            if engine_id not in self._peers or holder is None:
                raise PeerRefused(f"{engine_id} is no peer of ours")
            blocks = block_list(remote_blocks, local_blocks, self._peers[engine_id][0].blocks, len(self.kv))
        except (PeerRefused, ValueError) as reason:
            self._ended.append(Ended(read_id, ReadResult.FAILED, str(reason)))
            return
        before = holder.generations[blocks.remote].copy()
        ranks = len(self._peers[engine_id])
        flight = self._host.read(engine_id, partial(self._land, holder, blocks, ranks))
        self._reads.append(_Reading(read_id, flight, holder, blocks, before))

    def _land(self, holder: HostTransport, blocks: BlockList, ranks: int) -> None:
        for piece in pieces(self._spec.ranks, ranks):
            words = slice(piece.first, piece.first + piece.words)
            self.kv[blocks.local, words] = holder.kv[blocks.remote, words]

    def cancel(self, read_id: int) -> None:
        """A read ends when it would have ended."""

    def poll(self) -> list[Ended]:
        """Return the reads that have ended."""
        ended, self._ended = self._ended, []
        running = []
        for reading in self._reads:
            if reading.flight.state is ReadState.RUNNING:
                running.append(reading)
            elif reading.flight.state is ReadState.FAILED or not reading.holder.alive:
                ended.append(Ended(reading.read_id, ReadResult.FAILED, "the network failed"))
            elif (reading.holder.generations[reading.blocks.remote] != reading.before).any():
                ended.append(Ended(reading.read_id, ReadResult.TORN, "blocks were given away while they were read"))
            else:
                ended.append(Ended(reading.read_id, ReadResult.DONE))
        self._reads = running
        return ended

    def close(self) -> None:
        """End everything."""
        self.alive = False


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    wanted: str
    measured: bool
    hello: Hello


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    problem: str
    clock_ns: int
    hello: Hello


class HostShaker:
    """Handshakes over a world's network (`reference_impl.engine.connector.Shaker`)."""

    def __init__(self, host: Host, mine: Callable[[], Hello]) -> None:
        self._host, self._mine = host, mine
        self._results: list[Shaken] = []

    def connect(self, engine_id: str, host: str, port: int) -> None:  # noqa: ARG002 # the interface's
        """Start a handshake."""
        self._go(engine_id, port, measured=False)

    def measure(self, engine_id: str, host: str, port: int) -> None:  # noqa: ARG002 # the interface's
        """Start a measurement."""
        self._go(engine_id, port, measured=True)

    def results(self) -> list[Shaken]:
        """Return what has come out."""
        results, self._results = self._results, []
        return results

    def _go(self, engine_id: str, port: int, *, measured: bool) -> None:
        question = _Question(wanted=engine_id, measured=measured, hello=self._mine())
        self._host.ask(port, msgspec.msgpack.encode(question), partial(self._back, engine_id, measured))

    def _back(self, engine_id: str, measured: bool, reply: bytes | None, sent_ns: int, got_ns: int) -> None:
        if reply is None:
            self._over(engine_id, measured, "no answer in time")
            return
        answer = msgspec.msgpack.decode(reply, type=_Answer)
        problem = answer.problem or ("" if measured else incompatible(self._mine(), answer.hello))
        if problem:
            self._over(engine_id, measured, problem)
            return
        terms = answer.hello.terms
        self._results.append(
            Shaken(
                engine_id=engine_id, measured=measured, addresses=answer.hello.addresses, took_ns=got_ns - sent_ns,
                interval_ns=terms.interval_ns if terms.renews else 0,
                samples=[Sample(sent_ns, answer.clock_ns, got_ns)],
            )
        )  # fmt: skip

    def _over(self, engine_id: str, measured: bool, problem: str) -> None:
        self._results.append(Shaken(engine_id=engine_id, measured=measured, problem=problem))

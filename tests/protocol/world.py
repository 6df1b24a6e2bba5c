"""A whole deployment in virtual time: prefill and decode engines, a router, clients, and everything that goes wrong.

Cores, connectors, pools and content are the real ones; network, handshakes, clocks and clients are made here, out of
one seed. Nothing happens between two calls of `World.step`: what is on its way arrives, then each live engine hands
out what its last step made, polls its connector, and steps.
"""

from __future__ import annotations

import functools
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from reference_impl.content import BLOCK_TOKENS, BLOCK_WORDS, Ints, weight_words
from reference_impl.engine.connector import Connector, Shaken
from reference_impl.engine.core import EngineCore, Sequence
from reference_impl.engine.profile import Profile
from reference_impl.oracle import Weights, expected_answers
from reference_impl.rules.clock import NS_PER_MS, NS_PER_S, PPM
from reference_impl.rules.clocksync import Sample
from reference_impl.rules.events import EventKind, Scalar
from reference_impl.rules.handoff import BadHandOff, HandOff, parse
from reference_impl.rules.messages import MAGIC
from reference_impl.rules.terms import KvTerms
from reference_impl.transport.base import PeerRefused, RankAddress, ReadResult
from reference_impl.transport.memory import MemoryNetwork, ReadPlan
from tests.protocol.invariants import Watch

S, MS = NS_PER_S, NS_PER_MS
DAY = 86_400 * S
HOST = "127.0.0.1"
STEP_MAX_NS = 250 * MS
"""No engine goes longer without a look at its connector."""
PROMPT_DELAY_NS = 100 * MS
"""A message that takes longer is late."""
DRAIN_NS = 600 * S
"""Beside four times to live; a tight pool full of turns serves a request a time to live."""
ANSWER_MAX = 36
WEIGHTS = Weights(seed=7, words=4096)
WEIGHT_WORDS = weight_words(WEIGHTS.seed, 0, WEIGHTS.words)
TERMS = KvTerms(
    kv_lease_duration=3.0, single_timeout=20.0, decoder_kv_blocks_ttl=5.0, read_limit=1.5, load_limit=4.0
)  # fmt: skip
PROFILE = Profile(
    name="world", prefill_tokens_per_s=1e6, decode_base_s=0.001, decode_per_request_s=0.0001, chunk_tokens=128,
    requests_max=3, context_tokens_max=384, kv_blocks=40, weights_mib=1,
)  # fmt: skip


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """How often what goes wrong, as probabilities of one message, read, handshake or client."""

    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0
    damaged: float = 0.0
    slow_reads: float = 0.0
    """Reads that outlast their limit."""
    bad_reads: float = 0.0
    """Reads that fail or are torn."""
    bad_handshakes: float = 0.0
    held: float = 0.0
    """Hand-offs that router or client hold past the lease."""
    reused: float = 0.0
    """Hand-offs that a client uses twice."""
    rejected: float = 0.0
    """Requests that the decode side refuses at its door."""
    evictions: float = 0.0
    """Engines that have lost their prefix cache when a request comes, so that it has to be read."""
    crashes: float = 0.0
    """Engines that die in one turn of the history."""
    frozen: float = 0.0
    """Engines that are stopped for a while."""
    aborts: float = 0.0
    """Requests that are aborted."""


NO_FAULTS = Faults()


@functools.cache
def library() -> list[Ints]:
    """Prompts of 40 to 200 tokens; some begin alike, so that they hit each other's prefix."""
    chance = np.random.default_rng(11)
    roots = [chance.integers(0, 4096, 64) for _ in range(3)]
    prompts = []
    for number in range(24):
        own = chance.integers(0, 4096, int(chance.integers(40, 136)))
        prompts.append(np.concatenate([roots[number % 3], own]) if number % 2 else own)
    return prompts


_ANSWERS: dict[bytes, list[int]] = {}


def right_answer(prompt: Ints, count: int) -> list[int]:
    """The oracle's answer."""
    key = prompt.tobytes()
    if not _ANSWERS:
        made = expected_answers(library(), [ANSWER_MAX] * len(library()), WEIGHTS)
        _ANSWERS.update((p.tobytes(), a.tolist()) for p, a in zip(library(), made, strict=True))
    if key not in _ANSWERS:
        _ANSWERS[key] = expected_answers([prompt], [ANSWER_MAX], WEIGHTS)[0].tolist()
    return _ANSWERS[key][:count]


class WorldClock:
    """One engine's clock: the network's time, seen through an offset and a drift."""

    def __init__(self, network: MemoryNetwork, offset_ns: int, drift_ppm: int) -> None:
        self._network, self._offset_ns, self._drift_ppm = network, offset_ns, drift_ppm

    def now_ns(self) -> int:
        """What it shows."""
        true_ns = self._network.now_ns
        return self._offset_ns + true_ns + true_ns * self._drift_ppm // PPM


@dataclass(eq=False)
class Slot:
    """A place where engines live, one after the other: a name, a port, a clock."""

    name: str
    port: int
    ranks: int
    clock: WorldClock
    lives: int = 0
    engine: Engine | None = None
    frozen: bool = False
    thawed_ns: int = 0
    """True time of the last thaw."""


@dataclass(eq=False)
class Job:
    """One request of a client, with all its legs."""

    name: str
    prompt: Ints
    answer_tokens: int
    readers: int
    turns_left: int
    load: HandOff | None = None
    """What the first leg loads: the last turn."""
    params: dict[str, Any] | None = None
    """The first leg's hand-off."""


@dataclass(eq=False)
class Leg:
    """One request at one engine."""

    request_id: str
    engine: Engine
    job: Job
    sequence: Sequence
    keep: bool
    load: HandOff | None
    arrived_ns: int
    """True time."""
    end: str = ""
    """"answered", "aborted", "failed: ..." or "lost"; "" while it lives."""


class Engine:
    """One life of an engine."""

    def __init__(self, world: World, slot: Slot) -> None:
        slot.lives += 1
        self.world, self.slot = world, slot
        self.engine_id = f"{slot.name}.{slot.lives}"
        self.clock = slot.clock
        self.alive = True
        self.legs: dict[str, Leg] = {}
        """Those that have not ended."""
        self._made: list[Sequence] = []
        """Finished in the last step, not handed out yet."""
        profile = world.profile
        kv = np.zeros((profile.kv_blocks, BLOCK_WORDS), np.uint64)
        self.generations = np.zeros(profile.kv_blocks, np.uint64)
        self.core = EngineCore(profile, self.generations).bind(kv, WEIGHT_WORDS)
        self.transport = world.network.join(self.engine_id, kv, self.generations, slot.ranks)
        self.shaker = WorldShaker(world, self)
        self.connector = Connector(
            self.core, world.terms, self.transport, self.shaker, self._say, engine_id=self.engine_id, host=HOST,
            port=slot.port, ranks=slot.ranks,
        )  # fmt: skip

    @property
    def made(self) -> list[Sequence]:
        """Finished sequences that wait to be handed out."""
        return self._made

    def _say(self, kind: EventKind, subject: str, **detail: Scalar) -> None:
        self.world.heard(self, kind, subject, detail)

    def turn(self) -> None:
        """Do what the step loop does between two waits."""
        now_ns = self.clock.now_ns()
        made, self._made = self._made, []
        for sequence in made:
            params = self.connector.finished(sequence, now_ns)
            leg = self.legs.pop(sequence.request_id, None)
            if leg is not None:
                self.world.answered(leg, params)
        self.connector.poll(now_ns)
        failed, self.connector.failed = self.connector.failed, []
        for sequence, reason in failed:
            leg = self.legs.pop(sequence.request_id)
            self.world.ended(leg, f"failed: {reason}")
        if self.core.has_work:
            self._made = [s for s in self.core.step().produced if s.finished]


class WorldShaker:
    """Handshakes that take virtual time, fail, and meet dead and restarted engines."""

    def __init__(self, world: World, engine: Engine) -> None:
        self._world, self._engine = world, engine
        self._results: list[Shaken] = []

    def connect(self, engine_id: str, host: str, port: int) -> None:
        """Start a handshake."""
        assert host == HOST
        self._go(engine_id, port, measured=False)

    def measure(self, engine_id: str, host: str, port: int) -> None:
        """Start a measurement."""
        assert host == HOST
        self._go(engine_id, port, measured=True)

    def results(self) -> list[Shaken]:
        """What has come out."""
        results, self._results = self._results, []
        return results

    def _go(self, engine_id: str, port: int, *, measured: bool) -> None:
        world = self._world
        fail = partial(self._fail, engine_id, measured)
        if world.happens(world.faults.bad_handshakes):
            world.network.after(world.between(1, 3000 * MS), partial(fail, "no answer in time"))
            return
        sent_ns = self._engine.clock.now_ns()
        world.network.after(world.short_delay(), partial(self._there, engine_id, port, measured, sent_ns))

    def _there(self, engine_id: str, port: int, measured: bool, sent_ns: int) -> None:
        """Be at the other side."""
        world, peer = self._world, self._world.at(port)
        problem, remote_ns = "", 0
        addresses: list[RankAddress] = []
        if peer is None:
            problem = "connection refused"
        elif peer.slot.frozen:
            world.network.after(3 * S, partial(self._fail, engine_id, measured, "no answer in time"))
            return
        elif peer.engine_id != engine_id:
            problem = f"{peer.engine_id} lives there now"
        else:
            remote_ns = peer.clock.now_ns()
            addresses = peer.transport.addresses()
            try:
                if not measured:
                    peer.connector.welcome(self._engine.engine_id, self._engine.transport.addresses())
            except PeerRefused as error:
                problem = str(error)
        if problem:
            world.network.after(world.short_delay(), partial(self._fail, engine_id, measured, problem))
            return
        world.network.after(
            world.short_delay(), partial(self._back, engine_id, measured, sent_ns, remote_ns, addresses)
        )

    def _back(self, engine_id: str, measured: bool, sent_ns: int, remote_ns: int, addresses: list[RankAddress]) -> None:
        now_ns = self._engine.clock.now_ns()
        self._results.append(
            Shaken(
                engine_id=engine_id, measured=measured, addresses=addresses, took_ns=now_ns - sent_ns,
                interval_ns=self._world.terms.interval_ns if self._world.terms.renews else 0,
                samples=[Sample(sent_ns, remote_ns, now_ns)],
            )
        )  # fmt: skip

    def _fail(self, engine_id: str, measured: bool, problem: str) -> None:
        self._results.append(Shaken(engine_id=engine_id, measured=measured, problem=problem))


@dataclass
class Tally:
    """How the legs of a history ended, to see that it did something."""

    answered: int = 0
    aborted: int = 0
    failed: int = 0
    lost: int = 0
    refused: int = 0
    loaded: int = 0
    load_failed: int = 0
    turns: int = 0
    renewed: int = 0
    crashes: int = 0
    frozen: int = 0
    preempted: int = 0
    legs: int = 0


class World:
    """Everything. `broken` holds the invariants that were seen broken; a history is to be stopped then."""

    def __init__(
        self, seed: int, *, ranks: tuple[int, int] = (1, 1), engines: tuple[int, int] = (2, 2), terms: KvTerms = TERMS,
        profile: Profile = PROFILE, faults: Faults = NO_FAULTS, start_ns: int = 0,
    ) -> None:  # fmt: skip
        self.seed = seed
        self.chance = random.Random(seed)
        self.terms, self.profile, self.faults = terms, profile, faults
        self.calm = faults == NO_FAULTS
        self.healed = False
        self.network = MemoryNetwork(self._link, self._read)
        self.network.now_ns = start_ns
        self.tally = Tally()
        self.events: deque[tuple[int, str, str, str, dict[str, Scalar]]] = deque(maxlen=400)
        self.watch = Watch(self)
        self.dead: list[Engine] = []
        self.legs: list[Leg] = []
        """Those that have not ended."""
        self._names = 0
        self.open_jobs = 0
        """Legs that clients or the router are still going to start."""
        self.prefills = [self._slot(f"p{n}", 7000 + n, ranks[0]) for n in range(engines[0])]
        self.decodes = [self._slot(f"d{n}", 8000 + n, ranks[1]) for n in range(engines[1])]
        self.slots = self.prefills + self.decodes
        for slot in self.slots:
            slot.engine = Engine(self, slot)

    @property
    def broken(self) -> list[str]:
        """Invariants seen broken."""
        return self.watch.broken

    @property
    def engines(self) -> list[Engine]:
        """Those that live."""
        return [slot.engine for slot in self.slots if slot.engine is not None]

    def history(self) -> str:
        """What happened, one line an event, and how to see it again."""
        start = self.events[0][0] if self.events else 0
        lines = [
            f"{(t - start) / S:9.3f} s  {who:6} {what:18} {subject:14} "
            + " ".join(f"{name}={value}" for name, value in detail.items())
            for t, who, what, subject, detail in self.events
        ]
        return "\n".join([*lines, *self.broken, f"seed {self.seed}"])

    # Chance.

    def happens(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return probability > 0 and self.chance.random() < probability

    def between(self, low: int, high: int) -> int:
        """Draw a whole number."""
        return self.chance.randint(low, high)

    def short_delay(self) -> int:
        """Draw how long a message takes if all is well."""
        return int(self.chance.random() * 20 * MS)

    def _slot(self, name: str, port: int, ranks: int) -> Slot:
        offset = self.chance.choice([0, self.between(-5, 5) * S, self.between(-5 * DAY, 5 * DAY)])
        return Slot(name, port, ranks, WorldClock(self.network, 10 * DAY + offset, self.between(-200, 200)))

    def _link(self, sender: str, receiver: str, message: bytes) -> list[int]:
        faults = self.faults
        copies = 0 if self.happens(faults.lost) else 2 if self.happens(faults.repeated) else 1
        delays = [
            self.between(PROMPT_DELAY_NS, 4 * S) if self.happens(faults.late) else self.short_delay()
            for _ in range(copies)
        ]
        self.watch.sent(sender, receiver, message, delays)
        if self.happens(faults.damaged):
            damaged = MAGIC + self.chance.randbytes(12)
            self.watch.damaged(receiver)
            self.network.after(0, partial(self._damage, sender, receiver, damaged))
        return delays

    def _damage(self, sender: str, receiver: str, message: bytes) -> None:
        """Deliver bytes that nobody sent."""
        self.network.transports[receiver].arrived(sender, message)

    def _read(self, _reader: str, _holder: str) -> ReadPlan:
        if self.happens(self.faults.bad_reads):
            return ReadPlan(self.between(0, 1200 * MS), self.chance.choice([ReadResult.FAILED, ReadResult.TORN]))
        if self.happens(self.faults.slow_reads):
            return ReadPlan(self.between(1000 * MS, 6 * S))
        return ReadPlan(int(self.chance.random() ** 3 * (400 * MS if self.calm else 900 * MS)))

    # Engines.

    def at(self, port: int) -> Engine | None:
        """The engine that listens there."""
        return next((slot.engine for slot in self.slots if slot.port == port), None)

    def freeze(self, slot: Slot, ns: int) -> None:
        """Stop an engine for a while, as SIGSTOP does: what peers read and write in its memory goes on."""
        if slot.frozen or slot.engine is None:
            return
        self.note("world", "freeze", slot.name, seconds=ns / S)
        self.tally.frozen += 1
        slot.frozen = True
        self.network.after(ns, partial(self._thaw, slot))

    def _thaw(self, slot: Slot) -> None:
        slot.frozen, slot.thawed_ns = False, self.network.now_ns
        self.note("world", "thaw", slot.name)
        if slot.engine is not None:
            self.watch.thawed(slot.engine)

    def crash(self, slot: Slot, down_ns: int) -> None:
        """Kill an engine; another one lives there after a while."""
        engine = slot.engine
        if engine is None:
            return
        self.note("world", "crash", engine.engine_id)
        self.tally.crashes += 1
        self.network.kill(engine.engine_id)
        self.watch.died(engine)
        engine.alive, slot.engine = False, None
        self.dead.append(engine)
        for leg in list(engine.legs.values()):
            self.ended(leg, "lost")
            if not leg.keep and leg.job.params is not None and self.happens(0.5):
                self._later(self.between(0, S), partial(self.decode, leg.job))  # the client tries its hand-off again
        engine.legs.clear()
        self.network.after(down_ns, partial(self._start, slot))

    def _start(self, slot: Slot) -> None:
        slot.engine = Engine(self, slot)
        self.note(slot.engine.engine_id, "started", "")

    # Clients and router.

    def arrive(self, prompt: Ints, answer_tokens: int, *, readers: int = 1, turns: int = 1) -> None:
        """A client sends a request."""
        self._names += 1
        self.prefill(Job(f"j{self._names}", prompt, answer_tokens, readers, turns - 1))

    def prefill(self, job: Job) -> None:
        """The router's first leg."""
        engine = self._chosen(self.prefills)
        if engine is None:
            return
        asked = {} if job.load is None else job.load.params()
        asked |= {"do_remote_decode": True, "remote_readers": job.readers}
        self._submit(engine, job, asked, 1)

    def _chosen(self, slots: list[Slot]) -> Engine | None:
        """The router's choice; None if nobody lives there, or nobody answers."""
        slot = self.chance.choice(slots)
        return None if slot.frozen else slot.engine

    def decode(self, job: Job, answer_tokens: int | None = None) -> None:
        """The router's second leg."""
        engine = self._chosen(self.decodes)
        if engine is None or job.params is None:
            return
        self._submit(engine, job, job.params, job.answer_tokens if answer_tokens is None else answer_tokens)

    def _submit(self, engine: Engine, job: Job, params: dict[str, Any], answer_tokens: int) -> None:
        self._names += 1
        request_id = f"{engine.engine_id}/{self._names}"
        self.note(engine.engine_id, "request", request_id, job=job.name, prompt=len(job.prompt))
        asked = parse(json.loads(json.dumps(params)), block_tokens=BLOCK_TOKENS, hosts=(HOST,))
        if self.happens(self.faults.evictions):
            engine.core.pool.forget()
        try:
            sequence = engine.connector.submit(request_id, job.prompt, answer_tokens, asked, engine.clock.now_ns())
        except (ValueError, BadHandOff) as error:
            self.tally.refused += 1
            self.note(engine.engine_id, "refused", request_id, why=str(error))
            return
        leg = Leg(request_id, engine, job, sequence, asked.keep, asked.load, self.network.now_ns)
        engine.legs[request_id] = leg
        self.legs.append(leg)
        self.tally.legs += 1

    def abort(self, leg: Leg) -> None:
        """The client goes away; a frozen engine does not notice."""
        if leg.engine.slot.frozen:
            return
        self.watch.aborted(leg)
        leg.engine.connector.abort(leg.sequence)
        leg.engine.legs.pop(leg.request_id, None)
        self.ended(leg, "aborted")

    def ended(self, leg: Leg, how: str) -> None:
        """Note the end of a leg."""
        leg.end = how
        self.legs.remove(leg)
        name = how.partition(":")[0]
        setattr(self.tally, name, getattr(self.tally, name) + 1)
        self.note(leg.engine.engine_id, name, leg.request_id)

    def answered(self, leg: Leg, params: dict[str, Any] | None) -> None:
        """Take a whole answer, and go on as router or client would."""
        self.ended(leg, "answered")
        self.watch.answered(leg, right_answer(leg.job.prompt, leg.sequence.output_tokens_max))
        if leg.keep:
            self._hand_over(leg, params)
        elif params is not None and leg.job.turns_left and not self.healed:
            self._think(leg, params)

    def _hand_over(self, leg: Leg, params: dict[str, Any] | None) -> None:
        job = leg.job
        job.params = params
        if params is None:
            return
        for _ in range(job.readers):
            hold_ns = self._about(self.terms.first_ns) if self.happens(self.faults.held) else self.short_delay()
            tokens = self.profile.context_tokens_max if self.happens(self.faults.rejected) else None
            self._later(hold_ns, partial(self.decode, job, tokens))
            if self.happens(self.faults.reused):
                self._later(hold_ns + self.between(0, 2 * S), partial(self.decode, job))

    def _think(self, leg: Leg, params: dict[str, Any]) -> None:
        """The client reads the answer, and asks on; the time it takes lies around the blocks' time to live."""
        self.tally.turns += 1
        job = leg.job
        ttl_ns = self.terms.ttl_ns
        answer = np.array(right_answer(job.prompt, job.answer_tokens), np.int64)
        prompt = np.concatenate([job.prompt, answer, (answer[0] + np.arange(25)) % 4096])
        load = parse(json.loads(json.dumps(params)), block_tokens=BLOCK_TOKENS, hosts=(HOST,)).load
        if len(prompt) + ANSWER_MAX > self.profile.context_tokens_max or load is None:
            return
        after = Job(job.name + "+", prompt, job.answer_tokens, 1, job.turns_left - 1, load=load)
        wait_ns = self.chance.choice([self.between(0, ttl_ns // 2), self._about(ttl_ns)])
        if self.happens(0.3):
            self._later(min(wait_ns, self.between(0, ttl_ns)), partial(self._renew, leg, after))
            wait_ns += self.between(0, ttl_ns)
        self._later(wait_ns, partial(self.prefill, after))

    def _about(self, end_ns: int) -> int:
        """Draw a time around an end: long before, shortly before, or after it."""
        before_ns = min(end_ns, S)
        return self.chance.choice(
            [self.between(0, end_ns), end_ns - self.between(0, before_ns), end_ns + self.between(0, end_ns // 2)]
        )

    def _renew(self, leg: Leg, after: Job) -> None:
        """The client keeps its session alive."""
        if not leg.engine.alive or leg.engine.slot.frozen or after.load is None:
            return
        params = leg.engine.connector.renew(after.load, leg.engine.clock.now_ns())
        if params is not None:
            self.tally.renewed += 1
            self.watch.renewed(leg)
            after.load = parse(params, block_tokens=BLOCK_TOKENS, hosts=(HOST,)).load

    def _later(self, delay_ns: int, act: Callable[[], None]) -> None:
        self.open_jobs += 1
        self.network.after(delay_ns, partial(self._now, act))

    def _now(self, act: Callable[[], None]) -> None:
        self.open_jobs -= 1
        act()

    # Time.

    def step(self, dt_ns: int) -> None:
        """Let time pass."""
        try:
            self.network.deliver(self.network.now_ns + dt_ns)
            for slot in self.slots:
                if slot.engine is not None and not slot.frozen:
                    slot.engine.turn()
        except Exception as error:
            self.watch.breach("R1", f"an engine ended: {error!r}", error)
            return
        self.watch.step()

    def drain(self) -> None:
        """Heal everything and let it come to rest; what does not is a breach."""
        self.faults, self.healed = NO_FAULTS, True
        end_ns = self.network.now_ns + DRAIN_NS + 4 * self.terms.ttl_ns
        while not self.broken and self.network.now_ns < end_ns:
            self.step(STEP_MAX_NS)
            if not self.legs and not self.open_jobs and not any(self._lively(e) for e in self.engines):
                break
        self.tally.preempted = sum(engine.core.totals.preempted for engine in self.engines + self.dead)
        if not self.broken:
            self.watch.end()

    def _lively(self, engine: Engine) -> bool:
        return engine.connector.busy or engine.core.has_work or bool(engine.made)

    # Words.

    def note(self, who: str, what: str, subject: str, **detail: Scalar) -> None:
        """Write down what happened."""
        self.events.append((self.network.now_ns, who, what, subject, detail))

    def heard(self, engine: Engine, kind: EventKind, subject: str, detail: dict[str, Scalar]) -> None:
        """Take an event that an engine says."""
        self.events.append((self.network.now_ns, engine.engine_id, kind, subject, detail))
        self.tally.loaded += kind is EventKind.LOAD_DONE
        self.tally.load_failed += kind is EventKind.LOAD_FAILED
        self.watch.heard(engine, kind, subject, detail)

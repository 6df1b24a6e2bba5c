"""An engine for a connector that has none: queue, slots, block pool, prefix cache, and KV that shows its origin.

It computes a prompt in one step, and then a token a step. Each token is made from all KV before it, read from the pool;
so `Ending.right` is False as soon as a block held something else than what was written for that prefix.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from faults.nixl.dialects import Meaning
from harness.conformance.checked import check_has, check_takes, shown
from harness.conformance.simple_connector import HOOKS, Connector, Factory, Memory, Progress
from harness.conformance.simple_pool import (
    BLOCK_TOKENS,
    CONTEXT_TOKENS_MAX,
    Pool,
    blocks_for,
    next_token,
    slots_of,
)
from harness.conformance.subject import (
    METRICS,
    Capability,
    Ending,
    Engine,
    EngineSpec,
    Host,
    How,
    Misuse,
    Params,
    Policy,
    Refused,
    Request,
)


class SimpleSubject:
    """A subject of simple engines around the connectors of one factory. Has `PREFIX_HITS` only if it is claimed.

    `meaning` says what a message of its own is: a `Meaning` with `Kind.HEARTBEAT`, `COMPLETION` (the reader needs the
    blocks no longer), `CLAIM`, `ANSWER` or `UNKNOWN`, and the ids of the requests it names, as their holder knows them.
    """

    def __init__(
        self, name: str, factory: Factory, *, capabilities: Iterable[Capability], meaning: Callable[[bytes], Meaning],
        versions: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.versions = name, dict(versions or {})
        self.capabilities = frozenset(capabilities)
        self._factory, self._meaning = factory, meaning
        self._pools: dict[str, Pool] = {}

    def engine(self, spec: EngineSpec, host: Host) -> Engine:
        """Return a new engine."""
        pool = Pool(spec.blocks)
        check_takes("the factory", self._factory, ("spec", "host", "memory"))
        connector = self._factory(spec, host, Memory(pool, host, self._pools.get))
        check_has("what the factory makes is no connector", connector, HOOKS)
        self._pools[spec.name] = pool
        return SimpleEngine(spec, connector, pool, prefix_cache=Capability.PREFIX_HITS in self.capabilities)

    def meaning(self, message: bytes) -> Meaning:
        """Return what a message says."""
        check_takes("meaning", self._meaning, ("message",))
        return self._meaning(message)

    def close(self) -> None:
        """Give back the pools."""
        self._pools.clear()


class _Stage(enum.Enum):
    QUEUED = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()


class _Sequence:
    """A request that has not ended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.name = request.request_id
        self.prompt_tokens = len(request.prompt)
        self.tokens = np.zeros(self.prompt_tokens + request.max_tokens, np.int64)
        self.tokens[: self.prompt_tokens] = request.prompt
        self.known = self.prompt_tokens
        self.stage = _Stage.QUEUED
        self.by_itself = False
        """Whether it is computed here, without asking the connector."""
        self.blocks: list[int] = []
        self.computed = 0
        """Leading tokens whose KV is in its blocks."""
        self.sealed = 0
        self.loading = 0
        self.loaded = 0
        self.right = True


class SimpleEngine:
    """One life of a simple engine (`subject.Engine`)."""

    def __init__(self, spec: EngineSpec, connector: Connector, pool: Pool, *, prefix_cache: bool) -> None:
        self._spec, self._connector, self._pool, self._prefix_cache = spec, connector, pool, prefix_cache
        self._inbox: list[tuple[str, bytes]] = []
        self._queue: deque[_Sequence] = deque()
        self._admitted: dict[str, _Sequence] = {}
        self._kept: dict[str, list[int]] = {}
        """Blocks of finished requests, until the connector releases them."""
        self._landing: dict[str, list[int]] = {}
        """Blocks that nobody uses, and in which something may still land."""
        self._endings: list[Ending] = []

    # What clients do.

    def submit(self, request: Request) -> None:
        """Queue a request. Raises Refused if it is too long, or if the connector refuses it."""
        self._connector.new_request(request)
        tokens = len(request.prompt) + request.max_tokens
        most = min(CONTEXT_TOKENS_MAX, self._spec.blocks * BLOCK_TOKENS)
        if tokens > most:
            self._connector.aborted(request.request_id)
            raise Refused(f"prompt and answer have {tokens} tokens, and must have {most} at most")
        self._queue.append(_Sequence(request))

    def abort(self, request_id: str) -> None:
        """Give up a request, or what is kept of it."""
        waiting = next((s for s in self._queue if s.name == request_id), None)
        sequence = self._admitted.pop(request_id, None) or waiting
        if sequence is None:
            if request_id in self._kept:
                self._connector.aborted(request_id)
            return
        if waiting is not None:
            self._queue.remove(waiting)
        if sequence.stage is _Stage.LOADING:
            self._landing[request_id] = sequence.blocks
        else:
            self._pool.blocks.release(sequence.blocks)
        self._endings.append(Ending(request_id=request_id, how=How.ABORTED))
        self._connector.aborted(request_id)

    # What peers do.

    def deliver(self, sender: str, message: bytes, rank: int, to_rank: int) -> None:  # noqa: ARG002 # one rank
        """Keep a message until the next step."""
        self._inbox.append((sender, message))

    def answer(self, question: bytes) -> bytes | None:
        """Have the connector answer."""
        return self._connector.question(question)

    # The loop.

    def step(self) -> None:
        """Hear the peers and the connector, then admit and compute."""
        inbox, self._inbox = self._inbox, []
        for sender, message in inbox:
            self._connector.message(sender, message)
        self._apply(_progress(self._connector.step()))
        self._admit()
        for sequence in [s for s in self._admitted.values() if s.stage is _Stage.RUNNING]:
            self._compute(sequence)

    def _apply(self, progress: Progress) -> None:
        for name in progress.released:
            if name not in self._kept:
                raise Misuse(f"step() releases {name}, of which nothing is kept")
            self._pool.blocks.release(self._kept.pop(name))
        for name in progress.loaded:
            if not self._landed(name):
                self._loaded(self._loading("loaded", name))
        for name, why in progress.failed.items():
            if not self._landed(name):
                self._lost(self._loading("failed", name), why, self._spec.terms.policy)
        for name, why in progress.declined.items():
            if not self._landed(name):
                self._lost(self._loading("declined", name), why, Policy.RECOMPUTE)
        for name, why in progress.abandoned.items():
            self._leave(self._loading("abandoned", name), why)

    def _loading(self, what: str, name: str) -> _Sequence:
        sequence = self._admitted.get(name)
        if sequence is None or sequence.stage is not _Stage.LOADING:
            raise Misuse(f"step() says that {name} is {what}, which does not load")
        return sequence

    def _landed(self, name: str) -> bool:
        """Give back blocks in which nothing can land any more; false if it was not about such."""
        blocks = self._landing.pop(name, None)
        if blocks is not None:
            self._pool.blocks.release(blocks)
        return blocks is not None

    def _loaded(self, sequence: _Sequence) -> None:
        sequence.stage = _Stage.RUNNING
        sequence.computed += sequence.loading
        sequence.loaded = sequence.loading

    def _lost(self, sequence: _Sequence, why: str, policy: Policy) -> None:
        if policy is Policy.RECOMPUTE:
            sequence.stage = _Stage.RUNNING
            return
        del self._admitted[sequence.name]
        self._pool.blocks.release(sequence.blocks)
        self._endings.append(Ending(request_id=sequence.name, how=How.FAILED, error=why))

    def _leave(self, sequence: _Sequence, why: str) -> None:
        """Go on without blocks in which something may still land."""
        self._landing[sequence.name], sequence.blocks = sequence.blocks, []
        self._lost(sequence, why, self._spec.terms.policy)
        if self._admitted.pop(sequence.name, None) is not None:
            sequence.stage, sequence.by_itself, sequence.computed, sequence.sealed = _Stage.QUEUED, True, 0, 0
            self._queue.appendleft(sequence)

    def _admit(self) -> None:
        while self._queue and len(self._admitted) < self._spec.slots:
            sequence = self._queue[0]
            digests = self._digests(sequence, sequence.prompt_tokens)
            count = blocks_for(len(sequence.tokens))
            if not self._pool.blocks.fits(digests, count):
                return
            self._queue.popleft()
            found = self._pool.blocks.take_prefix(digests)
            sequence.blocks = found + self._pool.blocks.allocate(count - len(found))
            sequence.computed, sequence.sealed = len(found) * BLOCK_TOKENS, len(found)
            self._admitted[sequence.name] = sequence
            sequence.stage = _Stage.RUNNING
            if not sequence.by_itself:
                blocks = sequence.blocks[: blocks_for(sequence.prompt_tokens)]
                loading: Any = self._connector.scheduled(sequence.request, blocks, sequence.computed)
                sequence.loading = _fitting(sequence, loading)
                sequence.stage = _Stage.LOADING if loading else _Stage.RUNNING

    def _digests(self, sequence: _Sequence, tokens: int) -> list[bytes]:
        return self._pool.digests(slots_of(sequence.tokens[:tokens])) if self._prefix_cache else []

    def _compute(self, sequence: _Sequence) -> None:
        """Write the KV of what is known, read all of it, and say a token."""
        expected = slots_of(sequence.tokens[: sequence.known])
        self._pool.write(sequence.blocks, sequence.computed, expected[sequence.computed :])
        sequence.computed = sequence.known
        read = self._pool.read(sequence.blocks, sequence.known)
        sequence.right = sequence.right and bool((read == expected).all())
        if self._prefix_cache:
            full = self._pool.digests(expected)
            for place in range(sequence.sealed, len(full)):
                self._pool.blocks.seal(sequence.blocks[place], full[place])
            sequence.sealed = len(full)
        sequence.tokens[sequence.known] = next_token(read)
        sequence.known += 1
        if sequence.known == len(sequence.tokens):
            self._finish(sequence)

    def _finish(self, sequence: _Sequence) -> None:
        held = blocks_for(sequence.computed)
        blocks, rest = sequence.blocks[:held], sequence.blocks[held:]
        keep, hand_off = _kept(self._connector.request_finished(sequence.request, list(blocks)))
        del self._admitted[sequence.name]
        self._pool.blocks.release(rest)
        if keep:
            self._kept[sequence.name] = blocks
        else:
            self._pool.blocks.release(blocks)
        answer = [int(token) for token in sequence.tokens[sequence.prompt_tokens :]]
        self._endings.append(
            Ending(
                request_id=sequence.name, how=How.ANSWERED, hand_off=hand_off, answer=answer, right=sequence.right,
                loaded=sequence.loaded,
            )
        )  # fmt: skip

    # Looks.

    def ended(self) -> list[Ending]:
        """Return what ended."""
        endings, self._endings = self._endings, []
        return endings

    def renew(self, hand_off: Params) -> Params | None:  # noqa: ARG002 # the interface's
        """Simple engines keep no turn alive."""
        return None

    def holds(self) -> dict[str, list[int]]:
        """Return whose blocks are in use: of requests, of what is kept, and those in which something may land."""
        held = {name: list(blocks) for name, blocks in self._landing.items()}
        for name, blocks in [*self._kept.items(), *((s.name, s.blocks) for s in self._admitted.values())]:
            held[name] = held.get(name, []) + blocks
        return held

    def metrics(self) -> dict[str, float]:
        """Return what the connector counts."""
        found: Any = self._connector.metrics()
        strange = [name for name in found if name not in METRICS] if isinstance(found, dict) else []
        if strange:
            raise Misuse(f"metrics() has names that there are not: {shown(strange)}; there are {', '.join(METRICS)}")
        counters: dict[str, float] = found
        return counters

    def close(self) -> None:
        """There is nothing to give back: who still reads its memory may go on."""


def _progress(found: Any) -> Progress:
    """Return what a connector's step says. Raises Misuse if it is no progress."""
    if not isinstance(found, Progress):
        raise Misuse(f"step() must return a Progress, got {shown(found)}")
    try:
        return msgspec.json.decode(msgspec.json.encode(found), type=Progress)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise Misuse(f"step() returns a Progress that is none: {error}") from error


def _fitting(sequence: _Sequence, loading: Any) -> int:
    """Return how many tokens are to be loaded. Raises Misuse if so many cannot be."""
    if type(loading) is not int:
        raise Misuse(f"scheduled() must return a number of tokens, got {shown(loading)}")
    left = sequence.prompt_tokens - sequence.computed
    if not 0 <= loading <= left:
        raise Misuse(f"scheduled() wants to load {loading} tokens of {sequence.name}, which lacks {left}")
    if loading != left and loading % BLOCK_TOKENS:
        raise Misuse(f"scheduled() must load whole blocks of {BLOCK_TOKENS} tokens or the whole rest, got {loading}")
    return loading


def _kept(found: Any) -> tuple[bool, Params | None]:
    """Return what is to become of a finished request. Raises Misuse if that is not said."""
    if not (isinstance(found, tuple) and len(found) == 2):  # as vLLM's
        raise Misuse(f"request_finished() must return (keep the blocks, hand-off), got {shown(found)}")
    keep, hand_off = found
    if type(keep) is not bool or not (hand_off is None or isinstance(hand_off, dict)):
        raise Misuse(f"request_finished() must return a bool, and a hand-off or None; got {shown(found)}")
    return keep, hand_off

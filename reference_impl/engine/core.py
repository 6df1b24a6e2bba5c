"""The engine's core: continuous batching over a paged pool of real bytes. No clock, socket or thread in here.

One `step` does what one forward pass would: a token for every running decode, and prefill chunks with the rest of the
token budget. The bytes are real; how long the pass would have taken is for the caller to wait (`Step.compute_s`).
A request's whole length is reserved when it is admitted, so nothing is ever preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec
import numpy as np

from reference_impl.content import (
    BLOCK_TOKENS,
    BLOCK_WORDS,
    ROOT_DIGEST,
    SLOT_WORDS,
    Ints,
    Words,
    block_digests,
    digest_seed,
    last_word_place,
    next_seeds,
    next_tokens,
    slot_seeds,
    slot_words,
)
from reference_impl.engine.profile import Profile
from reference_impl.rules.blocks import BlockPool


class Sequence:
    """One request as the core sees it. `tokens` holds the prompt and then the answer."""

    def __init__(self, request_id: str, prompt: Ints, output_tokens_max: int) -> None:
        self.request_id = request_id
        self.prompt_tokens = len(prompt)
        self.tokens = np.empty(len(prompt) + output_tokens_max, np.int64)
        self.tokens[: len(prompt)] = prompt
        self.output_tokens = 0
        self.output_tokens_max = output_tokens_max
        self.computed = 0
        """Leading tokens whose KV stands in the pool."""
        self.cached_tokens = 0
        """Leading tokens whose KV was found in the prefix cache."""
        self.blocks: list[int] = []
        self.digests: list[bytes] = []
        """Of the full blocks of `tokens` so far."""
        self.row = -1

    @property
    def blocks_needed(self) -> int:
        """Blocks for the whole request; the last output token's KV is never written."""
        return -(-(len(self.tokens) - 1) // BLOCK_TOKENS)

    @property
    def finished(self) -> bool:
        """Whether the answer is whole."""
        return self.output_tokens == self.output_tokens_max


class Step(msgspec.Struct, frozen=True):
    """What one step did: who got a token, and how long the emulated hardware takes for it."""

    produced: list[Sequence]
    compute_s: float


class Totals(msgspec.Struct):
    """Counters over the core's life."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0


class EngineCore:
    """Runs sequences over the memory that `bind` gives it. Made before the memory is there: that takes milliseconds."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.pool = BlockPool(profile.kv_blocks)
        self.totals = Totals()
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self._kv = np.empty((0, BLOCK_WORDS), np.uint64)
        self._weights = np.empty(0, np.uint64)
        rows = profile.requests_max
        self._rows = list(range(rows - 1, -1, -1))
        self._table = np.zeros((rows, -(-profile.context_tokens_max // BLOCK_TOKENS)), np.int64)
        self._length = np.zeros(rows, np.int64)
        self._order = np.zeros(rows, np.int64)
        self._last_seed = np.zeros(rows, np.uint64)
        self._last_token = np.zeros(rows, np.int64)

    def bind(self, kv: Words, weights: Words) -> EngineCore:
        """Use this memory from now on, and return self: `kv` of shape [blocks, 512], `weights` with one axis."""
        if kv.shape != (self.profile.kv_blocks, BLOCK_WORDS):
            raise ValueError(f"kv must have shape {(self.profile.kv_blocks, BLOCK_WORDS)}, got {kv.shape}")
        self._kv, self._weights = kv, weights
        return self

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.running)

    def sequence(self, request_id: str, prompt: Ints, output_tokens_max: int) -> Sequence:
        """Queue a new sequence and return it. Raises ValueError, before any memory is taken, if it could never run."""
        limit = min(self.profile.context_tokens_max, self.pool.blocks * BLOCK_TOKENS)
        if not len(prompt) or output_tokens_max < 1:
            raise ValueError("a request needs one prompt token and one output token at least")
        if len(prompt) + output_tokens_max > limit:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and an answer of {output_tokens_max} exceed the context of {limit}"
            )
        sequence = Sequence(request_id, prompt, output_tokens_max)
        self.waiting.append(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence, wherever it is, and free its blocks. Harmless when it has ended."""
        if sequence.row >= 0:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return
        self.totals.aborted += 1

    def step(self) -> Step:
        """Run one forward pass."""
        self._admit()
        decodes = [s for s in self.running.values() if s.computed >= s.prompt_tokens]
        prefilled, prefill_tokens = self._prefill(self.profile.chunk_tokens - len(decodes))
        if decodes:
            self._extend(decodes)
        for group in (prefilled, decodes):
            if group:
                self._produce(group)
        produced = prefilled + decodes
        for sequence in produced:
            if sequence.finished:
                self._leave(sequence)
                self.totals.finished += 1
        return Step(produced, self.profile.step_s(len(decodes), prefill_tokens))

    def _admit(self) -> None:
        while self.waiting and self._rows:
            sequence = self.waiting[0]
            if not sequence.digests:
                sequence.digests = block_digests(sequence.tokens[: sequence.prompt_tokens])
            reusable = (sequence.prompt_tokens - 1) // BLOCK_TOKENS  # the last token is always computed
            prefix = self.pool.take_prefix(sequence.digests[:reusable])
            missing = sequence.blocks_needed - len(prefix)
            if missing > self.pool.available:
                self.pool.release(prefix)
                return
            self.waiting.popleft()
            sequence.blocks = prefix + self.pool.allocate(missing)
            sequence.computed = sequence.cached_tokens = len(prefix) * BLOCK_TOKENS
            sequence.row = row = self._rows.pop()
            self._table[row, : len(sequence.blocks)] = sequence.blocks
            self._order[row] = 0
            self.running[row] = sequence
            self.totals.prompt_tokens += sequence.prompt_tokens
            self.totals.cached_tokens += sequence.cached_tokens

    def _prefill(self, budget: int) -> tuple[list[Sequence], int]:
        """Spend up to `budget` prefill tokens, oldest request first; return who is done and how many were spent."""
        done, spent = [], 0
        for sequence in list(self.running.values()):
            left = sequence.prompt_tokens - sequence.computed
            count = min(left, budget - spent)
            if count < left:
                count -= count % BLOCK_TOKENS  # only a prompt's last chunk may end inside a block
            if left <= 0 or count <= 0:
                continue
            self._write_prompt(sequence, sequence.computed, sequence.computed + count)
            spent += count
            if sequence.computed == sequence.prompt_tokens:
                done.append(sequence)
        return done, spent

    def _write_prompt(self, sequence: Sequence, start: int, end: int) -> None:
        """Write the KV of prompt tokens `start .. end`; `start` is a block's first token."""
        first, full = start // BLOCK_TOKENS, end // BLOCK_TOKENS
        blocks = -(-end // BLOCK_TOKENS)
        parents = [sequence.digests[i - 1] if i else ROOT_DIGEST for i in range(first, blocks)]
        tokens = np.zeros((blocks - first) * BLOCK_TOKENS, np.int64)
        tokens[: end - start] = sequence.tokens[start:end]
        seeds = slot_seeds(tokens.reshape(-1, BLOCK_TOKENS), np.array([digest_seed(d) for d in parents], np.uint64))
        words = slot_words(seeds).reshape(-1, BLOCK_WORDS)
        self._kv[sequence.blocks[first:full]] = words[: full - first]
        if full < blocks:
            part = end % BLOCK_TOKENS * SLOT_WORDS
            self._kv[sequence.blocks[full], :part] = words[-1, :part]
        for index in range(first, full):
            self.pool.seal(sequence.blocks[index], sequence.digests[index])
        sequence.computed = end
        self._length[sequence.row] = end
        self._last_seed[sequence.row] = seeds.reshape(-1)[end - start - 1]

    def _extend(self, sequences: list[Sequence]) -> None:
        """Write the KV of each sequence's newest token."""
        rows = np.array([s.row for s in sequences])
        place = self._length[rows]
        slot = place % BLOCK_TOKENS
        for sequence in (s for s, at_start in zip(sequences, slot == 0, strict=True) if at_start):
            self._seal_answer_block(sequence)
        seeds = next_seeds(self._last_seed[rows], self._last_token[rows])
        columns = (slot * SLOT_WORDS)[:, None] + np.arange(SLOT_WORDS)
        self._kv[self._table[rows, place // BLOCK_TOKENS][:, None], columns] = slot_words(seeds)
        self._last_seed[rows] = seeds
        self._length[rows] += 1
        for sequence in sequences:
            sequence.computed += 1

    def _seal_answer_block(self, sequence: Sequence) -> None:
        """Index the block that has just become full, and start the next one from its digest."""
        full = sequence.computed // BLOCK_TOKENS
        if full > len(sequence.digests):
            parent = sequence.digests[-1] if sequence.digests else ROOT_DIGEST
            block = sequence.tokens[(full - 1) * BLOCK_TOKENS : full * BLOCK_TOKENS]
            sequence.digests += block_digests(block, parent)
            self.pool.seal(sequence.blocks[full - 1], sequence.digests[-1])
        self._last_seed[sequence.row] = digest_seed(sequence.digests[full - 1])

    def _produce(self, sequences: list[Sequence]) -> None:
        rows = np.array([s.row for s in sequences])
        order, length = self._order[rows], self._length[rows]
        column = (length - 1) % BLOCK_TOKENS * SLOT_WORDS + last_word_place(order)
        last = self._kv[self._table[rows, (length - 1) // BLOCK_TOKENS], column]
        tokens = next_tokens(rows, order, length, self._read_blocks, last, self._read_weights)
        self._last_token[rows] = tokens
        self._order[rows] += 1
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.tokens[sequence.prompt_tokens + sequence.output_tokens] = token
            sequence.output_tokens += 1
        self.totals.output_tokens += len(sequences)

    def _read_blocks(self, rows: Ints, blocks: Ints, slots: Ints, places: Ints) -> Words:
        words: Words = self._kv[self._table[rows, blocks], slots * SLOT_WORDS + places]
        return words

    def _read_weights(self, draws: Words) -> Words:
        words: Words = self._weights[draws % np.uint64(len(self._weights))]
        return words

    def _leave(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        del self.running[sequence.row]
        self._rows.append(sequence.row)
        sequence.row = -1
        sequence.blocks = []


def audit(core: EngineCore, ended: Iterable[Sequence] = ()) -> list[str]:
    """Return breaches of conservation (K1) in an idle core: blocks unaccounted for, held by nobody, or kept."""
    problems = core.pool.audit()
    held = {b for s in core.running.values() for b in s.blocks}
    if core.pool.held != len(held):
        problems.append(f"{core.pool.held} blocks are held, running requests name {len(held)}")
    problems += [f"ended request {s.request_id} still names {len(s.blocks)} blocks" for s in ended if s.blocks]
    return problems

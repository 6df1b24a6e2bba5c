"""The engine's core: continuous batching over a paged pool of real bytes. No clock, socket or thread in here.

One `step` does what one forward pass would: a token for every running decode, and prefill chunks with the rest of the
token budget. The bytes are real; how long the pass would have taken is for the caller to wait (`Step.compute_s`).

A request's whole length is reserved when it is admitted; or, by the profile's choice, it grows a block at a time, and
the newest is preempted when none is free: it waits at the front, and computes its prompt and answer so far once more.

A *remote* sequence's KV comes from a peer: admitted with its blocks and its row, it stands in `loading` until whoever
reads for it says `loaded` or `load_failed`. A sequence that *holds* leaves its blocks to its owner when it finishes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import msgspec
import numpy as np

from reference_impl.content import (
    BLOCK_TOKENS,
    BLOCK_WORDS,
    GROUP_WORDS,
    HEAD_GROUPS,
    ROOT_DIGEST,
    WORD_COLUMNS,
    Ints,
    Words,
    block_digests,
    block_words,
    digest_seed,
    last_word_place,
    next_seeds,
    next_tokens,
    slot_seeds,
    slot_words,
)
from reference_impl.engine.profile import Profile
from reference_impl.rules.blocks import BlockPool, Generations


class Sequence:
    """One request as the core sees it. `tokens` holds the prompt and then the answer.

    `remote_tokens` leading tokens of the prompt have their KV at a peer: 0 if it has no part in it, or fewer than all.
    `hold` says that the blocks stay after the answer, in `held_blocks`, until their owner releases them.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Ints,
        output_tokens_max: int,
        *,
        remote_tokens: int = 0,
        hold: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = len(prompt)
        self.tokens = np.empty(len(prompt) + output_tokens_max, np.int64)
        self.tokens[: len(prompt)] = prompt
        self.output_tokens = 0
        self.output_tokens_max = output_tokens_max
        self.remote = remote_tokens > 0
        self.remote_tokens = min(remote_tokens, len(prompt))
        if self.remote_tokens < len(prompt):  # the rest is prefilled here, from the start of a block
            self.remote_tokens -= self.remote_tokens % BLOCK_TOKENS
        self.load_from = 0
        """Index in `blocks` of the first block to load; those before it were found in the prefix cache."""
        self.hold = hold
        self.held_blocks: list[int] = []
        """After the end of a sequence that holds: the blocks of its `computed` tokens, each with a reference."""
        self.computed = 0
        """Leading tokens whose KV stands in the pool."""
        self.prefill_end = 0
        """Tokens that were known at the last admission: prefill ends there. 0 before the first."""
        self.cached_tokens = 0
        """Leading tokens whose KV was found in the prefix cache at the first admission."""
        self.blocks: list[int] = []
        self.digests: list[bytes] = []
        """Of the full blocks of `tokens` so far."""
        self.row = -1

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.prompt_tokens + self.output_tokens

    @property
    def decoding(self) -> bool:
        """Whether prefill is over: a token has been produced since the last admission."""
        return self.known_tokens > self.prefill_end

    @property
    def reusable_blocks(self) -> int:
        """Leading full blocks that a prefix cache may give; the last token is always computed."""
        return (self.known_tokens - 1) // BLOCK_TOKENS

    @property
    def blocks_needed(self) -> int:
        """Blocks for the whole request; the last output token's KV is never written."""
        return -(-(len(self.tokens) - 1) // BLOCK_TOKENS)

    @property
    def load_to(self) -> int:
        """Index in `blocks` after the last block to load, which may be filled in part."""
        return -(-self.remote_tokens // BLOCK_TOKENS)

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
    preempted: int = 0
    recomputed_tokens: int = 0
    """Prompt tokens computed here because a peer's KV of them could not be loaded."""


class EngineCore:
    """Runs sequences over the memory that `bind` gives it. Made before the memory is there: that takes milliseconds.

    `generation`, one counter a block, is where the pool counts how often it handed a block out, for peers to read.
    """

    def __init__(self, profile: Profile, generation: Generations | None = None) -> None:
        self.profile = profile
        self.pool = BlockPool(profile.kv_blocks, generation)
        self.totals = Totals()
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        """By row; the newest is last."""
        self.loading: dict[int, Sequence] = {}
        """By row: admitted, waiting for a peer's KV."""
        self.load_wanted: list[Sequence] = []
        """New in `loading`; whoever reads for them takes them off this list."""
        self.load_spared: list[Sequence] = []
        """New remote sequences that found their prefix here and read nothing: their peer is still to be told."""
        self._kv = np.empty((0, BLOCK_WORDS), np.uint64)
        self._parts = self._kv.reshape(0, HEAD_GROUPS, BLOCK_TOKENS, GROUP_WORDS)
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
        if not kv.flags.c_contiguous:
            raise ValueError("kv must be one piece, block after block, so that peers can read it")
        self._kv, self._weights = kv, weights
        self._parts = kv.reshape(-1, HEAD_GROUPS, BLOCK_TOKENS, GROUP_WORDS)
        return self

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. What changes that: a new sequence, an abort, a load's end, a release."""
        return bool(self.running) or self.can_admit

    @property
    def can_admit(self) -> bool:
        """Whether the sequence that has waited longest could start now. Those behind it wait for it."""
        if not (self.waiting and self._rows):
            return False
        head = self.waiting[0]
        self._digest(head)
        return self.pool.fits(head.digests[: head.reusable_blocks], self._blocks_at_admission(head))

    def sequence(
        self,
        request_id: str,
        prompt: Ints,
        output_tokens_max: int,
        *,
        remote_tokens: int = 0,
        hold: bool = False,
    ) -> Sequence:
        """Queue a new sequence and return it. Raises ValueError, before any memory is taken, if it could never run.

        With `remote_tokens` it is remote: a peer has the KV of so many leading tokens of its prompt. Of fewer than all,
        only full blocks are loaded. One that is to `hold` keeps its blocks after its answer (see `held_blocks`).
        """
        limit = min(self.profile.context_tokens_max, self.pool.blocks * BLOCK_TOKENS)
        if not len(prompt) or output_tokens_max < 1:
            raise ValueError("a request needs one prompt token and one output token at least")
        if len(prompt) + output_tokens_max > limit:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and an answer of {output_tokens_max} exceed the context of {limit}"
            )
        sequence = Sequence(request_id, prompt, output_tokens_max, remote_tokens=remote_tokens, hold=hold)
        self.waiting.append(sequence)
        return sequence

    def block_bytes(self, block: int) -> memoryview:
        """Return one block's bytes as they are in the pool; hold the block while you read them."""
        return memoryview(self._kv[block]).cast("B")

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence that waits or runs, and free its blocks, whether it holds or not. Harmless when it has ended.

        Raises ValueError for one that loads: something may still be written to its blocks (see `detach`).
        """
        if self._is_loading(sequence):
            raise ValueError(
                f"request {sequence.request_id} is loading: detach it, and release when the load has ended"
            )
        if sequence.row >= 0:
            self._release(self._leave(sequence, self.running))
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return
        self.totals.aborted += 1

    def detach(self, sequence: Sequence) -> list[int]:
        """Drop a sequence that loads, and return its blocks, which nobody else gets until the caller releases them.

        That is for when the transfer has ended (S6, KVC-XFER-003). Raises ValueError if the sequence does not load.
        """
        blocks = self._give_up_load(sequence)
        self.totals.aborted += 1
        return blocks

    def restart(self, sequence: Sequence) -> list[int]:
        """Give up on a load that may still land: the sequence starts again, from the front, and computes by itself.

        Returns its blocks, which are the caller's as after `detach`. Raises ValueError if the sequence does not load.
        """
        self._check_loading(sequence)
        self.totals.recomputed_tokens += sequence.remote_tokens - sequence.computed
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        return self._give_up_load(sequence)

    def loaded(self, sequence: Sequence) -> None:
        """Say that what was to be loaded stands in the pool: it is indexed, and the sequence runs.

        If that is the whole prompt, the first token costs the next step as much as one token of prefill. Raises
        ValueError if the sequence does not load.
        """
        self._check_loading(sequence)
        end = sequence.remote_tokens
        full = end // BLOCK_TOKENS
        for block, digest in zip(
            sequence.blocks[sequence.load_from : full], sequence.digests[sequence.load_from : full], strict=True
        ):
            self.pool.seal(block, digest)
        first = (end - 1) // BLOCK_TOKENS
        parent = np.array([digest_seed(sequence.digests[first - 1] if first else ROOT_DIGEST)], np.uint64)
        seeds = slot_seeds(sequence.tokens[None, first * BLOCK_TOKENS : end], parent)
        sequence.computed = self._length[sequence.row] = end
        self._last_seed[sequence.row] = seeds[0, -1]
        self.running[sequence.row] = self.loading.pop(sequence.row)

    def load_failed(self, sequence: Sequence) -> None:
        """Say that the load has ended without success: the sequence computes what was to be loaded by itself.

        What has landed is overwritten and was never indexed (KVC-XFER-002); nothing more may land after this call.
        Raises ValueError if the sequence does not load.
        """
        self._check_loading(sequence)
        self.totals.recomputed_tokens += sequence.remote_tokens - sequence.computed
        self.running[sequence.row] = self.loading.pop(sequence.row)

    def step(self) -> Step:
        """Run one forward pass."""
        if not self.profile.reserve:
            self._grow()
        while self.can_admit:
            self._admit(self.waiting.popleft())
        decodes = [s for s in self.running.values() if s.decoding]
        prefilled, prefill_tokens = self._prefill(self.profile.chunk_tokens - len(decodes))
        if decodes:
            self._extend(decodes)
        first = [s for s in prefilled if not s.output_tokens]
        later = [s for s in prefilled if s.output_tokens] + decodes
        for group in (first, later):
            if group:
                self._produce(group)
        produced = prefilled + decodes
        for sequence in produced:
            if sequence.finished:
                self._finish(sequence)
        return Step(produced, self.profile.step_s(len(decodes), prefill_tokens))

    def _grow(self) -> None:
        """Give each decode the block its next token needs, oldest first; when none is free, the newest gives way."""
        for sequence in list(self.running.values()):
            while sequence.row >= 0 and sequence.decoding and sequence.computed == len(sequence.blocks) * BLOCK_TOKENS:
                if self.pool.available:
                    self._table[sequence.row, len(sequence.blocks)] = block = self.pool.allocate(1)[0]
                    sequence.blocks.append(block)
                else:
                    self._preempt(next(reversed(self.running.values())))

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks of a running sequence; it starts again from the front of the queue."""
        self._release(self._leave(sequence, self.running))
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.totals.preempted += 1

    def _finish(self, sequence: Sequence) -> None:
        blocks = self._leave(sequence, self.running)
        kept = -(-sequence.computed // BLOCK_TOKENS) if sequence.hold else 0
        sequence.held_blocks = blocks[:kept]
        self._release(blocks[kept:])
        self.totals.finished += 1

    def _blocks_at_admission(self, sequence: Sequence) -> int:
        """With nothing reserved: what is known and one more, so that the newest is not preempted at once."""
        if self.profile.reserve:
            return sequence.blocks_needed
        return min(-(-sequence.known_tokens // BLOCK_TOKENS) + 1, sequence.blocks_needed)

    def _digest(self, sequence: Sequence) -> None:
        """Make the digests of all full blocks of what is known."""
        done = len(sequence.digests)
        if done < sequence.known_tokens // BLOCK_TOKENS:
            parent = sequence.digests[-1] if done else ROOT_DIGEST
            sequence.digests += block_digests(sequence.tokens[done * BLOCK_TOKENS : sequence.known_tokens], parent)

    def _admit(self, sequence: Sequence) -> None:
        """Start a sequence, or start it again after a preemption; there must be room (`can_admit`)."""
        prefix = self.pool.take_prefix(sequence.digests[: sequence.reusable_blocks])
        sequence.blocks = prefix + self.pool.allocate(self._blocks_at_admission(sequence) - len(prefix))
        sequence.computed = len(prefix) * BLOCK_TOKENS
        sequence.row = row = self._rows.pop()
        self._table[row, : len(sequence.blocks)] = sequence.blocks
        self._order[row] = sequence.output_tokens
        again = sequence.prefill_end > 0
        sequence.prefill_end = sequence.known_tokens
        if not again:
            sequence.cached_tokens = sequence.computed
            self.totals.prompt_tokens += sequence.prompt_tokens
            self.totals.cached_tokens += sequence.cached_tokens
        if not sequence.remote or again:  # the lease of one that starts again is long released: it computes by itself
            self.running[row] = sequence
        elif len(prefix) < min(sequence.reusable_blocks, sequence.remote_tokens // BLOCK_TOKENS):
            sequence.load_from = len(prefix)
            self.loading[row] = sequence
            self.load_wanted.append(sequence)
        else:
            self.running[row] = sequence
            self.load_spared.append(sequence)

    def _prefill(self, budget: int) -> tuple[list[Sequence], int]:
        """Spend up to `budget` prefill tokens, oldest request first; return who is done and how many were spent."""
        done, spent = [], 0
        for sequence in self.running.values():
            if sequence.decoding:
                continue
            left = sequence.prefill_end - sequence.computed
            count = min(max(left, 1), budget - spent)  # one for a token that needs nothing but what was loaded
            if count < left:
                count -= count % BLOCK_TOKENS  # only the last chunk may end inside a block
            if count <= 0:
                continue
            if left:
                self._write_prompt(sequence, sequence.computed, sequence.computed + count)
            spent += count
            if sequence.computed == sequence.prefill_end:
                done.append(sequence)
        return done, spent

    def _write_prompt(self, sequence: Sequence, start: int, end: int) -> None:
        """Write the KV of tokens `start .. end`; `start` is a block's first token."""
        first, full = start // BLOCK_TOKENS, end // BLOCK_TOKENS
        blocks = -(-end // BLOCK_TOKENS)
        parents = [sequence.digests[i - 1] if i else ROOT_DIGEST for i in range(first, blocks)]
        tokens = np.zeros((blocks - first) * BLOCK_TOKENS, np.int64)
        tokens[: end - start] = sequence.tokens[start:end]
        seeds = slot_seeds(tokens.reshape(-1, BLOCK_TOKENS), np.array([digest_seed(d) for d in parents], np.uint64))
        words = block_words(seeds)
        self._kv[sequence.blocks[first:full]] = words[: full - first]
        if full < blocks:
            part = words[-1].reshape(self._parts.shape[1:])
            self._parts[sequence.blocks[full], :, : end % BLOCK_TOKENS] = part[:, : end % BLOCK_TOKENS]
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
        columns = WORD_COLUMNS[slot]
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
        column = WORD_COLUMNS[(length - 1) % BLOCK_TOKENS, last_word_place(order)]
        last = self._kv[self._table[rows, (length - 1) // BLOCK_TOKENS], column]
        tokens = next_tokens(rows, order, length, self._read_blocks, last, self._read_weights)
        self._last_token[rows] = tokens
        self._order[rows] += 1
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.tokens[sequence.prompt_tokens + sequence.output_tokens] = token
            sequence.output_tokens += 1
        self.totals.output_tokens += len(sequences)

    def _read_blocks(self, rows: Ints, blocks: Ints, slots: Ints, places: Ints) -> Words:
        words: Words = self._kv[self._table[rows, blocks], WORD_COLUMNS[slots, places]]
        return words

    def _read_weights(self, draws: Words) -> Words:
        words: Words = self._weights[draws % np.uint64(len(self._weights))]
        return words

    def _give_up_load(self, sequence: Sequence) -> list[int]:
        self._check_loading(sequence)
        if sequence in self.load_wanted:
            self.load_wanted.remove(sequence)
        return self._leave(sequence, self.loading)

    def _is_loading(self, sequence: Sequence) -> bool:
        return self.loading.get(sequence.row) is sequence

    def _check_loading(self, sequence: Sequence) -> None:
        if not self._is_loading(sequence):
            raise ValueError(f"request {sequence.request_id} is not loading")

    def _leave(self, sequence: Sequence, place: dict[int, Sequence]) -> list[int]:
        """Take the sequence off its row; return its blocks, which keep their references."""
        del place[sequence.row]
        self._rows.append(sequence.row)
        sequence.row = -1
        blocks, sequence.blocks = sequence.blocks, []
        return blocks

    def _release(self, blocks: list[int]) -> None:
        """Release last block first, so that of a cached prefix the end is evicted before the beginning."""
        self.pool.release(reversed(blocks))


def audit(core: EngineCore, ended: Iterable[Sequence] = (), elsewhere: Iterable[int] = ()) -> list[str]:
    """Return breaches of conservation (K1), one line each: blocks or rows unaccounted for, held by nobody, or kept.

    `elsewhere` names the blocks that others hold (of finished sequences that hold, and of detached ones), once for each
    reference.
    """
    problems = core.pool.audit()
    admitted = [*core.running.values(), *core.loading.values()]
    named = Counter(b for s in admitted for b in s.blocks)
    named.update(elsewhere)
    if core.pool.held != len(named):
        problems.append(f"{core.pool.held} blocks are held, running and loading requests and others name {len(named)}")
    problems += [
        f"block {b} has {core.pool.references(b)} references, {count} are known"
        for b, count in named.items()
        if core.pool.references(b) != count
    ]
    if sorted([*core._rows, *core.running, *core.loading]) != list(range(core.profile.requests_max)):
        problems.append(
            f"{len(core._rows)} free rows + {len(admitted)} in use are not {core.profile.requests_max} rows"
        )
    problems += [f"ended request {s.request_id} still names {len(s.blocks)} blocks" for s in ended if s.blocks]
    return problems

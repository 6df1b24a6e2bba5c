"""The core and KV that comes from a peer, or stays for one; transfers are played by copying blocks between cores."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.content import BLOCK_TOKENS
from reference_impl.engine.core import EngineCore, Sequence, audit
from reference_impl.engine.profile import Profile
from tests.engine.cores import PROFILE, answer, make_core, prompt, right_answers, run, with_fields


class Pair:
    """A prefill core that holds and a decode core that loads."""

    def __init__(self, profile: Profile = PROFILE) -> None:
        self.holder, self.holder_kv = make_core()
        self.reader, self.reader_kv = make_core(profile)

    def prefill(self, length: int = 200, seed: int = 1) -> Sequence:
        """One request through the holder; its blocks stay."""
        sequence = self.holder.sequence("p", prompt(length, seed), 1, hold=True)
        run(self.holder)
        return sequence

    def submit(self, held: Sequence, output_tokens: int = 8) -> Sequence:
        """The same request at the reader, after one step there."""
        tokens = held.tokens[: held.prompt_tokens]
        sequence = self.reader.sequence("d", tokens, output_tokens, remote_tokens=held.prompt_tokens)
        self.reader.step()
        return sequence

    def copy(self, held: Sequence, sequence: Sequence) -> None:
        """The transfer."""
        wanted = slice(sequence.load_from, sequence.load_to)
        self.reader_kv[sequence.blocks[wanted]] = self.holder_kv[held.held_blocks[wanted]]


# The holder's side.


@pytest.mark.rule("KVC-LEASE-001")
@pytest.mark.parametrize("length", [1, 15, 16, 17, 200])
def test_a_prefill_that_holds_leaves_the_blocks_of_its_prompt(length: int) -> None:
    pair = Pair()
    held = pair.prefill(length)
    assert len(held.held_blocks) == -(-length // BLOCK_TOKENS)
    assert audit(pair.holder, [held], elsewhere=held.held_blocks) == []
    assert not pair.holder.has_work
    pair.holder.pool.release(held.held_blocks)
    assert pair.holder.pool.held == 0


@pytest.mark.rule("KVC-LEASE-002")
def test_a_prefill_that_is_aborted_holds_nothing() -> None:
    core, _ = make_core()
    sequence = core.sequence("p", prompt(600), 1, hold=True)
    core.step()
    assert sequence.blocks
    core.abort(sequence)
    assert (core.pool.held, sequence.held_blocks, audit(core, [sequence])) == (0, [], [])


def test_two_that_hold_the_same_prefix_hold_it_until_both_have_let_go() -> None:
    pair = Pair()
    first, second = pair.prefill(200), pair.prefill(200)
    assert second.cached_tokens == 192
    assert second.held_blocks[:12] == first.held_blocks[:12]
    both = first.held_blocks + second.held_blocks
    assert audit(pair.holder, elsewhere=both) == []
    pair.holder.pool.release(first.held_blocks)
    assert pair.holder.pool.held == len(second.held_blocks)
    pair.holder.pool.release(second.held_blocks)
    assert pair.holder.pool.held == 0


def test_an_answer_that_holds_keeps_what_has_been_computed_of_it() -> None:
    """The last output token has no KV: a next turn computes it."""
    core, _ = make_core()
    sequence = core.sequence("d", prompt(100), 29, hold=True)
    run(core)
    assert sequence.computed == 128
    assert len(sequence.held_blocks) == 8


# The reader's side.


@pytest.mark.rule("KVC-XFER-001")
@pytest.mark.parametrize("length", [17, 31, 32, 33, 200, 256])
def test_a_prompt_that_was_loaded_is_answered_right_without_being_computed(length: int) -> None:
    pair = Pair()
    held = pair.prefill(length)
    sequence = pair.submit(held, 40)
    assert pair.reader.load_wanted == [sequence]
    assert pair.reader.loading == {sequence.row: sequence}
    assert (sequence.load_from, sequence.load_to) == (0, len(held.held_blocks))
    pair.copy(held, sequence)
    pair.reader.loaded(sequence)
    first = pair.reader.step()
    assert first.produced == [sequence]
    assert first.compute_s == PROFILE.step_s(0, 1), "the first token costs what one token of prefill does"
    run(pair.reader)
    assert [answer(sequence)] == right_answers([sequence])
    assert pair.reader.totals.recomputed_tokens == 0
    assert audit(pair.reader, [sequence]) == []


def test_a_prompt_of_one_block_or_less_is_computed_and_its_holder_told() -> None:
    pair = Pair()
    held = pair.prefill(16)
    sequence = pair.submit(held)
    assert pair.reader.load_spared == [sequence]
    run(pair.reader)
    assert [answer(sequence)] == right_answers([sequence])


def test_while_all_it_has_is_loading_the_core_has_no_work() -> None:
    pair = Pair()
    sequence = pair.submit(pair.prefill())
    assert not pair.reader.has_work
    assert pair.reader.step().produced == []
    assert sequence.output_tokens == 0
    assert audit(pair.reader) == []


def test_loading_sequences_take_rows_and_blocks() -> None:
    pair = Pair(with_fields(requests_max=2, kv_blocks=64))
    held = pair.prefill(300)
    loading = pair.submit(held)
    other = pair.reader.sequence("a", prompt(500, 2), 8)
    third = pair.reader.sequence("b", prompt(20, 3), 8)
    pair.reader.step()
    assert list(pair.reader.running.values()) == [other]
    assert list(pair.reader.waiting) == [third], "both rows are taken"
    run(pair.reader)
    assert third.finished
    fourth = pair.reader.sequence("c", prompt(900, 4), 8)
    assert not pair.reader.has_work, "its blocks are taken"
    pair.copy(held, loading)
    pair.reader.loaded(loading)
    run(pair.reader)
    assert [answer(s) for s in (loading, other, third, fourth)] == right_answers([loading, other, third, fourth])


@pytest.mark.parametrize("length", [200, 208])
@pytest.mark.parametrize("block", range(13))
@pytest.mark.rule("KVC-XFER-001")
def test_damage_to_any_one_loaded_block_shows(length: int, block: int) -> None:
    pair = Pair()
    held = pair.prefill(length)
    sequence = pair.submit(held, 8)
    pair.copy(held, sequence)
    pair.reader_kv[sequence.blocks[block]] ^= np.uint64(1)
    pair.reader.loaded(sequence)
    run(pair.reader)
    assert [answer(sequence)] != right_answers([sequence])


@pytest.mark.rule("KVC-REL-003")
def test_a_full_local_hit_reads_nothing() -> None:
    pair = Pair()
    held = pair.prefill(200)
    pair.reader.sequence("before", prompt(200), 1)
    run(pair.reader)
    sequence = pair.submit(held)
    assert (pair.reader.load_wanted, pair.reader.load_spared) == ([], [sequence])
    assert not pair.reader.loading
    run(pair.reader)
    assert sequence.cached_tokens == 192
    assert [answer(sequence)] == right_answers([sequence])


def test_a_partial_local_hit_reads_the_rest() -> None:
    pair = Pair()
    held = pair.prefill(200)
    pair.reader.sequence("before", prompt(200)[:100], 1)
    run(pair.reader)
    sequence = pair.submit(held)
    assert (sequence.load_from, sequence.load_to) == (6, 13)
    pair.copy(held, sequence)
    pair.reader.loaded(sequence)
    run(pair.reader)
    assert [answer(sequence)] == right_answers([sequence])


def test_a_hit_on_the_holders_side_is_read_like_any_other_block() -> None:
    pair = Pair()
    pair.prefill(100)
    held = pair.prefill(200)
    assert held.cached_tokens == 96
    sequence = pair.submit(held)
    pair.copy(held, sequence)
    pair.reader.loaded(sequence)
    run(pair.reader)
    assert [answer(sequence)] == right_answers([sequence])


def test_what_was_loaded_is_found_again() -> None:
    pair = Pair()
    held = pair.prefill(200)
    sequence = pair.submit(held)
    pair.copy(held, sequence)
    pair.reader.loaded(sequence)
    again = pair.reader.sequence("again", prompt(200), 8)
    run(pair.reader)
    assert again.cached_tokens == 192
    assert answer(again) == answer(sequence)


@pytest.mark.rule("KVC-XFER-002")
@pytest.mark.parametrize("hit", [0, 100])
def test_a_failed_load_is_computed_here_and_poisons_no_cache(hit: int) -> None:
    pair = Pair()
    if hit:
        pair.reader.sequence("before", prompt(200)[:hit], 1)
        run(pair.reader)
    cached = pair.reader.pool.cached
    sequence = pair.submit(pair.prefill(200))
    pair.reader_kv[sequence.blocks[sequence.load_from : sequence.load_to]] = 0xDEAD  # it was torn
    behind = pair.reader.sequence("behind", prompt(200), 8)
    pair.reader.step()
    assert behind.cached_tokens == cached * BLOCK_TOKENS, "nothing of what is loading is found"
    pair.reader.load_failed(sequence)
    run(pair.reader)
    after = pair.reader.sequence("after", prompt(200), 8)
    run(pair.reader)
    assert after.cached_tokens == 192
    assert [answer(s) for s in (sequence, behind, after)] == right_answers([sequence, behind, after])
    assert pair.reader.totals.recomputed_tokens == 200 - cached * BLOCK_TOKENS
    assert audit(pair.reader, [sequence, behind, after]) == []


@pytest.mark.rule("KVC-XFER-003")
def test_the_blocks_of_an_aborted_load_are_nobodys_until_it_has_ended() -> None:
    pair = Pair(with_fields(kv_blocks=16))
    sequence = pair.submit(pair.prefill(200))
    with pytest.raises(ValueError, match="is loading"):
        pair.reader.abort(sequence)
    blocks = pair.reader.detach(sequence)
    assert (len(blocks), sequence.blocks, pair.reader.load_wanted) == (13, [], [])
    other = pair.reader.sequence("other", prompt(200, 2), 8)
    assert not pair.reader.has_work, "there are no blocks for it, and nothing to do meanwhile"
    assert audit(pair.reader, [sequence], elsewhere=blocks) == []
    assert audit(pair.reader, [sequence]) != [], "the auditor misses what it was not told of"
    pair.reader_kv[blocks] = 0xDEAD  # it lands
    pair.reader.pool.release(blocks)
    run(pair.reader)
    assert [answer(other)] == right_answers([other])
    assert pair.reader.totals.aborted == 1


@pytest.mark.rule("KVC-XFER-004")
def test_a_load_that_was_given_up_may_land_and_does_no_harm() -> None:
    """It starts again in other blocks, before those behind it."""
    pair = Pair()
    sequence = pair.submit(pair.prefill(200))
    behind = pair.reader.sequence("behind", prompt(300, 2), 8)
    blocks = pair.reader.restart(sequence)
    assert list(pair.reader.waiting) == [sequence, behind]
    for _ in range(3):
        pair.reader.step()
        pair.reader_kv[blocks] ^= np.uint64(7)  # it lands, late
        assert audit(pair.reader, elsewhere=blocks) == []
    run(pair.reader)
    pair.reader.pool.release(blocks)
    assert [answer(s) for s in (sequence, behind)] == right_answers([sequence, behind])
    assert pair.reader.totals.recomputed_tokens == 200
    assert pair.reader.totals.aborted == 0
    assert pair.reader.totals.prompt_tokens == 500, "a prompt is counted once"


@pytest.mark.parametrize("name", ["loaded", "load_failed", "detach", "restart"])
def test_the_end_of_a_load_that_is_not_running_is_refused(name: str) -> None:
    core, _ = make_core()
    sequence = core.sequence("a", prompt(40), 1)
    core.step()
    end: Callable[[Sequence], object] = getattr(core, name)
    with pytest.raises(ValueError, match="not loading"):
        end(sequence)


# The next turn: the peer has a part of the prompt.


@pytest.mark.parametrize("more", [0, 1, 15, 16, 100])
@pytest.mark.parametrize("turn_tokens", [20, 128, 131])
def test_a_next_turn_loads_the_last_one_and_computes_the_rest(turn_tokens: int, more: int) -> None:
    pair = Pair()
    turn = pair.holder.sequence("d", prompt(turn_tokens), 30, hold=True)
    run(pair.holder)
    tokens = np.concatenate([turn.tokens, prompt(more, 5)])
    sequence = pair.reader.sequence("p", tokens, 8, remote_tokens=turn.computed)
    pair.reader.step()
    assert (sequence.load_from, sequence.load_to) == (0, turn.computed // BLOCK_TOKENS)
    pair.copy(turn, sequence)
    pair.reader.loaded(sequence)
    run(pair.reader)
    assert [answer(sequence)] == right_answers([sequence])
    assert audit(pair.reader, [sequence]) == []


def test_less_than_a_block_of_the_last_turn_is_not_worth_a_read() -> None:
    pair = Pair()
    sequence = pair.reader.sequence("p", prompt(100), 8, remote_tokens=15)
    run(pair.reader)
    assert (pair.reader.load_wanted, pair.reader.load_spared) == ([], [sequence])


# All of it at once.


class Request(msgspec.Struct, frozen=True):
    """One request of a random history."""

    fate: str
    family: int
    length: int
    output_tokens: int
    held: bool
    starts_after: int
    takes: int
    """Steps that its load takes, or after which it is aborted."""


REQUESTS = st.builds(
    Request,
    fate=st.sampled_from(["local", "loaded", "failed", "detached", "restarted", "aborted"]),
    family=st.integers(0, 3),
    length=st.integers(1, 200),
    output_tokens=st.integers(1, 40),
    held=st.booleans(),
    starts_after=st.integers(0, 12),
    takes=st.integers(0, 12),
)


class History:
    """Plays a list of requests against a reader; every step is audited."""

    def __init__(self, requests: list[Request], profile: Profile) -> None:
        self.holder, self.holder_kv = make_core()
        self.core, self.kv = make_core(profile)
        self.requests = requests
        self.prefilled: dict[int, Sequence] = {}
        self.sequences: dict[int, Sequence] = {}
        self.due: dict[int, int] = {}
        self.draining: list[tuple[int, list[int]]] = []
        self.held: list[tuple[int, list[int]]] = []
        self.now = 0

    def play(self) -> None:
        for self.now in range(20_000):
            self._arrive()
            self._transfers()
            self._let_go()
            if self.core.has_work:
                before = self._progress()
                step = self.core.step()
                assert self._progress() != before, "the core says that it has work, and does nothing"
                self._produced(step.produced)
            self._check()
            if self._over():
                return
        pytest.fail("the history did not come to an end")

    def _over(self) -> bool:
        core = self.core
        live = core.running or core.loading or core.waiting or self.draining or self.held
        return not live and len(self.sequences) == len(self.requests)

    def _progress(self) -> tuple[object, ...]:
        computed = [(s.computed, s.output_tokens, s.row) for s in self.sequences.values()]
        return computed, list(self.core.loading), msgspec.structs.astuple(self.core.totals)

    def _arrive(self) -> None:
        for number, request in enumerate(self.requests):
            if request.starts_after != self.now:
                continue
            remote = request.fate not in ("local", "aborted")
            tokens = prompt(200, request.family)[: request.length]
            if remote:
                self.prefilled[number] = self.holder.sequence(str(number), tokens, 1, hold=True)
                run(self.holder)
            self.sequences[number] = self.core.sequence(
                str(number), tokens, request.output_tokens, remote_tokens=len(tokens) if remote else 0,
                hold=request.held,
            )  # fmt: skip
            if request.fate == "aborted":
                self.due[number] = self.now + request.takes

    def _transfers(self) -> None:
        wanted, self.core.load_wanted = self.core.load_wanted, []
        for sequence in wanted:
            number = int(sequence.request_id)
            self.kv[sequence.blocks[sequence.load_from : sequence.load_to]] = 0xDEAD
            self.due[number] = self.now + self.requests[number].takes
        for number in [n for n, due in self.due.items() if due <= self.now]:
            del self.due[number]
            self._end(self.sequences[number], self.prefilled.get(number), self.requests[number].fate)

    def _end(self, sequence: Sequence, prefilled: Sequence | None, fate: str) -> None:
        wanted = slice(sequence.load_from, sequence.load_to)
        if fate == "aborted":
            self.core.abort(sequence)
        elif fate == "loaded":
            assert prefilled is not None
            self.kv[sequence.blocks[wanted]] = self.holder_kv[prefilled.held_blocks[wanted]]
            self.core.loaded(sequence)
        elif fate == "failed":
            self.core.load_failed(sequence)
        else:
            blocks = self.core.detach(sequence) if fate == "detached" else self.core.restart(sequence)
            self.draining.append((self.now + 5, blocks))

    def _let_go(self) -> None:
        for _, blocks in self.draining:  # what was given up may land at any time
            self.kv[blocks[-1:]] ^= np.uint64(1)
        for due, blocks in [*self.draining, *self.held]:
            if due <= self.now:
                self.core.pool.release(blocks)
        self.draining = [d for d in self.draining if d[0] > self.now]
        self.held = [h for h in self.held if h[0] > self.now]

    def _produced(self, produced: list[Sequence]) -> None:
        assert len({id(s) for s in produced}) == len(produced), "a token was told twice"
        for sequence in produced:
            if sequence.held_blocks:
                assert len(sequence.held_blocks) == -(-sequence.computed // BLOCK_TOKENS)
                self.held.append((self.now + 7, sequence.held_blocks))

    def _check(self) -> None:
        elsewhere = [b for _, blocks in [*self.draining, *self.held] for b in blocks]
        inside = {id(s) for s in [*self.core.running.values(), *self.core.loading.values(), *self.core.waiting]}
        ended = [s for s in self.sequences.values() if id(s) not in inside]
        assert audit(self.core, ended, elsewhere) == []


def play(requests: list[Request], profile: Profile) -> EngineCore:
    """Play a history and check all that was answered."""
    history = History(requests, profile)
    history.play()
    sequences = list(history.sequences.values())
    assert [answer(s) for s in sequences] == right_answers(sequences, so_far=True)
    for request, sequence in zip(requests, (history.sequences[n] for n in range(len(requests))), strict=True):
        assert sequence.finished or request.fate in ("aborted", "detached")
    assert history.core.pool.held == 0
    kept = [b for s in history.prefilled.values() for b in s.held_blocks]
    assert audit(history.holder, elsewhere=kept) == []
    return history.core


@pytest.mark.rule("KVC-XFER-001")
@settings(max_examples=60, deadline=None)
@given(requests=st.lists(REQUESTS, min_size=1, max_size=14), blocks=st.integers(15, 60), reserve=st.booleans())
def test_whatever_becomes_of_loads_every_answer_is_the_oracles_and_no_block_is_lost(
    requests: list[Request], blocks: int, reserve: bool
) -> None:
    play(requests, with_fields(kv_blocks=blocks, requests_max=6, reserve=reserve))


def test_a_long_random_history_meets_everything() -> None:
    chance = np.random.default_rng(20)
    fates = ["local", "loaded", "failed", "detached", "restarted", "aborted"]
    requests = [
        Request(
            fate=fates[int(chance.integers(6))], family=int(chance.integers(4)), length=int(chance.integers(1, 200)),
            output_tokens=int(chance.integers(1, 60)), held=bool(chance.integers(2)),
            starts_after=int(chance.integers(300)), takes=int(chance.integers(20)),
        )
        for _ in range(150)
    ]  # fmt: skip
    core = play(requests, with_fields(kv_blocks=40, requests_max=8, reserve=False))
    totals = core.totals
    assert min(totals.preempted, totals.recomputed_tokens, totals.aborted, totals.cached_tokens) > 0

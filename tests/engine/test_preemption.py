"""A core that reserves nothing: requests grow a block at a time, and the newest gives way when none is free."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.content import BLOCK_TOKENS
from reference_impl.engine.core import Sequence, audit
from reference_impl.engine.loop import StepLoop
from reference_impl.engine.profile import Profile
from tests.engine.cores import STEPS_MAX, answer, make_core, prompt, right_answers, run, with_fields


def tight(blocks: int, **fields: object) -> Profile:
    return with_fields(kv_blocks=blocks, reserve=False, **fields)


def test_a_request_is_admitted_with_its_prompts_blocks_and_one_more_and_grows() -> None:
    core, _ = make_core(tight(64))
    sequence = core.sequence("a", prompt(30), 200)
    core.step()
    assert len(sequence.blocks) == 3
    sizes = []
    while core.has_work:
        core.step()
        sizes.append(core.pool.held)
        assert len(sequence.blocks) * BLOCK_TOKENS >= sequence.computed or sequence.finished
    assert max(sizes) == sequence.blocks_needed == 15
    assert core.totals.preempted == 0
    assert [answer(sequence)] == right_answers([sequence])


def test_more_requests_run_at_once_than_would_if_all_were_reserved() -> None:
    running = {}
    for reserve in (True, False):
        core, _ = make_core(with_fields(kv_blocks=40, reserve=reserve))
        for number in range(8):
            core.sequence(str(number), prompt(20, number), 200)
        core.step()
        running[reserve] = len(core.running)
    assert running == {True: 2, False: 8}


def test_the_newest_gives_way_and_starts_again_from_the_front() -> None:
    core, _ = make_core(tight(14, requests_max=4))
    old = core.sequence("old", prompt(60, 1), 100)
    new = core.sequence("new", prompt(60, 2), 100)
    behind = core.sequence("behind", prompt(150, 3), 8)
    for _ in range(STEPS_MAX):
        core.step()
        if core.totals.preempted:
            break
    assert list(core.running.values()) == [old]
    assert list(core.waiting) == [new, behind]
    assert (new.blocks, new.row, new.computed) == ([], -1, 0)
    assert 0 < new.output_tokens < 100
    before = answer(new)
    run(core)
    assert answer(new)[: len(before)] == before
    assert [answer(s) for s in (old, new, behind)] == right_answers([old, new, behind])
    assert core.totals.output_tokens == 208, "no token was made twice"
    assert core.totals.prompt_tokens == 270, "no prompt was counted twice"
    assert core.totals.finished == 3
    assert audit(core, [old, new, behind]) == []


@pytest.mark.parametrize("evict", [False, True])
def test_one_that_starts_again_is_right_whether_its_blocks_are_still_cached_or_not(evict: bool) -> None:
    """It recomputes blocks that its own answer filled, and ends inside one or at its end."""
    for made in range(1, 40):
        core, kv = make_core(tight(64))
        sequence = core.sequence("a", prompt(37), 60)
        while sequence.output_tokens < made:
            core.step()
        core._preempt(sequence)
        assert audit(core) == []
        if evict:
            core.pool.forget()
            kv[:] = 0
        run(core)
        assert [answer(sequence)] == right_answers([sequence])


def test_one_that_starts_again_finds_the_beginning_of_its_blocks() -> None:
    """Of what is cached, the end is evicted first: a prefix without its beginning is of no use."""
    core, _ = make_core(tight(16))
    sequence = core.sequence("a", prompt(160), 60)
    while sequence.output_tokens < 2:
        core.step()
    core._preempt(sequence)
    core.waiting.clear()
    other = core.pool.allocate(11)
    assert len(core.pool.take_prefix(sequence.digests)) == 5
    core.pool.release(other)


def test_one_that_is_alone_and_finds_no_block_waits_for_one() -> None:
    core, _ = make_core(tight(16))
    elsewhere = core.pool.allocate(10)
    sequence = core.sequence("a", prompt(40), 150)
    run(core)
    assert list(core.waiting) == [sequence]
    assert 0 < sequence.output_tokens < 150
    assert not core.has_work, "no step would do anything until somebody lets go of a block"
    assert audit(core, elsewhere=elsewhere) == []
    core.pool.release(elsewhere)
    run(core)
    assert [answer(sequence)] == right_answers([sequence])


def test_one_that_needs_the_whole_pool_is_admitted_again_near_its_end() -> None:
    core, _ = make_core(tight(16))
    sequence = core.sequence("a", prompt(40), 16 * BLOCK_TOKENS - 40)
    while len(sequence.blocks) < 16:
        core.step()
    core._preempt(sequence)
    run(core)
    assert [answer(sequence)] == right_answers([sequence])


def test_first_and_later_tokens_that_a_step_makes_together_are_right() -> None:
    """The first token reads every block, a later one a window: only prompts longer than that tell them apart."""
    core, _ = make_core(tight(256, chunk_tokens=4096))
    old = core.sequence("old", prompt(1500, 1), 20)
    while old.output_tokens < 5:
        core.step()
    core._preempt(old)
    new = core.sequence("new", prompt(1400, 2), 20)
    assert core.step().produced == [old, new]
    core._preempt(old)
    newest = core.sequence("newest", prompt(1100, 3), 20)
    core.waiting.rotate()
    assert core.step().produced == [newest, old, new]
    run(core)
    assert [answer(s) for s in (old, new, newest)] == right_answers([old, new, newest])


def test_a_preempted_request_can_be_aborted() -> None:
    core, _ = make_core(tight(64))
    sequence = core.sequence("a", prompt(40), 150, hold=True)
    core.step()
    core._preempt(sequence)
    core.abort(sequence)
    assert not core.has_work
    assert (core.pool.held, core.totals.aborted, sequence.held_blocks) == (0, 1, [])


def test_a_request_whose_kv_was_loaded_computes_by_itself_after_a_preemption() -> None:
    """Its lease is long released by then."""
    core, kv = make_core(tight(64))
    sequence = core.sequence("a", prompt(100), 60, remote_tokens=100)
    core.step()
    source, source_kv = make_core()
    held = source.sequence("a", prompt(100), 1, hold=True)
    run(source)
    kv[sequence.blocks[: sequence.load_to]] = source_kv[held.held_blocks]
    core.load_wanted.clear()
    core.loaded(sequence)
    for _ in range(30):
        core.step()
    core._preempt(sequence)
    core.pool.forget()
    kv[:] = 0
    run(core)
    assert (core.load_wanted, core.load_spared) == ([], [])
    assert [answer(sequence)] == right_answers([sequence])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 90), st.integers(0, 3)), min_size=1, max_size=12),
    blocks=st.integers(15, 45),
    chunk=st.sampled_from([16, 40, 64, 512]),
)
def test_whoever_gives_way_each_answer_is_the_oracles(
    lengths: list[tuple[int, int, int]], blocks: int, chunk: int
) -> None:
    core, _ = make_core(tight(blocks, chunk_tokens=chunk))
    sequences = [core.sequence(str(i), prompt(150, family)[:n], out) for i, (n, out, family) in enumerate(lengths)]
    told: dict[str, list[int]] = {s.request_id: [] for s in sequences}
    for _ in range(STEPS_MAX):
        if not core.has_work:
            break
        for sequence in core.step().produced:
            told[sequence.request_id].append(int(sequence.tokens[sequence.known_tokens - 1]))
        assert audit(core, [s for s in sequences if s.finished]) == []
    assert list(told.values()) == right_answers(sequences), "no token is lost, none is told twice"
    assert all(s.finished for s in sequences)
    assert core.pool.held == 0


async def test_streams_go_on_where_they_were() -> None:
    core, _ = make_core(tight(20))
    loop = StepLoop(core)
    running = asyncio.create_task(loop.run())
    prompts = [prompt(40, seed) for seed in range(6)]
    streams = [loop.submit(str(i), p, 120, interval_tokens=3) for i, p in enumerate(prompts)]

    async def whole(number: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < 120:
            tokens += (await streams[number].next()).tokens
        return tokens

    try:
        answers = await asyncio.wait_for(asyncio.gather(*(whole(i) for i in range(6))), timeout=30)
    finally:
        running.cancel()
    sequences: list[Sequence] = [s.sequence for s in streams]
    assert answers == right_answers(sequences)
    assert core.totals.preempted > 0


def test_damage_after_a_new_start_shows() -> None:
    core, kv = make_core(tight(64))
    sequence = core.sequence("a", prompt(100), 60)
    while sequence.output_tokens < 30:
        core.step()
    core._preempt(sequence)
    core.step()
    kv[sequence.blocks[2]] ^= np.uint64(1)
    run(core)
    assert [answer(sequence)] != right_answers([sequence])

"""The judge of sessions: each turn is held against the prompt that was really sent."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from harness.content import ReferenceOracle, judge, sent_prompt
from reference_impl.oracle import Weights, expected_answers
from workloads.prompts import NO_TOKENS, prompt_tokens
from workloads.rows import Outcome, PromptSpec, RequestRecord

WEIGHTS = Weights(seed=3, words=4096)
ORACLE = ReferenceOracle(WEIGHTS)
TOKENS = 12


def answer(prompt: np.ndarray) -> list[int]:
    [right] = expected_answers([prompt], [TOKENS], WEIGHTS)
    return [int(token) for token in right]


def session(turns: int, wrong: int = -1, trusts_a_wrong_answer: bool = False) -> list[RequestRecord]:
    """A session whose turn `wrong` was answered wrongly.

    With `trusts_a_wrong_answer` the server goes on as if it had answered that turn rightly: it reads KV that does not
    belong to the prompt that it was sent.
    """
    records: list[RequestRecord] = []
    sent = kept = NO_TOKENS
    for turn in range(turns):
        own = 100 if turn == 0 else 30
        after = records[-1].request_id if records else ""
        spec = PromptSpec(7, 5, len(sent) + own, after=after, turn=turn)
        sent, kept = prompt_tokens(spec, sent), prompt_tokens(spec, kept)
        right = answer(kept if trusts_a_wrong_answer else sent)
        ids = [right[0] ^ 1, *right[1:]] if turn == wrong else right
        records.append(
            RequestRecord(
                request_id=f"s-{turn}",
                prompt=spec,
                session=5,
                turn=turn,
                max_tokens=TOKENS,
                intended_ns=1,
                sent_ns=1,
                send_began_ns=1,
                end_ns=2,
                output_ids=ids,
                outcome=Outcome.OK,
            )
        )
        sent, kept = np.concatenate([sent, ids]), np.concatenate([kept, right])
    return records


@pytest.mark.rule("KVC-XFER-001")
def test_a_session_answered_rightly_is_right() -> None:
    records = session(4)
    done: list[int] = []
    assert judge(records, ORACLE, done.append) == [True] * 4
    assert judge(records[::-1], ORACLE) == [True] * 4
    assert done == [4]


@pytest.mark.rule("KVC-XFER-001")
def test_a_wrong_answer_is_held_against_its_own_turn_alone() -> None:
    assert judge(session(4, wrong=1), ORACLE) == [True, False, True, True]


@pytest.mark.rule("KVC-XFER-001")
def test_a_server_that_reads_other_tokens_than_it_was_sent_is_caught() -> None:
    """The twin: its later answers are right for a talk that never happened."""
    assert judge(session(4, wrong=1, trusts_a_wrong_answer=True), ORACLE) == [True, False, False, False]


def test_a_turn_whose_forerunner_left_no_record_cannot_be_judged() -> None:
    first, second, third = session(3)
    assert judge([first, third], ORACLE) == [True, None]
    assert judge([second], ORACLE) == [None]
    broken = msgspec.structs.replace(third, output_ids=third.output_ids[:5], outcome=Outcome.FAIL)
    unanswered = msgspec.structs.replace(third, output_ids=[], outcome=Outcome.UNKNOWN)
    assert judge([first, second, broken], ORACLE) == [True, True, True]
    assert judge([first, second, unanswered], ORACLE) == [True, True, None]


def test_turns_that_run_in_a_circle_are_refused() -> None:
    first, second = session(2)
    twisted = msgspec.structs.replace(first, prompt=msgspec.structs.replace(second.prompt, after="s-1"))
    with pytest.raises(ValueError, match="turns must count upwards"):
        sent_prompt(second, {"s-0": twisted, "s-1": second})


def test_prompts_of_traces_are_judged() -> None:
    spec = PromptSpec(7, 5, 90, block_ids=[4, 9], block_tokens=60)
    record = msgspec.structs.replace(session(1)[0], prompt=spec, output_ids=answer(prompt_tokens(spec)))
    wrong = msgspec.structs.replace(
        record, request_id="w", prompt=PromptSpec(7, 5, 90, block_ids=[4, 8], block_tokens=60)
    )
    assert judge([record, wrong], ORACLE) == [True, False]

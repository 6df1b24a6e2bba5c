"""Judges every answer of a run by the content oracle, after the load has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from reference_impl.oracle import Weights, expected_answers
from workloads.prompts import NO_TOKENS, prompt_tokens
from workloads.rows import RequestRecord

BATCH = 32


class Oracle(Protocol):
    """Who knows the right answers of the model under test."""

    def are_right(self, prompts: Sequence[NDArray[np.int64]], answers: Sequence[RequestRecord]) -> list[bool]:
        """Return for each prompt whether the answer in its record, as far as it came, is the right one."""
        ...


class ReferenceOracle:
    """The reference engine's: its tokens are a function of the prompt and of the weights."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def are_right(self, prompts: Sequence[NDArray[np.int64]], answers: Sequence[RequestRecord]) -> list[bool]:
        """Compare token by token."""
        right = expected_answers(list(prompts), [len(a.output_ids) for a in answers], self._weights)
        return [a.output_ids == expected.tolist() for a, expected in zip(answers, right, strict=True)]


def judge(
    records: Sequence[RequestRecord], oracle: Oracle, progress: Callable[[int], None] = lambda _: None
) -> list[bool | None]:
    """Return, for each record, whether the tokens that came are the right ones.

    None where none came, or where a later turn's prompt cannot be made again because a turn before it has no record. A
    broken stream is judged as far as it got. `progress` is told how many are done.
    """
    verdicts: list[bool | None] = [None] * len(records)
    by_id = {record.request_id: record for record in records}
    answered = [i for i, r in enumerate(records) if r.output_ids]
    for start in range(0, len(answered), BATCH):
        batch = answered[start : start + BATCH]
        prompts = [(i, prompt) for i in batch if (prompt := sent_prompt(records[i], by_id)) is not None]
        right = oracle.are_right([p for _, p in prompts], [records[i] for i, _ in prompts])
        for (i, _), is_right in zip(prompts, right, strict=True):
            verdicts[i] = is_right and is_whole(records[i])
        progress(start + len(batch))
    return verdicts


def sent_prompt(record: RequestRecord, by_id: Mapping[str, RequestRecord]) -> NDArray[np.int64] | None:
    """Return the tokens that `record`'s request really sent; None if a turn before it is not in `by_id`.

    A later turn repeats what it was answered, right or wrong: a wrong answer is held against its own turn alone.
    Raises ValueError if the turns do not fit together.
    """
    turns = [record]
    while turns[-1].prompt.after:
        before = by_id.get(turns[-1].prompt.after)
        if before is None:
            return None
        if before.prompt.turn >= turns[-1].prompt.turn:
            raise ValueError(f"{turns[-1].request_id} cannot follow {before.request_id}: turns must count upwards")
        turns.append(before)
    said = NO_TOKENS
    for turn in reversed(turns[1:]):
        said = np.concatenate([prompt_tokens(turn.prompt, said), np.asarray(turn.output_ids, np.int64)])
    return prompt_tokens(record.prompt, said)


def is_whole(record: RequestRecord) -> bool:
    """Return whether an answer called whole has as many tokens as were asked for: none lost, none doubled."""
    return record.outcome != "ok" or len(record.output_ids) == record.max_tokens

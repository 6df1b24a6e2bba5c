"""Judges every answer of a run by the content oracle, after the load has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reference_impl.oracle import Weights, expected_answers
from workloads.prompts import prompt_tokens
from workloads.rows import RequestRecord

BATCH = 32


def judge(
    records: Sequence[RequestRecord], weights: Weights, progress: Callable[[int], None] = lambda _: None
) -> list[bool | None]:
    """Return, for each record, whether the tokens that came are the right ones; None where none came.

    A broken stream is judged as far as it got. `progress` is told how many are done.
    """
    verdicts: list[bool | None] = [None] * len(records)
    answered = [i for i, r in enumerate(records) if r.output_ids]
    for start in range(0, len(answered), BATCH):
        batch = answered[start : start + BATCH]
        prompts = [prompt_tokens(records[i].prompt) for i in batch]
        right = expected_answers(prompts, [len(records[i].output_ids) for i in batch], weights)
        for i, expected in zip(batch, right, strict=True):
            verdicts[i] = records[i].output_ids == expected.tolist() and _whole(records[i])
        progress(start + len(batch))
    return verdicts


def _whole(record: RequestRecord) -> bool:
    """An answer called whole must have as many tokens as were asked for: none lost, none doubled."""
    return record.outcome != "ok" or len(record.output_ids) == record.max_tokens

"""Who knows the canary's right answers: an independent forward pass over what was really asked and answered.

An answer is judged in one go, each token given what came before it. It is right if every token is the most probable one
(or as good as it: a near tie may go either way on another machine), and if every probability that the server told is
the right one. So damage that leaves all tokens as they were shows as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from workloads.canary.forward import Forward, KvCache, log_softmax
from workloads.canary.spec import CanarySpec
from workloads.rows import RequestRecord

TOLERANCE: Final = 0.001
"""Of the logarithm of a probability. Rounding on a real server was a thirtieth of it (tests/vllm/test_canary.py);
damage to any one block of a prompt of 32,000 tokens moves it by 24 times as much (tests/workloads/test_canary.py)."""
POSITIONS_AT_ONCE: Final = 256


class Judgement(msgspec.Struct, frozen=True):
    """What is to be said of one answer. `first_bad` is the first token at fault, None if it is right as far as it came.

    `worst_error` is the largest difference of a told probability's logarithm from the right one, 0 if none was told.
    """

    right: bool
    first_bad: int | None
    worst_error: float


class CanaryOracle:
    """The canary of a `spec`."""

    def __init__(self, spec: CanarySpec) -> None:
        self._forward = Forward(spec)
        self._positions_max = spec.max_positions
        self._vocabulary = spec.vocabulary

    def answer(self, prompt: NDArray[np.int64], count: int) -> tuple[list[int], list[float]]:
        """Return the greedy answer of `count` tokens, and the logarithm of each one's probability."""
        cache = self._forward.cache(prompt)
        room = [np.zeros((count, part.shape[1]), part.dtype) for part in cache]
        keys, values = (np.concatenate([part, more]) for part, more in zip(cache, room, strict=True))
        last, ids, logprobs = int(prompt[-1]), list[int](), list[float]()
        for number in range(count):
            end = len(prompt) + number
            seen = KvCache(keys[:end], values[:end])
            behind = log_softmax(self._forward.logits(np.array([last]), np.array([end - 1]), seen))[0]
            last = int(behind.argmax())
            ids.append(last)
            logprobs.append(float(behind[last]))
            keys[end : end + 1], values[end : end + 1] = self._forward.cache(np.array([last]), end)
        return ids, logprobs

    def judge(self, prompt: NDArray[np.int64], ids: Sequence[int], logprobs: Sequence[float] = ()) -> Judgement:
        """Judge an answer as far as it came. `logprobs`: what the server told of its tokens; empty: nothing."""
        answered = np.asarray(ids, np.int64)
        if logprobs and len(logprobs) != len(answered):
            return Judgement(False, min(len(logprobs), len(answered)), float("inf"))
        tokens = np.concatenate([prompt, answered])
        if len(tokens) > self._positions_max or not ((tokens >= 0) & (tokens < self._vocabulary)).all():
            return Judgement(False, 0, float("inf"))
        behind, best = self._probabilities(tokens, len(prompt), answered)
        bad = best - behind > TOLERANCE
        errors = np.abs(np.asarray(logprobs) - behind) if logprobs else np.zeros(len(answered))
        bad |= ~(errors <= TOLERANCE)  # so that NaN is an error
        worst = float(np.nan_to_num(errors, nan=np.inf).max(initial=0.0))
        return Judgement(not bad.any(), int(bad.argmax()) if bad.any() else None, worst)

    def are_right(self, prompts: Sequence[NDArray[np.int64]], answers: Sequence[RequestRecord]) -> list[bool]:
        """Return for each prompt whether the answer in its record, as far as it came, is the right one."""
        return [
            self.judge(prompt, record.output_ids, record.logprobs).right
            for prompt, record in zip(prompts, answers, strict=True)
        ]

    def _probabilities(
        self, tokens: NDArray[np.int64], first: int, answered: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the logarithms of the answered tokens' probabilities, and of the most probable tokens' there."""
        cache = self._forward.cache(tokens[:-1])
        behind, best = np.empty(len(answered)), np.empty(len(answered))
        for start in range(0, len(answered), POSITIONS_AT_ONCE):
            part = slice(start, min(start + POSITIONS_AT_ONCE, len(answered)))
            positions = np.arange(first - 1 + part.start, first - 1 + part.stop)
            found = log_softmax(self._forward.logits(tokens[positions], positions, cache))
            behind[part] = found[np.arange(len(positions)), answered[part]]
            best[part] = found.max(axis=1)
        return behind, best

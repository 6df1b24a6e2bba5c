"""The short request that an engine answers to itself before it may register."""

from __future__ import annotations

from typing import Final

import numpy as np

from reference_impl.engine.loop import StepLoop
from reference_impl.oracle import Weights, expected_answers

PROMPT: Final = (np.arange(40, dtype=np.int64) * 97 + 13) % 4096
OUTPUT_TOKENS: Final = 1
"""One: it reads every block that the prompt filled, the last slot and the weights; a second would add a decode step."""


class Canary:
    """Knows the right answer beforehand, so that a wake spends no time on it."""

    def __init__(self, weights: Weights) -> None:
        self._expected = expected_answers([PROMPT], [OUTPUT_TOKENS], weights)[0].tolist()

    async def ask(self, loop: StepLoop) -> bool:
        """Run the canary through the engine's own step loop; return whether its answer is right."""
        stream = loop.submit("canary", PROMPT, OUTPUT_TOKENS, interval_tokens=1)
        answer: list[int] = []
        while len(answer) < OUTPUT_TOKENS:
            answer += (await stream.next()).tokens
        return bool(answer == self._expected)

"""What a session's next turn is made of: the turn before, its answer, its hand-off. Pure."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from workloads.answer import Answer
from workloads.plan import Planned, Turn
from workloads.prompts import NO_TOKENS, prompt_tokens
from workloads.rows import Outcome, PromptSpec
from workloads.streaming import Exchange

NS_PER_MS: Final = 1_000_000
NO_WORDS: Final = "the answer named no tokens (token_ids), and the next turn must repeat them"


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """One turn as it is sent."""

    request_id: str
    turn: Turn
    prompt: PromptSpec
    """Whole: of a later turn with what it repeats."""
    tokens: NDArray[np.int64]
    intended_ns: int
    hand_off: bytes
    renewals: int
    renewals_failed: int


class Conversation:
    """One session on its way: `say` a turn, `hear` its answer, and so on. Its first turn is due at `start_ns`."""

    def __init__(self, item: Planned, name: str, start_ns: int) -> None:
        self.hand_off = b""
        """What the next turn sends on."""
        self.end_ns = 0
        """When the turn before ended."""
        self._item = item
        self._name = name
        self._start_ns = start_ns
        self._after = ""
        self._tokens = NO_TOKENS
        self._renewals = self._renewals_failed = 0

    @property
    def keep_alive_s(self) -> float:
        """How often the hand-off is renewed during think time; 0: never."""
        return self._item.keep_alive_s

    def is_last(self, turn: Turn) -> bool:
        """Return whether no turn follows `turn`."""
        return turn is self._item.turns[-1]

    def moment_ns(self, turn: Turn) -> int:
        """Return when `turn` is due."""
        return self.end_ns + round(turn.think_ms * NS_PER_MS) if self._after else self._start_ns

    def renewed(self, hand_off: bytes, renewals: int, failed: int) -> None:
        """Take what the think time did to the hand-off."""
        self.hand_off, self._renewals, self._renewals_failed = hand_off, renewals, failed

    def say(self, turn: Turn) -> Said:
        """Return `turn` as it must be sent now."""
        own = turn.prompt
        prompt = msgspec.structs.replace(own, after=self._after, input_tokens=len(self._tokens) + own.input_tokens)
        return Said(
            request_id=self._name if len(self._item.turns) == 1 else f"{self._name}-{own.turn}",
            turn=turn,
            prompt=prompt,
            tokens=prompt_tokens(prompt, self._tokens),
            intended_ns=self.moment_ns(turn),
            hand_off=self.hand_off,
            renewals=self._renewals,
            renewals_failed=self._renewals_failed,
        )

    def hear(self, said: Said, answer: Answer, seen: Exchange) -> None:
        """Take the answer. One that gives a next turn nothing to repeat is made a failure in `seen`."""
        if self.is_last(said.turn) or seen.outcome is not Outcome.OK:
            return
        if not answer.output_ids:
            seen.outcome, seen.error = Outcome.FAIL, NO_WORDS
            return
        self._after = said.request_id
        self._tokens = np.concatenate([said.tokens, np.asarray(answer.output_ids, np.int64)])
        self.end_ns = seen.end_ns
        self.hand_off = answer.hand_off if self._item.kv_handoff else b""

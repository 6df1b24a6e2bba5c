"""When a call is tried again: how often, after what pause, and within which budget (KVC-IDEM-013).

Three limits, because each stops another trouble. `attempts_max` bounds one call. The pause grows, so that a server that
is down is not hammered, and is jittered, so that those who failed together do not come back together. The budget bounds
all calls of a client: when most of them fail, further attempts cannot help and only load the server, so none are made.

The budget is the token ratio that gRPC's proposal A6 describes as retry throttling for its own core; that one neither
bounds an attempt's own time nor tells how often it tried, so the rule stands here, where it can be tested.
Source: RPC document, "Retry".
"""

from __future__ import annotations

from typing import Final

import msgspec

ATTEMPTS_MAX: Final = 100
_MILLI: Final = 1000


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How one call is tried: pauses of 10, 20, 40 ms if nothing else is said."""

    attempts_max: int = 4
    """The first one counts."""
    initial_s: float = 0.01
    multiplier: float = 2.0
    max_s: float = 1.0
    """Longest pause, before jitter."""
    jitter: float = 0.2
    """Share by which a pause may be shorter or longer."""
    attempt_timeout_s: float = 1.0
    """Longest time that one attempt may take; less if its caller has less left."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, low, high in (
            ("attempts_max", 1, ATTEMPTS_MAX), ("initial_s", 0, 60), ("multiplier", 1, 10), ("max_s", 0, 3600),
            ("jitter", 0, 1), ("attempt_timeout_s", 0.001, 3600),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be from {low} to {high}, got {value}")


def backoff_s(policy: RetryPolicy, retry: int, draw: float) -> float:
    """Return the pause before the `retry`-th retry (1: the second attempt), in seconds; `draw` is uniform in [0, 1).

    min(initial * multiplier ** (retry - 1), max) * (1 - jitter + 2 * jitter * draw)
    """
    if retry < 1:
        raise ValueError(f"retry must be at least 1, got {retry}")
    pause_s = min(policy.initial_s * policy.multiplier ** (min(retry, ATTEMPTS_MAX) - 1), policy.max_s)
    return pause_s * (1 - policy.jitter + 2 * policy.jitter * draw)


class RetryBudget:
    """Tokens: an attempt that failed takes one, a success gives `token_ratio` back; above half of them one may retry.

    So at most about `token_ratio` retries a success leave in the long run, and `tokens_max / 2` in a burst. One budget
    belongs to one client and one server. Counted in thousandths, as A6 does: ten times a tenth is one.
    """

    def __init__(self, tokens_max: float = 10.0, token_ratio: float = 0.1) -> None:
        if not 0 < tokens_max <= 1000:
            raise ValueError(f"tokens_max must be above 0 and at most 1000, got {tokens_max}")
        if not 0 < token_ratio <= 1:
            raise ValueError(f"token_ratio must be above 0 and at most 1, got {token_ratio}")
        self._most = round(tokens_max * _MILLI)
        self._ratio = max(1, round(token_ratio * _MILLI))
        self._left = self._most

    @property
    def tokens(self) -> float:
        """Tokens that are left."""
        return self._left / _MILLI

    @property
    def may_retry(self) -> bool:
        """Whether a failed attempt may be followed by another now."""
        return 2 * self._left > self._most

    def failed(self) -> None:
        """Note an attempt that failed with an error that may be tried again."""
        self._left = max(0, self._left - _MILLI)

    def succeeded(self) -> None:
        """Note an attempt that was answered."""
        self._left = min(self._most, self._left + self._ratio)

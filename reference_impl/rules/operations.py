"""Operations that may be retried: what is kept of one, and what a repeated, changed or outdated one gets.

A write carries an id that its caller chose, and the moment at which he chose it: both together are its name, and a
retry repeats both. Whatever was decided is kept with the effect, in one transaction (KVC-IDEM-001 to -004, -007),
scoped by tenant, for as long as a retry may still come; an id older than that is refused and never run again, because
nobody could tell whether it has run (KVC-IDEM-008). Refusals that were decided are kept as well: such an answer is
never contradicted by a retry that finds the world changed.

`NOT_KEPT` are refusals at the door: a request that is turned away before anything is decided. They change nothing,
nothing is kept of them, and they say nothing of what became, or will become, of the operation.

Source: RPC document, "the second version: commit the operation's result with its effect" and the limits named there.
"""

from __future__ import annotations

from typing import Final

import msgspec

from reference_impl.rules.blockgroups import Answer, Outcome, Refusal, Request

WINDOW_MS: Final = 10 * 60 * 1000
"""Retries are served for ten minutes: longer than any deadline that a caller of ours sets."""
SKEW_MS: Final = 60 * 1000
"""How far a caller's wall clock may be ahead of ours."""


NOT_KEPT: Final = frozenset({Refusal.ID_REUSED, Refusal.ID_EXPIRED, Refusal.FROM_THE_FUTURE})
"""Refusals at the door: only this request was turned away.

FROM_THE_FUTURE may run once the clock has got there, ID_REUSED once the other's record is gone, and what is ID_EXPIRED
now may have run when it was young. Every other answer is kept, and final.
"""


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How long an operation can be retried; its record is kept for longer."""

    window_ms: int = WINDOW_MS
    skew_ms: int = SKEW_MS

    def __post_init__(self) -> None:
        """Refuse lengths that make no sense."""
        for name in ("window_ms", "skew_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def purge_before_ms(self, now_ms: int) -> int:
        """Return the issue time before which records are dropped: no retry of them would be run (nor answered)."""
        return now_ms - self.window_ms - self.skew_ms


class Record(msgspec.Struct, frozen=True):
    """What is kept of an operation: its canonical parameters, what was answered, and when its caller made it (ms)."""

    params: bytes
    answer: Answer
    issued_ms: int


class Replay(msgspec.Struct, frozen=True):
    """The operation has run: this was its answer."""

    answer: Answer


class Denied(msgspec.Struct, frozen=True):
    """The operation may not run, and nothing is kept of this attempt."""

    answer: Answer


def canonical(request: Request) -> bytes:
    """Return a request's parameters in the one form in which two of them are compared."""
    return msgspec.json.encode(request)


def judge(
    record: Record | None, request: Request, issued_ms: int, now_ms: int, purged_ms: int, retention: Retention
) -> Replay | Denied | None:
    """Return the saved answer, or why the operation may not run; None: it is new, and is to be run.

    `record` is what is kept under its tenant and id; `purged_ms` the latest issue time of which nothing is known any
    more, because records were dropped or there was no store yet: with it, a wall clock that steps back opens no hole.

    The moment is part of the name. A retry under a new moment would be answered as long as the record is kept, and run
    once more after that, within the window of its own moment: it is refused from the first.
    """
    if record is not None:
        return _held_against(record, request, issued_ms)
    if issued_ms <= now_ms - retention.window_ms:
        return _denied(
            Refusal.ID_EXPIRED,
            f"issued more than {retention.window_ms / 1000:g} s ago: whether it has run cannot be told any more",
            "issued_ms",
        )
    if issued_ms <= purged_ms:
        return _denied(
            Refusal.ID_EXPIRED,
            "issued before anything that this node remembers: whether it has run cannot be told",
            "issued_ms",
        )
    if issued_ms > now_ms + retention.skew_ms:
        return _denied(
            Refusal.FROM_THE_FUTURE,
            f"issued {(issued_ms - now_ms) / 1000:.0f} s ahead of this node's clock; at most "
            f"{retention.skew_ms / 1000:g} s are borne with",
            "issued_ms",
        )
    return None


def _held_against(record: Record, request: Request, issued_ms: int) -> Replay | Denied:
    """Return what a request gets under whose id something is kept."""
    if record.params != canonical(request):
        return _denied(Refusal.ID_REUSED, "this id was used with other parameters", "operation_id")
    if record.issued_ms != issued_ms:
        message = (
            f"this id was used by an operation issued {record.issued_ms - issued_ms:+} ms from this one: "
            "a retry repeats issued_ms as well, and another operation has another id"
        )
        return _denied(Refusal.ID_REUSED, message, "issued_ms")
    return Replay(record.answer)


def _denied(rule: Refusal, message: str, field: str) -> Denied:
    return Denied(Answer(outcome=Outcome.REFUSED, refusal=rule, message=message, field=field))

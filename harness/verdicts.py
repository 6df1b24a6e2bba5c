"""Verdicts and how they combine."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from reference_impl.rules.events import Scalar


class Verdict(enum.StrEnum):
    """What a check, or a run, comes to."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    """The fault did not demonstrably happen, too little load, too few samples, nothing selected."""
    ERROR = "error"
    """The harness's own fault."""


_WORST_FIRST = (Verdict.ERROR, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of `verdicts`; of none, `inconclusive`: nothing judged is never a pass."""
    seen = set(verdicts)
    return next((v for v in _WORST_FIRST if v in seen), Verdict.INCONCLUSIVE)


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """A check's verdict with its evidence.

    `rules` are catalogue ids; `found` is one sentence with the figures; `evidence` are the figures by name.
    """

    check: str
    title: str
    rules: list[str]
    verdict: Verdict
    found: str
    evidence: dict[str, Scalar] = {}

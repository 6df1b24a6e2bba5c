"""A case: something that is done to a pair of servers, and what must be seen of them. And its broken twins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from harness.cases.terms import Need, PairTerms
from harness.verdicts import CheckResult

if TYPE_CHECKING:
    from harness.cases.observations import CaseRun
    from harness.cases.stage import Stage

Drive: TypeAlias = Callable[["Stage"], Awaitable[None]]
"""Does things to a pair, and writes down what it saw. It judges nothing. Raises `Hindered` where it cannot do them."""
Judge: TypeAlias = Callable[["CaseRun"], CheckResult]
"""Reads a run folder and nothing else."""


class Hindered(Exception):
    """What the case wanted to do could not be done, so nothing can be concluded; the message says what."""


@dataclass(frozen=True)
class Twin:
    """A case run on a pair that was broken on purpose: the check `fails` must fail.

    The pair is broken by other terms than the case declares (`terms`), or by `sabotage`, which is done behind the
    drive's back before it starts. Either has to be something that a server could really do wrong.
    """

    name: str
    title: str
    fails: str
    terms: PairTerms | None = None
    sabotage: Drive | None = None
    needs: frozenset[Need] = frozenset()


@dataclass(frozen=True)
class Case:
    """`rules` are the catalogue's ids that its checks may speak of; each check names its own."""

    name: str
    title: str
    rules: tuple[str, ...]
    drive: Drive
    checks: tuple[Judge, ...]
    twins: tuple[Twin, ...]
    terms: PairTerms = field(default_factory=PairTerms)
    needs: frozenset[Need] = frozenset({Need.METRICS})
    limit_s: float = 120.0
    """How long the drive may take, besides what `Size.queue_leases` adds."""
    spoils: bool = False
    """Whether the next case needs a pair of its own."""

    def wants(self, twin: Twin | None = None) -> set[Need]:
        """Return what a target must be able to do to run this case, or its twin."""
        terms = (twin.terms if twin else None) or self.terms
        own = {Need.TERMS} if twin and twin.terms else set()
        return set(self.needs) | terms.needs() | own | (set(twin.needs) if twin else set())


class CaseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says of the case that ran."""

    name: str
    twin: str
    """Whose pair was broken on purpose; "": the case itself."""
    size: str
    terms: PairTerms
    """As the case declares them. A twin's pair may have others."""
    prefill: str
    """The prefill server's worker id, and the decode server's."""
    decode: str

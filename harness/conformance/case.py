"""A case: one rule, what it needs, and what is done to find out whether a subject keeps it. And its broken twins."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from harness.conformance.subject import Capability

if TYPE_CHECKING:
    from harness.conformance.trial import Trial

Body: TypeAlias = Callable[["Trial"], None]
"""Does something in a trial's world, and says what must be seen (`Trial.expect`)."""


class Level(enum.StrEnum):
    """How binding a rule is."""

    MUST = "must"
    SHOULD = "should"
    STOCHASTIC = "stochastic"
    """Passing proves little, a failure proves much."""


class Source(enum.StrEnum):
    """Where a rule comes from."""

    LEASE_DOCUMENT = "lease document"
    USERS = "users' reports"
    OURS = "this suite"


@dataclass(frozen=True)
class Case:
    """`name` is the rule's id and a word: `KVC-LEASE-003.never-back`. `twins` are defects that it must catch."""

    name: str
    title: str
    source: Source
    body: Body
    twins: tuple[str, ...]
    """Names of `defects.DEFECTS`, each put into the reference implementation."""
    level: Level = Level.MUST
    needs: frozenset[Capability] = field(default_factory=frozenset)

    @property
    def rule(self) -> str:
        """The catalogue's id."""
        return self.name.partition(".")[0]

"""What is expected to fail: known faults of a system, as data, so that a new one stands out and an old one is not kept.

A known failure that passes is stale; an entry that no check of the run answers to is unmatched. Neither is well.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from harness.errors import BadInput
from harness.verdicts import Verdict
from reference_impl import named_toml

PACKAGE: Final = "harness.cases.known"


class Kind(enum.StrEnum):
    """What is known of a check."""

    FAILING = "failing"
    FLAKY = "flaky"
    """It passes and fails; it is run and shown, and does not decide."""


class Expected(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One expectation. `case` may hold `*`; `link` leads to the report that was made of it, if any."""

    case: Annotated[str, msgspec.Meta(min_length=1)]
    kind: Kind = Kind.FAILING
    reason: Annotated[str, msgspec.Meta(min_length=1)]
    link: str = ""


class Known(Expected, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An expectation of one check of a case; `check` may hold `*` as well."""

    check: Annotated[str, msgspec.Meta(min_length=1)]

    def fits(self, case: str, check: str) -> bool:
        """Whether it speaks of this check of this case."""
        return fnmatch.fnmatchcase(case, self.case) and fnmatch.fnmatchcase(check, self.check)


class Expectations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of the versions of a system."""

    system: str
    versions: list[str]
    """For which it holds, as the system's package says its version; others are not judged by it."""
    known: list[Known] = []


class Standing(enum.StrEnum):
    """How a verdict stands to what was expected."""

    AS_EXPECTED = "as expected"
    NEW = "new"
    """A failure that nobody expected."""
    KNOWN = "known"
    STALE = "stale"
    """An expected failure that passed."""
    FLAKY = "flaky"
    OPEN = "open"
    """It was not judged."""
    NOT_APPLICABLE = "not applicable"


def load_expectations(name: str) -> Expectations:
    """Return the expectations of this name, or of the TOML file at this path. Raises BadInput."""
    try:
        return named_toml.load("expectations", name, PACKAGE, Expectations)
    except named_toml.BadToml as error:
        raise BadInput(str(error)) from error


def expectations_for(system: str, versions: Iterable[str]) -> Expectations | None:
    """Return the expectations that come with the package for a system in any of these versions, None if none do."""
    wanted = set(versions)
    for name in named_toml.names(PACKAGE):
        found = load_expectations(name)
        if found.system == system and wanted & set(found.versions):
            return found
    return None


def standing(case: str, check: str, verdict: Verdict, known: Expectations | None) -> tuple[Standing, Known | None]:
    """Return how a check's verdict stands, and the expectation that speaks of it."""
    of_it = next((k for k in known.known if k.fits(case, check)), None) if known else None
    return stands(verdict, of_it), of_it


def stands(verdict: Verdict | None, expected: Expected | None) -> Standing:
    """Return how a verdict stands to the expectation that speaks of it. No verdict: what was asked does not apply."""
    if verdict is None:
        return Standing.NOT_APPLICABLE
    if expected is not None and expected.kind is Kind.FLAKY:
        return Standing.FLAKY
    if verdict is Verdict.FAIL:
        return Standing.NEW if expected is None else Standing.KNOWN
    if verdict is Verdict.PASS:
        return Standing.AS_EXPECTED if expected is None else Standing.STALE
    return Standing.OPEN


def unmatched(known: Expectations | None, checks: Iterable[tuple[str, str]], cases: Iterable[str]) -> list[Known]:
    """Return the expectations that no check answers to, though a case that they speak of was run."""
    seen, ran = list(checks), list(cases)
    if known is None:
        return []
    return [
        k for k in known.known
        if any(fnmatch.fnmatchcase(case, k.case) for case in ran) and not any(k.fits(*pair) for pair in seen)
    ]  # fmt: skip

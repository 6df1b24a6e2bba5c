"""What is known to fail in process, as data (`known_cases/*.toml`), and what a run comes to in its light.

A **known** failure is still a failure: the run is not conformant, and the expectation only says that it is nothing new.
With `allow_known` a run whose only failures are known is well, so that a fork's CI can stay green until one is added or
mended. A known failure that passes is stale, and an expectation that no result answers to is unmatched: both fail the
run, or expectations would pile up. What is flaky is run and shown, and does not decide.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from harness.conformance.exits import Exit
from harness.conformance.results import CaseResult, Header
from harness.conformance.stream import ConformanceRun
from harness.errors import BadInput
from harness.expectations import Expected, Standing, stands
from harness.verdicts import Verdict
from reference_impl import named_toml

PACKAGE: Final = "harness.conformance.known_cases"


class BadKnown(BadInput):
    """Expectations cannot be used."""

    exit_code = Exit.CONFIGURATION


class KnownCase(Expected, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An expectation of a case. `versions` narrows it to some of its file's; none: it holds for all of them."""

    versions: list[str] = msgspec.field(default_factory=list)

    def fits(self, case: str) -> bool:
        """Whether it speaks of this case."""
        return fnmatch.fnmatchcase(case, self.case)


class KnownCases(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a subject in some versions. Both may hold `*`."""

    subject: Annotated[str, msgspec.Meta(min_length=1)]
    versions: list[str]
    """As one of the subject's packages says its version; others are not judged by it."""
    known: list[KnownCase] = []

    def speaks_of(self, header: Header) -> bool:
        """Whether it was written for what was run."""
        return fnmatch.fnmatchcase(header.subject, self.subject) and _any_version(self.versions, header.versions)


def load_known(name: str) -> KnownCases:
    """Return the expectations of this name, or of the TOML file at this path. Raises BadKnown."""
    try:
        return named_toml.load("expectations", name, PACKAGE, KnownCases)
    except named_toml.BadToml as error:
        raise BadKnown(str(error)) from error


def known_for(header: Header) -> KnownCases | None:
    """Return the expectations that come with the package for what was run, None if none do."""
    every = (load_known(name) for name in named_toml.names(PACKAGE))
    return next((known for known in every if known.speaks_of(header)), None)


@dataclass(frozen=True)
class Stood:
    """A result, and how it stands to what was expected."""

    result: CaseResult
    standing: Standing
    known: KnownCase | None


@dataclass(frozen=True)
class Decision:
    """What a run comes to."""

    run: ConformanceRun
    stood: list[Stood]
    unmatched: list[KnownCase]
    missing: list[str]
    """Cases that were announced, and have no result."""
    expected: bool
    """Whether there are expectations for what was run."""
    allow_known: bool
    exit: Exit

    def standing(self, *wanted: Standing) -> list[Stood]:
        """Return the results that stand so."""
        return [stood for stood in self.stood if stood.standing in wanted]

    @property
    def errors(self) -> list[Stood]:
        """Results that are the suite's own fault."""
        return [stood for stood in self.stood if stood.result.verdict is Verdict.ERROR]


def decided(
    run: ConformanceRun, known: KnownCases | None, *, allow_known: bool = False, every: Iterable[str] | None = None
) -> Decision:
    """Return what a run comes to. `every`: the names of all cases that there are, chosen or not; None: the registry's.

    The worst decides: our own fault (70), expectations that do not hold (3), a failure (1), nothing judged or not
    everything (2). Twins are the reference implementation's, broken on purpose: no expectation speaks of them, and one
    that is not caught is a failure.
    """
    header = run.header
    entries = [] if known is None or header.twins else [
        k for k in known.known if not k.versions or _any_version(k.versions, header.versions)
    ]  # fmt: skip
    stood = [_stood(result, entries) for result in run.results]
    have = {result.case for result in run.results}
    missing = [case for case in header.cases if case not in have]
    unmatched = _unmatched(entries, stood, {*(_registered() if every is None else every), *header.cases})
    code = _exit(run, stood, stale=bool(unmatched), missing=bool(missing), allow_known=allow_known)
    return Decision(run, stood, unmatched, missing, known is not None, allow_known, code)


def _registered() -> Iterable[str]:
    from harness.conformance.registry import CASES

    return CASES


def _stood(result: CaseResult, entries: list[KnownCase]) -> Stood:
    entry = next((k for k in entries if k.fits(result.case)), None)
    return Stood(result, stands(result.verdict, entry), entry)


def _unmatched(entries: list[KnownCase], stood: list[Stood], every: set[str]) -> list[KnownCase]:
    """Return the expectations of cases that there are not, and of cases that do not apply to the subject."""
    idle = {s.result.case for s in stood if s.standing is Standing.NOT_APPLICABLE}
    return [entry for entry in entries if all(case in idle for case in every if entry.fits(case))]


def _exit(run: ConformanceRun, stood: list[Stood], *, stale: bool, missing: bool, allow_known: bool) -> Exit:
    seen = {s.standing for s in stood}
    judged = seen & {Standing.AS_EXPECTED, Standing.KNOWN, Standing.NEW, Standing.STALE}
    if any(s.result.verdict is Verdict.ERROR for s in stood):
        return Exit.OUR_FAULT
    if stale or Standing.STALE in seen:
        return Exit.STALE
    if Standing.NEW in seen or (Standing.KNOWN in seen and not allow_known):
        return Exit.NOT_CONFORMANT
    if missing or not judged or Standing.OPEN in seen or not run.complete:
        return Exit.INCONCLUSIVE
    return Exit.CONFORMANT


def _any_version(patterns: Iterable[str], versions: Mapping[str, str]) -> bool:
    """Whether a version fits; a subject that names none fits `*`."""
    there = list(versions.values()) or [""]
    return any(fnmatch.fnmatchcase(version, pattern) for version in there for pattern in patterns)

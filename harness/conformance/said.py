"""What a run came to in words: the same on the terminal, on pages and in documents."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from harness.conformance.exits import Exit
from harness.conformance.known import Decision, Stood
from harness.conformance.results import Header
from harness.expectations import Standing
from harness.words import counted

NAMED_MAX: Final = 6
WORDS: Final = {
    Exit.CONFORMANT: "Conformant", Exit.NOT_CONFORMANT: "Not conformant", Exit.INCONCLUSIVE: "Inconclusive",
    Exit.STALE: "Expectations are stale", Exit.OUR_FAULT: "Error of the suite",
}  # fmt: skip
ONLY_KNOWN: Final = "Not conformant, in nothing new"
"""Known failures were let pass; that makes nothing conformant."""
TWINS_WORDS: Final = {**WORDS, Exit.CONFORMANT: "All caught", Exit.NOT_CONFORMANT: "Not all caught"}


def word(decision: Decision) -> str:
    """Return the verdict in a word or two."""
    if decision.exit is Exit.CONFORMANT and decision.standing(Standing.KNOWN):
        return ONLY_KNOWN
    return (TWINS_WORDS if decision.run.header.twins else WORDS)[decision.exit]


def subject(header: Header) -> str:
    """Return what was run: the subject, and the versions of its packages."""
    versions = ", ".join(f"{package} {version}" for package, version in header.versions.items())
    name = f"{header.subject} ({versions})" if versions else header.subject
    return f"twins of the cases, on {name}" if header.twins else name


def counts(decision: Decision) -> str:
    """Return what became of how many cases, in one sentence."""
    asked = [s for s in decision.stood if s.standing is not Standing.NOT_APPLICABLE]
    passed = len(decision.standing(Standing.AS_EXPECTED, Standing.STALE))
    new, known = (len(decision.standing(standing)) for standing in (Standing.NEW, Standing.KNOWN))
    failed = f"{new + known} failed" + (f" ({known} of them known)" if known else "")
    parts = [f"{passed} passed", failed]
    if flaky := len(decision.standing(Standing.FLAKY)):
        parts.append(f"{flaky} {'is' if flaky == 1 else 'are'} flaky and did not decide")
    if undecided := len(decision.standing(Standing.OPEN)):
        parts.append(f"{undecided} came to no verdict")
    if decision.missing:
        parts.append(f"{len(decision.missing)} did not run")
    if idle := len(decision.stood) - len(asked):
        parts.append(f"{idle} {'does' if idle == 1 else 'do'} not apply")
    what = "twin" if decision.run.header.twins else "case"
    return f"of {counted(len(decision.stood) + len(decision.missing), what)}, {_listed(parts)}"


def sentence(decision: Decision) -> str:
    """Return the verdict in one sentence."""
    return f"{subject(decision.run.header)}: {word(decision).lower()}; {counts(decision)}."


def reasons(decision: Decision) -> list[str]:
    """Say what keeps a run from being conformant, worst first; and what was let pass."""
    said = []
    if decision.errors:
        said.append(f"The suite itself failed in {_named(decision.errors)}: a bug, please report it.")
    if stale := decision.standing(Standing.STALE):
        said.append(f"Expected to fail, and passed: {_named(stale)}. Remove the expectation.")
    if decision.unmatched:
        names = _some([entry.case for entry in decision.unmatched])
        said.append(f"Expectations that no case answers to: {names}. Correct or remove them.")
    if new := decision.standing(Standing.NEW):
        if decision.run.header.twins:
            said.append(f"Broken on purpose, and not caught: {_named(new)}.")
        else:
            how = "that nobody expected" if decision.expected else "(there are no expectations for this version)"
            said.append(f"{counted(len(new), 'failure')} {how}: {_named(new)}.")
    if known := decision.standing(Standing.KNOWN):
        how = "allowed here" if decision.allow_known else "counted all the same (--allow-known lets them pass)"
        said.append(f"{counted(len(known), 'known failure')}, {how}: {_named(known)}.")
    if undecided := [s for s in decision.standing(Standing.OPEN) if s not in decision.errors]:
        said.append(f"No verdict on {_named(undecided)}.")
    if decision.missing:
        said.append(f"Not run: {_some(decision.missing)}.")
    if not decision.run.complete:
        said.append("The results have no footer: the run was cut short.")
    return said


def named(stood: Stood) -> str:
    """Return a result's name."""
    return f"{stood.result.case}, twin {stood.result.twin}" if stood.result.twin else stood.result.case


def again(header: Header, case: str) -> str:
    """Return the command that runs one case again."""
    words = ["pdproof", "conform"]
    for name, value in header.configuration.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value not in (None, False, ""):
            words += [option, value if isinstance(value, str) else msgspec.json.encode(value).decode()]
    words += ["--case", case, "--seed", str(header.seed), *(["--twins"] if header.twins else [])]
    return shlex.join(words)


def _named(stood: Sequence[Stood]) -> str:
    return _some([named(s) for s in stood])


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


def _listed(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last

"""The matrix's words, the same on the page and in the document."""

from __future__ import annotations

from typing import Final

from harness.conformance import said
from harness.conformance.known import Stood
from harness.expectations import Standing
from harness.words import counted
from reports.conformance.model import Cell, Column, Matrix, State, Uncovered

MARKS: Final = {
    State.PASS: "✓", State.FAIL: "×", State.KNOWN: "×", State.ERROR: "!", State.STALE: "!", State.INCONCLUSIVE: "?",
    State.FLAKY: "~", State.NOT_RUN: "–", State.NOT_APPLICABLE: "–",
}  # fmt: skip
"""So that a cell can be told from another without its colour, at a glance."""
READING: Final = {
    State.PASS: "every case of the rule passed that applies to the subject",
    State.FAIL: "a case failed, and nobody expected it",
    State.KNOWN: "a case failed, and that was known; it is a failure all the same",
    State.STALE: "a case that is known to fail passed: the expectation is to be removed",
    State.INCONCLUSIVE: "a case could not do what it is about; this is never a pass",
    State.FLAKY: "a case that is known to pass and to fail; it does not decide",
    State.NOT_APPLICABLE: "the subject does not claim what the rule is about",
    State.NOT_RUN: "no result: the run did not choose the rule's cases, or was cut short",
    State.ERROR: "the suite's own fault",
}  # fmt: skip
COVERAGE: Final = "Rules without cases"
CLAIMS: Final = "What the subjects claim"


def title(matrix: Matrix) -> str:
    """Return what the matrix is of."""
    return f"Conformance: {', '.join(column.name for column in matrix.columns)}"


def lead(column: Column) -> str:
    """Return what goes with a run's verdict, in one sentence, under the name that the run has here."""
    run = f"{column.name} ({column.versions})" if column.versions else column.name
    return f"{run}: {said.counts(column.decision)}."


def note(cell: Cell) -> str:
    """Say how many of a cell's cases it speaks for; "" where there is but one."""
    same, of = cell.share
    if of < 2:
        return ""
    return counted(of, "case") if same == of else f"{same} of {of} cases"


def standing_of(stood: Stood) -> str:
    """Say what was expected of a result; "" if nothing was."""
    if stood.known is None or stood.standing not in (Standing.KNOWN, Standing.FLAKY, Standing.STALE):
        return ""
    link = f" ({stood.known.link})" if stood.known.link else ""
    return f"{str(stood.standing).capitalize()}: {stood.known.reason}{link}"


def claims(column: Column) -> list[tuple[str, int]]:
    """Return what a subject claims, each with the number of cases with a verdict that used it."""
    judged = [s.result for s in column.decision.stood if s.standing in _JUDGED]
    return [(claim, sum(claim in r.needs for r in judged)) for claim in column.decision.run.header.capabilities]


def coverage(matrix: Matrix) -> str:
    """Say how much of the catalogue has results."""
    return (
        f"{matrix.covered} of the catalogue's {matrix.rules} rules have a result here. Those that have none, and why:"
    )


def by_reason(rules: list[Uncovered]) -> list[tuple[str, list[Uncovered]]]:
    """Return rules by the reason why they have no result."""
    found: dict[str, list[Uncovered]] = {}
    for rule in rules:
        found.setdefault(rule.why, []).append(rule)
    return list(found.items())


_JUDGED: Final = (Standing.AS_EXPECTED, Standing.NEW, Standing.KNOWN, Standing.STALE, Standing.FLAKY)

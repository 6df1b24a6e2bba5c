"""The matrix as a document: verdicts, rules by runs, and how to see each failure again."""

from __future__ import annotations

from collections.abc import Iterator

from harness.conformance import said
from reports.conformance.model import Cell, Column, Matrix, State, state_of
from reports.conformance.words import COVERAGE, MARKS, claims, coverage, lead, note, standing_of, title

_QUIET = (State.PASS, State.NOT_APPLICABLE)


def markdown(matrix: Matrix) -> str:
    """Return the document."""
    return "\n".join(_lines(matrix)) + "\n"


def _lines(matrix: Matrix) -> Iterator[str]:
    yield f"# {_plain(title(matrix))}"
    for column in matrix.columns:
        yield from ("", f"**{said.word(column.decision)}**: {_plain(lead(column))}.")
        reasons = said.reasons(column.decision)
        yield from (["", *(f"- {_plain(reason)}" for reason in reasons)] if reasons else [])
    yield from ("", "## Rules by subjects", "")
    yield _row(["rule", *(column.name for column in matrix.columns)])
    yield "|---" * (len(matrix.columns) + 1) + "|"
    for family in matrix.families:
        yield _row([f"**{family.title}**", *("" for _ in matrix.columns)])
        for row in family.rows:
            yield _row([f"{row.rule_id}: {row.text}", *map(_cell, row.cells)])
    yield from _failures(matrix)
    yield from _claims(matrix.columns)
    yield from ("", f"## {COVERAGE}", "", coverage(matrix))
    for name, rules in matrix.uncovered:
        yield from ("", f"**{name}**", "")
        yield from (f"- {rule.rule_id}: {_plain(rule.text)}. ({_plain(rule.why)})" for rule in rules)


def _cell(cell: Cell) -> str:
    more = note(cell)
    return f"{MARKS[cell.state]} {cell.state}{f' ({more})' if more else ''}"


def _failures(matrix: Matrix) -> Iterator[str]:
    for at, column in enumerate(matrix.columns):
        header = column.decision.run.header
        shown = [
            stood for family in matrix.families for row in family.rows for stood in row.cells[at].stood
            if state_of(stood) not in _QUIET
        ]  # fmt: skip
        if not shown:
            continue
        yield from ("", f"## What did not pass: {_plain(column.name)}", "")
        for stood in shown:
            expected = standing_of(stood)
            known = f". {_plain(expected)}" if expected else ""
            code = said.again(header, stood.result.case).replace("`", "'")
            yield f"- {state_of(stood)}: **{_plain(said.named(stood))}** ({_plain(stood.result.title)}). " + (
                f"{_plain(stood.result.found)}{known}. Again: `{code}`"
            )


def _claims(columns: list[Column]) -> Iterator[str]:
    idle = [(column, [claim for claim, cases in claims(column) if not cases]) for column in columns]
    if any(names for _, names in idle):
        yield from ("", "## Claims that no case exercised", "")
        yield from (f"- {_plain(column.name)}: {_plain(', '.join(names))}" for column, names in idle if names)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(map(_plain, cells))} |"


def _plain(text: str) -> str:
    """Return a sentence without what Markdown would take for its own."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ").rstrip(".")

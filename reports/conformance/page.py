"""The matrix as a page."""

from __future__ import annotations

import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from harness.conformance import said
from harness.conformance.exits import Exit
from harness.conformance.known import Decision, Stood
from harness.conformance.results import CaseResult
from harness.conformance.timeline import lines
from harness.words import counted
from reference_impl.rules.clock import NS_PER_S
from reports.conformance.model import Cell, Column, Matrix, Row, State, Uncovered, state_of
from reports.conformance.words import (
    CLAIMS,
    COVERAGE,
    MARKS,
    READING,
    by_reason,
    claims,
    coverage,
    lead,
    note,
    standing_of,
    title,
)
from reports.findings.model import INVARIANTS
from reports.page import render, write

LINES_MAX: Final = 400
"""Of a timeline. The whole is in the results; a page that held it would be too large to open."""
LINES_OF_A_PASS: Final = 80
_CLASSES: Final = {
    Exit.CONFORMANT: "pass", Exit.INCONCLUSIVE: "inconclusive", Exit.OUR_FAULT: "error",
}  # fmt: skip
_CLOSED: Final = (State.PASS, State.NOT_APPLICABLE, State.FLAKY)
"""What nobody has to look at is folded."""


class VerdictView(msgspec.Struct, frozen=True):
    """One run's verdict; `kind` is a class of the style sheet."""

    kind: str
    word: str
    lead: str
    reasons: list[str]


class CellView(msgspec.Struct, frozen=True):
    """One cell, and where its evidence is ("": there is none)."""

    kind: str
    mark: str
    word: str
    note: str
    evidence: str


class CaseView(msgspec.Struct, frozen=True):
    """The evidence of one case."""

    kind: str
    word: str
    name: str
    title: str
    about: str
    found: str
    note: str
    expected: str
    link: str
    breaches: list[tuple[str, str, str, str]]
    """When, of what, which is about what, and what was seen."""
    again: str
    timeline: str
    timeline_title: str


class EvidenceView(msgspec.Struct, frozen=True):
    """The evidence of one cell."""

    key: str
    kind: str
    mark: str
    word: str
    rule_id: str
    text: str
    opened: bool
    cases: list[CaseView]
    missing: list[str]


class RowView(msgspec.Struct, frozen=True):
    """One rule."""

    rule_id: str
    text: str
    level: str
    cells: list[CellView]


class ColumnView(msgspec.Struct, frozen=True):
    """One run."""

    name: str
    versions: str
    verdict: VerdictView
    evidence: list[EvidenceView]
    exercised: list[tuple[str, str]]
    unexercised: list[str]
    facts: list[tuple[str, str]]
    command: str
    configuration: str


class MatrixView(msgspec.Struct, frozen=True, kw_only=True):
    """What the page shows."""

    title: str
    page_title: str
    about: str
    sections: list[tuple[str, str]]
    version: str
    sources: list[str]
    columns: list[ColumnView]
    families: list[tuple[str, list[RowView]]]
    claims: str
    coverage: str
    coverage_lead: str
    uncovered: list[tuple[str, list[tuple[str, list[Uncovered]]]]]
    reading: list[tuple[str, str, str, str]]


def write_matrix(matrix: Matrix, out: Path) -> None:
    """Write the page. Raises MachineLimit where it cannot be written."""
    write(out, render("matrix.html", matrix_view(matrix)).encode("utf-8", "backslashreplace"))


def matrix_view(matrix: Matrix) -> MatrixView:
    """Return what the page shows."""
    columns = [_column(matrix, at) for at in range(len(matrix.columns))]
    began = min(column.decision.run.header.started_wall_ns for column in matrix.columns)
    many = len(columns) > 1
    sections = [
        ("matrix", "Rules by subjects"), ("evidence", "Evidence"), ("claims", CLAIMS), ("coverage", COVERAGE),
        ("reading", "How to read this page"), ("about", "What ran"),
    ]  # fmt: skip
    return MatrixView(
        title=title(matrix), page_title=title(matrix) if many else f"{columns[0].verdict.word}: {columns[0].name}",
        about=f"{counted(len(columns), 'run')} of in-process cases · {_moment(began)}", sections=sections,
        version=_version(), sources=[Path(column.decision.run.source or "a run").name for column in matrix.columns],
        columns=columns, families=[(f.title, [_row(row) for row in f.rows]) for f in matrix.families],
        claims=CLAIMS, coverage=COVERAGE, coverage_lead=coverage(matrix),
        uncovered=[(name, by_reason(rules)) for name, rules in matrix.uncovered],
        reading=[(_kind(state), MARKS[state], state, text) for state, text in READING.items()],
    )  # fmt: skip


def _row(row: Row) -> RowView:
    return RowView(row.rule_id, row.text, row.level, [_cell(row, at) for at in range(len(row.cells))])


def _cell(row: Row, at: int) -> CellView:
    cell = row.cells[at]
    key = _key(row, at) if cell.stood or cell.missing else ""
    return CellView(_kind(cell.state), MARKS[cell.state], cell.state, note(cell), key)


def _key(row: Row, at: int) -> str:
    return f"e{at}-{row.rule_id}"


def _kind(state: State) -> str:
    """Return the class of the style sheet for a state."""
    return state.replace(" ", "-").replace("/", "")


def _column(matrix: Matrix, at: int) -> ColumnView:
    column = matrix.columns[at]
    header = column.decision.run.header
    told = claims(column)
    evidence = [
        _evidence(row, at, column.decision) for family in matrix.families for row in family.rows
        if row.cells[at].stood or row.cells[at].missing
    ]  # fmt: skip
    return ColumnView(
        column.name, column.versions, _verdict(column), evidence,
        [(claim, counted(cases, "case")) for claim, cases in told if cases], [c for c, cases in told if not cases],
        _facts(column), " ".join(header.command),
        msgspec.json.format(msgspec.json.encode(header.configuration), indent=2).decode(),
    )  # fmt: skip


def _verdict(column: Column) -> VerdictView:
    decision = column.decision
    return VerdictView(
        _CLASSES.get(decision.exit, "fail"), said.word(decision), lead(column), said.reasons(decision)
    )  # fmt: skip


def _facts(column: Column) -> list[tuple[str, str]]:
    run, header = column.decision.run, column.decision.run.header
    return [
        ("Results", run.source or "not from a file"), ("Started", _moment(header.started_wall_ns)),
        ("Versions", column.versions or "none given"), ("Seed", str(header.seed)),
        ("Commit of pdproof", header.commit or "unknown"),
        ("Machine", " · ".join(f"{name} {value}" for name, value in header.machine.items()) or "unknown"),
    ]  # fmt: skip


def _evidence(row: Row, at: int, decision: Decision) -> EvidenceView:
    cell: Cell = row.cells[at]
    return EvidenceView(
        _key(row, at), _kind(cell.state), MARKS[cell.state], cell.state, row.rule_id, row.text,
        cell.state not in _CLOSED, [_case(stood, decision) for stood in cell.stood], cell.missing,
    )  # fmt: skip


def _case(stood: Stood, decision: Decision) -> CaseView:
    result, state = stood.result, state_of(stood)
    text, heading = timeline(result, LINES_OF_A_PASS if state in _CLOSED else LINES_MAX)
    link = stood.known.link if stood.known and stood.known.link.startswith(("https://", "http://")) else ""
    breaches = [
        (f"{b.t_ns / NS_PER_S:.3f} s", b.rule, INVARIANTS.get(b.rule, ""), b.what) for b in result.breaches
    ]  # fmt: skip
    return CaseView(
        _kind(state), state, said.named(stood), result.title,
        f"{result.level} · from {result.source} · {result.seconds:.2f} s", result.found, result.note,
        standing_of(stood), link, breaches, said.again(decision.run.header, result.case), text, heading,
    )  # fmt: skip


def timeline(result: CaseResult, lines_max: int) -> tuple[str, str]:
    """Return a timeline as text, and what part of it that is: around the first breach, or its end."""
    told = lines(result.timeline)
    if len(told) <= lines_max:
        return "\n".join(told), f"Timeline, {counted(len(told), 'line')}"
    start = len(told) - lines_max
    if result.breaches:
        moment = result.breaches[0].t_ns
        at = next((i for i, entry in enumerate(result.timeline) if entry.t_ns >= moment), len(told))
        start = min(start, max(0, at - lines_max // 2))
    shown = "\n".join(told[start : start + lines_max])
    return shown, f"Timeline, lines {start + 1:,} to {start + lines_max:,} of {len(told):,}; the rest is in the results"


def _moment(wall_ns: int) -> str:
    return f"{datetime.datetime.fromtimestamp(wall_ns / 1e9, tz=datetime.UTC):%Y-%m-%d %H:%M} UTC"


def _version() -> str:
    try:
        return version("pdproof")
    except PackageNotFoundError:
        return ""

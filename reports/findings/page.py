"""The findings as a page, and a summary for machines beside it."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from harness.verdicts import Verdict
from reports import words
from reports.figures.style import Panel
from reports.findings.figure import case_panel
from reports.findings.late_turns import LateTurn, LateTurnRow
from reports.findings.model import CaseFinding, Findings, RuleFinding
from reports.findings.words import (
    ASKED,
    LATE_TURNS,
    LATE_TURNS_HEADS,
    LATE_TURNS_LEAD,
    late_turn_case,
    late_turn_cells,
    late_turn_systems,
    lead,
    reasons,
    standing_of,
    title,
)
from reports.heading import Heading
from reports.page import render, write
from reports.view import VictimRow, victim_row

_HEADS: Final = tuple(head.capitalize() if head.islower() else head for head in LATE_TURNS_HEADS)


class SeenRow(msgspec.Struct, frozen=True):
    """One check of one case, as a line."""

    case: str
    check: str
    verdict: str
    found: str
    standing: str
    reference: str
    command: str


class RuleRow(msgspec.Struct, frozen=True):
    """One rule, as a row."""

    rule_id: str
    text: str
    level: str
    verdict: str
    seen: list[SeenRow]
    twins: int


class CaseBlock(msgspec.Struct, frozen=True):
    """One case, with its drawing."""

    name: str
    title: str
    verdict: str
    panel: Panel
    seen: list[SeenRow]


class TurnCell(msgspec.Struct, frozen=True):
    """One cell of the table of late turns, `below` in smaller print; `kind` is a class of the style sheet."""

    head: str
    main: str
    below: str
    kind: str


class TurnRow(msgspec.Struct, frozen=True):
    """One case of that table."""

    case: str
    how: str
    ran: bool
    asked: str
    cells: list[TurnCell]


class TurnTable(msgspec.Struct, frozen=True):
    """The table of late turns."""

    title: str
    lead: str
    systems: list[str]
    heads: tuple[str, ...]
    rows: list[TurnRow]


class FindingsView(Heading, frozen=True, kw_only=True):
    """What the page shows."""

    broken: list[RuleRow]
    undecided: list[RuleRow]
    kept: list[RuleRow]
    late_turns: TurnTable | None
    cases: list[CaseBlock]
    untried: list[tuple[str, str, str]]
    victims: list[VictimRow]
    recovery_lead: str
    twins: str
    facts: list[tuple[str, str]]


def write_findings(findings: Findings, out: Path) -> None:
    """Write `index.html` and `findings.json` into `out`. Raises MachineLimit where they cannot be written."""
    write(out / "index.html", render("findings.html", findings_view(findings)).encode())
    write(out / "findings.json", msgspec.json.format(msgspec.json.encode(findings), indent=2) + b"\n")


def findings_view(findings: Findings) -> FindingsView:
    """Return what the page shows."""
    started = datetime.datetime.fromtimestamp(findings.started_wall_ns / 1e9, tz=datetime.UTC)
    by_verdict: dict[Verdict, list[RuleRow]] = {verdict: [] for verdict in Verdict}
    for rule in findings.rules:
        by_verdict[rule.verdict].append(_rule_row(rule))
    victims = findings.recovery.victims if findings.recovery else []
    return FindingsView(
        verdict=findings.verdict, lead=lead(findings), reasons=reasons(findings), emulated=findings.unlike_production,
        compute_emulated=findings.system == "reference", profile=findings.system, time_scale="1", seed=0,
        started=f"{started:%Y-%m-%d %H:%M} UTC", version=findings.versions.get("pdproof", ""),
        sources=[f"{len(findings.cases)} run folders"], title=title(findings),
        about=f"{words.plural(len(findings.cases), 'black-box case')} of size {findings.size}",
        sections=_sections(findings), broken=by_verdict[Verdict.FAIL],
        undecided=by_verdict[Verdict.INCONCLUSIVE] + by_verdict[Verdict.ERROR], kept=by_verdict[Verdict.PASS],
        late_turns=_turn_table(findings), cases=[_case_block(case) for case in findings.cases],
        untried=[(rule.rule_id, rule.text, rule.why) for rule in findings.untried],
        victims=[victim_row(victim) for victim in victims], recovery_lead=_recovery_lead(findings),
        twins=f"{findings.twins_caught} of {findings.twins} twins, pairs broken on purpose, were caught by the check "
        "that had to." if findings.twins else "",
        facts=[("Machine", findings.machine), ("Commit", findings.commit),
               ("Versions", " · ".join(f"{k} {v}" for k, v in findings.versions.items()))],
    )  # fmt: skip


def _sections(findings: Findings) -> list[tuple[str, str]]:
    wanted = [
        ("recovery", "Recovery", bool(findings.recovery and findings.recovery.victims)),
        ("late-turns", "Late turns", bool(findings.late_turns)),
        ("broken", "Broken", findings.count(Verdict.FAIL) > 0),
        ("undecided", "Undecided", findings.count(Verdict.INCONCLUSIVE) + findings.count(Verdict.ERROR) > 0),
        ("kept", "Kept", findings.count(Verdict.PASS) > 0), ("cases", "Case by case", True),
        ("untried", "Not tried", bool(findings.untried)), ("about", "What ran", True),
    ]  # fmt: skip
    return [(key, name) for key, name, there in wanted if there]


def _turn_table(findings: Findings) -> TurnTable | None:
    if not findings.late_turns:
        return None
    ran = {case.name for case in findings.cases}
    rows = [_turn_row(row, ran=row.case in ran) for row in findings.late_turns]
    return TurnTable(LATE_TURNS, LATE_TURNS_LEAD, late_turn_systems(findings), _HEADS, rows)


def _turn_row(row: LateTurnRow, *, ran: bool) -> TurnRow:
    cells = _turn_cells(row.system) + (_turn_cells(row.reference) if row.reference else [])
    return TurnRow(row.case, late_turn_case(row), ran, ASKED, cells)


def _turn_cells(turn: LateTurn) -> list[TurnCell]:
    kinds = (f"word {turn.verdict or 'inconclusive'}", "", "")
    return [
        TurnCell(head, main, below, kind)
        for head, (main, below), kind in zip(_HEADS, late_turn_cells(turn), kinds, strict=True)
    ]


def _recovery_lead(findings: Findings) -> str:
    recovery = findings.recovery
    if recovery is None or recovery.ratio_recovery is None:
        return ""
    return (
        f"A worker served again {words.duration(recovery.shadow.recovery_s.median)} after a kill with a shadow, "
        f"{words.duration(recovery.cold.recovery_s.median)} after a cold start: {words.ratio(recovery.ratio_recovery)}."
    )


def _rule_row(rule: RuleFinding) -> RuleRow:
    rows = [_seen_row(seen.case, seen) for seen in rule.seen]
    return RuleRow(rule.rule_id, rule.text, rule.level, str(rule.verdict), rows, rule.twins)


def _case_block(case: CaseFinding) -> CaseBlock:
    return CaseBlock(case.name, case.title, str(case.verdict), case_panel(case.folder), _seen_rows(case))


def _seen_rows(case: CaseFinding) -> list[SeenRow]:
    return [_seen_row(seen.result.title, seen) for seen in case.seen]


def _seen_row(name: str, seen: Any) -> SeenRow:
    reference = "not asked" if seen.reference is None else str(seen.reference)
    result = seen.result
    return SeenRow(name, result.check, str(result.verdict), result.found, standing_of(seen), reference, seen.command)

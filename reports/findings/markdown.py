"""The findings as a document: rule, verdict, evidence, and how to see each failure again."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from harness.expectations import Standing
from harness.verdicts import Verdict
from reports import words
from reports.findings.model import Findings, RuleFinding, Seen
from reports.findings.words import (
    ASKED,
    LATE_TURNS,
    LATE_TURNS_HEADS,
    LATE_TURNS_LEAD,
    late_turn_case,
    late_turn_cells,
    late_turn_systems,
    lead,
    standing_of,
    title,
)


def markdown(findings: Findings) -> str:
    """Return the document."""
    return "\n".join(_lines(findings)) + "\n"


def _lines(findings: Findings) -> Iterator[str]:
    day = datetime.datetime.fromtimestamp(findings.started_wall_ns / 1e9, tz=datetime.UTC)
    yield f"# {title(findings)}"
    yield ""
    yield f"Written by `pdproof findings` from a run of {day:%Y-%m-%d} (commit `{findings.commit or 'unknown'}`)."
    yield f"Requests: {findings.size}. Machine: {findings.machine or 'unknown'}."
    if findings.unlike_production:
        yield f"Not as in production: {'; '.join(findings.unlike_production)}."
    yield ""
    yield f"**{lead(findings)}**"
    yield from _recovery(findings)
    yield from _late_turns(findings)
    yield from _rules(findings, Verdict.FAIL, "Rules that are broken")
    yield from _rules(findings, Verdict.INCONCLUSIVE, "Rules without a verdict")
    yield from _rules(findings, Verdict.PASS, "Rules that are kept")
    if findings.untried:
        yield from ("", "## Rules that were not tried", "")
        yield from (f"- **{rule.rule_id}**: {rule.text}. ({rule.why})" for rule in findings.untried)


def _recovery(findings: Findings) -> Iterator[str]:
    if findings.recovery is None or not findings.recovery.victims:
        return
    yield from ("", "## Recovery, by the process that died", "")
    yield "| killed | cold start | shadow | ratio | detection | promotion |"
    yield "|---|---|---|---|---|---|"
    for victim in findings.recovery.victims:
        cold, shadow = victim.cold_recovery_s, victim.shadow_recovery_s
        yield (
            f"| {victim.process} ({cold.n} and {shadow.n} kills) | {words.duration(cold.median)} "
            f"({words.span(cold.min, cold.max)}) | {words.duration(shadow.median)} "
            f"({words.span(shadow.min, shadow.max)}) | {words.ratio(victim.ratio_recovery)} | "
            f"{words.duration(victim.shadow_detection_s.median)} | {words.duration(victim.shadow_promotion_s.median)} |"
        )


def _late_turns(findings: Findings) -> Iterator[str]:
    if not findings.late_turns:
        return
    heads = ["case", "the lease document asks for"]
    heads += [f"{system}: {head}" for system in late_turn_systems(findings) for head in LATE_TURNS_HEADS]
    yield from ("", f"## {LATE_TURNS}", "", LATE_TURNS_LEAD, "", _table_row(heads), "|---" * len(heads) + "|")
    for row in findings.late_turns:
        turns = [row.system, *([row.reference] if row.reference else [])]
        cells = [cell for turn in turns for cell in late_turn_cells(turn)]
        shown = [f"{main} ({below})" if below else main for main, below in cells]
        yield _table_row([f"**{row.case}** ({late_turn_case(row)})", ASKED, *shown])


def _table_row(cells: list[str]) -> str:
    return f"| {' | '.join(map(_plain, cells))} |"


def _rules(findings: Findings, verdict: Verdict, heading: str) -> Iterator[str]:
    rules = [rule for rule in findings.rules if rule.verdict is verdict]
    if not rules:
        return
    yield from ("", f"## {heading}")
    for rule in rules:
        yield from _rule(rule, full=verdict is not Verdict.PASS)


def _rule(rule: RuleFinding, *, full: bool) -> Iterator[str]:
    yield from ("", f"### {rule.rule_id}", "", f"{rule.text}.", "")
    for seen in rule.seen:
        if full and seen.result.verdict is Verdict.PASS:
            continue
        yield f"- {seen.result.verdict}: **{seen.case}** ({seen.title}). {_plain(seen.result.found)}{_about(seen)}"


def _about(seen: Seen) -> str:
    """Say of a failure how to see it again, what the reference does, and whether it was known."""
    if seen.result.verdict is not Verdict.FAIL:
        return ""
    reference = {
        None: "The reference implementation was not asked", Verdict.PASS: "The reference implementation passes",
        Verdict.FAIL: "The reference implementation fails as well",
    }.get(seen.reference, f"On the reference implementation: {seen.reference}")  # fmt: skip
    known = f" {standing_of(seen)}." if seen.standing is not Standing.NEW or seen.known else ""
    return f". {reference}.{known} Again: `{seen.command}`"


def _plain(text: str) -> str:
    """Return a sentence without what Markdown would take for its own."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ").rstrip(".")

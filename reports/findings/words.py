"""The findings' words, the same on the page and in the document."""

from __future__ import annotations

from typing import Final

from harness.expectations import Standing
from harness.verdicts import Verdict
from reports import words
from reports.findings.model import Findings, Seen

NAMED_MAX: Final = 6


def title(findings: Findings) -> str:
    """Return what the findings are of."""
    return f"Findings: {findings.system} {findings.version}"


def lead(findings: Findings) -> str:
    """Return what it came to, in one sentence."""
    kept, broken = findings.count(Verdict.PASS), findings.count(Verdict.FAIL)
    rest = len(findings.rules) - kept - broken
    tried = words.plural(len(findings.rules), "rule")
    said = f"Of {tried} that were tried, {findings.system} keeps {kept} and breaks {broken}"
    return said + (f"; {rest} have no verdict." if rest else ".")


def reasons(findings: Findings) -> list[str]:
    """Say what keeps the findings from being as expected."""
    said = []
    if new := findings.standing(Standing.NEW):
        what = ", ".join(f"{s.case}/{s.result.check}" for s in new[:NAMED_MAX])
        more = f" and {len(new) - NAMED_MAX} more" if len(new) > NAMED_MAX else ""
        how = "that nobody expected" if findings.expected else "of a version that there are no expectations for"
        said.append(f"{words.plural(len(new), 'failure')} {how}: {what}{more}.")
    if stale := findings.standing(Standing.STALE):
        what = ", ".join(f"{s.case}/{s.result.check}" for s in stale)
        said.append(f"{words.plural(len(stale), 'expected failure')} passed, so the expectation is stale: {what}.")
    if findings.unmatched:
        what = ", ".join(f"{k.case}/{k.check}" for k in findings.unmatched)
        said.append(f"No check answers to {words.plural(len(findings.unmatched), 'expectation')}: {what}.")
    undecided = [r.rule_id for r in findings.rules if r.verdict is Verdict.INCONCLUSIVE]
    if undecided:
        said.append(f"No verdict on {', '.join(undecided)}.")
    return said


def standing_of(seen: Seen) -> str:
    """Say how a verdict stands to what was expected."""
    if seen.known is not None and seen.standing in (Standing.KNOWN, Standing.FLAKY, Standing.STALE):
        link = f" ({seen.known.link})" if seen.known.link else ""
        return f"{str(seen.standing).capitalize()}: {seen.known.reason}{link}"
    return str(seen.standing).capitalize()

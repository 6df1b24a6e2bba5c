"""The findings' words, the same on the page and in the document."""

from __future__ import annotations

from typing import Final

from harness.expectations import Standing
from harness.verdicts import Verdict
from harness.words import counted
from reports import words
from reports.findings.late_turns import NOT_RUN, LateTurn, LateTurnRow
from reports.findings.model import Findings, Seen

NAMED_MAX: Final = 6
LATE_TURNS: Final = "Turns that came too late"
LATE_TURNS_LEAD: Final = (
    "A conversation's second turn, sent after the decode side (D) had let the first one's blocks go; its clock is "
    "ahead of the prefill side's (P) or behind it, and P's failure policy is either of the two. The lease document "
    "asks for the same in all of them. Turns declined and reads are P's counts, late reads D's."
)
LATE_TURNS_HEADS: Final = ("the client got", "P's blocks in use", "counted")
ASKED: Final = "a recompute: slower, no error"
"""What the lease document asks for, whatever the policy: nothing failed, so there is no failure to apply it to."""


def title(findings: Findings) -> str:
    """Return what the findings are of."""
    return f"Findings: {findings.system} {findings.version}"


def lead(findings: Findings) -> str:
    """Return what it came to, in one sentence."""
    kept, broken = findings.count(Verdict.PASS), findings.count(Verdict.FAIL)
    rest = len(findings.rules) - kept - broken
    tried = words.plural(len(findings.rules), "rule")
    said = f"Of {tried} that were tried, {findings.system} keeps {kept} and breaks {broken}"
    return said + (f"; {rest} {'has' if rest == 1 else 'have'} no verdict." if rest else ".")


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


def late_turn_systems(findings: Findings) -> list[str]:
    """Return whose late turns are shown beside each other."""
    asked = any(row.reference is not None for row in findings.late_turns)
    return [findings.system, *(["reference implementation"] if asked else [])]


def late_turn_case(row: LateTurnRow) -> str:
    """Say how one case differs from the others."""
    way = "ahead" if row.skew_s > 0 else "behind"
    clock = f"D's clock {abs(row.skew_s):,.0f} s {way}" if row.skew_s else "clocks agree"
    return f"{clock}, policy {row.policy}"


def late_turn_cells(turn: LateTurn) -> list[tuple[str, str]]:
    """Return what became of a turn, each with smaller print: what the client got, P's blocks, the counters."""
    if turn.verdict is None:
        why = (turn.why, "") if turn.why == NOT_RUN else ("could not be judged", turn.why)
        return [why, (words.NONE, ""), (words.NONE, "")]
    status = f"HTTP {turn.status}" if turn.status else "no status"
    end, before, most = (
        "unknown" if share is None else f"{share:.2%}" for share in (turn.usage_end, turn.usage_before, turn.usage_most)
    )
    declined = "no count of turns declined" if turn.declined is None else f"{turn.declined:,.0f} declined"
    return [
        (str(turn.came), f"{status} after {words.duration(turn.seconds)}"),
        (f"{end} in the end", f"{before} before, {most} at most"),
        (declined, f"{counted(turn.late, 'late read')}, {counted(turn.reads, 'read')}"),
    ]

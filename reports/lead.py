"""The one sentence at the head of a page."""

from __future__ import annotations

from harness.verdicts import Verdict
from reports import words
from reports.arms import ArmSummary
from reports.summary import Summary


def comparison_lead(summary: Summary) -> str:
    """Return what the comparison came to."""
    cold, shadow = summary.cold.recovery_s.median, summary.shadow.recovery_s.median
    ratio = summary.ratio_recovery
    if ratio is None or cold is None or shadow is None:
        return "There is no ratio: not both arms recovered from a proved kill."
    times = (
        f"{words.significant(ratio)} times sooner than"
        if ratio >= 1
        else f"which is {words.significant(1 / ratio)} times later than"
    )
    begin = "Seen, but not proved: after" if summary.verdict in (Verdict.INCONCLUSIVE, Verdict.ERROR) else "After"
    return (
        f"{begin} a SIGKILL the worker served again in {words.duration(shadow)} with a shadow, {times} after a cold "
        f"start ({words.duration(cold)}){_full_scale(summary)}."
    )


def _full_scale(summary: Summary) -> str:
    """Say what the two medians are at full scale, where that differs."""
    cold, shadow = summary.cold.at_full_scale.recovery_s.median, summary.shadow.at_full_scale.recovery_s.median
    if summary.time_scale == 1 or cold is None or shadow is None:
        return ""
    return f"; at full scale {words.duration(shadow)} and {words.duration(cold)}"


def run_lead(arm: ArmSummary) -> str:
    """Return what a single run came to."""
    counts = f"{arm.requests_ok:,} of {words.plural(arm.requests, 'request')} answered, {arm.requests_failed:,} failed"
    wrong = f", {arm.content_wrong:,} with wrong content" if arm.content_wrong else ""
    if arm.recovery_s.median is None:
        return f"{counts}{wrong}."
    kills = words.plural(arm.recovery_s.n, "kill")
    return f"Serving again after {words.duration(arm.recovery_s.median)} (median of {kills}); {counts}{wrong}."

"""The one sentence at the head of the page."""

from __future__ import annotations

from harness.verdicts import Verdict
from reports import words
from reports.control.summary import ControlSummary, Proved


def lead(summary: ControlSummary) -> str:
    """Return what the run came to."""
    c = summary.counts
    if not c.invocations:
        return "Nothing was asked of the control plane."
    begin = "Seen, but not proved: " if summary.verdict in (Verdict.INCONCLUSIVE, Verdict.ERROR) else ""
    asked = f"{words.plural(c.operations, 'operation')} in {words.duration(summary.seconds)}{_through(summary.proved)}"
    answers = f"{c.retried:,} retried, {c.replayed:,} answers replayed, {c.refused:,} refused"
    return (
        f"{begin}{asked}: {answers}, {c.unresolved:,} of unknown outcome; {effects(c.double_effects)}, and "
        f"{_users(summary)}."
    )


def effects(double: int) -> str:
    """Return how many effects came twice, in words."""
    if not double:
        return "no operation had its effect twice"
    return "1 effect came twice" if double == 1 else f"{double:,} effects came twice"


def _through(proved: Proved) -> str:
    parts = [words.plural(proved.crashes, "crash", "crashes")] if proved.crashes else []
    if proved.replies:
        parts.append(f"{proved.replies:,} lost or late {'reply' if proved.replies == 1 else 'replies'}")
    return f", through {' and '.join(parts)}" if parts else ", with no proved fault"


def _users(summary: ControlSummary) -> str:
    u = summary.users
    if u.wrong:
        return "1 user's answer was wrong" if u.wrong == 1 else f"{u.wrong:,} users' answers were wrong"
    checked = u.ok - u.unchecked
    return "no user's answer was wrong" if checked > 0 else "no user's answer could be checked"

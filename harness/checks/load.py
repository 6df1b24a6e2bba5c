"""Check: there was enough load, before the first fault and after it, and the client kept its schedule."""

from __future__ import annotations

from typing import Final

from harness.checks.faults import scenario_of
from harness.latency import percentiles
from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict
from harness.words import counted
from reference_impl.rules.events import EventKind

SIDE_SHARE_MIN: Final = 0.1
"""Of the requests required, at least this share on each side of the first fault."""
SPOILT_SHARE_MAX: Final = 0.1
LAG_MAX_MS: Final = 50.0
LATE_SHARE_MAX: Final = 0.05
"""Requests that may start later than that; a percentile of a few dozen would make one late request void a run."""


def load_is_sufficient(run: RunFolder) -> CheckResult:
    """Inconclusive with too few requests, too many spoilt rows, or a client that fell behind its schedule."""
    rows, needed = run.requests, scenario_of(run).requests_min
    faults = run.events_of(EventKind.FAULT_INJECTED)
    first_ns = faults[0].t_ns if faults else 2**63 - 1
    before = int((rows.intended_ns < first_ns).sum())
    after = len(rows) - before
    spoilt = int((rows.spoilt != "").sum())
    lag = percentiles(rows.schedule_lag_ms).p99
    problems = []
    if len(rows) < needed:
        problems.append(f"fewer than {needed}")
    if before < needed * SIDE_SHARE_MIN or (faults and after < needed * SIDE_SHARE_MIN):
        problems.append("too few on one side of the first fault")
    if rows.empty or spoilt > len(rows) * SPOILT_SHARE_MAX:
        problems.append(f"more than {SPOILT_SHARE_MAX:.0%} spoilt by the client's own lateness")
    late = int((rows.schedule_lag_ms > LAG_MAX_MS).sum())
    if late > len(rows) * LATE_SHARE_MAX:
        problems.append(f"{late} started more than {LAG_MAX_MS:g} ms late")
    lag_text = "-" if lag is None else f"{lag:.1f} ms"
    found = (
        f"{counted(before, 'request')} before the first fault, {after} after; schedule lag p99 {lag_text}; "
        f"{counted(spoilt, 'row')} spoilt"
    )
    return CheckResult(
        check="load-sufficient", title="There was load enough, sent on time", rules=[],
        verdict=Verdict.INCONCLUSIVE if problems else Verdict.PASS,
        found=f"{found}: {'; '.join(problems)}" if problems else found,
        evidence={"requests": len(rows), "before": before, "after": after, "spoilt": spoilt, "lag_p99_ms": lag},
    )  # fmt: skip

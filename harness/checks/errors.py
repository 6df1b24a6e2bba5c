"""Check: requests fail only where a fault explains it, each visibly, and none hangs."""

from __future__ import annotations

from typing import Any, Final

from harness.recovery import Recovery, recoveries
from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict
from harness.words import counted

GRACE_NS: Final = 1_000_000_000
"""Between a failure at the server and its arrival at the client, on a busy machine."""


def errors_only_in_fault_windows(run: RunFolder) -> CheckResult:
    """Fail for a failed request that no kill explains; inconclusive for requests whose outcome is unknown."""
    rows, kills = run.requests, recoveries(run)
    failed, unknown = rows[rows.outcome == "fail"], rows[rows.outcome == "unknown"]
    stray = [row for row in failed.itertuples() if not any(_explains(kill, row) for kill in kills)]
    found = f"of {counted(len(rows), 'request')}, {len(failed)} failed, "
    found += f"{len(failed) - len(stray)} of them in a fault's window"
    verdict = Verdict.PASS
    if rows.empty or len(unknown):
        verdict = Verdict.INCONCLUSIVE
        found += f"; {counted(len(unknown), 'has', 'have')} no known outcome"
    if stray:
        verdict = Verdict.FAIL
        found += f"; outside: {stray[0].request_id}: {stray[0].error}"
    return CheckResult(
        check="errors-in-window", title="Requests fail only in a fault's window, and none hangs",
        rules=["KVC-ROUT-001", "KVC-ROUT-002"], verdict=verdict, found=found,
        evidence={"failed": len(failed), "stray": len(stray), "unknown": len(unknown)},
    )  # fmt: skip


def _explains(kill: Recovery, row: Any) -> bool:
    """A request is explained by a kill that struck while it ran on the victim, or left no worker to send it to.

    Its failure must come from the kill: not before it, and not after the worker is back.
    """
    over_ns = (kill.registered_ns or kill.fault_ns) + GRACE_NS
    if not kill.fault_ns <= row.end_ns <= over_ns:
        return False
    on_victim = f"{kill.worker_id}/{kill.victim}" in (row.node_d, row.node_p) or not row.node_d
    return bool(row.sent_ns <= kill.fault_ns + GRACE_NS and on_victim) or row.http_status in {502, 503}

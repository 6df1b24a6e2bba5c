"""Check: after every proved kill the worker was registered again, in time, through an answered canary."""

from __future__ import annotations

from typing import Final

from harness.latency import spread
from harness.recovery import Recovery, recoveries
from harness.run_folder import RunFolder
from harness.scenario import Arm
from harness.verdicts import CheckResult, Verdict
from harness.words import counted
from reference_impl.rules.events import EventKind

SHADOW_LIMIT_S: Final = 2.0
"""For a shadow, beyond what its profile emulates: far below any cold start, far above noise."""


def every_kill_recovers(run: RunFolder) -> CheckResult:
    """Fail if a worker never came back, came back without a canary, or a shadow took longer than its limit."""
    found = recoveries(run)
    problems = [p for r in found for p in _problems(run, r)]
    recovery, detection = spread(r.recovery_s for r in found), spread(r.detection_s for r in found)
    if not found:
        verdict, text = Verdict.INCONCLUSIVE, "no proved kill, so nothing to recover from"
    elif problems:
        verdict, text = Verdict.FAIL, "; ".join(problems)
    else:
        verdict = Verdict.PASS
        text = (
            f"{counted(len(found), 'kill')}, recovery {recovery.min:.3f} to {recovery.max:.3f} s, "
            f"median {recovery.median:.3f} s"
        )
    return CheckResult(
        check="recovery", title="Every kill is recovered from, in time",
        rules=["KVC-LOCK-002", "KVC-SHDW-004", "KVC-SHDW-005", "KVC-ROUT-001"], verdict=verdict, found=text,
        evidence={"kills": len(found), "recovery_s_median": recovery.median, "recovery_s_max": recovery.max,
                  "detection_s_median": detection.median},
    )  # fmt: skip


def _problems(run: RunFolder, recovery: Recovery) -> list[str]:
    where = f"{recovery.fault_id} of {recovery.victim}"
    if recovery.recovery_s is None or recovery.registered_ns is None:
        return [f"{where}: no engine of {recovery.worker_id} was registered again"]
    problems = []
    canaries = [
        e for e in run.events_of(EventKind.CANARY_ANSWERED)
        if e.subject == recovery.successor and recovery.fault_ns <= e.t_ns <= recovery.registered_ns and e.detail["ok"]
    ]  # fmt: skip
    if not canaries:
        problems.append(f"{where}: {recovery.successor} registered without a rightly answered canary")
    limit_s = SHADOW_LIMIT_S + sum(s.seconds for s in recovery.spans if s.emulated)
    if run.manifest.arm == Arm.SHADOW and recovery.recovery_s > limit_s:
        problems.append(f"{where}: recovery took {recovery.recovery_s:.2f} s, the limit is {limit_s:.2f} s")
    return problems

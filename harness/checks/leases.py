"""Checks on leases: none ends while its reader lives, none outlives a dead reader for long, none is left at the end."""

from __future__ import annotations

from typing import Final

from harness.holding import EXPIRED, Reclaim, excuses, freed_early, held, reclaims
from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict
from harness.words import counted
from reference_impl.rules.events import EventKind

KEPT_RULES: Final = ["KVC-LEASE-006", "KVC-LEASE-008", "KVC-LEASE-010", "KVC-OBS-002", "L2"]
GAUGES_OF_HOLDING: Final = ("pdproof:leases_live", "pdproof:lease_blocks_held", "pdproof:loads_running",
                            "vllm:num_requests_running", "vllm:num_requests_waiting",
                            "vllm:kv_cache_usage_perc")  # fmt: skip


def leases_are_kept(run: RunFolder) -> CheckResult:
    """Fail for a lease that ran out, or a reader that came too late, without a fault that explains it."""
    leases = [lease for lease in held(run) if not lease.turn]
    expired = [lease for lease in leases if lease.how == EXPIRED]
    early = freed_early(run)
    explained = {lease.request_id for lease in expired} - {lease.request_id for lease in early}
    known = {lease.request_id for lease in leases if not lease.loan}  # a loan may be taken back before it is claimed
    late = [e for e in run.events_of(EventKind.CLAIM_REFUSED) if e.subject in known - explained]
    text = f"{counted(len(leases), 'lease')}, {len(expired)} ran out, {len(early)} of them early"
    came = f"{counted(len(late), 'reader')} came for blocks that were gone"
    text += f"; {came if late else 'no reader was refused without cause'}"
    verdict = Verdict.INCONCLUSIVE if not leases else Verdict.FAIL if early or late else Verdict.PASS
    return CheckResult(
        check="leases-kept", title="No lease ends while its reader lives", rules=KEPT_RULES, verdict=verdict,
        found=text if leases else "no lease was granted",
        evidence={"leases": len(leases), "early": len(early), "refused": len(late)},
    )  # fmt: skip


def kv_is_loaded(run: RunFolder) -> CheckResult:
    """Fail for a load of KV that failed without a fault that explains it; inconclusive if none was ever done.

    Without this check a run in which no KV moves at all would pass: what is not loaded is computed, and right.
    """
    done, faults = run.events_of(EventKind.LOAD_DONE), excuses(run)
    failed = [e for e in run.events_of(EventKind.LOAD_FAILED) if not e.detail.get("expired")]
    stray = [e for e in failed if not any(fault.at(e.t_ns) for fault in faults)]
    found = f"{counted(len(done), 'load')} of KV done, {len(failed)} failed, "
    found += f"{len(stray)} of them without a fault to explain it"
    if stray:
        verdict, found = Verdict.FAIL, f"{found}; the first: {stray[0].detail.get('reason')}"
    else:
        verdict = Verdict.PASS if done else Verdict.INCONCLUSIVE
    return CheckResult(
        check="kv-loaded", title="KV moves between the engines", rules=["KVC-XFER-001", "KVC-XFER-002", "L3"],
        verdict=verdict, found=found, evidence={"done": len(done), "failed": len(failed), "stray": len(stray)},
    )  # fmt: skip


def dead_readers_blocks_return(run: RunFolder) -> CheckResult:
    """Fail if what a killed reader left stood longer than its first term, or one extension after the crash."""
    rules = ["KVC-LEASE-009", "KVC-LEASE-013", "L1"]
    title = "A dead reader's blocks are free one extension after the crash, or when their first term ends"
    found = [r for r in reclaims(run) if r.leases]
    if not found:
        return CheckResult(
            check="reclaim", title=title, rules=rules, verdict=Verdict.INCONCLUSIVE,
            found="no proved kill left a lease behind, so there was nothing to reclaim",
        )  # fmt: skip
    problems = [
        f"of {counted(r.leases, 'lease')}, {len(r.late)} stood too long after {r.fault_id}" for r in found if r.late
    ]
    texts = [
        f"{r.fault_id} left {counted(r.leases, 'lease')} on {counted(r.blocks, 'block')}; {_ending(r)}" for r in found
    ]  # fmt: skip
    return CheckResult(
        check="reclaim", title=title, rules=rules, verdict=Verdict.FAIL if problems else Verdict.PASS,
        found="; ".join([*problems, *texts]),
        evidence={"kills": len(found), "leases": sum(r.leases for r in found), "blocks": sum(r.blocks for r in found),
                  "seconds_max": max((r.seconds for r in found if r.seconds is not None), default=None)},
    )  # fmt: skip


def _ending(reclaim: Reclaim) -> str:
    if reclaim.seconds is None:
        return f"{reclaim.standing} still stood at the end"
    return f"the last ended {reclaim.seconds:.2f} s after it"


def everything_is_free_at_the_end(run: RunFolder) -> CheckResult:
    """Fail if an engine still held blocks, leases or requests in the run's last moments (K1)."""
    title, rules = "At the end every block is free", ["K1", "KVC-LEASE-007"]
    audits = [e.t_ns for e in run.events_of(EventKind.PHASE_STARTED) if e.detail["phase"] == "audit"]
    rows = run.metrics[run.metrics.t_ns >= audits[0]] if audits else run.metrics.iloc[:0]
    rows = rows[rows.name.isin(GAUGES_OF_HOLDING)]
    last = rows.sort_values("t_ns").drop_duplicates(["node", "name"], keep="last")
    left = last[last.value > 0]
    engines = last.node.nunique()
    standing = sum(lease.ended_ns is None for lease in held(run))
    if last.empty:
        verdict, text = Verdict.INCONCLUSIVE, "no engine was looked at in the audit"
    elif len(left) or standing:
        verdict = Verdict.FAIL
        text = "; ".join(
            [f"{row.node}: {row.name_} is {row.value:g}" for row in left.rename(columns={"name": "name_"}).itertuples()]
        )
        text += f"; {counted(standing, 'lease')} never ended" if standing else ""
    else:
        verdict = Verdict.PASS
        text = f"{counted(engines, 'engine holds', 'engines hold')} nothing: no request, no lease, no block"
    return CheckResult(
        check="all-free", title=title, rules=rules, verdict=verdict, found=text.removeprefix("; "),
        evidence={"engines": engines, "left": len(left), "leases": standing},
    )  # fmt: skip

"""Check: after a promotion the dead engine comes back as the new shadow (KVC-SHDW-003), holding no KV (-001)."""

from __future__ import annotations

from harness.latency import spread
from harness.recovery import recoveries
from harness.run_folder import RunFolder
from harness.scenario import Arm
from harness.verdicts import CheckResult, Verdict
from harness.words import counted


def redundancy_is_restored(run: RunFolder) -> CheckResult:
    """Fail if after the last kill no new shadow was parked; inconclusive if an earlier one was not given the time.

    The cold arm has no redundancy to restore.
    """
    title = "Redundancy is restored after every promotion"
    if run.manifest.arm != Arm.SHADOW:
        return CheckResult(
            check="redundancy", title=title, rules=["KVC-SHDW-003"], verdict=Verdict.PASS,
            found="not applicable: this arm runs without shadows",
        )  # fmt: skip
    kills = recoveries(run)
    missing = [k.fault_id for k in kills if k.redundancy_s is None]
    hasty = [k.fault_id for k in kills[:-1] if k.redundancy_s is None]
    restored = spread(k.redundancy_s for k in kills)
    if not kills:
        verdict, found = Verdict.INCONCLUSIVE, "no proved kill"
    elif missing and missing == hasty:
        verdict = Verdict.INCONCLUSIVE
        found = f"the next kill came before a new shadow was parked after {', '.join(hasty)}; leave it more time"
    elif missing:
        verdict, found = Verdict.FAIL, f"no new shadow was parked after {', '.join(missing)}"
    else:
        verdict = Verdict.PASS
        found = f"a new shadow was parked {restored.min:.2f} to {restored.max:.2f} s after each of "
        found += counted(len(kills), "kill")
    return CheckResult(
        check="redundancy", title=title, rules=["KVC-SHDW-003"], verdict=verdict, found=found,
        evidence={"kills": len(kills), "missing": len(missing), "redundancy_s_median": restored.median},
    )  # fmt: skip

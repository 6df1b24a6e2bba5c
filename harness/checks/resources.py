"""Checks: memory and descriptors come back to where they were, and no process outlives the run."""

from __future__ import annotations

from typing import Final

import pandas as pd

from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict
from harness.words import counted
from reference_impl.rules.events import EventKind

DESCRIPTORS_SPARE: Final = 4
"""A service may have this many more open at the end: connections that are just coming and going."""
MEMORY_SERVICE: Final = "-gms"
"""How the names of memory services end."""
WEIGHTS_SHARE_MAX: Final = 1.05
KV_SHARE_MAX: Final = 1.05


def resources_return(run: RunFolder) -> CheckResult:
    """Fail if a device holds more weights or KV than one copy, or a service has gained descriptors over the run.

    Weights and KV at the end are held against the most that one engine ever needs: the profile's sizes.
    """
    first = _window(run, "baseline")
    last = _window(run, "audit")
    title, rules = "Memory and descriptors come back", ["KVC-MEM-002", "KVC-MEM-009", "K1"]
    if first.empty or last.empty:
        return CheckResult(check="resources", title=title, rules=rules, verdict=Verdict.INCONCLUSIVE,
                           found="no gauge was scraped in the baseline, or none at the end")  # fmt: skip
    gained = _gained_descriptors(first, last)
    problems = [
        f"{node} has {counted(n, 'descriptor')} more than before" for node, n in gained.items() if n > DESCRIPTORS_SPARE
    ]
    weights, kv = _sizes(run)
    problems += _too_much(last, "memory_weights_bytes", weights * WEIGHTS_SHARE_MAX)
    problems += _too_much(last, "memory_kv_bytes", kv * KV_SHARE_MAX)
    held = last[last.name == "memory_weights_bytes"].groupby("node").value.max()
    text = f"at the end each device holds at most {held.max() / 2**20:,.0f} MiB of weights, one copy being "
    text += (
        f"{weights / 2**20:,.0f} MiB; services gained {counted(max(gained.values(), default=0), 'descriptor')} at most"
    )
    return CheckResult(
        check="resources", title=title, rules=rules, verdict=Verdict.FAIL if problems else Verdict.PASS,
        found="; ".join(problems) or text,
        evidence={"weights_bytes_max": float(held.max()), "descriptors_gained_max": max(gained.values(), default=0)},
    )  # fmt: skip


def nothing_is_left(run: RunFolder) -> CheckResult:
    """Fail if a process of the deployment was alive after its end."""
    audits = run.events_of(EventKind.AUDITED)
    left = run.events_of(EventKind.PROCESS_LEFT)
    looked_for = int(audits[0].detail["processes"] or 0) if audits else 0
    verdict = Verdict.FAIL if left else Verdict.PASS if looked_for else Verdict.INCONCLUSIVE
    return CheckResult(
        check="nothing-left", title="No process outlives the run", rules=["K1"], verdict=verdict,
        found=f"{counted(looked_for, 'process was', 'processes were')} looked for after the end, "
        f"{counted(len(left), 'was', 'were')} still alive",
        evidence={"processes": looked_for, "left": len(left)},
    )  # fmt: skip


def _window(run: RunFolder, phase: str) -> pd.DataFrame:
    starts = [e.t_ns for e in run.events_of(EventKind.PHASE_STARTED) if e.detail["phase"] == phase]
    ends = [e.t_ns for e in run.events_of(EventKind.PHASE_ENDED) if e.detail["phase"] == phase]
    if not starts or not ends:
        return run.metrics.iloc[:0]
    return run.metrics[(run.metrics.t_ns >= starts[0]) & (run.metrics.t_ns <= ends[0])]


def _gained_descriptors(first: pd.DataFrame, last: pd.DataFrame) -> dict[str, int]:
    """Of the memory services: they live through the run, and each descriptor of theirs is memory or a session.

    An engine's are mostly connections, as many as its traffic of the last seconds had kept open.
    """
    before, after = (
        w[(w.name == "open_descriptors") & w.node.str.endswith(MEMORY_SERVICE)].groupby("node").value
        for w in (first, last)
    )
    gained = (after.min() - before.max()).dropna()
    return {str(node): int(more) for node, more in gained.items()}


def _too_much(last: pd.DataFrame, gauge: str, limit: float) -> list[str]:
    held = last[last.name == gauge].groupby("node").value.max()
    return [f"{node} holds {value / 2**20:,.0f} MiB of {gauge}, more than one copy"
            for node, value in held.items() if value > limit]  # fmt: skip


def _sizes(run: RunFolder) -> tuple[int, int]:
    profile = run.manifest.configuration["profile"]
    return int(profile["weights_mib"]) * 2**20, int(profile["kv_blocks"]) * 4096

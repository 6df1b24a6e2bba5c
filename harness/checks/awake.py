"""Check: at most one engine of a device is awake at any time (KVC-LOCK-001)."""

from __future__ import annotations

from itertools import pairwise

from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict
from harness.words import counted
from reference_impl.rules.events import Event, EventKind


def at_most_one_awake(run: RunFolder) -> CheckResult:
    """Fail if an engine woke while its predecessor may still have lived, spoke after it, or had no higher epoch."""
    by_worker: dict[str, list[Event]] = {}
    for event in run.events_of(EventKind.ENGINE_AWAKE):
        by_worker.setdefault(str(event.detail["worker_id"]), []).append(event)
    pairs = [(a, b) for wakes in by_worker.values() for a, b in pairwise(wakes)]
    problems = [p for before, after in pairs for p in _problems(run, before, after)]
    wakes = sum(len(w) for w in by_worker.values())
    verdict = Verdict.FAIL if problems else Verdict.PASS if pairs else Verdict.INCONCLUSIVE
    return CheckResult(
        check="one-awake", title="At most one engine is awake for a device",
        rules=["KVC-LOCK-001", "KVC-LOCK-003", "KVC-LOCK-004"], verdict=verdict,
        found="; ".join(problems) or f"{counted(wakes, 'wake')} on {counted(len(by_worker), 'device')}, "
        f"{counted(len(pairs), 'hand-over')}, no overlap",
        evidence={"wakes": wakes, "hand_overs": len(pairs), "overlaps": len(problems)},
    )  # fmt: skip


def _problems(run: RunFolder, before: Event, after: Event) -> list[str]:
    where = f"{before.subject} then {after.subject}"
    problems = []
    if int(after.detail["epoch"] or 0) <= int(before.detail["epoch"] or 0):
        problems.append(f"{where}: epoch {after.detail['epoch']} does not follow {before.detail['epoch']}")
    if not _dead_before(run, before, after):
        problems.append(f"{where}: nothing shows that {before.subject} was dead when {after.subject} woke")
    late = [e for e in run.events if e.actor == before.subject and e.t_ns > after.t_ns]
    if late:
        problems.append(f"{where}: {before.subject} still said {late[0].kind} afterwards")
    return problems


def _dead_before(run: RunFolder, before: Event, after: Event) -> bool:
    """Whether its death is attested: seen by its parent, or a proved SIGKILL, after which it ran no instruction."""
    proved = {e.subject for e in run.events_of(EventKind.FAULT_PROVED)}
    deaths = [e.t_ns for e in run.events_of(EventKind.PROCESS_EXITED) if e.subject == before.subject]
    deaths += [
        e.t_ns for e in run.events_of(EventKind.FAULT_INJECTED)
        if e.detail.get("target") == before.subject and e.detail.get("fault") == "kill" and e.subject in proved
        and not e.detail.get("process")  # of an engine with several, the others live on
    ]  # fmt: skip
    return any(before.t_ns <= t <= after.t_ns for t in deaths)

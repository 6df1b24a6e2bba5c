"""Checks on the control plane: every operation had one effect, enough of them were tried, and no group is lost."""

from __future__ import annotations

from typing import Final

from harness.checks.faults import scenario_of
from harness.errors import BadRunFolder
from harness.group_timeline import Breach
from harness.new_engines import engines_of
from harness.operation_history import Counts, counts_of, judge_history, judge_ownership, not_tried
from harness.run_folder import RunFolder
from harness.scenario import ControlSpec, FaultKind
from harness.verdicts import CheckResult, Verdict
from harness.words import counted
from reference_impl.blockservice.failpoints import Action
from reference_impl.rules.events import Event, EventKind, Scalar

RULES: Final = [*(f"KVC-IDEM-{number:03}" for number in range(1, 12)), "KVC-IDEM-019"]
SHOWN_MAX: Final = 3
"""Breaches that are told in full, of different rules if there are such."""
NONE_INVOKED: Final = "no operation was invoked"


def operations_happen_once(run: RunFolder) -> CheckResult:
    """Fail for a history that no idempotent control plane leaves behind; inconclusive without one."""
    verdict = judge_history(run.control, engines=engines_of(run))
    counts, breaches = verdict.counts, verdict.breaches
    found = _told(counts)
    if breaches:
        result, found = Verdict.FAIL, f"{found}; {_shown(breaches)}"
    elif not counts.invocations:
        result, found = Verdict.INCONCLUSIVE, NONE_INVOKED
    else:
        result = Verdict.PASS
    return CheckResult(
        check="operations", title="Every operation has one effect and one answer, whatever is lost", rules=RULES,
        verdict=result, found=found,
        evidence=_evidence(counts) | {"looks": len(run.control.looks), "breaches": len(breaches)},
    )  # fmt: skip


def operations_are_enough(run: RunFolder) -> CheckResult:
    """Inconclusive with too little done or proved, or if a method never had an effect: refusing all breaks no rule."""
    spec, counts, crashes = _control_of(run), counts_of(run.control), _crashes(run)
    wanted = {
        "applied": (counts.applied, spec.applied_min), "retried": (counts.retried, spec.retried_min),
        "replayed": (counts.replayed, spec.replayed_min), "proved crashes": (crashes, spec.crashes_min),
    }  # fmt: skip
    problems = [f"{name}: fewer than {least}" for name, (number, least) in wanted.items() if number < least]
    if missing := not_tried(run.control):
        problems.append(f"never had an effect: {', '.join(missing)}")
    found = ", ".join(f"{number} {name}" for name, (number, _) in wanted.items())
    if not counts.invocations:
        problems = [NONE_INVOKED]
    return CheckResult(
        check="operations-load", title="Enough operations were applied, retried and replayed under crashes", rules=[],
        verdict=Verdict.INCONCLUSIVE if problems else Verdict.PASS,
        found=f"{found}: {'; '.join(problems)}" if problems else found,
        evidence=_evidence(counts) | {"crashes": crashes, "never": ", ".join(missing)},
    )  # fmt: skip


def groups_have_one_owner(run: RunFolder) -> CheckResult:
    """Fail for a group that two nodes own at the end, that is still moving, or that was lost by a migration."""
    groups = run.control.groups
    breaches = judge_ownership(run.control, engines=engines_of(run))
    nodes, moved = {row.node for row in groups}, sum(row.state == "MOVED" for row in groups)
    if breaches:
        verdict, found = Verdict.FAIL, _shown(breaches)
    elif not groups:
        verdict, found = Verdict.INCONCLUSIVE, "no node told of any group"
    else:
        verdict = Verdict.PASS
        found = f"{counted(len(groups), 'group')} at {counted(len(nodes), 'node')}; "
        found += f"{counted(moved, 'has', 'have')} moved, and it is known where to"
    return CheckResult(
        check="one-owner", title="Every group has one owner, and none is lost on its way",
        rules=["KVC-IDEM-010", "KVC-IDEM-011"], verdict=verdict, found=found,
        evidence={"groups": len(groups), "moved": moved, "breaches": len(breaches)},
    )  # fmt: skip


def _control_of(run: RunFolder) -> ControlSpec:
    spec = scenario_of(run).control
    if spec is None:
        raise BadRunFolder(run.path, "manifest.json: the scenario has no control plane")
    return spec


def _crashes(run: RunFolder) -> int:
    """Return how many faults that end a process were injected and proved."""
    injected = {e.subject for e in run.events_of(EventKind.FAULT_INJECTED) if _ends_a_process(e)}
    return len({e.subject for e in run.events_of(EventKind.FAULT_PROVED)} & injected)


def _ends_a_process(fault: Event) -> bool:
    kills = fault.detail.get("fault") in (FaultKind.KILL, FaultKind.BLOCKS_KILL)
    return kills or fault.detail.get("action") in (Action.EXIT, Action.KILL)


def _told(counts: Counts) -> str:
    return (
        f"{counted(counts.operations, 'operation')}: {counts.retried} retried, {counts.replayed} replayed, "
        f"{counts.refused} refused, {counts.unresolved} of unknown outcome to the end; "
        f"{counted(counts.effects, 'effect')}, {counted(counts.double_effects, 'double effect')}"
    )


def _shown(breaches: list[Breach]) -> str:
    """Return how many breaches there are, and the first of some rules in full."""
    first = {breach.rule: breach for breach in reversed(breaches)}
    shown = [first[rule] for rule in sorted(first)][:SHOWN_MAX]
    return f"{counted(len(breaches), 'breach', 'breaches')}: " + "; ".join(
        f"{breach.rule}: {breach.text}" for breach in shown
    )


def _evidence(counts: Counts) -> dict[str, Scalar]:
    return {name: getattr(counts, name) for name in Counts.__struct_fields__}

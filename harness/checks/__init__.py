"""Checks: each a function from a run folder to a verdict. Old runs can be judged again with newer checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from harness.checks.awake import at_most_one_awake
from harness.checks.content import answers_are_right
from harness.checks.errors import errors_only_in_fault_windows
from harness.checks.faults import faults_are_proved, scenario_of
from harness.checks.leases import (
    dead_readers_blocks_return,
    everything_is_free_at_the_end,
    kv_is_loaded,
    leases_are_kept,
)
from harness.checks.load import load_is_sufficient
from harness.checks.operations import groups_have_one_owner, operations_are_enough, operations_happen_once
from harness.checks.recovery import every_kill_recovers
from harness.checks.redundancy import redundancy_is_restored
from harness.checks.resources import nothing_is_left, resources_return
from harness.checks.turns import turns_are_judged_rightly
from harness.holding import reads, terms_of
from harness.run_folder import RunFolder
from harness.scenario import FaultKind
from harness.verdicts import CheckResult, Verdict, worst

Check: TypeAlias = Callable[[RunFolder], CheckResult]

CHECKS: Final[dict[str, Check]] = {
    "faults-proved": faults_are_proved,
    "load-sufficient": load_is_sufficient,
    "recovery": every_kill_recovers,
    "errors-in-window": errors_only_in_fault_windows,
    "content": answers_are_right,
    "kv-loaded": kv_is_loaded,
    "leases-kept": leases_are_kept,
    "reclaim": dead_readers_blocks_return,
    "turns": turns_are_judged_rightly,
    "all-free": everything_is_free_at_the_end,
    "operations": operations_happen_once,
    "operations-load": operations_are_enough,
    "one-owner": groups_have_one_owner,
    "one-awake": at_most_one_awake,
    "redundancy": redundancy_is_restored,
    "resources": resources_return,
    "nothing-left": nothing_is_left,
}
"""By name, in the order in which a reader wants them."""
OF_KILLS: Final = {"recovery", "one-awake", "redundancy"}
OF_MOVING_KV: Final = {"kv-loaded", "leases-kept", "reclaim", "turns", "all-free"}
"""Checks that only a scenario with kills, and only one in which KV moves between engines, can answer."""
OF_KNOWN_SIZES: Final = {"resources"}
"""Checks that need to know how large one copy of weights and KV is; of an engine that is not ours nobody says so."""
OF_CONTROL: Final = {"operations", "operations-load", "one-owner"}
"""Checks that only a scenario with a control plane of block groups can answer."""


def applicable(run: RunFolder) -> dict[str, Check]:
    """Return the checks that this run can answer: the others have no subject in it."""
    terms, scenario = terms_of(run), scenario_of(run)
    faults = [phase.fault for phase in scenario.phases if phase.fault is not None]
    killed = [fault.worker for fault in faults if fault.kind is FaultKind.KILL]
    if terms is None:
        left_out = OF_MOVING_KV
    else:
        left_out = {"redundancy"} | (set() if killed else OF_KILLS)
        left_out |= set() if any(reads(run, worker_id) for worker_id in killed) else {"reclaim"}
        left_out |= set() if terms.bidirectional_kv_xfer else {"turns"}
    left_out = left_out | (set() if scenario.control is not None else OF_CONTROL)
    if "weights_mib" not in run.manifest.configuration.get("profile", {}):
        left_out = left_out | OF_KNOWN_SIZES
    return {name: check for name, check in CHECKS.items() if name not in left_out}


def judge(run: RunFolder) -> list[CheckResult]:
    """Return every check's verdict on `run`, without writing them. A run without its footer passes nothing.

    A black-box case's run is judged by the checks of that case.
    """
    if run.incomplete is not None:
        return [
            CheckResult(
                check="complete", title="The run came to its end", rules=[], verdict=Verdict.INCONCLUSIVE,
                found=run.incomplete,
            )
        ]  # fmt: skip
    if "case" in run.manifest.configuration:
        from harness.cases import judging  # knows the whole suite of cases, which most runs have no use for

        return judging.judge(run)
    return [_judged(name, check, run) for name, check in applicable(run).items()]


def _judged(name: str, check: Check, run: RunFolder) -> CheckResult:
    """Run one check. One that stumbles over what the folder holds has no verdict on it: `error`, and the rest go on."""
    try:
        return check(run)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        title = (check.__doc__ or name).partition(".")[0]
        found = f"the check stumbled over what the folder holds: {type(error).__name__}: {error}"
        return CheckResult(check=name, title=title, rules=[], verdict=Verdict.ERROR, found=found)


def overall(results: list[CheckResult]) -> Verdict:
    """Return the worst verdict; of no results, `inconclusive`."""
    return worst(r.verdict for r in results)

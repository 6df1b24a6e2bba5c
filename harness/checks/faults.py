"""Check: every planned fault was injected, and proved. A campaign that injected nothing must not pass."""

from __future__ import annotations

import msgspec

from harness.errors import BadRunFolder
from harness.run_folder import RunFolder
from harness.scenario import Scenario
from harness.verdicts import CheckResult, Verdict
from harness.words import counted
from reference_impl.rules.events import EventKind


def faults_are_proved(run: RunFolder) -> CheckResult:
    """Inconclusive unless as many faults are proved as the scenario plans."""
    planned = scenario_of(run).faults
    injected = {e.subject for e in run.events_of(EventKind.FAULT_INJECTED)}
    proofs = [e for e in run.events_of(EventKind.FAULT_PROVED) if e.subject in injected]
    unproved = run.events_of(EventKind.FAULT_UNPROVED)
    enough = len(proofs) >= planned and not unproved
    found = f"of {counted(planned, 'planned fault')}, {counted(len(proofs), 'is', 'are')} proved"
    if unproved:
        found += f"; unproved: {unproved[0].detail.get('reason')}"
    elif proofs:
        found += f"; the first: {proofs[0].detail.get('evidence')}"
    return CheckResult(
        check="faults-proved", title="Every planned fault demonstrably happened", rules=[],
        verdict=Verdict.PASS if enough else Verdict.INCONCLUSIVE, found=found,
        evidence={"planned": planned, "proved": len(proofs), "unproved": len(unproved)},
    )  # fmt: skip


def scenario_of(run: RunFolder) -> Scenario:
    """Return the scenario that the run was made from, as its manifest holds it."""
    try:
        return msgspec.convert(run.manifest.configuration["scenario"], Scenario)
    except (KeyError, msgspec.ValidationError) as error:
        raise BadRunFolder(run.path, f"manifest.json holds no usable scenario: {error}") from error

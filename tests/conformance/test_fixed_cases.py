"""The fixed cases: the reference implementation passes each, and each catches its twins."""

from __future__ import annotations

import pytest

from harness.conformance.case import Case
from harness.conformance.defects import DEFECTS, broken
from harness.conformance.registry import CASES, chosen
from harness.conformance.subject import Capability
from harness.conformance.subjects.reference import ReferenceSubject
from harness.conformance.trial import Trial, tried
from harness.verdicts import Verdict

SEEDS = (2, 7)
TWINS = [(case, twin) for case in CASES.values() for twin in case.twins]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_reference_passes(case: Case, seed: int) -> None:
    judged = tried(case, ReferenceSubject(), seed)
    assert judged.verdict is Verdict.PASS, judged.found
    assert judged.timeline


@pytest.mark.parametrize(("case", "twin"), TWINS, ids=[f"{case.name}-{twin}" for case, twin in TWINS])
def test_a_case_catches_its_twins(case: Case, twin: str) -> None:
    with broken(twin):
        judged = tried(case, ReferenceSubject(), SEEDS[0])
    assert judged.verdict is Verdict.FAIL, judged.found


def test_every_case_has_a_twin_and_every_claim_of_the_reference_a_case() -> None:
    assert all(case.twins for case in CASES.values())
    used = {need for case in CASES.values() for need in case.needs}
    assert ReferenceSubject().capabilities - used <= {Capability.FENCE}, "a claim that no case uses"


def test_a_defect_is_gone_when_its_trial_is_over() -> None:
    for name in DEFECTS:
        before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in DEFECTS[name]()]
        with broken(name):
            changed = [getattr(owner, attribute) is not value for owner, attribute, value in before]
        assert any(changed), name
        assert all(getattr(owner, attribute) is value for owner, attribute, value in before), name


def test_the_same_seed_gives_the_same_history() -> None:
    case = CASES["KVC-REL-006.damaged"]
    first, second = (tried(case, ReferenceSubject(), 5) for _ in range(2))
    assert first.timeline == second.timeline
    assert Trial(ReferenceSubject(), 5).prompt() == Trial(ReferenceSubject(), 5).prompt()
    assert Trial(ReferenceSubject(), 5).prompt() != Trial(ReferenceSubject(), 6).prompt()


@pytest.mark.parametrize(
    ("pattern", "least"), [("KVC-LEASE-010", 5), ("KVC-CLK-*", 8), ("KVC-LEASE-001.grant", 1), ("no-such", 0)]
)
def test_cases_are_chosen_by_rule_name_or_pattern(pattern: str, least: int) -> None:
    found = chosen((pattern,))
    assert len(found) >= least
    assert bool(found) == bool(least)

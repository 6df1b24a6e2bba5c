"""Black-box cases on real vLLM: they run, they see what it does, and a broken hop before it is caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cases.makers import VllmMaker
from harness.cases.registry import CASES
from harness.cases.runner import Outcome, Plan, run_cases
from harness.cases.terms import SMALL
from harness.verdicts import Verdict

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]


async def run(names: list[str], out: Path, *, twins: bool) -> list[Outcome]:
    plan = Plan(size=SMALL, seed=5, out=out, twins=twins, command=[])
    return await run_cases([CASES[name] for name in names], VllmMaker(), plan, lambda _: None, lambda _: None)


async def test_nothing_is_disturbed_on_real_vllm(tmp_path: Path) -> None:
    (outcome,) = await run(["undisturbed"], tmp_path / "out", twins=False)
    verdicts = {r.check: r.verdict for r in outcome.results}
    verdicts.pop("metrics")  # vLLM has no figures of leases that live: KVC-OBS-001
    assert set(verdicts.values()) == {Verdict.PASS}, outcome.results


async def test_a_broken_hop_before_real_vllm_is_caught(tmp_path: Path) -> None:
    outcomes = await run(["undisturbed"], tmp_path / "out", twins=True)
    assert [(o.twin, o.reason) for o in outcomes if o.verdict is not Verdict.PASS] == []

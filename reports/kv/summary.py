"""A page in figures, for machines (`summary.json`) and for the page: both print from this and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.run_folder import RunFolder
from harness.verdicts import Verdict, worst
from reports import words
from reports.kv.arms import KvArm, summarise_arm
from reports.kv.designs import designs, in_order

FORMAT = "pdproof-kv-summary/1"
OF_THE_DESIGN = {"design", "single_timeout", "clock_correction"}
"""The terms in which the runs of a page are meant to differ."""


class KvSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one scenario, by design. The first that must pass is what the others are compared with."""

    format: str
    verdict: Verdict
    """Of the designs that must pass. A baseline's checks do not count, but a wrong answer of any run does."""
    reasons: list[str]
    """Why it is not a pass."""
    scenario: str
    profile: str
    time_scale: float
    seed: int
    ratio_reclaim: float | None
    """How many times longer `ratio_of` held a dead reader's blocks than the lease design, at full scale.

    Where it still held some at the end of its run: at least so many times.
    """
    ratio_of: str
    emulated: list[str]
    runs: dict[str, KvArm]
    """By design, in the order of the page."""


def summarise(runs: list[RunFolder]) -> KvSummary:
    """Return the summary of runs in any order. Raises `BadInput` unless they are of one scenario."""
    runs = in_order(runs)
    arms = [summarise_arm(run, design) for run, design in zip(runs, designs(runs), strict=True)]
    counted = [arm for arm in arms if arm.must_pass] or arms
    reasons = [*_wrong(arms), *_of_counted(counted), *_of_baselines(arms, counted), *_differ(runs)]
    verdicts = [arm.verdict for arm in counted]
    verdicts += [Verdict.FAIL] if any(arm.content_wrong for arm in arms) else []
    verdicts += [Verdict.INCONCLUSIVE] if reasons else []
    ratio, ratio_of = _ratio(arms)
    manifest = runs[0].manifest
    return KvSummary(
        format=FORMAT, verdict=worst(verdicts), reasons=reasons, scenario=manifest.scenario, profile=manifest.profile,
        time_scale=manifest.time_scale, seed=manifest.seed, ratio_reclaim=ratio, ratio_of=ratio_of,
        emulated=list(dict.fromkeys(line for arm in arms for line in arm.emulated)),
        runs={arm.design: arm for arm in arms},
    )  # fmt: skip


def _wrong(arms: list[KvArm]) -> list[str]:
    return [
        f"{arm.title}: {words.plural(arm.content_wrong, 'answer')} had wrong tokens."
        for arm in arms
        if arm.content_wrong
    ]


def _of_counted(counted: list[KvArm]) -> list[str]:
    return [f"{arm.title}: {reason}" for arm in counted for reason in arm.reasons]


def _of_baselines(arms: list[KvArm], counted: list[KvArm]) -> list[str]:
    """A baseline may fail its checks; what it shows must still have happened."""
    reasons = []
    for arm in arms:
        if arm in counted:
            continue
        if arm.incomplete:
            reasons.append(f"{arm.title}: the run is incomplete: {arm.incomplete}.")
        if arm.unproved:
            reasons.append(f"{arm.title}: {arm.unproved} of its faults left no proof that they happened.")
        if not arm.requests:
            reasons.append(f"{arm.title}: the run holds no request.")
    return reasons


def _differ(runs: list[RunFolder]) -> list[str]:
    """Say in what else than their design the runs differ."""
    reasons = []
    for name in ("profile", "time_scale", "seed", "commit"):
        values = list(dict.fromkeys(str(getattr(run.manifest, name)) for run in runs))
        if len(values) > 1:
            reasons.append(f"The runs differ in {name} ({', '.join(values)}), so they cannot be compared.")
    for name in ("configuration", "versions", "machine"):
        held = [_comparable(getattr(run.manifest, name)) for run in runs]
        other = sorted({key for one in held for key in one | held[0] if one.get(key) != held[0].get(key)})
        if other:
            reasons.append(f"The runs differ in {name} ({', '.join(other)}), so they cannot be compared.")
    return reasons


def _comparable(part: dict[str, Any]) -> dict[str, Any]:
    """Leave out what runs of one page are meant to differ in: their design, and the timeout of the old one."""
    found = dict(part)
    if "terms" in found:
        found["terms"] = _without_design(found["terms"])
    scenario = found.get("scenario")
    if isinstance(scenario, dict):
        found["scenario"] = scenario | {"kv": _without_design(scenario.get("kv"))}
    return found


def _without_design(terms: Any) -> Any:
    return {k: v for k, v in terms.items() if k not in OF_THE_DESIGN} if isinstance(terms, dict) else terms


def _ratio(arms: list[KvArm]) -> tuple[float | None, str]:
    """Compare with the baseline of the longest timeout that lost a reader."""
    lease = next((arm for arm in arms if arm.must_pass), None)
    ours = lease.at_full_scale.reclaim_s if lease else None
    for arm in arms:
        theirs = held_s(arm)
        if not arm.must_pass and arm.extension_s is None and theirs is not None and ours:
            return theirs / ours, arm.design
    return None, ""


def held_s(arm: KvArm) -> float | None:
    """Return how long a dead reader's blocks were held, at full scale: at least so long, if some still were."""
    if arm.crash is None or not arm.crash.leases:
        return None
    return arm.at_full_scale.watched_s if arm.crash.standing else arm.at_full_scale.reclaim_s

"""A comparison in figures, for machines (`summary.json`) and for the page: both print from this and nothing else."""

from __future__ import annotations

import msgspec

from harness.errors import BadInput
from harness.run_folder import RunFolder
from harness.verdicts import Verdict, worst
from reports.arms import ArmSummary, summarise_arm
from reports.published import PUBLISHED, Published
from reports.victims import Victim, victims

FORMAT = "pdproof-summary/1"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Cold start against shadow recovery. Ratios say how many times better the shadow was."""

    format: str
    verdict: Verdict
    reasons: list[str]
    """Why it is not a pass, beside the verdicts of the checks."""
    ratio_recovery: float | None
    """Median recovery of the cold starts / median recovery of the shadows."""
    ratio_recovery_min: float | None
    """Shortest cold start over longest shadow recovery: the ratio of medians can hide how much single ones vary."""
    ratio_recovery_max: float | None
    ratio_ttft_p50: float | None
    ratio_decode_rate_p50: float | None
    profile: str
    time_scale: float
    seed: int
    emulated: list[str]
    published: Published
    cold: ArmSummary
    shadow: ArmSummary
    victims: list[Victim] = []
    """By the process that was killed, where an engine is several."""


def summarise(cold: RunFolder, shadow: RunFolder) -> Summary:
    """Return the comparison of two runs. Raises `BadInput` unless they are a cold arm and a shadow arm."""
    for run, arm in ((cold, "cold"), (shadow, "shadow")):
        if run.manifest.arm != arm:
            found = run.manifest.arm or "no arm"
            raise BadInput(f"{run.path}: expected a run of the arm {arm!r}, found {found!r}; give the cold run first")
    left, right = summarise_arm(cold), summarise_arm(shadow)
    ratio = _ratio(left.recovery_s.median, right.recovery_s.median)
    least = _ratio(left.recovery_s.min, right.recovery_s.max)
    most = _ratio(left.recovery_s.max, right.recovery_s.min)
    reasons = _reasons(cold, shadow, left, right, ratio)
    return Summary(
        format=FORMAT,
        verdict=worst([left.verdict, right.verdict, *([Verdict.INCONCLUSIVE] if reasons else [])]),
        reasons=reasons,
        ratio_recovery=ratio,
        ratio_recovery_min=least,
        ratio_recovery_max=most,
        ratio_ttft_p50=_ratio(left.ttft_ms.after_fault.p50, right.ttft_ms.after_fault.p50),
        ratio_decode_rate_p50=_ratio(
            right.decode_rate_tokens_s.after_fault.p50, left.decode_rate_tokens_s.after_fault.p50
        ),
        profile=cold.manifest.profile,
        time_scale=cold.manifest.time_scale,
        seed=cold.manifest.seed,
        emulated=list(dict.fromkeys([*left.emulated, *right.emulated])),
        published=PUBLISHED,
        cold=left,
        shadow=right,
        victims=victims(cold, shadow),
    )


def _ratio(larger: float | None, smaller: float | None) -> float | None:
    return larger / smaller if larger is not None and smaller else None


def _reasons(cold: RunFolder, shadow: RunFolder, left: ArmSummary, right: ArmSummary, ratio: float | None) -> list[str]:
    reasons = [f"Cold start: {reason}" for reason in left.reasons]
    reasons += [f"Shadow: {reason}" for reason in right.reasons]
    for name in ("scenario", "profile", "time_scale", "seed", "commit"):
        ours, theirs = getattr(cold.manifest, name), getattr(shadow.manifest, name)
        if ours != theirs:
            reasons.append(f"The runs differ in {name} ({ours} and {theirs}), so they cannot be compared.")
    for name in ("configuration", "versions", "machine"):
        ours, theirs = getattr(cold.manifest, name), getattr(shadow.manifest, name)
        if other := sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key)):
            reasons.append(f"The runs differ in {name} ({', '.join(other)}), so they cannot be compared.")
    if ratio is None:
        reasons.append("There is no ratio of recoveries: at least one arm measured none.")
    return reasons

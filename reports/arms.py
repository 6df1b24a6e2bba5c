"""One run in figures: the part of `summary.json` that each arm of a comparison fills."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import pandas as pd

from harness.latency import Percentiles, Spread, percentiles, spread
from harness.recovery import Recovery, recoveries
from harness.run_folder import RunFolder
from harness.verdicts import Verdict, worst
from reference_impl.rules.events import EventKind
from reports.memory import Memory, memory_peaks
from reports.published import DECODE_LIMIT_TOKENS_S, TTFT_LIMIT_S
from reports.split import back_in_band_s, by_end, by_first_token
from reports.weights import SharedWeights, shared_weights

S = TypeVar("S", bound=msgspec.Struct)


class RatePercentiles(msgspec.Struct, frozen=True):
    """Rates that 50, 90 and 99 % of `n` requests reached; the `censored` ones count as slower than any measured."""

    n: int
    censored: int
    p50: float | None
    p90: float | None
    p99: float | None
    min_measured: float | None


class Ttft(msgspec.Struct, frozen=True):
    """Time to first token before and after the first fault, in ms."""

    baseline: Percentiles
    after_fault: Percentiles


class DecodeRate(msgspec.Struct, frozen=True):
    """Mean decode rate of a request before and after the first fault, in tokens/s."""

    baseline: RatePercentiles
    after_fault: RatePercentiles


class OverLimit(msgspec.Struct, frozen=True):
    """Of `n` requests after the first fault that have a figure to hold against the limit, `over` were slower.

    `undetermined` more have none: they failed (and are counted as failed), or were cut off when the load was stopped,
    before they were over it.
    """

    limit: float
    over: int
    undetermined: int
    n: int


class FullScale(msgspec.Struct, frozen=True, kw_only=True):
    """Measured figures taken back to full scale: durations times `time_scale`, rates divided by it."""

    recovery_s: Spread
    detection_s: Spread
    promotion_s: Spread
    first_service_s: Spread
    back_in_band_s: Spread
    redundancy_s: Spread
    ttft_ms: Ttft
    decode_rate_tokens_s: DecodeRate


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Durations are in seconds as measured, spreads are over the kills of the run."""

    run_id: str
    arm: str
    scenario: str
    verdict: Verdict
    reasons: list[str]
    """Why it is not a pass; empty if nothing stands in the way."""
    incomplete: str | None
    kills: int
    recovery_s: Spread
    detection_s: Spread
    promotion_s: Spread
    first_service_s: Spread
    back_in_band_s: Spread
    redundancy_s: Spread
    requests: int
    requests_ok: int
    requests_failed: int
    requests_unknown: int
    content_wrong: int
    content_unchecked: int
    schedule_lag_ms_p99: float | None
    spoilt_rows: int
    ttft_ms: Ttft
    decode_rate_tokens_s: DecodeRate
    ttft_over_limit: OverLimit
    decode_under_limit: OverLimit
    memory: Memory
    at_full_scale: FullScale
    emulated: list[str]
    weights: list[SharedWeights] = []
    """How engines share their weights, where they say it."""


def summarise_arm(run: RunFolder) -> ArmSummary:
    """Return the figures of `run`, complete or not."""
    found = recoveries(run)
    spreads = _spreads(run, found)
    ttft, rate = _ttft(run), _decode_rate(run)
    outcomes = run.requests.outcome.value_counts()
    reasons = _reasons(run, found)
    return ArmSummary(
        run_id=run.manifest.run_id, arm=run.manifest.arm, scenario=run.manifest.scenario,
        verdict=_verdict(run, reasons), reasons=reasons, incomplete=run.incomplete,
        kills=len(run.events_of(EventKind.FAULT_INJECTED)), **spreads,
        requests=len(run.requests), requests_ok=int(outcomes.get("ok", 0)),
        requests_failed=int(outcomes.get("fail", 0)), requests_unknown=int(outcomes.get("unknown", 0)),
        content_wrong=int((run.requests.content_ok == False).fillna(False).sum()),  # noqa: E712 - NA is neither
        content_unchecked=int(run.requests.content_ok.isna().sum()),
        schedule_lag_ms_p99=percentiles(run.requests.schedule_lag_ms).p99,
        spoilt_rows=int((run.requests.spoilt.fillna("") != "").sum()),
        ttft_ms=ttft, decode_rate_tokens_s=rate,
        ttft_over_limit=_ttft_over(run), decode_under_limit=_decode_under(run), memory=memory_peaks(run),
        at_full_scale=_full_scale(run.manifest.time_scale, spreads, ttft, rate), emulated=list(run.manifest.emulated),
        weights=shared_weights(run),
    )  # fmt: skip


def _spreads(run: RunFolder, found: list[Recovery]) -> dict[str, Spread]:
    return {
        "recovery_s": spread(r.recovery_s for r in found),
        "detection_s": spread(r.detection_s for r in found),
        "promotion_s": spread(r.promotion_s for r in found),
        "first_service_s": spread(r.first_service_s for r in found),
        "back_in_band_s": spread(back_in_band_s(run)),
        "redundancy_s": spread(r.redundancy_s for r in found),
    }


def _reasons(run: RunFolder, found: list[Recovery]) -> list[str]:
    """Say what keeps this run from being a pass: the checks that it did not pass, worst first, and what is missing."""
    reasons = [f"The run is incomplete: {run.incomplete}."] if run.incomplete else []
    if not run.verdicts:
        reasons.append("No check has judged this run; `pdproof check` does.")
    if run.requests.empty:
        reasons.append("It holds no request.")
    faults = len(run.events_of(EventKind.FAULT_INJECTED))
    if len(found) < faults:
        reasons.append(f"{faults - len(found)} of {faults} faults left no proof that they happened.")
    lost = sum(r.recovery_s is None for r in found)
    if lost:
        reasons.append(f"After {lost} of {len(found)} kills no successor registered.")
    if run.manifest.arm and not found:
        reasons.append("It holds no proved kill, so there is no recovery to measure.")
    order = [Verdict.ERROR, Verdict.FAIL, Verdict.INCONCLUSIVE]
    return [f"{c.title}: {c.verdict}. {c.found}" for v in order for c in run.verdicts if c.verdict is v] + reasons


def _verdict(run: RunFolder, reasons: list[str]) -> Verdict:
    return worst([*(c.verdict for c in run.verdicts), *([Verdict.INCONCLUSIVE] if reasons else [])])


def _ttft(run: RunFolder) -> Ttft:
    halves = by_first_token(run)
    return Ttft(percentiles(halves.baseline.ttft_ms), percentiles(halves.after.ttft_ms))


def _decode_rate(run: RunFolder) -> DecodeRate:
    halves = by_end(run)
    return DecodeRate(_rates(halves.baseline.mean_decode_gap_ms), _rates(halves.after.mean_decode_gap_ms))


def _rates(gaps_ms: pd.Series[float]) -> RatePercentiles:
    gaps = percentiles(gaps_ms)
    return RatePercentiles(
        gaps.n, gaps.censored, _inverse(gaps.p50), _inverse(gaps.p90), _inverse(gaps.p99), _inverse(gaps.max_measured)
    )


def _inverse(gap_ms: float | None) -> float | None:
    return 1000.0 / gap_ms if gap_ms else None


def _ttft_over(run: RunFolder) -> OverLimit:
    """A request without a first token is over the limit if it had waited longer than the limit already."""
    limit_s = TTFT_LIMIT_S / run.manifest.time_scale
    rows = by_first_token(run).after
    waited_ms = rows.ttft_ms.fillna((rows.end_ns - rows.sent_ns) / 1e6)
    late = waited_ms > limit_s * 1000
    open_ = rows.ttft_ms.isna() & ~late
    return OverLimit(limit_s, int(late.sum()), int(open_.sum()), int((~open_).sum()))


def _decode_under(run: RunFolder) -> OverLimit:
    """A request without a whole answer has no decode rate: it did not decode slowly, it failed or was cut off."""
    limit = DECODE_LIMIT_TOKENS_S * run.manifest.time_scale
    rows = by_end(run).after
    slow = rows.mean_decode_gap_ms > 1000.0 / limit
    open_ = rows.mean_decode_gap_ms.isna() & ~slow
    return OverLimit(limit, int(slow.sum()), int(open_.sum()), int((~open_).sum()))


def _full_scale(scale: float, spreads: dict[str, Spread], ttft: Ttft, rate: DecodeRate) -> FullScale:
    return FullScale(
        **{name: _scaled(value, scale) for name, value in spreads.items()},
        ttft_ms=Ttft(_scaled(ttft.baseline, scale), _scaled(ttft.after_fault, scale)),
        decode_rate_tokens_s=DecodeRate(_scaled(rate.baseline, 1 / scale), _scaled(rate.after_fault, 1 / scale)),
    )


def _scaled(figures: S, factor: float) -> S:
    """Multiply every measured figure of `figures`, and leave its counts."""
    values = {f: getattr(figures, f) for f in figures.__struct_fields__ if f not in ("n", "censored")}
    return msgspec.structs.replace(figures, **{f: None if v is None else v * factor for f, v in values.items()})

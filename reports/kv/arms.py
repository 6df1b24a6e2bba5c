"""One run in figures: what each design fills of `summary.json`."""

from __future__ import annotations

import msgspec

from harness.latency import Percentiles, percentiles
from harness.run_folder import RunFolder
from harness.verdicts import Verdict, worst
from reference_impl.rules.events import EventKind
from reports.kv.clocks import Clock, clocks
from reports.kv.designs import Design
from reports.kv.gauges import recomputed_tokens, waiting
from reports.kv.leases import Crash, Leases, crash, leases
from reports.kv.loads import Loads, loads
from reports.kv.setup import DECODE, must_pass, setup
from reports.kv.turns import Think, Turns, think_times, turn_counts, turns
from reports.split import timed


class FullScale(msgspec.Struct, frozen=True, kw_only=True):
    """Measured durations times `time_scale`."""

    reclaim_s: float | None
    watched_s: float | None
    promised_s: float | None
    block_seconds: float | None
    ttft_ms: Percentiles


class KvArm(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Durations are as measured."""

    run_id: str
    design: str
    title: str
    tone: str
    must_pass: bool
    """Whether its verdict counts; a baseline is there to be compared with."""
    verdict: Verdict
    """Of its own checks."""
    reasons: list[str]
    """Why it is not a pass."""
    incomplete: str | None
    unproved: int
    """Faults without proof."""
    time_scale: float
    timeout_s: float
    """At full scale: a lease's first term, or the old design's only one."""
    extension_s: float | None
    """At full scale: how far a heartbeat moves a lease's end; None without heartbeats."""
    corrected: bool
    """Whether peers' clocks are corrected; off only to show what happens then."""
    pool_blocks: int | None
    requests: int
    requests_ok: int
    requests_failed: int
    requests_unknown: int
    content_wrong: int
    content_unchecked: int
    """Whole answers that could not be compared."""
    spoilt_rows: int
    crash: Crash | None
    leases: Leases
    loads: Loads
    recomputed_tokens: int | None
    waiting_max: float | None
    """Most requests that waited at the decode engines together."""
    ttft_ms: Percentiles
    turns: Turns | None
    think: list[Think]
    clocks: list[Clock]
    at_full_scale: FullScale
    emulated: list[str]


def summarise_arm(run: RunFolder, design: Design) -> KvArm:
    """Return the figures of `run`, complete or not."""
    made, scale, rows = setup(run), run.manifest.time_scale, run.requests
    decoders, outcomes = made.workers(DECODE), rows.outcome.value_counts()
    reasons, left, ttft = _reasons(run), crash(run), percentiles(timed(run).ttft_ms)
    gauge, judged = waiting(run, decoders).value, turns(run)
    return KvArm(
        run_id=run.manifest.run_id, design=design.key, title=design.title, tone=design.tone, must_pass=must_pass(run),
        verdict=worst([*(c.verdict for c in run.verdicts), *([Verdict.INCONCLUSIVE] if reasons else [])]),
        reasons=reasons, incomplete=run.incomplete, unproved=_unproved(run), time_scale=scale,
        timeout_s=made.terms.first_ns / 1e9 * scale,
        extension_s=made.terms.extension_ns / 1e9 * scale if made.terms.renews else None,
        corrected=made.terms.clock_correction,
        pool_blocks=made.pool_blocks, requests=len(rows), requests_ok=int(outcomes.get("ok", 0)),
        requests_failed=int(outcomes.get("fail", 0)), requests_unknown=int(outcomes.get("unknown", 0)),
        content_wrong=int((rows.content_ok == False).fillna(False).sum()),  # noqa: E712 - NA is neither
        content_unchecked=int((rows.content_ok.isna() & (rows.outcome == "ok")).sum()),
        spoilt_rows=int((rows.spoilt.fillna("") != "").sum()), crash=left, leases=leases(run), loads=loads(run),
        recomputed_tokens=recomputed_tokens(run, decoders), waiting_max=None if gauge.empty else float(gauge.max()),
        ttft_ms=ttft, turns=turn_counts(run, judged), think=think_times(run, judged), clocks=clocks(run),
        at_full_scale=_full_scale(left, ttft, scale), emulated=list(run.manifest.emulated),
    )  # fmt: skip


def _full_scale(left: Crash | None, ttft: Percentiles, scale: float) -> FullScale:
    def scaled(value: float | None) -> float | None:
        return None if value is None else value * scale

    measured = {name: getattr(ttft, name) for name in ("p50", "p90", "p99", "max_measured")}
    return FullScale(
        reclaim_s=scaled(left.reclaim_s if left else None), watched_s=scaled(left.watched_s if left else None),
        promised_s=scaled(left.promised_s if left else None),
        block_seconds=scaled(left.block_seconds if left else None),
        ttft_ms=msgspec.structs.replace(ttft, **{name: scaled(value) for name, value in measured.items()}),
    )  # fmt: skip


def _unproved(run: RunFolder) -> int:
    """Count faults that were to be injected and have no proof, injected or not."""
    proved = {e.subject for e in run.events_of(EventKind.FAULT_PROVED)}
    wanted = {e.subject for e in run.events_of(EventKind.FAULT_INJECTED, EventKind.FAULT_UNPROVED)}
    return len(wanted - proved)


def _reasons(run: RunFolder) -> list[str]:
    """Say what keeps this run from being a pass: its checks, worst first, and what is missing."""
    order = [Verdict.ERROR, Verdict.FAIL, Verdict.INCONCLUSIVE]
    reasons = [f"{c.title}: {c.verdict}. {c.found}" for v in order for c in run.verdicts if c.verdict is v]
    if run.incomplete:
        reasons.append(f"The run is incomplete: {run.incomplete}.")
    if not run.verdicts:
        reasons.append("No check has judged this run; `pdproof check` does.")
    if run.requests.empty:
        reasons.append("It holds no request.")
    if unproved := _unproved(run):
        reasons.append(f"{unproved} of its faults left no proof that they happened.")
    return reasons

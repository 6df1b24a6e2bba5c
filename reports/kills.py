"""Each kill of a run: what was done, what proves it, and what followed."""

from __future__ import annotations

import msgspec

from harness.latency import Percentiles, Spread, percentiles
from harness.recovery import recoveries
from harness.run_folder import RunFolder
from reference_impl.rules.events import Event, EventKind
from reports import words
from reports.arms import ArmSummary
from reports.split import NEVER_NS, back_in_band_s, timed

NAMES = (
    ("Detection", "detection_s"), ("Promotion", "promotion_s"), ("Recovery", "recovery_s"),
    ("First service", "first_service_s"), ("Back in band", "back_in_band_s"), ("Redundancy", "redundancy_s"),
)  # fmt: skip


class Kill(msgspec.Struct, frozen=True):
    """One proved kill: its durations in the order of `NAMES`, and the TTFT of requests until the next one."""

    title: str
    durations: list[str]
    ttft: Percentiles
    ttft_p50: str


class KillTable(msgspec.Struct, frozen=True):
    """All kills of a run, and their medians and ranges."""

    arm: str
    title: str
    kills: list[Kill]
    median: list[str]
    ranges: list[str]


class FaultRow(msgspec.Struct, frozen=True):
    """A fault as the run folder tells it."""

    name: str
    at: str
    target: str
    proved: bool
    evidence: str


def kill_table(run: RunFolder, arm: ArmSummary) -> KillTable:
    """Return the kills of `run`; `arm` is its summary."""
    spreads: list[Spread] = [getattr(arm, name) for _, name in NAMES]
    return KillTable(
        arm=arm.arm,
        title=words.arm_title(arm.arm),
        kills=_kills(run),
        median=[words.duration(s.median) for s in spreads],
        ranges=["" if s.n == 0 else f"{words.duration(s.min)} to {words.duration(s.max)}" for s in spreads],
    )


def _kills(run: RunFolder) -> list[Kill]:
    found = recoveries(run)
    bands = back_in_band_s(run)
    rows = timed(run)
    kills = []
    for number, (recovery, band) in enumerate(zip(found, bands, strict=True), 1):
        until = min((r.fault_ns for r in found if r.fault_ns > recovery.fault_ns), default=NEVER_NS)
        ttft = percentiles(rows.ttft_ms[(rows.intended_ns >= recovery.fault_ns) & (rows.intended_ns < until)])
        values = [band if name == "back_in_band_s" else getattr(recovery, name) for _, name in NAMES]
        p50 = "censored" if ttft.p50 is None and ttft.n else words.milliseconds(ttft.p50)
        kills.append(Kill(f"kill {number}", [words.duration(v) for v in values], ttft, p50))
    return kills


def fault_rows(run: RunFolder) -> list[FaultRow]:
    """Return every fault that was injected, with its proof or the lack of one."""
    said = {e.subject: e for e in run.events_of(EventKind.FAULT_PROVED, EventKind.FAULT_UNPROVED)}
    return [_fault_row(run, fault, said.get(fault.subject)) for fault in run.events_of(EventKind.FAULT_INJECTED)]


def _fault_row(run: RunFolder, fault: Event, said: Event | None) -> FaultRow:
    kind, target = fault.detail.get("fault") or "fault", fault.detail.get("target") or fault.detail.get("worker_id")
    pid = fault.detail.get("pid")
    return FaultRow(
        name=fault.subject,
        at=words.duration(run.seconds(fault.t_ns)),
        target=f"{kind} of {target}" + (f", pid {pid}" if pid else ""),
        proved=said is not None and said.kind is EventKind.FAULT_PROVED,
        evidence=_evidence(said),
    )


def _evidence(said: Event | None) -> str:
    """Everything that the proof says, beyond what the injection said already."""
    if said is None:
        return "no proof was recorded"
    known = {"fault", "target", "worker_id"}
    parts = [
        str(v) if k in ("evidence", "reason") else f"{k} {words.scalar(k, v)}"
        for k, v in said.detail.items() if k not in known
    ]  # fmt: skip
    return "; ".join(parts) or "recorded without detail"

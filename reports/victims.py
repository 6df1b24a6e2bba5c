"""Recoveries by the process that was killed, where an engine is several: each has a death of its own."""

from __future__ import annotations

import msgspec

from harness.latency import Spread, spread
from harness.recovery import Recovery, recoveries
from harness.run_folder import RunFolder


class Victim(msgspec.Struct, frozen=True, kw_only=True):
    """The kills of one process of an engine, in both arms. Durations in seconds, as measured."""

    process: str
    cold_recovery_s: Spread
    shadow_recovery_s: Spread
    shadow_detection_s: Spread
    shadow_promotion_s: Spread
    shadow_first_service_s: Spread
    ratio_recovery: float | None
    """Median cold start over median shadow recovery."""
    ratio_recovery_min: float | None
    """Shortest cold start over longest shadow recovery."""


def victims(cold: RunFolder, shadow: RunFolder) -> list[Victim]:
    """Return one entry a process that was killed in either arm, in the order of the kills; [] if engines are one."""
    left, right = _by_process(cold), _by_process(shadow)
    return [_victim(name, left.get(name, []), right.get(name, [])) for name in dict.fromkeys([*left, *right]) if name]


def _by_process(run: RunFolder) -> dict[str, list[Recovery]]:
    found: dict[str, list[Recovery]] = {}
    for recovery in recoveries(run):
        found.setdefault(recovery.process, []).append(recovery)
    return found


def _victim(process: str, cold: list[Recovery], shadow: list[Recovery]) -> Victim:
    ours, theirs = spread(r.recovery_s for r in cold), spread(r.recovery_s for r in shadow)
    return Victim(
        process=process,
        cold_recovery_s=ours,
        shadow_recovery_s=theirs,
        shadow_detection_s=spread(r.detection_s for r in shadow),
        shadow_promotion_s=spread(r.promotion_s for r in shadow),
        shadow_first_service_s=spread(r.first_service_s for r in shadow),
        ratio_recovery=_ratio(ours.median, theirs.median),
        ratio_recovery_min=_ratio(ours.min, theirs.max),
    )


def _ratio(larger: float | None, smaller: float | None) -> float | None:
    return larger / smaller if larger is not None and smaller else None

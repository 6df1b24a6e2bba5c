"""The retry storms that were run behind the run: what was offered, what could be done, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from workloads.retry_storm import StormResult

WITH = "with_budget"
WITHOUT = "without_budget"


class Storm(msgspec.Struct, frozen=True, kw_only=True):
    """One storm."""

    budget: bool
    clients: int
    seconds: float
    outage_s: float
    capacity_per_s: float
    calls: int
    attempts: int
    succeeded: int
    failed: int
    unknown: int
    amplification: float
    """Attempts a call, of the whole storm."""
    outage_amplification: float
    """Attempts a call while the server stood still."""
    goodput_after: float
    """Share of the calls after the outage that succeeded, as long as the load was high."""
    recovered_s: float | None
    """End of the outage -> four of five calls succeed, half a second long; None: not before the storm's end."""


def storms(results: list[StormResult]) -> dict[str, Storm]:
    """Return the storms by whether there was a budget, the one with it first; of several of a kind the last."""
    found = {WITH if r.budget else WITHOUT: _storm(r) for r in results}
    return {key: found[key] for key in (WITH, WITHOUT) if key in found}


def _storm(result: StormResult) -> Storm:
    whole = (0.0, float("inf"))
    return Storm(
        budget=result.budget, clients=result.clients, seconds=result.seconds,
        outage_s=(result.outage_to_ms - result.outage_from_ms) / 1e3, capacity_per_s=result.capacity_per_s,
        calls=result.total("calls_started", *whole), attempts=result.total("attempts_arrived", *whole),
        succeeded=result.total("succeeded", *whole), failed=result.total("failed", *whole),
        unknown=result.total("unknown", *whole), amplification=result.amplification(),
        outage_amplification=result.storm_amplification, goodput_after=result.goodput_after,
        recovered_s=None if result.recovered_ms < 0 else result.recovered_ms / 1e3,
    )  # fmt: skip

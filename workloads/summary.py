"""What a load came to, in a few lines, from its raw rows. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from workloads.rows import Outcome, RequestRecord


class Figures(msgspec.Struct, frozen=True, gc=False):
    """The figures of one row that a summary needs; small enough to keep for every request."""

    outcome: Outcome
    counts_as_failure: bool
    schedule_lag_ms: float
    ttft_ms: float | None
    mean_decode_gap_ms: float | None
    spoilt: bool
    kv_handed: bool = False
    renewals: int = 0
    renewals_failed: int = 0


def figures(record: RequestRecord, stopped: bool) -> Figures:
    """Return the figures of `record`; `stopped` says that the end of the load broke it off."""
    return Figures(
        outcome=record.outcome,
        counts_as_failure=record.outcome is not Outcome.OK and not stopped,
        schedule_lag_ms=record.schedule_lag_ms,
        ttft_ms=record.ttft_ms,
        mean_decode_gap_ms=record.mean_decode_gap_ms,
        spoilt=bool(record.spoilt),
        kv_handed=record.kv_handed,
        renewals=record.renewals,
        renewals_failed=record.renewals_failed,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile: a value that was measured, never one in between. NaN of no values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def summary(rows: Sequence[Figures]) -> str:
    """Return the lines. A request without a first token takes part as an endless TTFT and is counted as censored."""
    if not rows:
        return "pdproof: no request was sent\n"
    counts = Counter(row.outcome for row in rows)
    ttfts = [math.inf if row.ttft_ms is None else row.ttft_ms for row in rows]
    censored = sum(math.isinf(ttft) for ttft in ttfts)
    lags = [row.schedule_lag_ms for row in rows]
    rates = [1e3 / row.mean_decode_gap_ms for row in rows if row.mean_decode_gap_ms]
    outcomes = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome)
    return (
        f"pdproof: {len(rows)} requests: {outcomes}\n"
        f"  TTFT           {_spread(ttfts, (0.5, 0.9, 0.99), 'ms')}   ({censored} of {len(rows)} censored)\n"
        f"  decode rate    {_spread(rates, (0.5,), 'tokens/s')}   ({len(rows) - len(rates)} of {len(rows)} censored)\n"
        f"  schedule lag   {_spread(lags, (0.5, 0.99), 'ms')}\n"
        f"  spoilt by the client's own lateness: {sum(row.spoilt for row in rows)}\n"
        f"{_hand_offs(rows)}"
    )


def _hand_offs(rows: Sequence[Figures]) -> str:
    """Return the line about two-turn mode, none for a load without hand-offs."""
    handed = sum(row.kv_handed for row in rows)
    if not handed:
        return ""
    renewals, failed = sum(row.renewals for row in rows), sum(row.renewals_failed for row in rows)
    return f"  hand-offs sent {handed}, renewed {renewals} times, renewals failed {failed}\n"


def _spread(values: Sequence[float], shares: Sequence[float], unit: str) -> str:
    return " ".join(f"p{share * 100:g} {_number(quantile(values, share))} {unit}" for share in shares)


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "never" if math.isinf(value) else f"{value:.2f}"

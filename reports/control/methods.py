"""How long each method took its callers, and in how many attempts; and what users of the engines saw meanwhile."""

from __future__ import annotations

import msgspec
import pandas as pd

from harness.latency import Percentiles, percentiles
from harness.run_folder import RunFolder
from reports.split import by_end, by_first_token, timed, with_rate
from workloads.operation_rows import Invocation


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """One method: its invocations by how they ended, and the latency of those that were applied."""

    invocations: int
    ok: int
    refused: int
    failed: int
    """Without an answer, and without an effect."""
    unknown: int
    ms: Percentiles
    """Of those that ended ok, retries and pauses included; what ended as unknown is not in it."""
    attempts_mean: float | None
    """Of calls of which any attempt left: with an open breaker none does."""
    attempts_max: int


class Users(msgspec.Struct, frozen=True, kw_only=True):
    """The load on the engines."""

    requests: int
    ok: int
    failed: int
    unknown: int
    wrong: int
    unchecked: int
    ttft_before_ms: Percentiles
    """What was decided before the first fault."""
    ttft_after_ms: Percentiles
    gap_before_ms: Percentiles
    gap_after_ms: Percentiles
    during: int
    """Requests under way while a block service was away."""
    during_failed: int
    during_wrong: int
    ttft_during_ms: Percentiles


def methods(invocations: list[Invocation]) -> dict[str, Method]:
    """Return the methods that were invoked, the most frequent first; all of them together under "all"."""
    names = pd.Series([i.method for i in invocations], dtype="string").value_counts().index.tolist()
    found = {str(name): _method([i for i in invocations if i.method == name]) for name in names}
    return found | {"all": _method(invocations)}


def _method(rows: list[Invocation]) -> Method:
    attempts = [i.attempts for i in rows if i.attempts]
    refused = sum(i.outcome == "fail" and bool(i.refusal) for i in rows)
    return Method(
        invocations=len(rows), ok=sum(i.outcome == "ok" for i in rows), refused=refused,
        failed=sum(i.outcome == "fail" for i in rows) - refused, unknown=sum(i.outcome == "unknown" for i in rows),
        ms=percentiles(pd.Series([i.latency_ms for i in rows if i.outcome == "ok"], dtype=float)),
        attempts_mean=sum(attempts) / len(attempts) if attempts else None, attempts_max=max(attempts, default=0),
    )  # fmt: skip


def users(run: RunFolder, away: dict[str, list[tuple[int, int]]]) -> Users:
    """Return what the engines' users saw; `away`: when a block service was."""
    rows, first, ends = run.requests, by_first_token(run), by_end(run)
    during = rows[_overlaps(rows, [stretch for of in away.values() for stretch in of])]
    outcomes = rows.outcome.value_counts()
    return Users(
        requests=len(rows), ok=int(outcomes.get("ok", 0)), failed=int(outcomes.get("fail", 0)),
        unknown=int(outcomes.get("unknown", 0)), wrong=_wrong(rows),
        unchecked=int((rows.content_ok.isna() & (rows.outcome == "ok")).sum()),
        ttft_before_ms=percentiles(first.baseline.ttft_ms), ttft_after_ms=percentiles(first.after.ttft_ms),
        gap_before_ms=percentiles(with_rate(ends.baseline).mean_decode_gap_ms),
        gap_after_ms=percentiles(with_rate(ends.after).mean_decode_gap_ms),
        during=len(during), during_failed=int((during.outcome == "fail").sum()), during_wrong=_wrong(during),
        ttft_during_ms=percentiles(timed(run)[lambda r: _overlaps(r, [s for of in away.values() for s in of])].ttft_ms),
    )  # fmt: skip


def _wrong(rows: pd.DataFrame) -> int:
    return int((rows.content_ok == False).fillna(False).sum())  # noqa: E712 - NA is neither


def _overlaps(rows: pd.DataFrame, stretches: list[tuple[int, int]]) -> pd.Series[bool]:
    found = pd.Series(False, index=rows.index)
    for start_ns, end_ns in stretches:
        found |= (rows.intended_ns < end_ns) & (rows.end_ns > start_ns)
    return found

"""Which requests belong to the time before the first fault, and which to the time after it.

What was over before the first fault belongs to the baseline; everything else to the time after. So a request that was
under way at the fault is counted once, on the side of its own outcome, and none is lost.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pandas as pd

from harness.latency import percentiles
from harness.recovery import recoveries
from harness.run_folder import RunFolder
from reference_impl.rules.events import EventKind
from reports.published import WINDOW_S

NS_PER_S = 1e9
IN_BAND = 1.2
"""Back in band: a window's median TTFT at most this many times that of the baseline (see `band_limit_ms`)."""
NEVER_NS = 2**63 - 1


class Halves(msgspec.Struct, frozen=True):
    """Rows before and after the first fault."""

    baseline: pd.DataFrame
    after: pd.DataFrame


def first_fault_ns(run: RunFolder) -> int:
    """Return the moment of the first fault, or a moment after everything if there was none."""
    faults = run.events_of(EventKind.FAULT_INJECTED)
    return faults[0].t_ns if faults else NEVER_NS


def timed(run: RunFolder) -> pd.DataFrame:
    """Return the requests whose times can be trusted: all but those that the client's own lateness spoilt."""
    return run.requests[run.requests.spoilt.fillna("") == ""]


def with_rate(rows: pd.DataFrame) -> pd.DataFrame:
    """Leave out whole answers that have no decode rate: those of one token, and those that came in one read.

    They are not slow. What was broken off stays: it is censored.
    """
    return rows[~((rows.outcome == "ok") & ~(rows.mean_decode_gap_ms > 0))]


def by_first_token(run: RunFolder) -> Halves:
    """Split by the moment that decides a TTFT: the first token, or the end of a request that never had one."""
    rows = timed(run)
    return _split(rows, rows.first_token_ns.where(rows.first_token_ns > 0, rows.end_ns), first_fault_ns(run))


def by_end(run: RunFolder) -> Halves:
    """Split by the moment that decides a decode rate: the end of the request."""
    rows = with_rate(timed(run))
    return _split(rows, rows.end_ns, first_fault_ns(run))


def _split(rows: pd.DataFrame, decided_ns: pd.Series[int], fault_ns: int) -> Halves:
    return Halves(rows[decided_ns < fault_ns], rows[decided_ns >= fault_ns])


def window_medians(rows: pd.DataFrame, start_ns: int, window_ns: int) -> list[tuple[int, float | None]]:
    """Return (start, median TTFT in ms) of each window of `rows` by intended start; windows without rows are absent.

    A median that falls among requests without a first token is None: later than anything measured.
    """
    index = (rows.intended_ns - start_ns) // window_ns
    groups = rows.ttft_ms.groupby(index)
    return [(start_ns + int(str(i)) * window_ns, percentiles(group).p50) for i, group in groups]


def back_in_band_s(run: RunFolder) -> list[float | None]:
    """Return, for each recovery, fault -> median TTFT (10 s windows) within the band of the baseline for good.

    0 where it never left; None where it did not return before the next fault, or where nothing was sent.
    """
    limit_ms = band_limit_ms(run)
    faults = [e.t_ns for e in run.events_of(EventKind.FAULT_INJECTED)]
    found: list[float | None] = []
    for recovery in recoveries(run):
        until = min((t for t in faults if t > recovery.fault_ns), default=NEVER_NS)
        rows = timed(run)
        rows = rows[(rows.intended_ns >= recovery.fault_ns) & (rows.intended_ns < until)]
        found.append(_returned_s(window_medians(rows, recovery.fault_ns, _window_ns(run)), recovery.fault_ns, limit_ms))
    return found


def band_limit_ms(run: RunFolder) -> float | None:
    """Return the largest median TTFT that counts as the baseline's: 20 % above its own median.

    A window holds few requests, so chance alone takes some beyond that: where windows of the baseline itself went
    higher, the band reaches as high as they did. None where there is no baseline.
    """
    rows = by_first_token(run).baseline
    p50 = percentiles(rows.ttft_ms).p50
    if p50 is None:
        return None
    own = [median for _, median in window_medians(rows, run.origin_ns, _window_ns(run)) if median is not None]
    return max([IN_BAND * p50, *own])


def _window_ns(run: RunFolder) -> int:
    return round(WINDOW_S / run.manifest.time_scale * NS_PER_S)


def _returned_s(medians: list[tuple[int, float | None]], fault_ns: int, limit_ms: float | None) -> float | None:
    if limit_ms is None or not medians:
        return None
    outside = [start for start, p50 in medians if p50 is None or p50 > limit_ms]
    if not outside:
        return 0.0
    later = [start for start, _ in medians if start > outside[-1]]
    return (later[0] - fault_ns) / NS_PER_S if later else None


def duration_s(run: RunFolder) -> float:
    """Return the length of the time axis: from the run's origin to its last event or answer."""
    last = max([e.t_ns for e in run.events[-1:]] + ([int(run.requests.end_ns.max())] if len(run.requests) else []))
    return float(np.maximum((last - run.origin_ns) / NS_PER_S, 1e-3))

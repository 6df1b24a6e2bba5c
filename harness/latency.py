"""Latency statistics that do not lose the lost: a request without an answer is censored, never left out."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np
import pandas as pd


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of `n` observations, `censored` of which lie beyond every measured one.

    A percentile that falls among the censored is None: "more than anything measured".
    """

    n: int
    censored: int
    p50: float | None
    p90: float | None
    p99: float | None
    max_measured: float | None


def percentiles(values: pd.Series[float]) -> Percentiles:
    """Return nearest-rank percentiles of `values`, in which NaN stands for a censored observation."""
    measured = np.sort(values.dropna().to_numpy(dtype=float))
    n = len(values)

    def rank(share: float) -> float | None:
        place = math.ceil(share * n) - 1
        return float(measured[place]) if 0 <= place < len(measured) else None

    return Percentiles(
        n=n, censored=n - len(measured), p50=rank(0.5), p90=rank(0.9), p99=rank(0.99),
        max_measured=float(measured[-1]) if len(measured) else None,
    )  # fmt: skip


class Spread(msgspec.Struct, frozen=True):
    """Repeats of one measurement."""

    median: float | None
    min: float | None
    max: float | None
    n: int


def spread(values: Iterable[float | None]) -> Spread:
    """Return the median and range of the repeats that have a value; `n` counts those."""
    present = sorted(v for v in values if v is not None)
    if not present:
        return Spread(None, None, None, 0)
    return Spread(float(np.median(present)), present[0], present[-1], len(present))

"""Memory over time, read off a run's scraped gauges."""

from __future__ import annotations

import msgspec
import pandas as pd

from harness.run_folder import RunFolder

WEIGHTS = "memory_weights_bytes"
KV = "memory_kv_bytes"
PSS = "engine_pss_bytes"
NS_PER_S = 1e9
TICKS_MAX = 160
"""Points a line is drawn with; more cannot be seen at the width of a column."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Peaks, in bytes. None where the run has no such gauge."""

    weights_bytes_max: float | None
    """Weights that one device's memory service held."""
    kv_bytes_max: float | None
    """KV cache that one device's memory service held."""
    worker_pss_bytes_max: float | None
    """Proportional set size of all engines of one worker together: shared pages are counted once."""
    engine_pss_bytes_max: float | None
    """Proportional set size of one engine."""


def memory_peaks(run: RunFolder) -> Memory:
    """Return the peaks of `run`."""
    engines = run.metrics[run.metrics.name == PSS]
    sums = [pss_by_engine(run, worker).sum(axis=1).max() for worker in workers(run)]
    return Memory(
        weights_bytes_max=_peak(run, WEIGHTS),
        kv_bytes_max=_peak(run, KV),
        worker_pss_bytes_max=float(max(sums)) if not engines.empty and sums else None,
        engine_pss_bytes_max=_peak(run, PSS),
    )


def _peak(run: RunFolder, name: str) -> float | None:
    values = run.metrics.value[run.metrics.name == name]
    return None if values.empty else float(values.max())


def workers(run: RunFolder) -> list[str]:
    """Return the workers that have memory gauges, in order."""
    rows = run.metrics[run.metrics.name.isin([WEIGHTS, KV, PSS])]
    return sorted({str(node).split("/", maxsplit=1)[0] for node in rows.node})


def tick_s(run: RunFolder) -> float:
    """Return the width of the steps that gauges are gathered into: at least as wide as they are scraped apart."""
    rows = run.metrics[run.metrics.name.isin([WEIGHTS, KV, PSS])]
    if len(rows) < 2:
        return 1.0
    length_s = float(rows.t_ns.max() - rows.t_ns.min()) / NS_PER_S
    stamps = rows.groupby(["node", "name"]).t_ns
    apart_s = float(stamps.diff().median()) / NS_PER_S
    return max(length_s / TICKS_MAX, 1.5 * apart_s if apart_s > 0 else 1.0, 1e-3)


def device_gauge(run: RunFolder, worker: str, name: str) -> pd.DataFrame:
    """Return (`x_s`, `value`) of a gauge of the worker's device, at most `TICKS_MAX` rows or so."""
    rows = run.metrics[(run.metrics.name == name) & (run.metrics.node == worker)]
    tick = tick_s(run)
    steps = (run.seconds(rows.t_ns) // tick) * tick
    last = rows.value.groupby(steps).last()
    return pd.DataFrame({"x_s": last.index.to_numpy(dtype=float), "value": last.to_numpy(dtype=float)})


def pss_by_engine(run: RunFolder, worker: str) -> pd.DataFrame:
    """Return PSS with one column an engine and one row a step (seconds); 0 before an engine came and after it went.

    Of each step the last round of scraping counts, whose rows have one stamp: an engine that died within the step and
    its successor, which maps the same pages, were never there together.
    """
    rows = run.metrics[(run.metrics.name == PSS) & run.metrics.node.str.startswith(f"{worker}/")]
    rounds = rows.pivot_table(index="t_ns", columns="node", values="value", aggfunc="last")
    rounds = rounds.ffill().where(rounds.bfill().notna()).fillna(0.0)  # a missed scrape is no death
    tick = tick_s(run)
    steps = rounds.groupby((run.seconds(rounds.index.to_series()) // tick) * tick).last()
    return steps.rename_axis("x_s")

"""What was scraped of the decode engines: requests that wait, tokens computed again."""

from __future__ import annotations

import pandas as pd

from harness.run_folder import RunFolder

WAITING = "vllm:num_requests_waiting"
RECOMPUTED = ("pdproof:recomputed_tokens_total", "pdproof:recomputed_tokens")


def waiting(run: RunFolder, workers: set[str]) -> pd.DataFrame:
    """Return (`t_ns`, `value`): requests that wait at `workers` together, one row a round of scraping."""
    rows = _of(run, (WAITING,), workers)
    sums = rows.groupby("t_ns").value.sum()
    return pd.DataFrame({"t_ns": sums.index.to_numpy(dtype="int64"), "value": sums.to_numpy(dtype=float)})


def recomputed_tokens(run: RunFolder, workers: set[str]) -> int | None:
    """Return the tokens that engines of `workers` computed because a load failed: the last value of each engine.

    None where nobody scraped it. What an engine counted after its last scrape, and before it died, is lost.
    """
    rows = _of(run, RECOMPUTED, workers)
    return None if rows.empty else int(rows.sort_values("t_ns").groupby("node").value.last().sum())


def _of(run: RunFolder, names: tuple[str, ...], workers: set[str]) -> pd.DataFrame:
    rows = run.metrics
    return rows[rows.name.isin(names) & rows.node.str.split("/").str[0].isin(sorted(workers))]

"""The metrics of the RPC document, as they were scraped: one figure a metric and node, of the whole run."""

from __future__ import annotations

import enum
from typing import Final

import msgspec
import pandas as pd

from harness.run_folder import RunFolder

CLIENTS: Final = "clients"


class Reading(enum.StrEnum):
    """What is told of a metric's samples."""

    LARGEST = "largest"
    GAINED = "gained"
    """Of a counter: what it rose by, also over restarts of its process."""


NAMES: Final = {
    "rpc_qps": Reading.LARGEST, "rpc_error_rate": Reading.LARGEST, "rpc_timeout_count": Reading.GAINED,
    "rpc_retry_count": Reading.GAINED, "rpc_latency_p50": Reading.LARGEST, "rpc_latency_p99": Reading.LARGEST,
    "rpc_inflight_requests": Reading.LARGEST, "rpc_queue_length": Reading.LARGEST,
    "connection_pool_in_use": Reading.LARGEST, "connection_pool_wait_time": Reading.GAINED,
    "circuit_breaker_state": Reading.LARGEST, "rate_limited_count": Reading.GAINED,
    "get_metadata_latency": Reading.LARGEST, "get_block_group_latency": Reading.LARGEST,
    "migrate_start_latency": Reading.LARGEST, "migrate_status_latency": Reading.LARGEST,
    "evict_latency": Reading.LARGEST, "pin_latency": Reading.LARGEST, "unpin_latency": Reading.LARGEST,
    "remote_read_timeout_count": Reading.GAINED,
}  # fmt: skip
"""Every metric that the RPC document names."""
MILLISECONDS: Final = ("latency", "wait_time")
"""Parts of the names of metrics in ms."""


class Gauge(msgspec.Struct, frozen=True, kw_only=True):
    """One metric."""

    reading: Reading
    of: dict[str, float]
    """By node, or "clients"; a node that never told it is not there."""
    samples: int


class Breaker(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients' breakers were seen to do."""

    samples: int
    half_open: int
    open: int
    last: float | None


def gauges(run: RunFolder) -> dict[str, Gauge]:
    """Return every metric that the document names, also one that nobody scraped."""
    rows = run.metrics
    parts = rows.name.str.split(" ")
    rows = rows.assign(base=parts.str[0], node=rows.node.str.split("/").str[0])
    rows = rows[rows.base.isin(list(NAMES))]
    return {name: _gauge(rows[rows.base == name], reading) for name, reading in NAMES.items()}


def _gauge(rows: pd.DataFrame, reading: Reading) -> Gauge:
    found: dict[str, float] = {}
    for node, of in rows.groupby("node"):
        if reading is Reading.LARGEST:
            found[str(node)] = float(of.value.max())
        else:
            found[str(node)] = sum(_gained(series) for _, series in of.groupby("name"))
    return Gauge(reading=reading, of=found, samples=len(rows))


def _gained(rows: pd.DataFrame) -> float:
    """Return what a counter rose by; one that starts again at less starts at nothing."""
    values = rows.sort_values("t_ns").value
    steps = values.diff()
    return float(values.iloc[0] + steps.where(steps >= 0, values).iloc[1:].sum())


def breaker(run: RunFolder) -> Breaker:
    """Return the samples of the clients' breakers: of all clients, the one furthest from CLOSED."""
    rows = run.metrics[(run.metrics.name == "circuit_breaker_state") & (run.metrics.node == CLIENTS)]
    values = rows.sort_values("t_ns").value
    return Breaker(
        samples=len(values), half_open=int((values == 1).sum()), open=int((values == 2).sum()),
        last=None if values.empty else float(values.iloc[-1]),
    )  # fmt: skip

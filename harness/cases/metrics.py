"""The metrics that cases look at, under vLLM's names and those of the reference implementation beside them."""

from __future__ import annotations

import contextlib
from typing import Final

USAGE: Final = "vllm:kv_cache_usage_perc"
RUNNING: Final = "vllm:num_requests_running"
EXPIRED: Final = "vllm:nixl_num_kv_expired_reqs_total"
FAILED_TRANSFERS: Final = "vllm:nixl_num_failed_transfers_total"
FAILED_NOTIFICATIONS: Final = "vllm:nixl_num_failed_notifications_total"
LATE: Final = ("vllm:nixl_num_notifications_after_expiry_total", "pdproof:reads_after_expiry_total")
"""Reads that came after their lease."""
KEPT_PREFIXES: Final = ("vllm:", "pdproof:")


def summed(text: str) -> dict[str, float]:
    """Return the figures of a page of metrics by name, labels summed up. By hand: a page of vLLM's has 1,000 lines."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith(KEPT_PREFIXES):
            continue
        name = line.partition("{")[0].partition(" ")[0]
        if name.endswith(("_created", "_bucket")):
            continue
        with contextlib.suppress(ValueError):
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found

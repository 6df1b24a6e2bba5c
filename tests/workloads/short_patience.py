"""A second locustfile that makes the master's waits short."""

from __future__ import annotations

from workloads import process

process.WORKER_GRACE_S = 1.0
process.WORKER_END_S = 1.0
process.CUT_S = 0.5

"""The locustfile of sessions: `locust -f workloads/multiturn.py [--host URL] [--headless]`.

Sessions start in an open loop. A turn repeats the turn before and the answer to it, adds tokens of its own, and starts
a think time after the answer's end. With `--kv-handoff` it sends on where the last answer's KV waits
(`kv_transfer_params`, the two-turn mode of vLLM's NixlConnector). Options: `locust -f workloads/multiturn.py
--help-load`. Exit codes: `workloads/locustfile.py`.
"""

from __future__ import annotations

from workloads.locustfile import IdleUser, Locustfile
from workloads.options import SessionOptions

__all__ = ["IdleUser"]

Locustfile(SessionOptions, "workloads/multiturn.py")

"""The locustfile of traces: `locust -f workloads/trace.py --trace FILE [--host URL] [--headless]`.

Replays a trace in the Mooncake format (FAST'25): its starts, lengths and shared prefixes. Equal `hash_ids` become
equal tokens. Options: `locust -f workloads/trace.py --help-load`. Exit codes: `workloads/locustfile.py`.
"""

from __future__ import annotations

from workloads.locustfile import IdleUser, Locustfile
from workloads.options import TraceOptions

__all__ = ["IdleUser"]

Locustfile(TraceOptions, "workloads/trace.py")

"""The locustfile of requests that stand alone: `locust -f workloads/pd.py [--host URL] [--headless]`.

Without a host it starts the embedded reference deployment. Options: `locust -f workloads/pd.py --help-load`. Exit
codes: `workloads/locustfile.py`.
"""

from __future__ import annotations

from workloads.locustfile import IdleUser, Locustfile
from workloads.options import PdOptions

__all__ = ["IdleUser"]

Locustfile(PdOptions, "workloads/pd.py")

"""A second locustfile that makes a worker late: locust's `init` comes only after the master has said "spawn".

So it is on a busy machine when a worker is not run between the master's "ack" and its "spawn": both wait in its socket
then, and one greenlet handles them in one go.
"""

from __future__ import annotations

from typing import Any, Final

import gevent
from locust.runners import WorkerRunner

from reference_impl.realclock import now_ns

LIMIT_S: Final = 20.0
POLL_S: Final = 0.01

_connect = WorkerRunner.connect_to_master


def connect_late(self: Any) -> None:
    """Connect, then wait for "spawn"."""
    _connect(self)
    limit_ns = now_ns() + round(LIMIT_S * 1e9)
    while not self.last_received_spawn_timestamp and now_ns() < limit_ns:
        gevent.sleep(POLL_S)


WorkerRunner.connect_to_master = connect_late

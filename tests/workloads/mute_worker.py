"""A second locustfile whose workers never say how they ended, though their heartbeats go on."""

from __future__ import annotations

from typing import Any

from locust.runners import WorkerRunner

from workloads.process import ENDED

_send = WorkerRunner.send_message


def send_all_but_the_end(self: Any, msg_type: str, *more: Any, **named: Any) -> None:
    """Send it, unless it is the end."""
    if msg_type != ENDED:
        _send(self, msg_type, *more, **named)


WorkerRunner.send_message = send_all_but_the_end

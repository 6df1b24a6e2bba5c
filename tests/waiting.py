"""Waiting for what a test means, never for a length of time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from reference_impl.realclock import now_ns

POLL_S = 0.01


def until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Return once `condition()` is true. Raises AssertionError that names `what` after `timeout_s`."""
    deadline_ns = now_ns() + timeout_s * 1e9
    pause = threading.Event()
    while not condition():
        assert now_ns() < deadline_ns, f"{what}: not within {timeout_s:g} s"
        pause.wait(POLL_S)

"""Waiting in tests: for a condition, with a deadline, and never for a length of time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from reference_impl.realclock import now_ns
from reference_impl.rules.clock import s_to_ns

T = TypeVar("T")
_POLL_S = 0.002


def until(condition: Callable[[], T], timeout_s: float, what: str) -> T:
    """Return the first true value of `condition`. Raises AssertionError after `timeout_s` that names `what`."""
    deadline_ns = now_ns() + s_to_ns(timeout_s)
    pause = threading.Event()  # never set: only its timed wait is used
    while True:
        value = condition()
        if value:
            return value
        if now_ns() > deadline_ns:
            raise AssertionError(f"waited {timeout_s} s in vain until {what}; last seen: {value!r}")
        pause.wait(_POLL_S)


async def until_async(condition: Callable[[], T], timeout_s: float, what: str) -> T:
    """As `until`, with the event loop running in between."""
    deadline_ns = now_ns() + s_to_ns(timeout_s)
    while not (value := condition()):
        if now_ns() > deadline_ns:
            raise AssertionError(f"waited {timeout_s} s in vain until {what}; last seen: {value!r}")
        await asyncio.sleep(_POLL_S)
    return value

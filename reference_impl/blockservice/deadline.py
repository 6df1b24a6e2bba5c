"""What is left of the time that a caller gave us: the calls that we make for him must not take more (KVC-IDEM-012).

It travels with the task, so no function in between has to hand it on: a server's handler runs `within` what is left,
and every `BlockClient.call` below it, in tasks that it starts as well, asks `remaining_s`. The end is a moment on this
process's own clock; between machines only lengths travel, as gRPC does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S

_END_NS: Final[ContextVar[int | None]] = ContextVar("end_ns", default=None)


def remaining_s() -> float | None:
    """Return what is left in seconds, 0 once it is over; None: nobody upstream set an end."""
    end_ns = _END_NS.get()
    return None if end_ns is None else max(0, end_ns - now_ns()) / NS_PER_S


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Run the body with `seconds` left, or with less if less was left before: an inner end is never the later one."""
    before_ns = _END_NS.get()
    end_ns = now_ns() + int(seconds * NS_PER_S)
    token = _END_NS.set(end_ns if before_ns is None else min(end_ns, before_ns))
    try:
        yield
    finally:
        _END_NS.reset(token)

"""Lets modules that read the machine's clock read a world's instead, whoever's turn it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from harness.conformance.subject import Host
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S

_READINGS: Final = ("perf_counter", "monotonic", "time", "perf_counter_ns", "monotonic_ns", "time_ns")


class WorldTime:
    """Stands in for the module `time`. Within `of(host)` it shows that host's clock; outside, the real one."""

    def __init__(self) -> None:
        self._host: Host | None = None
        self._at_ns: int | None = None

    @contextmanager
    def of(self, host: Host, at_ns: int | None = None) -> Iterator[None]:
        """Show a host's clock for a while; with `at_ns`, as it stood then."""
        before = self._host, self._at_ns
        self._host, self._at_ns = host, at_ns
        try:
            yield
        finally:
            self._host, self._at_ns = before

    def now_ns(self) -> int:
        """Return what is shown, in ns."""
        if self._host is None:
            return now_ns()
        return self._host.now_ns() if self._at_ns is None else self._at_ns

    def perf_counter(self) -> float:
        """As `time.perf_counter`."""
        return self.now_ns() / NS_PER_S

    monotonic = time = perf_counter

    def perf_counter_ns(self) -> int:
        """As `time.perf_counter_ns`."""
        return self.now_ns()

    monotonic_ns = time_ns = perf_counter_ns

    def sleep(self, seconds: float) -> None:
        """Refuse: whoever sleeps in a step holds up its engine."""
        raise RuntimeError(f"the connector sleeps for {seconds} s in its engine's step")

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def put_into(module: ModuleType, world_time: WorldTime) -> int:
    """Have a module read `world_time`, however it imported the clock; return how many names were changed."""
    real = {id(getattr(time, name)): name for name in _READINGS}
    changed = 0
    for name, value in list(vars(module).items()):
        if value is time:
            setattr(module, name, world_time)
        elif id(value) in real:
            setattr(module, name, getattr(world_time, real[id(value)]))
        else:
            continue
        changed += 1
    return changed

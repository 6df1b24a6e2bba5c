"""When each request starts: a seeded arrival schedule in nanoseconds from the load's origin.

Pure: it reads no clock and waits for nothing. The load walks it in absolute time, so a late request never delays
the next one (open loop).
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec
import numpy as np

from workloads.chance import generator

T = TypeVar("T")
NS_PER_S: Final = 1e9
_BLOCK: Final = 1024
"""Gaps drawn at a time. Part of the schedule's definition only through numpy, which draws alike in any block size."""


class Arrivals(enum.StrEnum):
    """The law of the gaps between arrivals."""

    POISSON = "poisson"
    """Independent exponential gaps: what many independent users make."""
    CONSTANT = "constant"
    """Equal gaps; the first request starts at 0."""


class Arrival(msgspec.Struct, frozen=True):
    """One request's place in the schedule: its number in the whole schedule, and its start in ns from the origin."""

    index: int
    offset_ns: int


class ArrivalSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """The starts of all requests. Without `duration_s` and `count` it never ends; with both, the first to come ends it.

    Raises ValueError for a rate, a duration or a count that is not positive.
    """

    seed: int
    rate_per_s: float
    arrivals: Arrivals = Arrivals.POISSON
    duration_s: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "duration_s", "count"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")

    def __iter__(self) -> Iterator[Arrival]:
        end_ns = float("inf") if self.duration_s is None else self.duration_s * NS_PER_S
        for index, offset_ns in enumerate(itertools.islice(self._offsets_ns(), self.count)):
            if offset_ns >= end_ns:
                return
            yield Arrival(index, offset_ns)

    def end_ns(self) -> int | None:
        """Return an offset that no arrival comes after; None if the schedule never ends."""
        if self.count is None:
            return None if self.duration_s is None else round(self.duration_s * NS_PER_S)
        last = deque(self, maxlen=1)
        return last[0].offset_ns if last else 0

    def shard(self, index: int, shards: int) -> Iterator[Arrival]:
        """Yield every `shards`-th arrival from the `index`-th on: the shards together are this schedule, each once."""
        return stripe(iter(self), index, shards)

    def _offsets_ns(self) -> Iterator[int]:
        gap_ns = NS_PER_S / self.rate_per_s
        if self.arrivals is Arrivals.CONSTANT:
            yield from (round(index * gap_ns) for index in itertools.count())
            return
        chance = generator(self.seed, "arrivals")
        reached_ns = 0.0
        while True:
            offsets_ns = reached_ns + np.cumsum(chance.exponential(gap_ns, _BLOCK))
            reached_ns = float(offsets_ns[-1])
            yield from (int(offset_ns) for offset_ns in offsets_ns)


def stripe(items: Iterator[T], index: int, shards: int) -> Iterator[T]:
    """Yield item `index`, `index + shards`, and so on. Raises ValueError unless 0 <= index < shards."""
    if not 0 <= index < shards:
        raise ValueError(f"shard {index} of {shards} does not exist")
    return itertools.islice(items, index, None, shards)

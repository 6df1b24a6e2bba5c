"""What a case asks for: the pair's terms, the requests' size, and what a target must be able to do."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from reference_impl.rules.terms import EXTENSION_SHARE


class Need(enum.StrEnum):
    """Something that not every target can do. A case whose need is missing is not run, and says so."""

    PROCESSES = "processes"
    """Kill and stop the servers' processes."""
    NOTIFICATIONS = "notifications"
    """Lose, repeat or damage what the servers' NIXL agents tell each other."""
    CLOCK = "clock"
    """A monotonic clock of its own for one side."""
    RESTART = "restart"
    """Somebody starts a server again after its death."""
    LOGS = "logs"
    METRICS = "metrics"
    TERMS = "terms"
    """The harness chooses the terms, and not whoever runs the servers."""
    DESIGNS = "designs"
    """The older designs, for comparison: only the reference implementation has them."""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How large requests are and how long what is held up is held up."""

    name: str
    input_tokens: int
    output_tokens: int
    queue_leases: int
    """Lease lengths that a request waits in the decode side's queue."""


SMALL: Final = Size(name="small", input_tokens=2_000, output_tokens=64, queue_leases=3)
FULL: Final = Size(name="full", input_tokens=32_000, output_tokens=1_000, queue_leases=10)
SIZES: Final = {size.name: size for size in (SMALL, FULL)}


class Pool(enum.StrEnum):
    """How many tokens each server's KV pool holds."""

    ROOMY = "roomy"
    """No case ever fills it."""
    TIGHT = "tight"
    """A few requests: freed blocks are soon given to others."""


class PairTerms(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill and one decode server, as a case wants them. Cases with equal terms share a pair."""

    lease_s: float = 6
    load_failure_policy: str = "recompute"
    bidirectional: bool = False
    ttl_s: float = 20
    """How long the decode side keeps a finished turn."""
    decode_clock_offset_s: float = 0.0
    pool: Pool = Pool.ROOMY
    decode_slots: int = 2
    """Requests that the decode server runs at once; the others wait in its queue."""
    design: str = "lease"
    """"single-timeout" needs `Need.DESIGNS`; so does switching the clock correction off."""
    single_timeout_s: float = 480.0
    clock_correction: bool = True

    @property
    def extension_s(self) -> float:
        """How far a heartbeat moves a lease's end from its arrival."""
        return self.lease_s * EXTENSION_SHARE

    @property
    def recomputes(self) -> bool:
        """Whether a request whose KV cannot be loaded is to be computed anew, and not refused."""
        return self.load_failure_policy == "recompute"

    def needs(self) -> set[Need]:
        """Return what a target must be able to do for these terms to be had."""
        found = {Need.TERMS} if self.pool is Pool.TIGHT else set()
        if self.decode_clock_offset_s:
            found.add(Need.CLOCK)
        if self.design != "lease" or not self.clock_correction:
            found.add(Need.DESIGNS)
        return found


def pool_tokens(pool: Pool, size: Size) -> int:
    """Return how many tokens a server's KV pool is to hold."""
    longest = size.input_tokens + size.output_tokens
    if pool is Pool.TIGHT:
        return _up(3 * longest + longest // 2)
    return _up(max(81_920, 8 * longest))


def spare_share(pool: Pool, size: Size) -> float:
    """Return the share of a pool that counts as nothing: a quarter of one request. A poke's own block may be in it."""
    return size.input_tokens / 4 / pool_tokens(pool, size)


def _up(tokens: int) -> int:
    """Round up to whole blocks, whoever's they are."""
    return -(-tokens // 1024) * 1024

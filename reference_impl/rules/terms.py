"""The terms on which engines keep KV for each other: vLLM's parameters by their names, ours beside them.

Both sides agree on them at the handshake (C3), and each is checked at the door, with its name in the error.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from reference_impl.rules.clock import s_to_ns

INTERVAL_SHARE: Final = 6
"""A heartbeat every sixth of the lease's duration (KVC-HB-003)."""
EXTENSION_SHARE: Final = 2 / 3
"""A heartbeat extends to now + two thirds of the duration (KVC-LEASE-003)."""
SECONDS_MAX: Final = 86_400.0
SECONDS_MIN: Final = 0.05
"""Less is a few turns of the step loop, in which nobody gets anything done. A time scale divides terms, so no more."""


class LeaseDesign(enum.StrEnum):
    """How a holder decides that nobody will read its blocks any more."""

    LEASE = "lease"
    """A short lease, renewed by heartbeats."""
    SINGLE_TIMEOUT = "single-timeout"
    """The old design, kept as the baseline (KVC-LEASE-013): one long timeout, no heartbeats."""


class LoadPolicy(enum.StrEnum):
    """What becomes of a request whose KV cannot be loaded (R2)."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class KvTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine's terms. Raises ValueError with the field's name for a value that makes no sense."""

    design: LeaseDesign = LeaseDesign.LEASE
    kv_lease_duration: float = 30.0
    """Seconds from the end of a prefill to the lease's end, unless a heartbeat moves it."""
    single_timeout: float = 480.0
    """Seconds that the old design keeps blocks, whatever happens."""
    bidirectional_kv_xfer: bool = False
    """Two turns: the decode side keeps its blocks for the next turn's prefill."""
    decoder_kv_blocks_ttl: float = 480.0
    """Seconds that the decode side keeps them, from the end of the turn."""
    kv_load_failure_policy: LoadPolicy = LoadPolicy.RECOMPUTE
    read_limit: float = 10.0
    """Seconds in which a read ends, one way or another (KVC-XFER-004)."""
    load_limit: float = 60.0
    """Seconds from a request's admission to its blocks standing in our pool, or its policy applies (L3)."""
    clock_correction: bool = True
    """Off only to show what happens without (the broken twin of KVC-CLK-002)."""

    def __post_init__(self) -> None:
        """Refuse what could not be kept."""
        for name in ("kv_lease_duration", "single_timeout", "decoder_kv_blocks_ttl", "read_limit", "load_limit"):
            value = getattr(self, name)
            if not 0 < value <= SECONDS_MAX:
                raise ValueError(f"{name} must be above 0 and at most {SECONDS_MAX:g} seconds, got {value!r}")
            if value < SECONDS_MIN:
                raise ValueError(f"{name} must be at least {SECONDS_MIN:g} seconds, got {value!r}")
        if self.load_limit < self.read_limit:
            raise ValueError(f"load_limit must be at least read_limit ({self.read_limit:g} s), got {self.load_limit!r}")

    @property
    def renews(self) -> bool:
        """Whether readers send heartbeats."""
        return self.design is LeaseDesign.LEASE

    @property
    def first_ns(self) -> int:
        """How long a lease lasts from the end of its prefill."""
        return s_to_ns(self.kv_lease_duration if self.renews else self.single_timeout)

    @property
    def extension_ns(self) -> int:
        """How far from its arrival a heartbeat moves the deadline."""
        return s_to_ns(self.kv_lease_duration * EXTENSION_SHARE)

    @property
    def interval_ns(self) -> int:
        """Least time between two heartbeats to one engine."""
        return s_to_ns(self.kv_lease_duration / INTERVAL_SHARE)

    @property
    def read_limit_ns(self) -> int:
        """How long a claimed read may take: never longer than an extension, so that a dead reader's claim adds none."""
        return min(s_to_ns(self.read_limit), self.extension_ns)

    @property
    def ttl_ns(self) -> int:
        """How long the decode side keeps a finished turn."""
        return s_to_ns(self.decoder_kv_blocks_ttl)

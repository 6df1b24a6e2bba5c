"""Clocks of a world: one true time, seen by each engine through an offset and a drift."""

from __future__ import annotations

import msgspec

from reference_impl.rules.clock import NS_PER_S, PPM


class Skew(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine's clock differs from the true time."""

    offset_s: float = 0.0
    drift_ppm: int = 0

    def shows(self, true_ns: int) -> int:
        """Return what the clock shows at a true time, in ns."""
        return round(self.offset_s * NS_PER_S) + true_ns + true_ns * self.drift_ppm // PPM

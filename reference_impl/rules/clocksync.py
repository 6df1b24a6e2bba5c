"""The offset between two engines' clocks, from round trips, with its error (KVC-CLK-002, -003, -005, -006).

A sample says: we sent at `sent_ns`, the peer's clock showed `remote_ns`, the answer was here at `received_ns`. The peer
read its clock somewhere in between, so the offset is known to half the round trip. As a sample ages, drift adds to its
error; the best sample is the one whose error is smallest *now*.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from reference_impl.rules.clock import NS_PER_MS, NS_PER_S, PPM

DRIFT_PPM: Final = 401
"""Drift that we allow for between two clocks: 200 ppm each, in opposite directions, is a little over 400 of either."""
SAMPLES_MAX: Final = 16
AGE_NS: Final = 30 * NS_PER_S
"""After this a sample is measured again: drift has added 12 ms to its error at most."""
ERROR_WANTED_NS: Final = 20 * NS_PER_MS


class Sample(NamedTuple):
    """One round trip."""

    sent_ns: int
    remote_ns: int
    received_ns: int


class Estimate(NamedTuple):
    """remote clock - our clock, and how wrong that can be at most."""

    offset_ns: int
    error_ns: int


class ClockSync:
    """What we know of one peer's clock."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._best: Sample | None = None
        """Drift adds to all errors alike, so the best sample stays the best until the samples change."""

    def add(self, sample: Sample) -> bool:
        """Take a sample; false, and nothing changes, if it went back in time."""
        if sample.received_ns < sample.sent_ns:
            return False
        self._samples = [*self._samples, sample][-SAMPLES_MAX:]
        newest_ns = max(s.received_ns for s in self._samples)
        self._best = min(self._samples, key=lambda s: _estimate(s, newest_ns).error_ns)
        return True

    def estimate(self, now_ns: int) -> Estimate | None:
        """Return the best estimate at `now_ns`, None before the first sample. Asked at every poll, so it is cheap."""
        return _estimate(self._best, now_ns) if self._best else None

    def stale(self, now_ns: int) -> bool:
        """Whether it is time to measure again: the newest sample is old, or none is good enough."""
        best = self.estimate(now_ns)
        if best is None:
            return True
        age_ns = now_ns - self._samples[-1].received_ns
        return age_ns > (AGE_NS // 10 if best.error_ns > ERROR_WANTED_NS else AGE_NS)


def _estimate(sample: Sample, now_ns: int) -> Estimate:
    middle_ns = (sample.sent_ns + sample.received_ns) // 2
    half_ns = (sample.received_ns - sample.sent_ns + 1) // 2
    age_ns = max(0, now_ns - sample.sent_ns)  # the peer read its clock after that, so drift has had no longer
    return Estimate(sample.remote_ns - middle_ns, half_ns + age_ns * DRIFT_PPM // PPM + 1)


def left_ns(expiry_ns: int, estimate: Estimate, now_ns: int) -> int:
    """Return how long a deadline on the peer's clock is still away, at the least: its error already taken off."""
    return expiry_ns - estimate.offset_ns - now_ns - estimate.error_ns

"""Leases on prefills, counted, and what a reader's crash left behind."""

from __future__ import annotations

from collections import Counter

import msgspec

from harness.holding import DIED, EXPIRED, blocks_over_time, came_late, freed_early, held, reclaims
from harness.run_folder import RunFolder
from reference_impl.rules.events import EventKind


class Leases(msgspec.Struct, frozen=True, kw_only=True):
    """The leases of a run's prefills. Each that was granted is released, expired, died or standing."""

    granted: int
    released: int
    """By a report of its reader, or an abort."""
    expired: int
    died: int
    """With the engine that held them."""
    standing: int
    """Not ended when the run did."""
    extended: int
    """Extensions by heartbeats."""
    freed_early: int
    """Expired, and neither a reader's crash nor a router's hold explains it."""
    freed_early_blocks: int
    claims_late: int
    """Leases whose reader came when they had expired: it lived."""
    claims_refused: int
    """Claims refused, for whatever reason."""
    blocks_max: int
    """Most blocks held at once, by all holders together."""


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """What the crashes of readers left at the holders. Durations are as measured, in seconds."""

    crashes: int
    leases: int
    blocks: int
    standing: int
    """Leases still held when the run ended."""
    reclaim_s: float | None
    """Crash -> the last of its blocks is free, the longest of all crashes; None while one is still held."""
    watched_s: float
    """How long the holders were watched after a crash: what is still held, was held at least so long."""
    promised_s: float | None
    """Crash -> the last end that the design promises."""
    late: int
    """Leases that stood half a second longer than a lease would, whatever this run's design."""
    block_seconds: float


def leases(run: RunFolder) -> Leases:
    """Return the counts of `run`."""
    all_ = [lease for lease in held(run) if not lease.turn]
    early = freed_early(run)
    how = Counter(
        lease.how if lease.how in (EXPIRED, DIED) else "standing" if lease.ended_ns is None else "released"
        for lease in all_
    )
    return Leases(
        granted=len(all_), released=how["released"], expired=how[EXPIRED], died=how[DIED], standing=how["standing"],
        extended=sum(int(e.detail.get("leases") or 0) for e in run.events_of(EventKind.LEASE_EXTENDED)),
        freed_early=len(early), freed_early_blocks=sum(lease.blocks for lease in early),
        claims_late=len(came_late(run) & {(lease.engine_id, lease.request_id) for lease in all_}),
        claims_refused=len(run.events_of(EventKind.CLAIM_REFUSED)),
        blocks_max=max((blocks for _, blocks in blocks_over_time(all_)), default=0),
    )  # fmt: skip


def crash(run: RunFolder) -> Crash | None:
    """Return what the readers' crashes left behind; None if no reader was killed, with proof."""
    found = reclaims(run)
    if not found:
        return None
    standing = sum(r.standing for r in found)
    return Crash(
        crashes=len(found), leases=sum(r.leases for r in found), blocks=sum(r.blocks for r in found),
        standing=standing, reclaim_s=None if standing else _longest([r.seconds for r in found]),
        watched_s=max(run.events[-1].t_ns - r.fault_ns for r in found if r.standing or not standing) / 1e9,
        promised_s=_longest([r.promised_s for r in found]), late=sum(len(r.late) for r in found),
        block_seconds=sum(r.block_seconds for r in found),
    )  # fmt: skip


def _longest(seconds: list[float | None]) -> float | None:
    return max((s for s in seconds if s is not None), default=None)

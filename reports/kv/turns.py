"""Later turns of sessions: what their reader judged, beside what the holder of their blocks knew."""

from __future__ import annotations

import enum

import msgspec

from harness.holding import EXPIRED, Held, held
from harness.latency import Percentiles, percentiles
from harness.run_folder import RunFolder
from reference_impl.rules.consumer import TURN_MARGIN_NS
from reference_impl.rules.events import Event, EventKind
from reports.kv.loads import number
from reports.kv.setup import setup

NS_PER_MS = 1e6
NS_PER_S = 1e9


class Fate(enum.StrEnum):
    """What became of a turn that its reader judged."""

    LOADED = "loaded"
    """Judged live, and read."""
    DECLINED = "declined"
    """Judged expired, and by the holder's clock it had no more left than the margin and the estimate's error."""
    TOO_LATE = "too late"
    """Judged live, and refused by the holder, whose blocks were gone."""
    TOO_EARLY = "too early"
    """Judged expired, while the holder kept its blocks for longer than the margin and the error explain."""
    OTHER = "other"
    """Judged live, and neither read nor refused: its load failed otherwise, was given up, or was found cached."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One judged turn. Durations are as measured."""

    request_id: str
    fate: Fate
    gap_s: float | None
    """End of the turn before -> judged, on the host's clock; None where the holder's lease is not known."""
    tokens: int
    """Loaded, and so not computed again."""
    left_ms: float
    """Left by the reader's own, corrected count; its error already taken off."""
    true_left_ms: float | None
    """Left by the holder's count; below 0: it had expired."""
    error_ms: float


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """The judged turns of a run, and the leases that decode engines kept for them."""

    kept: int
    """Leases on finished turns."""
    kept_expired: int
    judged: int
    loaded: int
    declined: int
    too_late: int
    too_early: int
    other: int
    unmeasured: int
    """Declined because the holder's clock was not known yet; not judged."""
    tokens_loaded: int
    error_ms_max: float | None
    ttl_s: float


class Think(msgspec.Struct, frozen=True, kw_only=True):
    """Later turns as the client saw them, by planned think time beside the time to live."""

    title: str
    turns: int
    cached_tokens: Percentiles
    ttft_ms: Percentiles


def turns(run: RunFolder) -> list[Turn]:
    """Return every turn that was judged, in order; one that was judged again counts as judged last."""
    leases = {(lease.engine_id, lease.request_id): lease for lease in held(run) if lease.turn}
    done = {_key(e): e for e in run.events_of(EventKind.LOAD_DONE)}
    refused = {
        (str(e.detail.get("engine_id", "")), e.subject, str(e.detail.get("reader", "")))
        for e in run.events_of(EventKind.CLAIM_REFUSED)
    }  # fmt: skip
    judged = {_key(e): e for e in run.events_of(EventKind.TURN_JUDGED)}
    return [_turn(run, e, leases, done.get(key), refused) for key, e in judged.items()]


def _key(event: Event) -> tuple[str, str]:
    return str(event.detail.get("engine_id", "")), event.subject


def _turn(
    run: RunFolder, event: Event, leases: dict[tuple[str, str], Held], done: Event | None,
    refused: set[tuple[str, str, str]],
) -> Turn:  # fmt: skip
    holder = engine_of(str(event.detail.get("remote_engine_id", "")))
    request_id = str(event.detail.get("remote_request_id", ""))
    lease = leases.get((holder, request_id))
    error_ms = number(run, event, "error_ms")
    true_left_ms = None if lease is None else (_deadline_ns(lease) - event.t_ns) / NS_PER_MS
    if done is not None:
        fate = Fate.LOADED
    elif not event.detail.get("live"):
        fate = Fate.TOO_EARLY if _early(true_left_ms, error_ms) else Fate.DECLINED
    else:
        fate = Fate.TOO_LATE if (holder, request_id, event.subject) in refused else Fate.OTHER
    return Turn(
        request_id=event.subject, fate=fate, tokens=0 if done is None else round(number(run, done, "tokens")),
        gap_s=None if lease is None else (event.t_ns - lease.granted_ns) / NS_PER_S,
        left_ms=number(run, event, "left_ms"), true_left_ms=true_left_ms, error_ms=error_ms,
    )  # fmt: skip


def engine_of(kv_engine_id: str) -> str:
    """Return the engine whose life a KV engine id names: the id is the engine's own with a random end."""
    return kv_engine_id.rpartition(".")[0] or kv_engine_id


def _deadline_ns(lease: Held) -> int:
    """The holder's own deadline. One that stood longer than granted was renewed meanwhile."""
    deadline_ns = lease.granted_ns + round(lease.duration_s * NS_PER_S)
    if lease.ended_ns is not None and (lease.ended_ns > deadline_ns or lease.how == EXPIRED):
        return lease.ended_ns
    return deadline_ns


def _early(true_left_ms: float | None, error_ms: float) -> bool:
    """An estimate may be off by its error either way, and the error is taken off once more."""
    return true_left_ms is not None and true_left_ms > TURN_MARGIN_NS / NS_PER_MS + 2 * error_ms


def turn_counts(run: RunFolder, found: list[Turn]) -> Turns | None:
    """Return the counts of `found`, the turns of `run`; None if it keeps no turns."""
    terms = setup(run).terms
    if not terms.bidirectional_kv_xfer:
        return None
    kept = [lease for lease in held(run) if lease.turn]
    fates = [turn.fate for turn in found]
    late = {_key(e) for e in run.events_of(EventKind.LOAD_FAILED) if e.detail.get("expired")}
    return Turns(
        kept=len(kept), kept_expired=sum(lease.how == EXPIRED for lease in kept), judged=len(found),
        loaded=fates.count(Fate.LOADED), declined=fates.count(Fate.DECLINED), too_late=fates.count(Fate.TOO_LATE),
        too_early=fates.count(Fate.TOO_EARLY), other=fates.count(Fate.OTHER),
        unmeasured=len(late - {_key(e) for e in run.events_of(EventKind.TURN_JUDGED)}),
        tokens_loaded=sum(turn.tokens for turn in found),
        error_ms_max=max((turn.error_ms for turn in found), default=None), ttl_s=terms.decoder_kv_blocks_ttl,
    )  # fmt: skip


THINK_COLUMNS = ("session", "turn", "think_ms", "cached_tokens")
NEAR = (0.9, 1.1)
"""Think times from this to that share of the time to live are near it."""


def think_times(run: RunFolder) -> list[Think]:
    """Return later turns by think time, as the client saw them; none where its rows hold no sessions."""
    rows = run.requests
    if any(name not in rows.columns for name in THINK_COLUMNS):
        return []
    rows = rows[(rows["turn"] > 0) & (rows.spoilt.fillna("") == "")]
    share = rows["think_ms"] / 1e3 / setup(run).terms.decoder_kv_blocks_ttl
    low, high = NEAR
    groups = [
        ("below the time to live", share < low), (f"within {100 * (high - 1):.0f} % of it", share.between(low, high)),
        ("above it", share > high),
    ]  # fmt: skip
    return [
        Think(
            title=title, turns=int(mask.sum()), cached_tokens=percentiles(rows["cached_tokens"][mask].astype(float)),
            ttft_ms=percentiles(rows.ttft_ms[mask]),
        )
        for title, mask in groups
    ]  # fmt: skip

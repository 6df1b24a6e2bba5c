"""Later turns of sessions: what their reader judged, beside what the holder of their blocks knew."""

from __future__ import annotations

import enum

import msgspec
import pandas as pd

from harness.checks.turns import Turn as Judgement
from harness.checks.turns import turns as judgements
from harness.holding import EXPIRED, Held, held
from harness.latency import Percentiles, percentiles
from harness.run_folder import RunFolder
from reference_impl.rules.events import Event, EventKind
from reports.kv.loads import number
from reports.kv.setup import setup

NS_PER_S = 1e9


class Fate(enum.StrEnum):
    """What became of a turn that its reader judged."""

    LOADED = "loaded"
    """Judged live, and read."""
    DECLINED = "declined"
    """Judged expired, and the holder's own time for it was over, or nearly."""
    TOO_LATE = "too late"
    """Judged live, when the holder's time for it was over: refused, and computed again."""
    TOO_EARLY = "too early"
    """Judged expired, while the holder would have kept its blocks for longer than margin and slack explain."""
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
    """Later turns by think time beside the time to live: as engines saw them, and as the client did.

    Engines count from the end of the turn before to the judgement; the client knows what it planned.
    """

    title: str
    judged: int
    loaded: int
    tokens_loaded: Percentiles
    """Of each judged turn; 0 where it was computed again."""
    rows: int
    """Later turns that the client sent; 0 where its rows hold no sessions."""
    cached_tokens: Percentiles
    """What the answer's usage calls cached: on the decode side, so it holds what was read from the prefill side."""
    ttft_ms: Percentiles


def turns(run: RunFolder) -> list[Turn]:
    """Return every judgement of a turn, in order, with what the check on turns makes of it."""
    leases = {(lease.engine_id, lease.request_id): lease for lease in held(run) if lease.turn}
    done = {_key(e): e for e in run.events_of(EventKind.LOAD_DONE)}
    events = run.events_of(EventKind.TURN_JUDGED)
    return [
        _turn(run, event, truth, leases, done.get(_key(event)))
        for event, truth in zip(events, judgements(run), strict=True)
    ]


def _key(event: Event) -> tuple[str, str]:
    return str(event.detail.get("engine_id", "")), event.subject


def _turn(
    run: RunFolder, event: Event, truth: Judgement, leases: dict[tuple[str, str], Held], done: Event | None
) -> Turn:
    holder = engine_of(str(event.detail.get("remote_engine_id", "")))
    lease = leases.get((holder, str(event.detail.get("remote_request_id", ""))))
    return Turn(
        request_id=event.subject, fate=_fate(truth, loaded=done is not None),
        gap_s=None if lease is None else (event.t_ns - lease.granted_ns) / NS_PER_S,
        tokens=0 if done is None else round(number(run, done, "tokens")), left_ms=number(run, event, "left_ms"),
        true_left_ms=None if truth.left_s is None else truth.left_s * 1e3, error_ms=number(run, event, "error_ms"),
    )  # fmt: skip


def _fate(truth: Judgement, *, loaded: bool) -> Fate:
    if truth.early:
        return Fate.TOO_EARLY
    if truth.late:
        return Fate.TOO_LATE
    if not truth.live:
        return Fate.DECLINED
    return Fate.LOADED if loaded else Fate.OTHER


def engine_of(kv_engine_id: str) -> str:
    """Return the engine whose life a KV engine id names: the id is the engine's own with a random end."""
    return kv_engine_id.rpartition(".")[0] or kv_engine_id


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


NEAR = (0.9, 1.1)
"""Think times from this to that share of the time to live are near it."""


def think_times(run: RunFolder, found: list[Turn]) -> list[Think]:
    """Return the turns `found` in `run` and its client's rows by think time; none if it keeps no turns."""
    terms, (low, high) = setup(run).terms, NEAR
    if not terms.bidirectional_kv_xfer:
        return []
    rows = run.requests[(run.requests["turn"] > 0) & (run.requests.spoilt.fillna("") == "")]
    ranges = [
        ("below the time to live", 0.0, low), (f"within {100 * (high - 1):.0f} % of it", low, high),
        ("above it", high, float("inf")),
    ]  # fmt: skip
    ttl_s = terms.decoder_kv_blocks_ttl
    return [_think(title, a * ttl_s, b * ttl_s, found, rows) for title, a, b in ranges]


def _think(title: str, low_s: float, high_s: float, found: list[Turn], rows: pd.DataFrame) -> Think:
    mine = [turn for turn in found if turn.gap_s is not None and low_s <= turn.gap_s < high_s]
    planned = rows["think_ms"] / 1e3
    rows = rows[(planned >= low_s) & (planned < high_s)]
    return Think(
        title=title, judged=len(mine), loaded=sum(turn.fate is Fate.LOADED for turn in mine),
        tokens_loaded=percentiles(pd.Series([turn.tokens for turn in mine], dtype=float)), rows=len(rows),
        cached_tokens=percentiles(rows["cached_tokens"].astype("float64")), ttft_ms=percentiles(rows.ttft_ms),
    )  # fmt: skip

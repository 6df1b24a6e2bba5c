"""The tables of the page, a column a design; each figure knows where in `summary.json` it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from reports import words
from reports.kv.arms import KvArm
from reports.tables import Cell, Figure, Row, is_emulated

Say = Callable[[Any], str]


class Table(msgspec.Struct, frozen=True):
    """Rows under one heading."""

    title: str
    rows: list[Row]


def at(arm: KvArm, path: str) -> Any:
    """Return what stands at a dotted path of a run's summary; None where the way ends."""
    value: Any = arm
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def figure(arm: KvArm, path: str, say: Say, before: str = "") -> Figure:
    """Return a figure of a run, as `say` prints it; one that is not there is a dash."""
    value = at(arm, path)
    return Figure(words.NONE if value is None else say(value), f"runs.{arm.design}.{path}" if value is not None else "",
                  value, before)  # fmt: skip


def row(arms: list[KvArm], title: str, note: str, path: str, say: Say = words.count, *, full: str = "",
        emulated: bool = False) -> Row:  # fmt: skip
    """Return a line with a figure a design; `full` is its path at full scale, printed where the scale is not 1."""
    cells = []
    for arm in arms:
        scaled = full and arm.time_scale != 1 and at(arm, full) is not None
        below = [figure(arm, full, say, "full scale")] if scaled else []
        cells.append(Cell(arm.title, figure(arm, path, say), below, arm.tone))
    return Row(title, note, cells, emulated)


def tables(arms: list[KvArm]) -> list[Table]:
    """Return the tables by design; that of a crash only where there was one."""
    crashed = any(arm.crash for arm in arms)
    return [
        *([Table("What the crash left behind", crash_rows(arms))] if crashed else []),
        Table("Leases", lease_rows(arms)),
        Table("Loads of KV", load_rows(arms)),
        Table("What clients saw", client_rows(arms)),
    ]


def crash_rows(arms: list[KvArm]) -> list[Row]:
    """Return what readers' crashes left at the holders, and for how long."""
    return [
        row(arms, "Blocks left behind", "under leases that nobody came for any more", "crash.blocks"),
        reclaim_row(arms),
        row(arms, "Promised", "crash → the last end that the design allows", "crash.promised_s", words.duration,
            full="at_full_scale.promised_s"),
        row(arms, "Block-seconds held", "blocks × time held for dead readers", "crash.block_seconds", words.significant,
            full="at_full_scale.block_seconds"),
        row(arms, "Longer than a lease would", "leases that stood past a lease's promise", "crash.late"),
    ]  # fmt: skip


def reclaim_row(arms: list[KvArm]) -> Row:
    """Return the reclaim; what still stood at the end of a run was held for longer than it was watched."""
    cells = []
    for arm in arms:
        standing = arm.crash is not None and arm.crash.standing > 0
        name, before = ("watched_s", "more than") if standing else ("reclaim_s", "")
        below = []
        if (
            arm.time_scale != 1
            and at(arm, f"at_full_scale.{name}") is not None
            and at(arm, f"crash.{name}") is not None
        ):
            below = [figure(arm, f"at_full_scale.{name}", words.duration, "full scale")]
        if standing:
            below.append(figure(arm, "crash.standing", lambda n: f"{n:,} leases", "still held:"))
        cells.append(Cell(arm.title, figure(arm, f"crash.{name}", words.duration, before), below, arm.tone))
    return Row("Reclaim", "crash → the last of them is free", cells)


def lease_rows(arms: list[KvArm]) -> list[Row]:
    """Return what became of the leases."""
    return [
        terms_row(arms),
        row(arms, "Granted", "one a prefill that ended for a remote decode", "leases.granted"),
        row(arms, "Released", "read, found cached, or given up: its reader said so", "leases.released"),
        row(arms, "Expired", "ran out", "leases.expired"),
        row(arms, "Extended", "by heartbeats, each lease each time", "leases.extended"),
        early_row(arms),
        row(arms, "Reader came after expiry", "its claim was refused, so it read nothing", "leases.claims_late"),
        row(arms, "Ended with their holder", "the engine died", "leases.died"),
        row(arms, "Still standing", "when the run ended", "leases.standing"),
        peak_row(arms),
    ]


def terms_row(arms: list[KvArm]) -> Row:
    """Return the terms at full scale: they are given, so they are printed as given."""
    cells = []
    for arm in arms:
        below = []
        if arm.extension_s is not None:
            below = [figure(arm, "extension_s", _given, "renewed by")]
        cells.append(Cell(arm.title, figure(arm, "timeout_s", _given), below, arm.tone))
    return Row("Term", "as set, at full scale", cells)


def _given(seconds: float) -> str:
    return words.given(words.duration(seconds))


def early_row(arms: list[KvArm]) -> Row:
    """Return leases that ran out though nothing had crashed."""
    cells = []
    for arm in arms:
        below = [figure(arm, "leases.freed_early_blocks", lambda n: words.count(n, "blocks"))]
        shown = below if arm.leases.freed_early else []
        cells.append(Cell(arm.title, figure(arm, "leases.freed_early", words.count), shown, arm.tone))
    return Row("Freed too early", "expired, and no fault explains it", cells)


def peak_row(arms: list[KvArm]) -> Row:
    """Return the most blocks held at once, and their share of the prefill side's pool."""
    cells = []
    for arm in arms:
        share = (
            []
            if not arm.pool_blocks
            else [Figure(words.percent(arm.leases.blocks_max, arm.pool_blocks) + " of the pool")]
        )
        cells.append(Cell(arm.title, figure(arm, "leases.blocks_max", words.count), share, arm.tone))
    return Row("Most blocks held", "at once, by all prefill engines", cells)


def load_rows(arms: list[KvArm]) -> list[Row]:
    """Return loads, and how their time splits."""
    return [
        row(arms, "Done", "the blocks arrived, checked", "loads.done"),
        row(arms, "Failed", "each is computed again, or fails its request, by policy", "loads.failed"),
        row(arms, "Tokens computed again", "on decode engines, because a load failed", "recomputed_tokens"),
        percentile_row(arms, "Waited", "destination there → read begins", "loads.waited_ms"),
        percentile_row(arms, "Handshake", "part of the wait of the first load from an engine", "loads.handshake_ms"),
        percentile_row(arms, "Read", "the blocks themselves, and their generations", "loads.read_ms"),
        percentile_row(arms, "Read, bytes/s", "of a read; p99: of the fastest", "loads.bytes_per_s", words.speed),
        row(arms, "Read in all", "by all readers", "loads.bytes_read", words.size),
    ]  # fmt: skip


def percentile_row(arms: list[KvArm], title: str, note: str, path: str, say: Say = words.milliseconds, *,
                   full: str = "", emulated: bool = False) -> Row:  # fmt: skip
    """Return a median with its p99 below."""
    cells = []
    for arm in arms:
        below = [_percentile(arm, f"{path}.p99", say, "p99")] if at(arm, f"{path}.n") else []
        if full and arm.time_scale != 1 and at(arm, f"{full}.p50") is not None:
            below.append(figure(arm, f"{full}.p50", say, "full scale"))
        cells.append(Cell(arm.title, _percentile(arm, f"{path}.p50", say), below, arm.tone))
    return Row(title, note, cells, emulated)


def _percentile(arm: KvArm, path: str, say: Say, before: str = "") -> Figure:
    n = at(arm, path.rpartition(".")[0] + ".n")
    return Figure("censored", before=before) if n and at(arm, path) is None else figure(arm, path, say, before)


def client_rows(arms: list[KvArm]) -> list[Row]:
    """Return what the client counted."""
    compute = is_emulated([line for arm in arms for line in arm.emulated], "compute time")
    return [
        percentile_row(arms, "TTFT", "median of the whole run", "ttft_ms", full="at_full_scale.ttft_ms",
                       emulated=compute),
        row(arms, "Requests", "sent", "requests"),
        row(arms, "Answered", "whole, with status 200", "requests_ok"),
        row(arms, "Failed", "the client saw an error", "requests_failed"),
        row(arms, "Unknown", "timed out, or still running at the end", "requests_unknown"),
        row(arms, "Wrong answers", "tokens differ from the oracle's: must be 0 everywhere", "content_wrong"),
        row(arms, "Answers unchecked", "whole, and nothing to compare them with", "content_unchecked"),
        row(arms, "Most waiting on D", "requests at once", "waiting_max"),
        row(arms, "Spoilt", "left out of latencies: the client was late", "spoilt_rows"),
    ]  # fmt: skip


def turn_rows(arms: list[KvArm]) -> list[Row]:
    """Return what became of later turns, by the holder's own truth."""
    return [
        row(arms, "Turns kept", "leases of decode engines on finished turns", "turns.kept"),
        row(arms, "Judged", "later turns that came with a hand-off", "turns.judged"),
        row(arms, "Loaded", "judged live, and read", "turns.loaded"),
        row(arms, "Declined", "judged expired, and by the holder's clock it was", "turns.declined"),
        row(arms, "Too late", "judged live, refused by the holder: computed again", "turns.too_late"),
        row(arms, "Declined too early", "the holder would still have had it", "turns.too_early"),
        row(arms, "Live, load failed", "or given up, or found cached", "turns.other"),
        row(arms, "Declined unmeasured", "the holder's clock was not known yet", "turns.unmeasured"),
        row(arms, "Tokens loaded", "and so not computed again", "turns.tokens_loaded"),
        row(arms, "Largest error bound", "of an estimated offset, when a turn was judged", "turns.error_ms_max",
            words.milliseconds),
    ]  # fmt: skip

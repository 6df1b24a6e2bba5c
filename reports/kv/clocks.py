"""What engines made of each other's clocks, beside how those were set."""

from __future__ import annotations

import msgspec

from harness.run_folder import RunFolder
from reference_impl.rules.events import Event, EventKind
from reports.kv.setup import setup
from reports.kv.turns import engine_of

MS_PER_S = 1e3


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker's engines measured of another's clock: its clock minus their own.

    `off_ms_max` is the largest difference to how the clocks were set, `error_ms_max` the largest error bound that was
    claimed; `within` says that no estimate was further off than its own bound.
    """

    reader: str
    holder: str
    measured: int
    set_s: float
    estimate_s: float
    """The last one."""
    off_ms_max: float
    error_ms_max: float
    within: bool


def clocks(run: RunFolder) -> list[Clock]:
    """Return the pairs of workers of which one measured the other's clock."""
    workers = _workers(run)
    pairs: dict[tuple[str, str], list[Event]] = {}
    for event in run.events_of(EventKind.PEER_CONNECTED):
        reader, holder = str(event.detail.get("worker_id", "")), workers.get(engine_of(event.subject), "")
        if reader and holder and _measured(event):
            pairs.setdefault((reader, holder), []).append(event)
    return [_clock(run, reader, holder, events) for (reader, holder), events in pairs.items()]


def _measured(event: Event) -> bool:
    return all(isinstance(event.detail.get(name), (int, float)) for name in ("offset_ms", "offset_error_ms"))


def _workers(run: RunFolder) -> dict[str, str]:
    """Engine -> its worker, as every event of an engine says; that of the harness and the router name no engine."""
    found = {}
    for event in run.events:
        worker, engine = event.detail.get("worker_id"), event.detail.get("engine_id")
        if worker and engine:
            found[str(engine)] = str(worker)
        elif worker and event.kind is EventKind.ROUTER_REGISTERED:
            found[event.subject] = str(worker)
    return found


def _clock(run: RunFolder, reader: str, holder: str, events: list[Event]) -> Clock:
    made = setup(run)
    set_s = made.offset_s(holder) - made.offset_s(reader)
    estimates = [(float(e.detail["offset_ms"] or 0), float(e.detail["offset_error_ms"] or 0)) for e in events]
    off = [(abs(offset - set_s * MS_PER_S), error) for offset, error in estimates]
    return Clock(
        reader=reader, holder=holder, measured=len(events), set_s=set_s, estimate_s=estimates[-1][0] / MS_PER_S,
        off_ms_max=max(difference for difference, _ in off), error_ms_max=max(error for _, error in off),
        within=all(difference <= error for difference, error in off),
    )  # fmt: skip

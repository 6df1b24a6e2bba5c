"""Each time a block service was away: from the end of its process until its node applied an operation again."""

from __future__ import annotations

import bisect
import signal
from collections import defaultdict
from typing import Final

import msgspec

from harness.latency import Spread, spread
from harness.run_folder import RunFolder
from reference_impl.rules.events import Event, EventKind
from reports.control.setup import SERVICE, is_service, node_of
from reports.control.strikes import Sort, Strike

NS_PER_S: Final = 1e9
SOON_NS: Final = 5_000_000_000
"""A fault explains an exit that follows it so soon."""
ORDERLY: Final = (0, -signal.SIGTERM)
"""How a service ends that was told to."""


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """One crash. None: it was not seen again."""

    node: str
    cause: str
    exited_ns: int
    status: int
    started_s: float | None
    """Exit -> the next process was started."""
    linked_s: float | None
    """Exit -> an engine told the new process what it holds."""
    applied_s: float | None
    """Exit -> the first operation applied."""


class Outages(msgspec.Struct, frozen=True, kw_only=True):
    """All crashes of block services."""

    crashes: int
    back: int
    """Of them, those after which operations were applied again."""
    unexplained: int
    """Of them, those that no fault of the run explains."""
    applied_s: Spread
    started_s: Spread
    linked_s: Spread


def outages(run: RunFolder, struck: list[Strike], end_ns: int) -> list[Outage]:
    """Return the crashes of block services up to `end_ns`, in order. What ends with the run itself is none."""
    services = {e.subject for e in run.events_of(EventKind.PROCESS_STARTED) if e.detail.get("role") == SERVICE}
    exits = [
        e for e in run.events_of(EventKind.PROCESS_EXITED)
        if e.t_ns <= end_ns and (e.subject in services or is_service(e.subject))
        and e.detail.get("status") not in ORDERLY
    ]  # fmt: skip
    started = _moments([e for e in run.events_of(EventKind.PROCESS_STARTED) if e.detail.get("role") == SERVICE])
    linked = _moments(run.events_of(EventKind.BLOCKS_LINKED))
    applied = _moments(run.events_of(EventKind.OPERATION_APPLIED))
    return [
        Outage(
            node=node_of(e), cause=_cause(e, struck), exited_ns=e.t_ns, status=int(str(e.detail.get("status") or 0)),
            started_s=_until(e, started), linked_s=_until(e, linked), applied_s=_until(e, applied),
        )
        for e in exits
    ]  # fmt: skip


def summarise_outages(found: list[Outage]) -> Outages:
    """Return their figures together."""
    return Outages(
        crashes=len(found), back=sum(o.applied_s is not None for o in found),
        unexplained=sum(not o.cause for o in found),
        applied_s=spread(o.applied_s for o in found), started_s=spread(o.started_s for o in found),
        linked_s=spread(o.linked_s for o in found),
    )  # fmt: skip


def away(found: list[Outage], end_ns: int) -> dict[str, list[tuple[int, int]]]:
    """Return, by node, the stretches in which it applied nothing because its service had crashed."""
    stretches: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for outage in found:
        over = end_ns if outage.applied_s is None else outage.exited_ns + round(outage.applied_s * NS_PER_S)
        stretches[outage.node].append((outage.exited_ns, over))
    return stretches


def _moments(events: list[Event]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for event in events:
        found[node_of(event)].append(event.t_ns)
    return found


def _until(event: Event, moments: dict[str, list[int]]) -> float | None:
    """Return the seconds from an event to the first of its node's moments that follows it."""
    theirs = moments.get(node_of(event), [])
    place = bisect.bisect_right(theirs, event.t_ns)
    return (theirs[place] - event.t_ns) / NS_PER_S if place < len(theirs) else None


def _cause(event: Event, struck: list[Strike]) -> str:
    """Return the fault that struck this node last before its exit, shortly before; "" if none did."""
    near = [
        (moment, strike.fault_id)
        for strike in struck if strike.node == node_of(event) and strike.sort is Sort.CRASH
        for moment in strike.moments if 0 <= event.t_ns - moment <= SOON_NS
    ]  # fmt: skip
    return max(near)[1] if near else ""

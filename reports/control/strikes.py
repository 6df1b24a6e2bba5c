"""What was done to the control plane: each fault, when it really struck, and whether that is proved."""

from __future__ import annotations

import enum
from collections import defaultdict
from typing import Final

import msgspec

from harness.run_folder import RunFolder
from reference_impl.rules.events import Event, EventKind
from reports.control.setup import node_of


class Sort(enum.StrEnum):
    """What a fault is to whoever waits for a reply."""

    CRASH = "crash"
    """A block service ends."""
    LOST = "lost"
    """It lives, and a reply is never sent, or after its deadline."""
    TWICE = "twice"
    FULL = "full"
    OTHER = "other"


_SORTS: Final = {
    "exit": Sort.CRASH, "kill": Sort.CRASH, "drop": Sort.LOST, "delay": Sort.LOST, "repeat": Sort.TWICE,
    "full": Sort.FULL,
}  # fmt: skip
_ACTIONS: Final = {
    "exit": "Process ends", "kill": "Process killed", "drop": "Reply dropped", "delay": "Reply held back",
    "repeat": "Request worked on twice", "full": "Disk full",
}  # fmt: skip
_POINTS: Final = {
    "received": "request received", "before_commit": "before the commit", "after_commit": "after the commit",
    "after_commit_before_reply": "after the commit, before the reply", "after_reply": "after the reply",
    "migration_accepted": "a moving group was accepted", "migration_copied": "a moving group was copied",
    "migration_decided": "a move was decided",
}  # fmt: skip
_KINDS: Final = {
    "blocks_kill": "Block service killed", "kill": "Engine killed", "router_hold": "Hand-offs held by the router",
}  # fmt: skip


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. `moments`: when it struck (none: it never did); of a fail point, each passage at which it acted."""

    fault_id: str
    key: str
    """Names its kind in `summary.json`."""
    title: str
    where: str
    """The fail point, in words; "" of other faults."""
    sort: Sort
    node: str
    injected_ns: int | None
    """None: it could not even be tried."""
    moments: list[int]
    methods: list[str]
    """Of each moment, the method that passed; "": any."""
    proved: bool


def strikes(run: RunFolder) -> list[Strike]:
    """Return every fault of the run, in the order in which they were injected or missed."""
    proved = {e.subject for e in run.events_of(EventKind.FAULT_PROVED)}
    injected = run.events_of(EventKind.FAULT_INJECTED)
    tried = {e.subject for e in injected}
    missed = [e for e in run.events_of(EventKind.FAULT_UNPROVED) if e.subject not in tried]
    reached = _reached(run, injected)
    found = [_strike(e, reached.get(e.subject, []), e.subject in proved) for e in injected]
    found += [_missed(e) for e in missed]
    return sorted(found, key=lambda s: s.injected_ns or 0)


def _named(event: Event) -> tuple[str, str, str]:
    detail = event.detail
    return str(detail.get("fault") or "fault"), str(detail.get("point") or ""), str(detail.get("action") or "")


def _reached(run: RunFolder, injected: list[Event]) -> dict[str, list[Event]]:
    """Give each passage of a fail point to the latest fault that ordered it there."""
    found: dict[str, list[Event]] = defaultdict(list)
    for passage in run.events_of(EventKind.FAIL_POINT_REACHED):
        node, action = node_of(passage), str(passage.detail.get("action") or "")
        orders = [
            e for e in injected
            if e.t_ns <= passage.t_ns and node_of(e) == node and _named(e)[1:] == (passage.subject, action)
        ]  # fmt: skip
        if orders:
            found[orders[-1].subject].append(passage)
    return found


def _strike(event: Event, passages: list[Event], is_proved: bool) -> Strike:
    kind, point, action = _named(event)
    return Strike(
        fault_id=event.subject, key=_key(kind, point, action), title=_title(kind, action),
        where=_POINTS.get(point, point), sort=_sort(kind, action), node=node_of(event), injected_ns=event.t_ns,
        moments=[p.t_ns for p in passages] if point else [event.t_ns],
        methods=[str(p.detail.get("method") or "") for p in passages] if point else [""], proved=is_proved,
    )  # fmt: skip


def _missed(event: Event) -> Strike:
    kind, point, action = _named(event)
    return Strike(
        fault_id=event.subject, key=_key(kind, point, action), title=_title(kind, action),
        where=_POINTS.get(point, point), sort=_sort(kind, action), node=node_of(event), injected_ns=None, moments=[],
        methods=[], proved=False,
    )  # fmt: skip


def _key(kind: str, point: str, action: str) -> str:
    return (f"{action}@{point}" if point else kind).replace(".", "_")


def _title(kind: str, action: str) -> str:
    return _ACTIONS.get(action, action) if action else _KINDS.get(kind, kind)


def _sort(kind: str, action: str) -> Sort:
    if kind == "blocks_kill":
        return Sort.CRASH
    return _SORTS.get(action, Sort.OTHER)

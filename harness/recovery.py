"""Recoveries, read off a run folder's events: the words for time of the architecture page, and nothing else."""

from __future__ import annotations

import msgspec

from harness.run_folder import RunFolder
from reference_impl.rules.events import Event, EventKind

NS_PER_S = 1e9


class Span(msgspec.Struct, frozen=True):
    """A named stretch of a recovery. `emulated`: its length comes from a profile and not from real work."""

    name: str
    start_ns: int
    end_ns: int
    emulated: bool = False

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return (self.end_ns - self.start_ns) / NS_PER_S


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What followed one proved kill of an engine. A moment that never came is None."""

    fault_id: str
    worker_id: str
    victim: str
    process: str = ""
    """Which process of the engine was killed, where it has several."""
    fault_ns: int
    successor: str | None = None
    lock_won_ns: int | None = None
    registered_ns: int | None = None
    first_service_ns: int | None = None
    redundancy_ns: int | None = None
    spans: list[Span] = []
    """Gapless from the fault to the registration, in order; empty if the worker never recovered."""

    @property
    def detection_s(self) -> float | None:
        """Fault -> lock won by the successor."""
        return _seconds(self.fault_ns, self.lock_won_ns)

    @property
    def promotion_s(self) -> float | None:
        """Lock won -> registered with the router (the canary's answer lies in between)."""
        return _seconds(self.lock_won_ns, self.registered_ns)

    @property
    def recovery_s(self) -> float | None:
        """Fault -> registered."""
        return _seconds(self.fault_ns, self.registered_ns)

    @property
    def first_service_s(self) -> float | None:
        """Registered -> first token of a user's request that the successor served."""
        return _seconds(self.registered_ns, self.first_service_ns)

    @property
    def redundancy_s(self) -> float | None:
        """Fault -> a new shadow is parked."""
        return _seconds(self.fault_ns, self.redundancy_ns)


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / NS_PER_S


def recoveries(run: RunFolder) -> list[Recovery]:
    """Return one `Recovery` a proved kill, in the order of the kills. An unproved fault has none."""
    proved = {e.subject for e in run.events_of(EventKind.FAULT_PROVED)}
    faults = [e for e in run.events_of(EventKind.FAULT_INJECTED) if e.subject in proved]
    found = []
    for fault in faults:
        worker = str(fault.detail.get("worker_id", ""))
        later = [f.t_ns for f in faults if f.t_ns > fault.t_ns and f.detail.get("worker_id") == worker]
        until = min(later, default=2**63 - 1)
        found.append(_recovery(run, fault, worker, until))
    return found


def _recovery(run: RunFolder, fault: Event, worker: str, until_ns: int) -> Recovery:
    window = [e for e in run.events if fault.t_ns <= e.t_ns < until_ns and e.detail.get("worker_id") == worker]
    lock = _first(window, EventKind.LOCK_WON)
    registered = _first(window, EventKind.ROUTER_REGISTERED)
    successor = registered.subject if registered else lock.subject if lock else None
    parked = [
        e for e in window if e.kind is EventKind.ENGINE_ASLEEP and e.subject != successor and _was_started(window, e)
    ]
    return Recovery(
        fault_id=fault.subject,
        worker_id=worker,
        victim=str(fault.detail.get("target", "")),
        process=str(fault.detail.get("process", "")),
        fault_ns=fault.t_ns,
        successor=successor,
        lock_won_ns=lock.t_ns if lock else None,
        registered_ns=registered.t_ns if registered else None,
        first_service_ns=_first_service(run, worker, successor, registered),
        redundancy_ns=parked[0].t_ns if parked else None,
        spans=_spans(window, fault, successor, registered) if registered else [],
    )


def _first(events: list[Event], kind: EventKind) -> Event | None:
    return next((e for e in events if e.kind is kind), None)


def _was_started(window: list[Event], parked: Event) -> bool:
    """A shadow counts as new redundancy only if its process began after the fault."""
    return any(e.kind is EventKind.PROCESS_STARTED and e.subject == parked.subject for e in window)


def _first_service(run: RunFolder, worker: str, successor: str | None, registered: Event | None) -> int | None:
    if successor is None or registered is None:
        return None
    served = run.requests[
        (run.requests.node_d == f"{worker}/{successor}") & (run.requests.first_token_ns >= registered.t_ns)
    ]
    return None if served.empty else int(served.first_token_ns.min())


def _spans(window: list[Event], fault: Event, successor: str | None, registered: Event) -> list[Span]:
    """Cut fault..registered into the successor's own phases, and name what lies between them."""
    phases = [
        e for e in window
        if e.kind in (EventKind.INIT_PHASE, EventKind.PROMOTION_PHASE) and e.subject == successor
    ]  # fmt: skip
    spans: list[Span] = []
    at = fault.t_ns
    for event in sorted(phases, key=lambda e: int(e.detail["start_ns"] or 0)):
        start, end = int(event.detail["start_ns"] or 0), int(event.detail["end_ns"] or 0)
        if end <= at or start >= registered.t_ns:
            continue
        if start > at:
            spans.append(Span(_gap_name(window, at, event, after_fault=not spans), at, start))
        end = min(end, registered.t_ns)  # a phase may end after the registration that it asked for
        if end > max(start, at):
            spans.append(Span(str(event.detail["name"]), max(start, at), end, bool(event.detail.get("emulated"))))
        at = end
    if at < registered.t_ns:
        spans.append(Span("register", at, registered.t_ns))
    return spans


def _gap_name(window: list[Event], start_ns: int, following: Event, *, after_fault: bool) -> str:
    """Name what lies before the phase `following`: of the first gap, only a successor to be started has init phases."""
    if after_fault:
        return "detect death and spawn" if following.kind is EventKind.INIT_PHASE else "process death to lock"
    end_ns = int(following.detail["start_ns"] or 0)
    took_lock = any(e.kind is EventKind.LOCK_WON and start_ns <= e.t_ns <= end_ns for e in window)
    return "take the lock" if took_lock else "between phases"

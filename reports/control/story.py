"""One retried operation, followed through the run: what its client did, what its node said, its lines in the logs."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import msgspec

from harness.run_folder import RunFolder
from reference_impl.rules.events import Event, EventKind
from reports.control.rpc_lines import RpcLine
from reports.control.setup import is_service, node_of
from workloads.operation_rows import Invocation

STEPS_MAX: Final = 24
LINES_MAX: Final = 6
_OF_OPERATION: Final = {
    EventKind.OPERATION_APPLIED: "applied, and its answer kept with it", EventKind.OPERATION_REPLAYED:
    "found: the kept answer is given again", EventKind.OPERATION_REFUSED: "refused, and the refusal kept",
}  # fmt: skip
_OF_NODE: Final = (
    EventKind.FAIL_POINT_REACHED, EventKind.PROCESS_EXITED, EventKind.PROCESS_STARTED, EventKind.BLOCKS_LINKED,
    EventKind.FAULT_INJECTED,
)  # fmt: skip


class Step(msgspec.Struct, frozen=True):
    """Something that happened; `of_operation`: to the operation itself, and not only around it."""

    t_ns: int
    who: str
    what: str
    of_operation: bool


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """One operation. `lines`: those of the services' logs and of the clients' that name it."""

    operation_id: str
    tenant: str
    node: str
    method: str
    start_ns: int
    steps: list[Step]
    left_out: int
    lines: list[RpcLine]


def story(run: RunFolder, lines: list[RpcLine]) -> Story | None:
    """Return the operation whose retry tells most, None if none was retried.

    Best is one that was applied, whose node then crashed, and whose retry found its answer; then one with lines in the
    logs; then the shortest.
    """
    asked: dict[tuple[str, str, str], list[Invocation]] = defaultdict(list)
    for invocation in run.control.invocations:
        asked[invocation.node, invocation.tenant, invocation.operation_id].append(invocation)
    said: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in run.events_of(*_OF_OPERATION):
        said[node_of(event), event.subject].append(event)
    logged: dict[str, list[RpcLine]] = defaultdict(list)
    for line in lines:
        logged[line.of("operation_id")].append(line)
    exits = defaultdict(list)
    for event in run.events_of(EventKind.PROCESS_EXITED):
        if is_service(event.subject):
            exits[node_of(event)].append(event.t_ns)
    best: tuple[tuple[bool, bool, bool, float], tuple[str, str, str]] | None = None
    for key, of in asked.items():
        if max(i.attempts for i in of) == 1 and len(of) == 1:
            continue
        rank = _rank(of, said[key[0], key[2]], exits[key[0]], bool(logged.get(key[2])))
        if best is None or rank > best[0]:
            best = rank, key
    if best is None:
        return None
    node, tenant, operation_id = best[1]
    return _told(run, asked[best[1]], said[node, operation_id], logged.get(operation_id, [])[:LINES_MAX], tenant)


def _rank(
    of: list[Invocation], said: list[Event], exits: list[int], logged: bool
) -> tuple[bool, bool, bool, float]:  # fmt: skip
    applied = [e.t_ns for e in said if e.kind is EventKind.OPERATION_APPLIED]
    replayed = [e.t_ns for e in said if e.kind is EventKind.OPERATION_REPLAYED]
    between = bool(applied and replayed) and any(applied[0] < t < replayed[0] for t in exits)
    span_ns = max(i.end_ns for i in of) - min(i.start_ns for i in of)
    return between, logged, bool(replayed), -span_ns


def _told(
    run: RunFolder, of: list[Invocation], said: list[Event], lines: list[RpcLine], tenant: str
) -> Story:  # fmt: skip
    of = sorted(of, key=lambda i: i.start_ns)
    node, start_ns, end_ns = of[0].node, of[0].start_ns, max(i.end_ns for i in of)
    steps = [step for i in of for step in _of_client(i)]
    steps += [
        Step(e.t_ns, f"{node} blocks", _OF_OPERATION[e.kind] + _refusal(e), True)
        for e in said if start_ns <= e.t_ns <= end_ns and e.detail.get("tenant") in (tenant, None)
    ]  # fmt: skip
    steps += [
        step for e in run.events_of(*_OF_NODE)
        if start_ns <= e.t_ns <= end_ns and node_of(e) == node and (step := _around(e)) is not None
    ]  # fmt: skip
    steps.sort(key=lambda s: s.t_ns)
    return Story(
        operation_id=of[0].operation_id, tenant=tenant, node=node, method=of[0].method, start_ns=start_ns,
        steps=steps[:STEPS_MAX], left_out=max(0, len(steps) - STEPS_MAX), lines=lines,
    )  # fmt: skip


def _of_client(i: Invocation) -> list[Step]:
    told = {"ok": "told that it is applied", "unknown": "gives up: it may have happened or not"}.get(i.outcome, "told")
    if i.outcome == "fail":
        told = f"told {i.refusal}" if i.refusal else f"gives up: {i.error_code}, nothing can have happened"
    again = ", as the answer given before" if i.replayed else ""
    attempts = "1 attempt" if i.attempts == 1 else f"{i.attempts} attempts"
    return [
        Step(i.start_ns, f"client {i.client}", f"calls {i.method} on {i.block_group_id}, epoch {i.epoch}", True),
        Step(i.end_ns, f"client {i.client}", f"{told}{again}, after {attempts}", True),
    ]


def _refusal(event: Event) -> str:
    return f" ({event.detail['refusal']})" if event.detail.get("refusal") else ""


def _around(event: Event) -> Step | None:
    """Return a step of a block service or of the harness; None of what is no news here: a fail point that is armed."""
    detail, node = event.detail, node_of(event)
    who, text = f"{node} blocks", ""
    match event.kind:
        case EventKind.FAIL_POINT_REACHED:
            text = f"fail point {event.subject}: {detail.get('action')}"
        case EventKind.FAULT_INJECTED if not detail.get("point"):
            who, text = "harness", f"{detail.get('fault')} of {detail.get('target') or node}"
        case EventKind.BLOCKS_LINKED:
            text = "its engine has told what it holds"
        case EventKind.PROCESS_EXITED if is_service(event.subject):
            text = f"process {detail.get('pid')} has ended with status {detail.get('status')}"
        case EventKind.PROCESS_STARTED if is_service(event.subject):
            text = f"process {detail.get('pid')} is started"
    return Step(event.t_ns, who, text, False) if text else None

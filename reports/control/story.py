"""One retried operation, followed through the run: what its client did, what its node said, its lines in the logs."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import msgspec

from harness.run_folder import RunFolder
from reference_impl.rules.events import Event, EventKind
from reports.control.caught import Key, tag_of
from reports.control.rpc_lines import CLIENTS, RpcLine
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
    asked: dict[Key, list[Invocation]] = defaultdict(list)
    for invocation in run.control.invocations:
        asked[invocation.node, invocation.tenant, invocation.operation_id].append(invocation)
    said: dict[Key, list[Event]] = defaultdict(list)
    for event in run.events_of(*_OF_OPERATION):
        said[node_of(event), str(event.detail.get("tenant", "")), event.subject].append(event)
    logged: dict[str, list[RpcLine]] = defaultdict(list)
    for line in lines:
        logged[line.of("operation_id")].append(line)
    exits = defaultdict(list)
    for event in run.events_of(EventKind.PROCESS_EXITED):
        if is_service(event.subject):
            exits[node_of(event)].append(event.t_ns)
    ranked = [
        (_rank(of, said[key], exits[key[0]], bool(_lines(of, logged))), key)
        for key, of in asked.items() if len(of) > 1 or of[0].attempts > 1
    ]  # fmt: skip
    if not ranked:
        return None
    key = max(ranked)[1]
    return _told(run, asked[key], said[key], _lines(asked[key], logged))


def _lines(of: list[Invocation], logged: dict[str, list[RpcLine]]) -> list[RpcLine]:
    """Return the lines of an operation, the services' first. A line names no tenant: it must also ask for the same."""
    wanted = {(i.method, i.block_group_id, str(i.epoch)) for i in of}
    found = [
        line for line in logged.get(of[0].operation_id, [])
        if (tag_of(line.of("rpc_method")), line.of("block_group_id"), line.of("epoch")) in wanted
    ]  # fmt: skip
    return sorted(found, key=lambda line: line.owner == CLIENTS)[:LINES_MAX]


def _rank(
    of: list[Invocation], said: list[Event], exits: list[int], logged: bool
) -> tuple[int, bool, bool, float]:  # fmt: skip
    """Rank by a crash between effect and replay (best within one call), lines in the logs, a replay, and shortness."""
    applied = [e.t_ns for e in said if e.kind is EventKind.OPERATION_APPLIED]
    replayed = [e.t_ns for e in said if e.kind is EventKind.OPERATION_REPLAYED]
    between = [(a, r) for a in applied[:1] for t in exits for r in replayed if a < t < r]
    in_one = any(i.start_ns <= a and r <= i.end_ns for i in of for a, r in between)
    span_ns = max(i.end_ns for i in of) - min(i.start_ns for i in of)
    return bool(between) + in_one, logged, bool(replayed), -span_ns


def _told(run: RunFolder, of: list[Invocation], said: list[Event], lines: list[RpcLine]) -> Story:
    of = sorted(of, key=lambda i: i.start_ns)
    node, start_ns, end_ns = of[0].node, of[0].start_ns, max(i.end_ns for i in of)
    steps = [step for i in of for step in _of_client(i)]
    steps += [Step(e.t_ns, f"{node} blocks", _OF_OPERATION[e.kind] + _refusal(e), True) for e in said]
    steps += [
        step for e in run.events_of(*_OF_NODE)
        if start_ns <= e.t_ns <= end_ns and node_of(e) == node and (step := _around(e)) is not None
    ]  # fmt: skip
    steps.sort(key=lambda s: s.t_ns)
    return Story(
        operation_id=of[0].operation_id, tenant=of[0].tenant, node=node, method=of[0].method, start_ns=start_ns,
        steps=steps[:STEPS_MAX], left_out=max(0, len(steps) - STEPS_MAX), lines=lines,
    )  # fmt: skip


def _of_client(i: Invocation) -> list[Step]:
    attempts = "after 1 attempt" if i.attempts == 1 else f"after {i.attempts} attempts"
    return [
        Step(i.start_ns, f"client {i.client}", f"calls {i.method} on {i.block_group_id}, epoch {i.epoch}", True),
        Step(i.end_ns, f"client {i.client}", f"{_ending(i)}, {attempts}", True),
    ]


def _ending(i: Invocation) -> str:
    again = ", as the answer given before" if i.replayed else ""
    if i.outcome == "ok":
        return f"told that it is applied{again}"
    if i.refusal and i.outcome == "fail":
        return f"told {i.refusal}{again}"
    because = f" ({i.error_code})" if i.error_code else ""
    may = "it may have happened or not" if i.outcome == "unknown" else "nothing can have happened"
    return f"gives up{because}: {may}"


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

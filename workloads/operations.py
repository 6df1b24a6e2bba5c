"""Clients of a control plane, as a process: an open loop of operations, each with its retries, written down at its end.

`python -m workloads.operations PLAN` with an `OperationsPlan` as JSON; the deployment's secret is in the environment.
What ended as unknown is asked for by its id (GetOperation) and asked again later, under its id, until it is known; at
the end every pin is taken back. What reads were answered is written down as well.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice import wire
from reference_impl.blockservice.calls import BAD_REPLY
from reference_impl.blockservice.client import (
    BlockClient,
    BreakerLimits,
    BreakerState,
    CallOutcome,
    Credentials,
    Result,
)
from reference_impl.blockservice.client_metrics import ClientMetrics
from reference_impl.blockservice.credentials import credential
from reference_impl.blockservice.rpc_log import RpcLog
from reference_impl.processes import die_with_parent
from reference_impl.realclock import host_ns, now_ns, wall_ns
from reference_impl.rules.blockgroups import GroupState, Migration
from reference_impl.rules.clock import NS_PER_MS, NS_PER_S
from reference_impl.rules.operations import canonical
from reference_impl.rules.retries import RetryBudget, RetryPolicy
from reference_impl.secret import TOKEN_VARIABLE
from workloads.chance import generator
from workloads.operation_mix import Asked, Known, Mix
from workloads.operation_rows import Invocation, Look, LookKind, Seen, Told

LIST_S: Final = 0.5
SAMPLE_S: Final = 0.5
CALL_S: Final = 4.0
"""What an operation's caller has time for; its attempts, pauses and waits together."""
POLICY: Final = RetryPolicy(attempts_max=6, initial_s=0.05, max_s=1.0, attempt_timeout_s=1.0)
BUDGET_TOKENS: Final = 40.0
"""Of a client, for all nodes together: a service's restart costs each of its calls some attempts."""
BREAKER: Final = BreakerLimits(failures=12)
"""Two calls with all their attempts."""
READ_S: Final = 0.1
READ_LIMIT_S: Final = 1.0
AGAIN_S: Final = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before an operation that ended as unknown is asked again."""
RUNNING_MAX: Final = 512
CLOSE_LIMIT_S: Final = 30.0
RELEASE_ROUNDS_MAX: Final = 5


class OperationsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done, by whom, for how long."""

    targets: dict[str, str]
    """By node: where its block service listens."""
    owner: str
    """The tenant whose groups the engines publish."""
    strangers: list[str] = []
    """Tenants to whom none of the groups belong."""
    clients: int
    rate_per_s: float
    """Operations a second, of all clients together; gaps are exponential."""
    start_ns: int
    """CLOCK_MONOTONIC."""
    seconds: float
    seed: int
    rows: str
    """A file of `Invocation`s, one a line."""
    looks: str
    """A file of `Look`s, one a line."""
    samples: str
    """A file of `Sample`s, one a line: the clients' own metrics."""
    log: str = ""
    """A file of one line a call, as the services write theirs; empty: none."""
    parent_pid: int = 0


class Sample(msgspec.Struct, frozen=True):
    """A client-side metric at a moment, of all clients together."""

    t_ns: int
    name: str
    value: float


_SUMMED: Final = {"rpc_retry_count", "rpc_timeout_count", "rpc_inflight_requests", "connection_pool_in_use", "rpc_qps"}
_LARGEST: Final = {"connection_pool_wait_time", "circuit_breaker_state", "rpc_latency_p50", "rpc_latency_p99",
                   "rpc_error_rate"}  # fmt: skip


class Operations:
    """All clients of one process."""

    def __init__(self, plan: OperationsPlan, secret: bytes) -> None:
        self._plan = plan
        self._metrics = [ClientMetrics() for _ in range(plan.clients)]
        self._rows = Path(plan.rows).open("ab", buffering=0)  # noqa: SIM115 # closed by `run`; a line is one write
        self._looks = Path(plan.looks).open("ab", buffering=0)  # noqa: SIM115 # as above
        self._samples = Path(plan.samples).open("ab", buffering=0)  # noqa: SIM115 # as above
        self._known: dict[str, list[Known]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._log = RpcLog(Path(plan.log) if plan.log else None)
        budgets = [RetryBudget(BUDGET_TOKENS) for _ in range(plan.clients)]
        self._clients = {
            (number, tenant, node): BlockClient(
                target, Credentials(tenant, credential(secret, tenant)), policy=POLICY, connections=1,
                metrics=self._metrics[number], budget=budgets[number], breaker=BREAKER, log=self._log.say,
                changed=self._breaker_changed,
            )
            for tenant in [plan.owner, *plan.strangers]
            for number in range(plan.clients if tenant == plan.owner else 1)
            for node, target in plan.targets.items()
        }  # fmt: skip
        self._readers = {
            (tenant, node): BlockClient(
                target, Credentials(tenant, credential(secret, tenant)), connections=1, log=self._log.say
            )
            for tenant in [plan.owner, *plan.strangers] for node, target in plan.targets.items()
        }  # fmt: skip
        """Of those who ask for operations: what they ask costs the writers no retry, and opens no breaker of theirs."""
        rng = generator(plan.seed, "operations")
        self._gaps = generator(plan.seed, "operations", "arrivals")
        self._mix = Mix(rng, list(plan.targets), plan.owner, plan.strangers, f"op-{plan.seed}")
        self._turn = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Do it all, or as much as there is time for until `stop`."""
        beside = [asyncio.create_task(work) for work in (self._list(), self._read(), self._sample())]
        try:
            await self._arrive(stop)
            await self._finish(stop)
        finally:
            for task in [*beside, *self._running]:
                task.cancel()
            await asyncio.gather(*beside, *self._running, return_exceptions=True)
            for client in (*self._clients.values(), *self._readers.values()):
                await client.close()
            self._rows.close()
            self._looks.close()
            self._samples.close()
            self._log.close()

    async def _arrive(self, stop: asyncio.Event) -> None:
        """Start operations on an absolute schedule."""
        plan = self._plan
        at_ns, end_ns = plan.start_ns, plan.start_ns + int(plan.seconds * NS_PER_S)
        while not stop.is_set():
            at_ns += int(self._gaps.exponential(1 / plan.rate_per_s) * NS_PER_S)
            if at_ns >= end_ns:
                return
            await asyncio.sleep(max(0, at_ns - now_ns()) / NS_PER_S)
            known = [group for groups in self._known.values() for group in groups]
            asked = self._mix.next(known, wall_ns() // NS_PER_MS)
            if asked is not None and len(self._running) < RUNNING_MAX:
                self._start(asked)

    def _start(self, asked: Asked) -> None:
        self._turn += 1
        task = asyncio.create_task(self._see_to(asked, self._turn))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _finish(self, stop: asyncio.Event) -> None:
        """Wait for what runs, and take pins back until none is left."""
        for _ in range(RELEASE_ROUNDS_MAX):
            if self._running and not stop.is_set():
                await asyncio.wait(set(self._running), timeout=CLOSE_LIMIT_S)
            left = self._mix.release(wall_ns() // NS_PER_MS)
            if not left or stop.is_set():
                return
            for asked in left:
                self._start(asked)

    async def _see_to(self, asked: Asked, turn: int) -> None:
        """Ask for an operation until it is known what became of it, and look meanwhile, and at times behind it."""
        number = turn % self._plan.clients if asked.tenant == self._plan.owner else 0
        client = self._clients[number, asked.tenant, asked.node]
        for pause_s in (*AGAIN_S, 0.0):
            result = await self._invoke(client, asked, f"{asked.tenant}-{number}")
            if result.outcome is not CallOutcome.UNKNOWN and result.attempts:
                self._mix.ended(asked, str(result.outcome), result.error_code)
                if self._mix.looks_after():
                    await self._ask_for(asked, f"{asked.tenant}-{number}")
                return
            await asyncio.sleep(pause_s)  # unknown, or not sent: the breaker was open, or there was no place
            if result.outcome is CallOutcome.UNKNOWN:
                await self._ask_for(asked, f"{asked.tenant}-{number}")

    async def _ask_for(self, asked: Asked, name: str) -> None:
        """Ask what became of an operation (KVC-IDEM-019)."""
        start_ns = host_ns()
        result = await self._readers[asked.tenant, asked.node].get_operation(
            asked.operation_id, issued_ms=asked.issued_ms, timeout_s=READ_LIMIT_S
        )
        self._saw(_look(asked, LookKind.OPERATION, asked.tenant, name, start_ns, result))

    def _saw(self, look: Look) -> None:
        self._looks.write(msgspec.json.encode(look) + b"\n")

    async def _invoke(self, client: BlockClient, asked: Asked, name: str) -> Result:
        """Call once, with the retries that the policy allows, and write it down."""
        method = wire.METHODS[type(asked.request)]
        message = wire.write_pb(wire.Named(asked.operation_id, asked.issued_ms), asked.request)
        start_ns = host_ns()
        result = Result(outcome=CallOutcome.UNKNOWN, error_code="BROKEN_OFF")
        try:
            result = await client.call(method, message, timeout_s=CALL_S)
        finally:
            self._rows.write(msgspec.json.encode(_row(asked, name, start_ns, host_ns(), result)) + b"\n")
        return result

    async def _list(self) -> None:
        """Learn, now and then, which groups there are."""
        while True:
            for node in self._plan.targets:
                listed = await self._clients[0, self._plan.owner, node].list_groups(
                    state=GroupState.RESIDENT, timeout_s=1.0
                )  # fmt: skip
                if isinstance(listed.reply, pb.ListGroupsReply):
                    self._known[node] = [Known(node, g.block_group_id, g.epoch, g.pins) for g in listed.reply.groups]
            await asyncio.sleep(LIST_S)

    async def _read(self) -> None:
        """Look at a group, and at a migration, now and then: reads are asked among the writes."""
        while True:
            await asyncio.sleep(READ_S)
            asked = self._mix.look([group for groups in self._known.values() for group in groups])
            if asked is None:
                continue
            owner, start_ns = self._plan.owner, host_ns()
            client = self._clients[0, owner, asked.node]
            if isinstance(asked, Known):
                kind = LookKind.METADATA
                result = await client.get_metadata(asked.block_group_id, timeout_s=READ_LIMIT_S)
            else:
                kind = LookKind.MIGRATION
                result = await client.get_migrate_status(
                    asked.operation_id, issued_ms=asked.issued_ms, timeout_s=READ_LIMIT_S
                )
            self._saw(_look(asked, kind, owner, f"{owner}-0", start_ns, result))

    def _breaker_changed(self, _before: BreakerState, after: BreakerState) -> None:
        """Write down each change: between two samples one may open and close."""
        value = float(list(BreakerState).index(after))
        self._samples.write(msgspec.json.encode(Sample(host_ns(), "circuit_breaker_state", value)) + b"\n")

    async def _sample(self) -> None:
        """Write the clients' own metrics down."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            t_ns = host_ns()
            for name, value in _gathered([metrics.text().decode() for metrics in self._metrics]).items():
                self._samples.write(msgspec.json.encode(Sample(t_ns, name, value)) + b"\n")


def _row(asked: Asked, client: str, start_ns: int, end_ns: int, result: Result) -> Invocation:
    request = asked.request
    answer, replayed, refusal = "", False, ""
    if isinstance(result.reply, pb.Answer):
        told, replayed = wire.answer_of(result.reply)
        answer, refusal = msgspec.json.encode(told).decode(), str(told.refusal)
    return Invocation(
        client=client, tenant=asked.tenant, node=asked.node, operation_id=asked.operation_id,
        method=str(type(request).__struct_config__.tag), block_group_id=request.block_group_id, epoch=request.epoch,
        params=canonical(request).decode(), start_ns=start_ns, end_ns=end_ns, outcome=str(result.outcome),
        replayed=replayed, refusal=refusal, error_code=result.error_code, answer=answer, attempts=result.attempts,
        timeouts=result.timeouts, latency_ms=(end_ns - start_ns) / NS_PER_MS,
    )  # fmt: skip


def _look(asked: Asked | Known, kind: LookKind, tenant: str, client: str, start_ns: int, result: Result) -> Look:
    """Return the row of a read that has just ended: of a group, or of an operation or the migration that it started."""
    if isinstance(asked, Known):
        operation_id, name = "", asked.block_group_id
    else:
        operation_id, name = asked.operation_id, asked.request.block_group_id
    said, error_code = "", result.error_code
    try:
        said = _said(result)
    except wire.BadRequest:
        error_code = BAD_REPLY
    return Look(
        client=client, tenant=tenant, node=asked.node, kind=kind, operation_id=operation_id, block_group_id=name,
        start_ns=start_ns, end_ns=host_ns(), outcome=str(result.outcome), error_code=error_code, said=said,
    )  # fmt: skip


def _said(result: Result) -> str:
    """Return what a read was answered, in the rules' own words. Raises BadRequest if it has no such words."""
    said: Told | Seen | Migration
    match result.reply:
        case pb.OperationState():
            known, answer = wire.state_of(result.reply)
            said = Told(known=known, answer=answer)
        case pb.Metadata():
            group, pins = wire.metadata_of(result.reply)
            said = Seen(group=group, pins=pins)
        case pb.Migration():
            said = wire.migration_of(result.reply)
        case _:
            return ""
    return msgspec.json.encode(said).decode()


def _gathered(texts: list[str]) -> dict[str, float]:
    """Return one value a metric: the sum over all clients, or the largest, as the metric wants it."""
    found: dict[str, float] = {}
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    for sample in (sample for family in families for sample in family.samples):
        if sample.name in _SUMMED:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
        elif sample.name in _LARGEST:
            found[sample.name] = max(found.get(sample.name, 0.0), sample.value)
    return found


async def _main(plan: OperationsPlan) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    await Operations(plan, os.environb.get(TOKEN_VARIABLE.encode(), b"")).run(stop)


def main() -> None:
    """Run the plan that the one argument holds."""
    plan = msgspec.json.decode(sys.argv[1], type=OperationsPlan)
    if plan.parent_pid:
        die_with_parent(plan.parent_pid)
    asyncio.run(_main(plan))


if __name__ == "__main__":
    main()

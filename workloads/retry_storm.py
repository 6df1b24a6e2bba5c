"""A retry storm: many clients, a server of fixed capacity, an outage in the middle, with the retry budget and without.

Calls arrive at a rate that does not ask how the server is (an open loop), below its capacity: a few at first, then
`LOAD` of what it can do, through an outage and after it, and few again. The server works on a fixed number of attempts
at a time and keeps a queue; it does not notice that a caller has left, so work on attempts that timed out is lost. With
retries that nothing bounds, what is offered in the outage is a multiple of the calls, and stays it afterwards: the
queue is full of attempts that nobody waits for, so further attempts time out and are repeated (RPC document, "retry
storm"). With a budget it is little more than the calls, and the queue drains. Source: KVC-IDEM-013; issue 4.

Server and clients are real (gRPC over loopback, in one process); only the server's work is a wait. Each client has a
connection, a retry budget and its own jitter. The breaker is kept out of it: it would hide what the budget does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import grpc
import msgspec

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice.client import BlockClient, BreakerLimits, Credentials
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_MS, NS_PER_S, s_to_ns
from reference_impl.rules.retries import RetryBudget, RetryPolicy
from workloads.chance import generator

BIN_MS: Final = 100
LOAD: Final = 0.7
FEW: Final = 0.3
PHASES: Final = ((0.08, FEW, True), (0.20, LOAD, True), (0.60, LOAD, False), (0.94, LOAD, True), (1.0, FEW, True))
"""Until which share of the time, at which share of the capacity, and whether the server works."""
WORKERS: Final = 5
WORK_S: Final = 0.02
CAPACITY_PER_S: Final = WORKERS / WORK_S
QUEUE_MAX: Final = 80
"""0.32 s of work: longer than an attempt waits, so a full queue answers nobody in time."""
CALL_TIMEOUT_S: Final = 1.2
POLICY: Final = RetryPolicy(attempt_timeout_s=0.2)
TOKENS_MAX: Final = 4.0
"""A client makes only some calls in an outage of seconds, so its budget is small: one retry, then one in ten."""
STOP_S: Final = 1.0
NEVER_OPEN: Final = BreakerLimits(failures=1 << 30)
_RESERVE: Final = "/pdproof.blocks.v1.BlockGroups/Reserve"


class NoBudget(RetryBudget):
    """Pays for every retry: what a client without a budget does."""

    @property
    def may_retry(self) -> bool:
        """Always."""
        return True


class StormRow(msgspec.Struct, frozen=True):
    """What happened in the `BIN_MS` that begin at `t_ms`. Calls are counted as started once and as ended once."""

    t_ms: int
    calls_started: int
    attempts_arrived: int
    """At the server, in time or not."""
    succeeded: int
    failed: int
    unknown: int


class StormResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run: with the budget, or without."""

    budget: bool
    clients: int
    seed: int
    seconds: float
    capacity_per_s: float
    outage_from_ms: int
    outage_to_ms: int
    rows: list[StormRow]

    def amplification(self, from_ms: float = 0, to_ms: float = float("inf")) -> float:
        """Return attempts a call in a part of the run; 0 if no call was made."""
        calls = self.total("calls_started", from_ms, to_ms)
        return self.total("attempts_arrived", from_ms, to_ms) / calls if calls else 0.0

    @property
    def storm_amplification(self) -> float:
        """Attempts a call during the outage."""
        return self.amplification(self.outage_from_ms, self.outage_to_ms)

    @property
    def goodput_after(self) -> float:
        """Share of the calls after the outage that succeeded, as long as the load was high."""
        window = self.outage_to_ms, PHASES[3][0] * self.seconds * 1e3
        calls = self.total("calls_started", *window)
        return self.total("succeeded", *window) / calls if calls else 0.0

    @property
    def recovered_ms(self) -> int:
        """How long after the outage half a second's successes came to 80 % of its calls; -1: not in this run."""
        for row in self.rows:
            window = row.t_ms, row.t_ms + 500
            if row.t_ms >= self.outage_to_ms and window[1] <= self.seconds * 1e3:
                calls = self.total("calls_started", *window)
                if calls and self.total("succeeded", *window) >= 0.8 * calls:
                    return row.t_ms - self.outage_to_ms
        return -1

    def total(self, column: str, from_ms: float, to_ms: float) -> int:
        """Return the sum of a column over the rows that begin in a part of the run."""
        return sum(getattr(row, column) for row in self.rows if from_ms <= row.t_ms < to_ms)


class SlowServer(grpc.GenericRpcHandler):
    """Does `WORKERS` attempts at a time, `WORK_S` each, in order; what finds the queue full is never answered.

    A worker that wakes up late works on the next attempt for so much less: a busy machine does not lower the capacity.
    """

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived
        self._works = asyncio.Event()
        self._resumed_ns = 0
        self._queue: asyncio.Queue[tuple[int, asyncio.Future[None]]] = asyncio.Queue(QUEUE_MAX)
        self._workers: list[asyncio.Task[None]] = []
        self._server = grpc.aio.server(handlers=(self,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    async def start(self) -> None:
        """Listen and work."""
        self.resume()
        self._workers = [asyncio.create_task(self._work()) for _ in range(WORKERS)]
        await self._server.start()

    def stand_still(self) -> None:
        """Work on nothing more: the outage."""
        self._works.clear()

    def resume(self) -> None:
        """Work again."""
        if not self._works.is_set():
            self._resumed_ns = now_ns()
            self._works.set()

    async def stop(self) -> None:
        """Drop everything."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        await self._server.stop(STOP_S)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the one method that there is (gRPC's protocol)."""
        if handler_call_details.method != _RESERVE:
            return None
        self._arrived()
        return grpc.unary_unary_rpc_method_handler(
            self._reserve, request_deserializer=pb.ReserveRequest.FromString,
            response_serializer=pb.Answer.SerializeToString,
        )  # fmt: skip

    async def _reserve(self, _request: pb.ReserveRequest, _context: grpc.aio.ServicerContext[Any, Any]) -> pb.Answer:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._queue.full():
            self._queue.put_nowait((now_ns(), done))
        await done  # gRPC cancels this when the attempt's deadline is over; the work stays in the queue
        return pb.Answer(disposition=pb.APPLIED)

    async def _work(self) -> None:
        free_ns = 0
        while True:
            arrived_ns, done = await self._queue.get()
            await self._works.wait()
            free_ns = max(free_ns, arrived_ns, self._resumed_ns) + s_to_ns(WORK_S)
            await asyncio.sleep(max(0, free_ns - now_ns()) / NS_PER_S)
            if not done.done():
                done.set_result(None)


class _Storm:
    """One run: counts by what happened and when, and the calls under way."""

    def __init__(self, clients: list[BlockClient]) -> None:
        self.clients = clients
        self.counts: Counter[tuple[str, int]] = Counter()
        self.began_ns = now_ns()
        self._calls: set[asyncio.Task[None]] = set()
        self._made = 0

    @property
    def t_ms(self) -> int:
        """Since the run began."""
        return (now_ns() - self.began_ns) // NS_PER_MS

    def count(self, what: str) -> None:
        """Note that something happened now."""
        self.counts[what, self.t_ms // BIN_MS] += 1

    def start(self, client: BlockClient) -> None:
        """Start a call. No more are under way than arrive within a call's longest time."""
        self._made += 1
        task = asyncio.create_task(self._call(client, f"storm-{self._made}"))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def ended(self) -> None:
        """Wait until no call is under way."""
        while self._calls:
            await asyncio.wait(self._calls, timeout=2 * CALL_TIMEOUT_S)

    async def _call(self, client: BlockClient, operation_id: str) -> None:
        self.count("calls_started")
        result = await client.reserve("bg_1", 1, 1, operation_id=operation_id, timeout_s=CALL_TIMEOUT_S)
        self.count(result.outcome)

    def rows(self) -> list[StormRow]:
        """Return every bin up to the last in which anything happened."""
        bins = range(max((n for _, n in self.counts), default=-1) + 1)
        columns = ("calls_started", "attempts_arrived", "ok", "fail", "unknown")
        return [StormRow(n * BIN_MS, *(self.counts[column, n] for column in columns)) for n in bins]


async def storm(
    *, budget: bool, clients: int = 200, seconds: float = 30.0, seed: int = 1, tokens_max: float = TOKENS_MAX
) -> StormResult:  # fmt: skip
    """Run one storm of so many seconds and return what happened; equal seeds make equal arrivals."""
    run = _Storm([])
    server = SlowServer(lambda: run.count("attempts_arrived"))
    await server.start()
    run.clients = [_client(server.port, n, budget, seed, tokens_max) for n in range(clients)]
    try:
        await _connect(run.clients)
        run.counts.clear()
        run.began_ns = now_ns()
        await _arrivals(run, server, seconds, seed)
        await run.ended()
    finally:
        for client in run.clients:
            await client.close()
        await server.stop()
    return StormResult(
        budget=budget, clients=clients, seed=seed, seconds=seconds, capacity_per_s=CAPACITY_PER_S,
        outage_from_ms=round(PHASES[1][0] * seconds * 1e3), outage_to_ms=round(PHASES[2][0] * seconds * 1e3),
        rows=run.rows(),
    )  # fmt: skip


def _client(port: int, n: int, budget: bool, seed: int, tokens_max: float) -> BlockClient:
    return BlockClient(
        f"127.0.0.1:{port}", Credentials(f"storm-{n}", "none"), policy=POLICY, connections=1, breaker=NEVER_OPEN,
        budget=RetryBudget(tokens_max) if budget else NoBudget(tokens_max), draw=generator(seed, "jitter", n).random,
    )  # fmt: skip


async def _connect(clients: list[BlockClient]) -> None:
    """Make every connection before the run, a few at a time."""
    for n in range(0, len(clients), WORKERS):
        await asyncio.gather(
            *(c.reserve("bg_1", 1, 1, operation_id="connect", timeout_s=30) for c in clients[n : n + WORKERS])
        )


async def _arrivals(run: _Storm, server: SlowServer, seconds: float, seed: int) -> None:
    """Start calls at the planned moments, late ones at once, and let the server stand still in the outage."""
    chance = generator(seed, "storm")
    at_s = 0.0
    for until, load, works in PHASES:
        at_s = max(at_s, run.t_ms / 1e3)
        (server.resume if works else server.stand_still)()
        while at_s < until * seconds:
            left_s = at_s - (now_ns() - run.began_ns) / NS_PER_S
            if left_s > 0:
                await asyncio.sleep(left_s)
            run.start(run.clients[int(chance.integers(len(run.clients)))])
            at_s += chance.exponential(1 / (load * CAPACITY_PER_S))

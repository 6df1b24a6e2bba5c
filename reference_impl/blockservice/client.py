"""The client of a block-group service: one call is one operation, however many attempts it takes.

Every attempt carries the same operation, a deadline of its own that is never beyond what its caller has left
(KVC-IDEM-012), and its number. Within one call that is seen to; who calls again for the same operation passes the same
`operation_id`, `issued_ms` and parameters: together they say which operation it is. Which errors are tried again, how
often and after what pause, `rules.retries` says; the libraries do the attempts and the breaker (KVC-IDEM-013, -014). A
call never raises for what a server or a network does: its `Result` says what may be concluded. With CIRCUIT_OPEN, or
whenever a prefix cannot be had in time, compute it anew.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import grpc
from google.protobuf.message import Message
from grpc.aio import AioRpcError, Metadata
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice import credentials as proof
from reference_impl.blockservice.breaker import Breaker, BreakerLimits, BreakerState
from reference_impl.blockservice.calls import (
    MAY_BE_RETRIED,
    NOTHING_RAN,
    CallOutcome,
    Credentials,
    Method,
    NotSent,
    Result,
    line_of,
    method_of,
    of_error,
    of_not_sent,
    of_reply,
)
from reference_impl.blockservice.client_metrics import CallStats, ClientMetrics, Watched
from reference_impl.blockservice.deadline import remaining_s
from reference_impl.blockservice.pool import Connection, Pool
from reference_impl.blockservice.rpc_log import Line
from reference_impl.realclock import now_ns, wall_ns
from reference_impl.rules.clock import NS_PER_MS, NS_PER_S, s_to_ns
from reference_impl.rules.retries import RetryBudget, RetryPolicy, backoff_s

__all__ = ["BlockClient", "BreakerLimits", "BreakerState", "CallOutcome", "Credentials", "Result"]

TIMEOUT_MAX_S: Final = 3600.0
POLICY: Final = RetryPolicy()
BREAKER: Final = BreakerLimits()
CANCELLED: Final = "CANCELLED"
ALMOST_NS: Final = 10 * NS_PER_MS
"""A server may end an attempt that much before its deadline because of it: lengths travel in whole milliseconds."""


class _Call:
    """One call under way."""

    def __init__(self, method: Method, request: Message, request_id: str, limit_s: float) -> None:
        self.method = method
        self.request = request
        self.request_id = request_id
        self.began_ns = now_ns()
        self.end_ns = self.began_ns + s_to_ns(limit_s)
        self.limit_s = limit_s
        self.attempts = 0
        self.timeouts = 0
        self.waited_s = 0.0
        self.doubtful = False

    @property
    def left_s(self) -> float:
        """What is left of its time."""
        return (self.end_ns - now_ns()) / NS_PER_S


class BlockClient:
    """Calls one node's service on behalf of one tenant. Make and use it in one event loop; `close` it at the end.

    Every write takes `operation_id` and `issued_ms`, the moment at which the operation was made (ms of the wall clock).
    Left out, that is now: right for an operation that is asked for in this one call, whatever its attempts. Who may ask
    again, say after an "unknown", takes a moment once and passes it every time. With another one it is another
    operation under the same id: refused as ID_REUSED (field "issued_ms") while the first one's answer is kept.

    `policy` and `budget` bound the retries; clients that share a budget share its tokens. `draw` gives the jitter,
    uniform in [0, 1), and `sleep` waits. `log` is given a line at the end of every call (`RpcLog.say`), `changed` the
    breaker's state before and after every change.
    """

    def __init__(
        self,
        target: str,
        credentials: Credentials,
        *,
        policy: RetryPolicy = POLICY,
        budget: RetryBudget | None = None,
        connections: int = 2,
        calls_per_connection: int = 64,
        waiting_max: int = 1024,
        breaker: BreakerLimits = BREAKER,
        draw: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        metrics: ClientMetrics | None = None,
        log: Callable[[Line], None] | None = None,
        changed: Callable[[BreakerState, BreakerState], None] | None = None,
    ) -> None:
        self.target = target
        self.policy = policy
        self.budget = budget if budget is not None else RetryBudget()
        self.pool = Pool(target, connections, calls_per_connection, waiting_max)
        self.breaker = Breaker(target, breaker, changed)
        self.stats = CallStats()
        self._who = credentials
        self._draw = draw if draw is not None else secrets.SystemRandom().random
        self._sleep = sleep
        self._log = log
        self._metrics = metrics
        self._ids = secrets.token_hex(4)
        self._made = 0
        self._closed = False
        self._watched: Watched | None = None
        if metrics is not None:
            self._watched = metrics.add(target, credentials.tenant, self.stats, self.pool, self.breaker)

    async def close(self) -> None:
        """Close the connections. Calls under way end as unknown."""
        if self._closed:
            return
        self._closed = True
        if self._metrics is not None and self._watched is not None:
            self._metrics.remove(self._watched)
        await self.pool.close()

    async def call(self, method: str, request: Message, *, timeout_s: float, request_id: str = "") -> Result:
        """Call `method` (its name in blocks.proto); return how it ended, within `timeout_s` or what is left upstream.

        `request_id` is for logs; one is made if it is empty. Raises ValueError or TypeError for a call that could not
        be meant, RuntimeError once closed, and CancelledError if the caller's task is cancelled; nothing else.
        """
        if self._closed:
            raise RuntimeError(f"the client of {self.target} is closed")
        if not 0 < timeout_s <= TIMEOUT_MAX_S:
            raise ValueError(f"timeout_s must be above 0 and at most {TIMEOUT_MAX_S:g}, got {timeout_s}")
        call = _Call(method_of(method, request), request, request_id or self._next_id(), self._limit_s(timeout_s))
        self.stats.inflight += 1
        result: Result | None = None
        try:
            result = await self._run(call)
            return result
        finally:
            self.stats.inflight -= 1
            self._ended(call, result)

    async def _run(self, call: _Call) -> Result:
        attempts = AsyncRetrying(
            sleep=self._sleep, stop=partial(self._enough, call), wait=self._pause_s, reraise=True,
            retry=retry_if_exception(self._may_be_retried),
        )  # fmt: skip
        try:
            return of_reply(await attempts(self._attempt, call), call)
        except AioRpcError as error:
            return of_error(error, call)
        except NotSent as error:
            return of_not_sent(error, call)

    def _limit_s(self, timeout_s: float) -> float:
        """Return how long a call may take: no longer than whoever called us has left."""
        upstream_s = remaining_s()
        return timeout_s if upstream_s is None else min(timeout_s, upstream_s)

    def _attempt_limit_s(self, call: _Call) -> float:
        """Return how long an attempt may take.

        The server may be told of up to 3 % more: gRPC repeats a length that it has sent before. Ours ends it then.
        """
        return min(self.policy.attempt_timeout_s, call.left_s)

    @staticmethod
    def _may_be_retried(error: BaseException) -> bool:
        return isinstance(error, AioRpcError) and error.code() in MAY_BE_RETRIED

    def _pause_s(self, state: RetryCallState) -> float:
        return backoff_s(self.policy, state.attempt_number, self._draw())

    def _enough(self, call: _Call, state: RetryCallState) -> bool:
        """Whether no further attempt is made: too many, none that the budget pays, or no time left after the pause."""
        if state.attempt_number >= self.policy.attempts_max or not self.budget.may_retry:
            return True
        return call.left_s <= state.upcoming_sleep

    async def _attempt(self, call: _Call) -> Message:
        async with self.breaker.attempt(), self.pool.place(max(0.0, call.left_s), call) as connection:
            self.breaker.check()
            return await self._send(call, connection)

    async def _send(self, call: _Call, connection: Connection) -> Message:
        limit_s = self._attempt_limit_s(call)
        if limit_s <= 0:
            raise NotSent(grpc.StatusCode.DEADLINE_EXCEEDED.name, f"no time was left of {call.limit_s:.3f} s")
        end_ns = now_ns() + s_to_ns(limit_s) - ALMOST_NS
        call.attempts += 1
        self.stats.retries += call.attempts > 1
        who = self._who
        metadata = proof.metadata(who.tenant, who.credential, request_id=call.request_id, attempt=call.attempts)
        try:
            reply = await connection.stub(call.method)(call.request, timeout=limit_s, metadata=Metadata(*metadata))
        except AioRpcError as given:
            error = _too_late(given) if given.code() is grpc.StatusCode.CANCELLED and now_ns() >= end_ns else given
            self._failed(call, error)
            raise error from None
        except asyncio.CancelledError:
            if not self._closed or _asked_to_stop():
                raise
            raise _closed_under(self.target) from None  # by `close`: nobody cancelled the caller
        self.budget.succeeded()
        return reply

    def _failed(self, call: _Call, error: AioRpcError) -> None:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            call.timeouts += 1
            self.stats.timeouts += 1
        if error.code() in MAY_BE_RETRIED:
            self.budget.failed()
        call.doubtful = call.doubtful or error.code() not in NOTHING_RAN

    def _ended(self, call: _Call, result: Result | None) -> None:
        """Count and log a call; no result: its caller gave it up."""
        outcome = CANCELLED.lower() if result is None else result.outcome
        error = result is None or result.reply is None
        latency_ms = self.stats.ended(call.method.name, outcome, call.began_ns, error=error)
        if self._log is not None:
            self._log(
                line_of(
                    call.method.name,
                    call.request,
                    call.request_id,
                    limit_s=call.limit_s,
                    latency_ms=latency_ms,
                    attempts=call.attempts,
                    error_code=CANCELLED if result is None else result.error_code,
                )
            )

    def _next_id(self) -> str:
        self._made += 1
        return f"{self._ids}-{self._made}"

    # The methods of blocks.proto. `issued_ms` left out is now: of an operation that is never called again (see above).

    async def reserve(
        self, block_group_id: str, epoch: int, slots: int, *, operation_id: str, issued_ms: int | None = None,
        timeout_s: float,
    ) -> Result:  # fmt: skip
        """Set `slots` blocks aside for a group to grow by."""
        request = pb.ReserveRequest(
            operation=_operation(operation_id, issued_ms), block_group_id=block_group_id, epoch=epoch, slots=slots
        )
        return await self.call("Reserve", request, timeout_s=timeout_s)

    async def pin(
        self, block_group_id: str, epoch: int, request_id: str, *, operation_id: str, issued_ms: int | None = None,
        timeout_s: float,
    ) -> Result:  # fmt: skip
        """Keep a group for a request."""
        request = _pin(block_group_id, epoch, request_id, _operation(operation_id, issued_ms))
        return await self.call("Pin", request, timeout_s=timeout_s, request_id=request_id)

    async def unpin(
        self, block_group_id: str, epoch: int, request_id: str, *, operation_id: str, issued_ms: int | None = None,
        timeout_s: float,
    ) -> Result:  # fmt: skip
        """Keep it for that request no longer."""
        request = _pin(block_group_id, epoch, request_id, _operation(operation_id, issued_ms))
        return await self.call("Unpin", request, timeout_s=timeout_s, request_id=request_id)

    async def evict(
        self, block_group_id: str, epoch: int, *, operation_id: str, issued_ms: int | None = None, timeout_s: float
    ) -> Result:  # fmt: skip
        """Give a group's blocks back."""
        request = pb.EvictRequest(
            operation=_operation(operation_id, issued_ms), block_group_id=block_group_id, epoch=epoch
        )
        return await self.call("Evict", request, timeout_s=timeout_s)

    async def prepare_get(
        self, block_group_id: str, epoch: int, request_id: str, *, operation_id: str, issued_ms: int | None = None,
        timeout_s: float,
    ) -> Result:  # fmt: skip
        """Ask where a group's bytes can be read, once; the reply's `place` says so (KVC-IDEM-016)."""
        request = pb.PrepareGetRequest(
            operation=_operation(operation_id, issued_ms), block_group_id=block_group_id, epoch=epoch,
            request_id=request_id,
        )  # fmt: skip
        return await self.call("PrepareGet", request, timeout_s=timeout_s, request_id=request_id)

    async def start_migrate(
        self, block_group_id: str, epoch: int, src: str, dst: str, *, operation_id: str, issued_ms: int | None = None,
        timeout_s: float,
    ) -> Result:  # fmt: skip
        """Start to move a group; the operation's id names the migration."""
        request = pb.StartMigrateRequest(
            operation=_operation(operation_id, issued_ms), block_group_id=block_group_id, epoch=epoch, src=src, dst=dst
        )
        return await self.call("StartMigrate", request, timeout_s=timeout_s)

    async def cancel_migrate(
        self, block_group_id: str, epoch: int, migration_id: str, *, operation_id: str, issued_ms: int | None = None,
        timeout_s: float,
    ) -> Result:  # fmt: skip
        """End a migration, if it is not decided yet."""
        request = pb.CancelMigrateRequest(
            operation=_operation(operation_id, issued_ms), block_group_id=block_group_id, epoch=epoch,
            migration_id=migration_id,
        )  # fmt: skip
        return await self.call("CancelMigrate", request, timeout_s=timeout_s)

    async def get_metadata(self, block_group_id: str, *, timeout_s: float) -> Result:
        """Ask what is known of a group."""
        return await self.call("GetMetadata", pb.GetMetadataRequest(block_group_id=block_group_id), timeout_s=timeout_s)

    async def list_groups(self, *, state: str = "", limit: int = 0, after: str = "", timeout_s: float) -> Result:
        """Ask for groups in the order of their ids: of `state` ("": any), those after `after`, at most `limit`."""
        request = pb.ListGroupsRequest(state=state, limit=limit, after=after)
        return await self.call("ListGroups", request, timeout_s=timeout_s)

    async def get_migrate_status(
        self, operation_id: str, *, issued_ms: int | None = None, timeout_s: float
    ) -> Result:  # fmt: skip
        """Ask how far a migration is. `issued_ms` does not matter to that."""
        request = pb.GetOperationRequest(operation=_operation(operation_id, issued_ms))
        return await self.call("GetMigrateStatus", request, timeout_s=timeout_s)

    async def get_operation(self, operation_id: str, *, issued_ms: int | None = None, timeout_s: float) -> Result:
        """Ask what became of an operation whose answer was lost (KVC-IDEM-019).

        `issued_ms` is the operation's own: of one that is not known, it tells whether it may still run, or is too old.
        """
        request = pb.GetOperationRequest(operation=_operation(operation_id, issued_ms))
        return await self.call("GetOperation", request, timeout_s=timeout_s)


def _operation(operation_id: str, issued_ms: int | None) -> pb.Operation:
    return pb.Operation(
        operation_id=operation_id, issued_ms=wall_ns() // NS_PER_MS if issued_ms is None else issued_ms
    )  # fmt: skip


def _pin(block_group_id: str, epoch: int, request_id: str, operation: pb.Operation) -> pb.PinRequest:
    return pb.PinRequest(operation=operation, block_group_id=block_group_id, epoch=epoch, request_id=request_id)


def _asked_to_stop() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _too_late(error: AioRpcError) -> AioRpcError:
    """Return what a server's CANCELLED means when the time was over: its timer was a moment earlier than ours."""
    return AioRpcError(
        grpc.StatusCode.DEADLINE_EXCEEDED, Metadata(), error.trailing_metadata(), details="cancelled at its deadline"
    )


def _closed_under(target: str) -> AioRpcError:
    return AioRpcError(
        grpc.StatusCode.CANCELLED, Metadata(), Metadata(), details=f"the client of {target} was closed under it"
    )

"""The server of a node's control plane: gRPC in, a `Node` behind, and between them what every call must keep to.

A call is admitted (room, credential, deadline), read (every bound), and worked on in the time that its caller has left:
once that is over, or he has hung up, the work is cancelled wherever it waits, and a commit that has begun goes on to
its end, to be found by the retry. No exception of a handler gets out: a caller sees one line, the log the rest.

Errors carry `x-pdproof-field` (what of the request is at fault) and `x-pdproof-rule` (one of `Rule`) in their trailing
metadata. Source: RPC document; KVC-IDEM-012, -015, -016, -018, -019.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import Message

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice import credentials, wire
from reference_impl.blockservice.buckets import Bucket, Buckets, RateLimited
from reference_impl.blockservice.deadline import remaining_s, within
from reference_impl.blockservice.engine_link import NoEngine
from reference_impl.blockservice.failpoints import Action, FailPoints, Point
from reference_impl.blockservice.metrics import RpcMetrics
from reference_impl.blockservice.node import CallerGone
from reference_impl.blockservice.rpc_log import Line, RpcLog
from reference_impl.blockservice.store import Done, StoreError
from reference_impl.blockservice.wire import BadRequest, Copy, Known
from reference_impl.blockservice.writer import QueueFull
from reference_impl.realclock import now_ns
from reference_impl.rules.blockgroups import Answer, Group, GroupState, Migration, PrepareGet, Request
from reference_impl.rules.clock import NS_PER_MS

PACKAGE: Final = "pdproof.blocks.v1"
FIELD_KEY: Final = "x-pdproof-field"
RULE_KEY: Final = "x-pdproof-rule"
METADATA_BYTES_MAX: Final = 8 * 1024
DEADLINE_S_MAX: Final = 600.0
"""No work goes on for longer, whatever its caller would wait."""
ATTEMPT_MAX: Final = 1000
_LEFT_SHARE: Final = 0.99
"""gRPC rounds the time that a caller leaves up, by 1 % at most: so much less of it is used, that none is exceeded."""
_WAIT_SHARE: Final = 0.5
"""Of the time left, how much a call waits for its token: who is refused then can still do something else."""
_SILENCE_S: Final = 5.0
"""How long after its deadline a call without a reply is ended, if gRPC has not done so."""
_FAIL_POINTS: Final = "FailPoints"
"""The service whose calls pass no fail points: an order would end the process with the call that gives it."""
_LOGGER: Final = logging.getLogger(__name__)

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class Rule(enum.StrEnum):
    """Why a call ended with an error of gRPC: nothing was decided, or nobody can say."""

    BAD_REQUEST = "BAD_REQUEST"
    NO_DEADLINE = "NO_DEADLINE"
    WRONG_CREDENTIAL = "WRONG_CREDENTIAL"
    UNKNOWN_GROUP = "UNKNOWN_GROUP"
    UNKNOWN_OPERATION = "UNKNOWN_OPERATION"
    TOO_MANY_CALLS = "TOO_MANY_CALLS"
    RATE_LIMITED = "RATE_LIMITED"
    QUEUE_FULL = "QUEUE_FULL"
    NO_ENGINE = "NO_ENGINE"
    STORE_FULL = "STORE_FULL"
    STORE_LOCKED = "STORE_LOCKED"
    STORE_DAMAGED = "STORE_DAMAGED"
    STORE_FAILING = "STORE_FAILING"
    TIMED_OUT = "TIMED_OUT"
    REPLY_TOO_LARGE = "REPLY_TOO_LARGE"
    BROKEN = "BROKEN"


class CallError(Exception):
    """How a call ends, if not with a reply."""

    def __init__(self, code: grpc.StatusCode, rule: Rule, message: str, field: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.rule = rule
        self.field = field


class _ReplyDropped(Exception):
    """A fail point says that this reply is never sent."""


class Node(Protocol):
    """What the server needs of a node. Any method may raise StoreError, QueueFull, NoEngine or CallerGone."""

    async def write(self, tenant: str, operation_id: str, issued_ms: int, request: Request) -> Done:
        """Have a write run, or its answer given again (KVC-IDEM-001). Cancelled, it stops if nothing is queued yet."""
        ...

    async def metadata(self, tenant: str, block_group_id: str) -> tuple[Group, int] | None:
        """Return a group and how many requests pin it; None: there is none."""
        ...

    async def groups(self, tenant: str, state: GroupState | None, limit: int, after: str) -> list[tuple[Group, int]]:
        """Return groups with their pins, by id, at most `limit`, and only those whose ids come after `after`."""
        ...

    async def migration(self, tenant: str, operation_id: str) -> Migration | None:
        """Return the migration that an operation started; None: it started none."""
        ...

    async def operation(self, tenant: str, operation_id: str, issued_ms: int) -> tuple[Known, Answer | None]:
        """Return what became of an operation, and its answer if it is DONE (KVC-IDEM-019)."""
        ...

    async def accept(self, order: wire.AcceptOrder) -> tuple[Copy, str]:
        """Take a migration's copy in; return how far that is, and why it failed. Asked until it has arrived."""
        ...

    async def settle(self, order: wire.SettleOrder) -> Copy:
        """Hear how a migration ended. Asked until it is settled."""
        ...


class _Call:
    """One call, while it is worked on."""

    def __init__(self, method: _Method, context: _Context) -> None:
        self.method = method
        self.context = context
        self.began_ns = now_ns()
        self.metadata: dict[str, str] = {}
        for key, value in context.invocation_metadata() or ():
            # A name that comes twice says nothing for certain, so it says nothing.
            self.metadata[key] = "" if key in self.metadata or isinstance(value, bytes) else value
        self.attempt = _attempt(self.metadata.get(credentials.ATTEMPT_KEY, "1"))
        told_s = context.time_remaining()
        self.left_s: float | None = None if told_s is None else _LEFT_SHARE * told_s
        self.tenant = ""
        self.line = Line(request_id=self.metadata.get(credentials.REQUEST_ID_KEY, ""))
        self.code = "CANCELLED"
        """Its caller has gone, unless something else is written here before its end."""
        self.refusal = ""


class _Method(NamedTuple):
    """A method of a service: how its message is read, and who does what it asks."""

    service: str
    name: str
    shape: type[Message]
    read: Callable[[Any], Any]
    do: Callable[[_Call, Any], Awaitable[Message]]
    ours: bool = False
    """Whether the deployment's own credential is needed; otherwise it is a tenant's."""


class BlockServer:
    """Serves one node.

    At most `calls_max` calls are worked on at a time. A message of more than `message_bytes_max` bytes is refused (of
    more than twice that by gRPC itself, unread), and no reply is longer. Without `points` there is no service for fail
    points either.
    """

    def __init__(
        self, node: Node, secret: bytes, *, points: FailPoints | None, buckets: Buckets, metrics: RpcMetrics,
        log: RpcLog, calls_max: int = 256, message_bytes_max: int = 1 << 20,
    ) -> None:  # fmt: skip
        credentials.credential(secret, credentials.DEPLOYMENT)  # is it long enough?
        self._node = node
        self._secret = secret
        self._points = points
        self._buckets = buckets
        self._metrics = metrics
        self._log = log
        self._calls_max = calls_max
        self._message_bytes_max = message_bytes_max
        self._running: Counter[tuple[str, str]] = Counter()
        self._late: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port (0 asks for any). Raises ValueError if `host` is not this machine's own address.

        Credentials travel unsealed, so they must not leave the machine. Raises RuntimeError if the port is taken.
        """
        if not ipaddress.ip_address(host).is_loopback:
            raise ValueError(f"host must be a loopback address, got {host}: credentials would travel unsealed")
        bytes_max = self._message_bytes_max
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", 2 * bytes_max),
                ("grpc.max_send_message_length", bytes_max),
                ("grpc.max_metadata_size", METADATA_BYTES_MAX),
                ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
                ("grpc.so_reuseport", 0),  # a second server on this port is an error
            ],
            # Half-sent requests count here and nowhere else.
            maximum_concurrent_rpcs=4 * self._calls_max,
        )
        server.add_generic_rpc_handlers(self._handlers())
        bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        await server.start()
        self._server = server
        return bound

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and give those that run `grace_s` seconds before they are cancelled."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)
        for task in list(self._late):
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

    # What every call goes through.

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        methods = self._methods()
        return tuple(
            grpc.method_handlers_generic_handler(
                f"{PACKAGE}.{service}", {m.name: self._handler(m) for m in methods if m.service == service}
            )
            for service in sorted({m.service for m in methods})
        )

    def _handler(self, method: _Method) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Return gRPC's handler of a method: bytes in, bytes out, so that we say what malformed ones get."""

        async def handle(data: bytes, context: _Context) -> bytes:
            return await self._serve(_Call(method, context), data)

        return grpc.unary_unary_rpc_method_handler(handle)

    async def _serve(self, call: _Call, data: bytes) -> bytes:
        """Answer a call, or end it with an error; count it and write its line either way."""
        self._metrics.began(call.method.name, call.attempt)
        try:
            reply = await self._worked(call, data)
        except asyncio.CancelledError:
            call.code = "DEADLINE_EXCEEDED" if call.context.time_remaining() == 0 else "CANCELLED"
            raise
        except Exception as error:
            known = self._told(error, call)
            call.code, call.refusal = known.code.name, known.rule
            trailing = ((FIELD_KEY, known.field), (RULE_KEY, known.rule.value))
            await call.context.abort(known.code, str(known), trailing)
        else:
            call.code = "OK"
            return reply
        finally:
            self._ended(call)

    async def _worked(self, call: _Call, data: bytes) -> bytes:
        """Return a call's reply. Raises CallError, and what the node raises."""
        left_s = self._admit(call)
        if len(data) > self._message_bytes_max:
            raise BadRequest("message", f"has {len(data)} bytes; at most {self._message_bytes_max} are read")
        asked = call.method.read(wire.parsed(data, call.method.shape))
        call.line = _line(call.line, asked, self._log.node)
        reply = await self._done(call, asked, left_s)
        sent = reply.SerializeToString()
        if len(sent) > self._message_bytes_max:
            message = f"the reply has {len(sent)} bytes; at most {self._message_bytes_max} are sent"
            raise CallError(grpc.StatusCode.INTERNAL, Rule.REPLY_TOO_LARGE, message)
        return sent

    async def _done(self, call: _Call, asked: Any, left_s: float) -> Message:
        """Have a call's work done in the time that it has."""
        with within(left_s):
            try:
                async with asyncio.timeout(left_s):
                    if self._points is None or call.method.service == _FAIL_POINTS:
                        return await call.method.do(call, asked)
                    return await self._with_faults(self._points, call, asked)
            except _ReplyDropped as error:
                # Nothing is sent, not even an error: the deadline of its caller ends this call from outside.
                await asyncio.sleep(min(call.context.time_remaining(), DEADLINE_S_MAX) + _SILENCE_S)
                raise TimeoutError from error

    def _admit(self, call: _Call) -> float:
        """Return the time that a call has, in seconds. Raises CallError if it may not be worked on."""
        if self._metrics.inflight > self._calls_max:
            message = f"{self._calls_max} calls are being worked on; try again later"
            raise CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, Rule.TOO_MANY_CALLS, message)
        self._authenticate(call)
        if call.left_s is None:
            message = "deadline: every call needs one, and this one has none"
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, Rule.NO_DEADLINE, message, "deadline")
        if not call.attempt:
            raise BadRequest(credentials.ATTEMPT_KEY, f"must be a number from 1 to {ATTEMPT_MAX}")
        return min(call.left_s, DEADLINE_S_MAX)

    def _authenticate(self, call: _Call) -> None:
        """Find out who calls. Every wrong answer reads the same, whatever of it is wrong."""
        tenant = call.metadata.get(credentials.TENANT_KEY, "?")
        given = credentials.bearer(call.metadata.get(credentials.CREDENTIAL_KEY, ""))
        may = tenant == credentials.DEPLOYMENT if call.method.ours else wire.is_id(tenant)
        if not may or not credentials.valid(self._secret, tenant, given):
            whose = "the deployment's own" if call.method.ours else "the tenant's"
            message = f"{credentials.TENANT_KEY} and {credentials.CREDENTIAL_KEY}: {whose} credential is needed"
            raise CallError(
                grpc.StatusCode.UNAUTHENTICATED, Rule.WRONG_CREDENTIAL, message, credentials.CREDENTIAL_KEY
            )  # fmt: skip
        call.tenant = tenant

    def _told(self, error: Exception, call: _Call) -> CallError:
        """Return what a caller is told of an exception: of one that we do not know, only that there was one."""
        known = _known(error)
        if known is None:
            self._metrics.broke()
            _LOGGER.error("%s failed: %s", call.method.name, type(error).__name__, exc_info=error)
            return CallError(grpc.StatusCode.INTERNAL, Rule.BROKEN, "the node failed at this call; its log says how")
        return known

    def _ended(self, call: _Call) -> None:
        latency_ns = now_ns() - call.began_ns
        self._metrics.ended(call.method.name, call.code, latency_ns)
        code = "" if call.code == "OK" else call.code
        self._log.say(
            msgspec.structs.replace(
                call.line, rpc_method=call.method.name, retry_count=max(0, call.attempt - 1),
                timeout_ms=None if call.left_s is None else int(call.left_s * 1000),
                error_code=code or call.refusal, latency_ms=round(latency_ns / NS_PER_MS, 3),
            )
        )  # fmt: skip

    # Faults, where a process is told to have them.

    async def _with_faults(self, points: FailPoints, call: _Call, asked: Any) -> Message:
        """Work as without, and pass the points of a handler."""
        name = call.method.name
        before = await points.reach(Point.RECEIVED, name)
        if before is Action.DROP:
            raise _ReplyDropped
        if before is Action.REPEAT:
            reply, _ = await asyncio.gather(call.method.do(call, asked), call.method.do(call, asked))
        else:
            reply = await call.method.do(call, asked)
        after = await points.reach(Point.AFTER_COMMIT_BEFORE_REPLY, name)
        if after is Action.DROP:
            raise _ReplyDropped
        if after is Action.REPEAT:
            await call.method.do(call, asked)
        call.context.add_done_callback(cast(Any, partial(self._after_reply, points, call, asked)))
        return reply

    def _after_reply(self, points: FailPoints, call: _Call, asked: Any, _context: object) -> None:
        """Pass the point after a reply: a request may come a second time here as well."""
        if points.reach_now(Point.AFTER_REPLY, call.method.name) is Action.REPEAT:
            task = asyncio.get_running_loop().create_task(self._late_repeat(call, asked))
            self._late.add(task)
            task.add_done_callback(self._late.discard)

    async def _late_repeat(self, call: _Call, asked: Any) -> None:
        limit_s = min(call.left_s or 0.0, DEADLINE_S_MAX)
        with within(limit_s):
            try:
                await asyncio.wait_for(call.method.do(call, asked), limit_s)
            except Exception as error:
                _LOGGER.warning("%s, repeated by a fail point, failed: %s", call.method.name, type(error).__name__)

    # What each method does.

    def _methods(self) -> list[_Method]:
        tenants = "BlockGroups"
        methods = [
            _Method(tenants, "GetMetadata", pb.GetMetadataRequest, wire.block_group_id_of, self._get_metadata),
            _Method(tenants, "ListGroups", pb.ListGroupsRequest, wire.listing_of, self._list_groups),
            _Method(tenants, "GetMigrateStatus", pb.GetOperationRequest, _migration_asked, self._get_migrate_status),
            _Method(tenants, "GetOperation", pb.GetOperationRequest, _operation_asked, self._get_operation),
        ]
        for name, (shape, _) in wire.WRITES.items():
            methods.append(_Method(tenants, name, shape, partial(wire.write_of, name), self._write))
        methods.append(_Method("Peers", "Accept", pb.AcceptRequest, wire.accept_of, self._accept, ours=True))
        methods.append(_Method("Peers", "Settle", pb.SettleRequest, wire.settle_of, self._settle, ours=True))
        if self._points is not None:
            methods.append(_Method(_FAIL_POINTS, "Arm", pb.ArmRequest, _as_it_is, self._arm, ours=True))
            methods.append(_Method(_FAIL_POINTS, "Report", pb.ReportRequest, _as_it_is, self._report, ours=True))
        return methods

    async def _write(self, call: _Call, asked: tuple[wire.Named, Request]) -> Message:
        named, request = asked
        if isinstance(request, PrepareGet):
            wait_s = _WAIT_SHARE * (remaining_s() or 0.0)
            await self._buckets.take(Bucket.REMOTE_READ_QPS, call.tenant, timeout_s=wait_s)
        key = (call.tenant, named.operation_id)
        self._running[key] += 1
        try:
            done = await self._node.write(call.tenant, named.operation_id, named.issued_ms, request)
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
        self._metrics.answered(done.answer, replayed=done.replayed)
        call.refusal = done.answer.refusal
        return wire.answer_pb(done.answer, replayed=done.replayed)

    async def _get_metadata(self, call: _Call, block_group_id: str) -> Message:
        found = await self._node.metadata(call.tenant, block_group_id)
        if found is None:
            raise _not_found(Rule.UNKNOWN_GROUP, "block_group_id", "no such block group here")
        return wire.metadata_pb(*found)

    async def _list_groups(self, call: _Call, asked: wire.Listing) -> Message:
        """Return as many as one message holds; who wants more asks again, after the last of them."""
        reply, room_bytes = pb.ListGroupsReply(), self._message_bytes_max
        for group, pins in await self._node.groups(call.tenant, asked.state, asked.limit, asked.after):
            entry = wire.metadata_pb(group, pins)
            room_bytes -= entry.ByteSize() + _ENTRY_BYTES
            if room_bytes < 0:
                break
            reply.groups.append(entry)
        return reply

    async def _get_migrate_status(self, call: _Call, asked: wire.Named) -> Message:
        migration = await self._node.migration(call.tenant, asked.operation_id)
        if migration is None:
            raise _not_found(Rule.UNKNOWN_OPERATION, "operation.operation_id", "no migration of this id here")
        return wire.migration_pb(migration)

    async def _get_operation(self, call: _Call, asked: wire.Named) -> Message:
        """Say what became of an operation; one that is being worked on has not run, and may yet (KVC-IDEM-019)."""
        known, answer = await self._node.operation(call.tenant, asked.operation_id, asked.issued_ms)
        if known is Known.UNKNOWN and (call.tenant, asked.operation_id) in self._running:
            known = Known.IN_PROGRESS
        return wire.state_pb(known, answer)

    async def _accept(self, _call: _Call, order: wire.AcceptOrder) -> Message:
        return wire.accepted_pb(*await self._node.accept(order))

    async def _settle(self, _call: _Call, order: wire.SettleOrder) -> Message:
        return wire.accepted_pb(await self._node.settle(order), "")

    async def _arm(self, call: _Call, asked: pb.ArmRequest) -> Message:
        assert self._points is not None
        if not asked.action:
            self._points.disarm(wire.point_of(asked))
        else:
            try:
                self._points.arm(wire.order_of(asked))
            except ValueError as error:
                raise BadRequest("point", str(error)) from error
        return await self._report(call, asked)

    async def _report(self, _call: _Call, _asked: object) -> Message:
        assert self._points is not None
        return pb.FailPointReport(acted=self._points.acted, armed=self._points.armed, pid=os.getpid())


_ENTRY_BYTES: Final = 8
"""What one more entry of a list costs besides itself, at most."""
_STORE_ERRORS: Final = {
    "full": (grpc.StatusCode.RESOURCE_EXHAUSTED, Rule.STORE_FULL, "the node's store has no room left to write"),
    "locked": (grpc.StatusCode.UNAVAILABLE, Rule.STORE_LOCKED, "another process has the node's store locked"),
    "damaged": (grpc.StatusCode.INTERNAL, Rule.STORE_DAMAGED, "the node's store is damaged; its log says how"),
}
_STORE_FAILING: Final = (grpc.StatusCode.UNAVAILABLE, Rule.STORE_FAILING, "the disk of the node's store failed")
"""What may pass: a read or a sync that failed once."""
_ERRORS: Final[dict[type[Exception], tuple[grpc.StatusCode, Rule, str]]] = {
    QueueFull: (grpc.StatusCode.RESOURCE_EXHAUSTED, Rule.QUEUE_FULL, "too many writes wait for the node's store"),
    NoEngine: (grpc.StatusCode.UNAVAILABLE, Rule.NO_ENGINE, "the node has no engine to ask now"),
    TimeoutError: (grpc.StatusCode.DEADLINE_EXCEEDED, Rule.TIMED_OUT, "the deadline passed before an answer"),
    CallerGone: (grpc.StatusCode.DEADLINE_EXCEEDED, Rule.TIMED_OUT, "the deadline passed before an answer"),
}


def _known(error: Exception) -> CallError | None:
    """Return what a caller is told of an exception that a node may raise; None of any other."""
    match error:
        case CallError():
            return error
        case BadRequest():
            return CallError(grpc.StatusCode.INVALID_ARGUMENT, Rule.BAD_REQUEST, str(error), error.field)
        case StoreError():
            passing = error.code == "damaged" and error.retry
            return CallError(*(_STORE_FAILING if passing else _STORE_ERRORS[error.code]))
        case RateLimited():
            return CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, Rule.RATE_LIMITED, str(error), error.bucket)
        case _:
            told = next((told for kind, told in _ERRORS.items() if isinstance(error, kind)), None)
            return None if told is None else CallError(*told)


def _attempt(text: str) -> int:
    """Return which attempt a call says it is, 0 if that is no number we take."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= ATTEMPT_MAX else 0


def _line(line: Line, asked: Any, node: str) -> Line:
    """Return a call's line with what is known once its message has been read."""
    line = msgspec.structs.replace(line, dst_node=node)
    match asked:
        case str():
            return msgspec.structs.replace(line, block_group_id=asked)
        case wire.Named():
            return msgspec.structs.replace(line, operation_id=asked.operation_id)
        case wire.AcceptOrder():
            return msgspec.structs.replace(
                line, operation_id=asked.operation_id, block_group_id=asked.group.block_group_id,
                epoch=asked.group.epoch, src_node=asked.place.node,
            )  # fmt: skip
        case wire.SettleOrder():
            return msgspec.structs.replace(line, operation_id=asked.operation_id)
        case (wire.Named() as named, request):
            return msgspec.structs.replace(
                line, operation_id=named.operation_id, block_group_id=request.block_group_id, epoch=request.epoch,
                request_id=line.request_id or getattr(request, "request_id", ""),
                src_node=getattr(request, "src", ""), dst_node=getattr(request, "dst", node),
            )  # fmt: skip
        case _:
            return line


def _operation_asked(message: pb.GetOperationRequest) -> wire.Named:
    return wire.named_of(message.operation)


def _migration_asked(message: pb.GetOperationRequest) -> wire.Named:
    """Return a migration's name: when it was started does not matter to who asks how far it is."""
    return wire.Named(wire.operation_id_of(message.operation), message.operation.issued_ms)


def _as_it_is(message: Message) -> Message:
    return message


def _not_found(rule: Rule, field: str, message: str) -> CallError:
    return CallError(grpc.StatusCode.NOT_FOUND, rule, message, field)

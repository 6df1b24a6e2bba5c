"""What a call is, and what its caller may conclude from how it ended.

"ok": the effect is there, or the read was answered. "fail": this call has had no effect, and will have none. "unknown":
it may have; only the same operation, or `get_operation`, tells (KVC-IDEM-019). An error, or a refusal at the door
(`NOT_KEPT`), says "fail" only if it comes before anything runs, and no earlier attempt of the same call may have run.

"fail" is final for the operation if its refusal was decided, and so kept. After a refusal at the door or an error it
speaks of this call alone: another call of the same operation, before or after it, may have its effect.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import grpc
import msgspec
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc.aio import AioRpcError

from reference_impl.blockservice import blocks_pb2
from reference_impl.blockservice.rpc_log import Line
from reference_impl.rules.operations import NOT_KEPT

CIRCUIT_OPEN: Final = "CIRCUIT_OPEN"
"""The server has failed too often lately: it is left alone for a while. Compute the prefix anew (KVC-IDEM-014)."""
POOL_EXHAUSTED: Final = "POOL_EXHAUSTED"
IN_PROGRESS: Final = "IN_PROGRESS"
BAD_REPLY: Final = "BAD_REPLY"
"""The server's reply could not be read, or says nothing."""

MAY_BE_RETRIED: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
)
NOTHING_RAN: Final = frozenset(
    {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.NOT_FOUND}
)


class CallOutcome(enum.StrEnum):
    """What a caller may conclude."""

    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Credentials(msgspec.Struct, frozen=True):
    """Who calls. `credential` belongs to the tenant and is a secret: it is never printed."""

    tenant: str
    credential: str

    def __repr__(self) -> str:
        return f"Credentials({self.tenant!r}, ...)"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a call ended, all its attempts together."""

    outcome: CallOutcome
    reply: Message | None = None
    """Also there if it is an `Answer` that refuses."""
    attempts: int = 0
    """Requests that left; 0: the server knows nothing of this call."""
    error_code: str = ""
    """gRPC's name of the status, a refusal, or one of this module's; "" if the outcome is ok."""
    message: str = ""
    field: str = ""
    """The parameter at fault."""
    timeouts: int = 0
    """Attempts that were not answered in time."""
    waited_ms: float = 0.0
    """For a place on a connection."""


class NotSent(Exception):
    """An attempt that did not leave; `code` says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Method(NamedTuple):
    """One RPC of ours."""

    name: str
    path: str
    request: type[Message]
    reply: type[Message]


def _methods() -> Iterator[tuple[str, Method]]:
    for service in blocks_pb2.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            request, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
            yield method.name, Method(method.name, f"/{service.full_name}/{method.name}", request, reply)


METHODS: Final = dict(_methods())


def method_of(name: str, request: Message) -> Method:
    """Return what is called. Raises ValueError if there is no such method, TypeError if the request is another's."""
    method = METHODS.get(name)
    if method is None:
        raise ValueError(f"no method {name!r}; there are {', '.join(sorted(METHODS))}")
    if not isinstance(request, method.request):
        raise TypeError(f"{name} takes a {method.request.__name__}, got a {type(request).__name__}")
    return method


class Tally(Protocol):
    """What is counted of a call while it runs."""

    attempts: int
    timeouts: int
    waited_s: float
    doubtful: bool
    """Whether an attempt failed that may have run."""


def of_reply(reply: Message | None, tally: Tally) -> Result:
    """Return the result of a call that was answered."""
    if isinstance(reply, blocks_pb2.Answer):
        return _of_answer(reply, tally)
    if reply is None:
        return _result(CallOutcome.UNKNOWN, tally, error_code=BAD_REPLY, message="the reply could not be read")
    return _result(CallOutcome.OK, tally, reply=reply)


def _of_answer(answer: blocks_pb2.Answer, tally: Tally) -> Result:
    match answer.disposition:
        case blocks_pb2.APPLIED | blocks_pb2.REPLAYED:
            return _result(CallOutcome.OK, tally, reply=answer)
        case blocks_pb2.REFUSED:
            doubtful = tally.doubtful and answer.refusal in NOT_KEPT
            outcome = CallOutcome.UNKNOWN if doubtful else CallOutcome.FAIL
            return _result(
                outcome, tally, reply=answer, error_code=answer.refusal, message=answer.message, field=answer.field
            )  # fmt: skip
        case blocks_pb2.IN_PROGRESS:
            return _result(CallOutcome.UNKNOWN, tally, reply=answer, error_code=IN_PROGRESS, message=answer.message)
        case _:
            message = f"an answer of disposition {answer.disposition}"
            return _result(CallOutcome.UNKNOWN, tally, reply=answer, error_code=BAD_REPLY, message=message)


def of_error(error: AioRpcError, tally: Tally) -> Result:
    """Return the result of a call whose last attempt ended with a gRPC error."""
    nothing = error.code() in NOTHING_RAN and not tally.doubtful
    return _result(
        CallOutcome.FAIL if nothing else CallOutcome.UNKNOWN, tally, error_code=error.code().name,
        message=error.details() or "", field=field_at_fault(error),
    )  # fmt: skip


def of_not_sent(error: NotSent, tally: Tally) -> Result:
    """Return the result of a call whose last attempt did not leave."""
    outcome = CallOutcome.UNKNOWN if tally.doubtful else CallOutcome.FAIL
    return _result(outcome, tally, error_code=error.code, message=str(error))


def field_at_fault(error: AioRpcError) -> str:
    """Return the field that the server names in its trailing metadata, "" if it names none."""
    for key, value in error.trailing_metadata() or ():
        if key == "x-pdproof-field":
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""


def _result(
    outcome: CallOutcome, tally: Tally, *, reply: Message | None = None, error_code: str = "", message: str = "",
    field: str = "",
) -> Result:  # fmt: skip
    return Result(
        outcome=outcome, reply=reply, attempts=tally.attempts, error_code=error_code, message=message, field=field,
        timeouts=tally.timeouts, waited_ms=tally.waited_s * 1e3,
    )  # fmt: skip


def line_of(
    method: str, request: Message, request_id: str, *, limit_s: float, latency_ms: float, attempts: int, error_code: str
) -> Line:
    """Return what is logged of a call; fields that its request does not have are empty."""
    operation = getattr(request, "operation", None)
    return Line(
        request_id=request_id, operation_id=getattr(operation or request, "operation_id", ""),
        block_group_id=getattr(request, "block_group_id", ""), src_node=getattr(request, "src", ""),
        dst_node=getattr(request, "dst", ""), epoch=getattr(request, "epoch", None), rpc_method=method,
        timeout_ms=round(limit_s * 1e3), retry_count=max(0, attempts - 1), error_code=error_code,
        latency_ms=latency_ms,
    )  # fmt: skip

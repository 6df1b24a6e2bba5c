"""A server in this process that does with each call what a test tells it to, and writes down what reached it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeAlias

import grpc
from google.protobuf.message import Message

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice.calls import METHODS
from reference_impl.blockservice.client import BlockClient, Credentials
from reference_impl.realclock import now_ns

APPLIED = pb.Answer(disposition=pb.APPLIED, epoch=7, state="RESIDENT")
HOST = "127.0.0.1"
ME = Credentials("tenant-a", "a" * 64)
FOREVER_S = 3600.0


class Seen(NamedTuple):
    """One attempt, as it arrived."""

    at_ns: int
    method: str
    request: Any
    attempt: int
    request_id: str
    left_s: float

    @property
    def operation_id(self) -> str:
        return str(self.request.operation.operation_id)


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Script = Callable[[Seen, Context], Awaitable[Message]]


def answer(reply: Message = APPLIED, after_s: float = 0.0) -> Script:
    async def script(seen: Seen, context: Context) -> Message:
        if after_s:
            await asyncio.sleep(after_s)
        return reply

    return script


def refuse(rule: str, field: str = "epoch") -> Script:
    return answer(pb.Answer(disposition=pb.REFUSED, refusal=rule, message=f"it is {rule}", field=field))


def fail(code: grpc.StatusCode, details: str = "as told", field: str = "") -> Script:
    async def script(seen: Seen, context: Context) -> Message:
        await context.abort(code, details, (("x-pdproof-field", field),) if field else ())
        raise AssertionError("abort returned")

    return script


UNAVAILABLE = fail(grpc.StatusCode.UNAVAILABLE)


def never() -> Script:
    return answer(after_s=FOREVER_S)


def each(*scripts: Script) -> Script:
    """Do the n-th of `scripts` with the n-th call that arrives, and the last of them with all that follow."""
    left = list(scripts)

    async def script(seen: Seen, context: Context) -> Message:
        return await (left.pop(0) if len(left) > 1 else left[0])(seen, context)

    return script


class ScriptedServer(grpc.GenericRpcHandler):
    """Serves every method of blocks.proto by `script`, which may be changed at any time."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def target(self) -> str:
        return f"{HOST}:{self.port}"

    async def start(self) -> None:
        """Listen: on the port of the time before, if there was one."""
        self._server = grpc.aio.server(handlers=(self,), options=(("grpc.so_reuseport", 0),))
        self.port = self._server.add_insecure_port(f"{HOST}:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """Close the port and every connection; calls under way are lost."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        method = METHODS[handler_call_details.method.rpartition("/")[2]]

        async def behaviour(request: Message, context: Context) -> Message:
            sent = dict(context.invocation_metadata() or ())
            seen = Seen(
                now_ns(), method.name, request, int(sent["x-pdproof-attempt"]), str(sent["x-pdproof-request-id"]),
                context.time_remaining(),
            )  # fmt: skip
            self.seen.append(seen)
            return await self.script(seen, context)

        return grpc.unary_unary_rpc_method_handler(
            behaviour,
            request_deserializer=method.request.FromString,
            response_serializer=method.reply.SerializeToString,
        )


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(script)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def calling(
    target: str, *, make: type[BlockClient] = BlockClient, who: Credentials = ME,
    draw: Callable[[], float] = lambda: 0.5, **options: Any,
) -> AsyncIterator[BlockClient]:  # fmt: skip
    """Run a client, or a twin of it; its pauses are in the middle of what jitter allows unless told otherwise."""
    client = make(target, who, draw=draw, **options)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def pair(script: Script, **options: Any) -> AsyncIterator[tuple[ScriptedServer, BlockClient]]:
    """Run a server and a client of it."""
    async with serving(script) as server, calling(server.target, **options) as client:
        yield server, client

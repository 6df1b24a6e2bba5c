"""A server over a real store, in this process or in one of its own, and a caller that hides nothing of what it gets.

As a program it serves until it is told to stop: `python -m tests.blockservice.server_kit STORE EVENTS [--no-points]
[--tenants NAME ...]`, each of whom has the one group; TENANT alone, if none is named.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec
from google.protobuf.message import Message

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice import wire
from reference_impl.blockservice.buckets import Bucket, Buckets, Limit
from reference_impl.blockservice.calls import METHODS
from reference_impl.blockservice.credentials import ATTEMPT_KEY, DEPLOYMENT, credential, metadata
from reference_impl.blockservice.failpoints import FailPoints
from reference_impl.blockservice.metrics import RpcMetrics
from reference_impl.blockservice.rpc_log import RpcLog
from reference_impl.blockservice.server import FIELD_KEY, RULE_KEY, BlockServer
from reference_impl.blockservice.store import Done, Effect, Kept, Standing, Store, Write, wall_ms
from reference_impl.blockservice.wire import AcceptOrder, Copy, Known, Named, SettleOrder
from reference_impl.blockservice.writer import Writer
from reference_impl.rules.blockgroups import (
    Answer,
    EngineSays,
    Group,
    GroupState,
    Migration,
    MigrationStatus,
    Place,
    PrepareGet,
    Request,
)
from tests.memory_service.running import end, read_line

SECRET: Final = b"the secret of a deployment in tests"
TENANT: Final = "tenant-a"
OTHER: Final = "tenant-b"
NODE: Final = "node-1"
NODES: Final = frozenset({NODE, "node-2"})
GROUP: Final = Group(
    block_group_id="bg_1", location=NODE, epoch=7, size_bytes=1 << 20, token_end=512, checksum="ab" * 16
)
CALL_S: Final = 20.0
"""For calls that are to be answered: a busy machine may take its time."""


class StoreNode:
    """A node that is nothing but its store; an engine that says yes to everything is made up."""

    def __init__(self, store: Store) -> None:
        self.writer = Writer(store)
        self.lends = Place(
            node=NODE, handoff="{}", size_bytes=1, checksum="ab" * 16, transfer_token="token", expires_ms=0
        )  # fmt: skip

    async def write(self, tenant: str, operation_id: str, issued_ms: int, request: Request) -> Done:
        says = EngineSays()
        if isinstance(request, PrepareGet):
            token, expires_ms = f"token-{operation_id}", wall_ms() + 30_000
            says = EngineSays(
                place=msgspec.structs.replace(self.lends, transfer_token=token, expires_ms=expires_ms)
            )  # fmt: skip
        return await self.writer.run(
            Write(tenant=tenant, operation_id=operation_id, issued_ms=issued_ms, request=request, engine=says)
        )  # fmt: skip

    async def metadata(self, tenant: str, block_group_id: str) -> tuple[Group, int] | None:
        def read(store: Store) -> tuple[Group, int] | None:
            group = store.group(tenant, block_group_id)
            return None if group is None else (group, store.pins(tenant, block_group_id))

        return await self.writer.call(read)

    async def groups(self, tenant: str, state: GroupState | None, limit: int, after: str) -> list[tuple[Group, int]]:
        def read(store: Store) -> list[tuple[Group, int]]:
            found = store.groups(tenant, state=state, limit=limit, after=after)
            return [(group, store.pins(tenant, group.block_group_id)) for group in found]

        return await self.writer.call(read)

    async def migration(self, tenant: str, operation_id: str) -> Migration | None:
        return await self.writer.call(lambda store: store.migration(tenant, operation_id))

    async def operation(self, tenant: str, operation_id: str, issued_ms: int) -> tuple[Known, Answer | None]:
        record = await self.writer.call(lambda store: store.look(tenant, operation_id))
        if record is not None:
            return Known.DONE, record.answer
        return (Known.EXPIRED if issued_ms < wall_ms() - 600_000 else Known.UNKNOWN), None

    async def accept(self, order: AcceptOrder) -> tuple[Copy, str]:
        taken = await self.writer.call(lambda store: store.accept(order.tenant, order.operation_id, order.group))
        return (Copy.FAILED, "it is here already") if taken is None else (Copy.COPIED, "")

    async def settle(self, order: SettleOrder) -> Copy:
        ours = order.status is MigrationStatus.SUCCEEDED
        await self.writer.call(lambda store: store.settle(order.tenant, order.operation_id, ours=ours))
        return Copy.SETTLED


class Failed(Exception):
    """A call that ended with an error of gRPC, as its caller sees it."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        trailing = {key: str(value) for key, value in error.trailing_metadata() or ()}
        self.code = error.code()
        self.details = error.details() or ""
        self.field = trailing.get(FIELD_KEY, "")
        self.rule = trailing.get(RULE_KEY, "")
        super().__init__(f"{self.code.name} {self.rule} {self.field}: {self.details}")


class Caller:
    """Calls as one tenant. No retries, no pool: what comes back is what the server sent."""

    def __init__(self, port: int, tenant: str = TENANT, *, key: str | None = None, connection: int = 0) -> None:
        # Channels to one address share a connection, unless an option sets them apart.
        options = [("grpc.max_metadata_size", 1 << 20), ("pdproof.connection", connection)]
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        self.metadata = metadata(tenant, credential(SECRET, tenant) if key is None else key)
        self._issued_ms: dict[str, int] = {}
        """When it made each of its operations: asked again, they are repeated as they were."""

    async def call(
        self, method: str, message: Message, *, timeout_s: float | None = CALL_S, attempt: int = 1,
        more: Sequence[tuple[str, str]] = (),
    ) -> Any:  # fmt: skip
        """Return the reply. Raises Failed."""
        known = METHODS[method]
        data = await self.raw(known.path, message.SerializeToString(), timeout_s=timeout_s, attempt=attempt, more=more)
        return known.reply.FromString(data)

    async def raw(
        self, path: str, data: bytes, *, timeout_s: float | None = CALL_S, attempt: int = 1,
        more: Sequence[tuple[str, str]] = (),
    ) -> bytes:  # fmt: skip
        """Return the reply's bytes. `more` comes on top of the usual metadata. Raises Failed."""
        pairs = [(key, value) for key, value in self.metadata if key != ATTEMPT_KEY]
        if not any(key == ATTEMPT_KEY for key, _ in more):
            pairs.append((ATTEMPT_KEY, str(attempt)))
        try:
            reply: bytes = await self._channel.unary_unary(path)(data, timeout=timeout_s, metadata=(*pairs, *more))
        except grpc.aio.AioRpcError as error:
            raise Failed(error) from error
        return reply

    async def write(
        self, operation_id: str, request: Request, *, issued_ms: int | None = None, **more: Any
    ) -> tuple[Answer, bool]:  # fmt: skip
        """Return a write's answer, and whether it was given before. Raises Failed."""
        if issued_ms is None:
            issued_ms = self._issued_ms.setdefault(operation_id, wall_ms())
        named = Named(operation_id, issued_ms)
        method = wire.METHODS[type(request)]
        return wire.answer_of(await self.call(method, wire.write_pb(named, request), **more))

    async def arm(self, point: str, action: str, **more: Any) -> pb.FailPointReport:
        """Arm a fail point; needs a caller with the deployment's credential. Raises Failed."""
        report: pb.FailPointReport = await self.call("Arm", pb.ArmRequest(point=point, action=action, times=1, **more))
        return report

    async def close(self) -> None:
        await self._channel.close(None)


class Held(msgspec.Struct, frozen=True):
    """Everything that a store holds."""

    effects: list[Effect]
    records: list[Kept]
    finals: list[Standing]

    def of_clients(self) -> list[tuple[str, str, str]]:
        """Return operation, kind and key of every effect that a client's write had."""
        return [(e.operation_id, e.kind, e.key) for e in self.effects if e.cause == "client"]

    def seen_by(self, tenant: str) -> Held:
        """Return what there is of one tenant, without his name."""
        return Held(*(
            [msgspec.structs.replace(row, tenant="") for row in rows if row.tenant == tenant]
            for rows in (self.effects, self.records, self.finals)
        ))  # fmt: skip

    def state(self) -> tuple[Any, ...]:
        """Return what is there in the end, without moments: what two runs are compared by."""
        records = [(r.tenant, r.operation_id, r.params, r.outcome, r.answer) for r in self.records]
        return sorted(records), [(f.tenant, f.group, f.pins) for f in self.finals], self.of_clients()


def held_by(store: Store) -> Held:
    return Held(list(store.effects()), list(store.records()), list(store.finals()))


def held_at(path: Path) -> Held:
    """Return what the store in a file holds, once its process has ended."""
    store = Store(path, NODE, nodes=NODES)
    try:
        store.check()
        return held_by(store)
    finally:
        store.close()


class Serving:
    """A server in this process, its store, and whoever calls it."""

    def __init__(self, node: StoreNode, server: BlockServer, port: int, metrics: RpcMetrics, log_path: Path) -> None:
        self.node, self.server, self.port, self.metrics, self.log_path = node, server, port, metrics, log_path
        self.callers: list[Caller] = []

    def caller(self, tenant: str = TENANT, **more: Any) -> Caller:
        self.callers.append(Caller(self.port, tenant, **more))
        return self.callers[-1]

    async def held(self) -> Held:
        return await self.node.writer.call(held_by)


@contextlib.asynccontextmanager
async def serving(
    folder: Path, *, node: type[StoreNode] = StoreNode, points: FailPoints | None = None,
    limits: Mapping[Bucket, Limit] | None = None, groups: Sequence[Group] = (GROUP,), **more: Any,
) -> AsyncIterator[Serving]:  # fmt: skip
    """Serve a store in `folder` that holds `groups` for TENANT; see at the end that no handler broke unexpectedly."""
    store = Store(folder / "store", NODE, nodes=NODES, reached=points.in_store if points else None)
    store.publish(TENANT, groups)
    behind = node(store)
    metrics = RpcMetrics(queue_length=lambda: behind.writer.queue_length)
    log = RpcLog(folder / "rpc.jsonl", NODE)
    server = BlockServer(
        behind, SECRET, points=points, buckets=Buckets(limits or {}, limited=metrics.rate_limited), metrics=metrics,
        log=log, **more,
    )  # fmt: skip
    here = Serving(behind, server, await server.start("127.0.0.1", 0), metrics, folder / "rpc.jsonl")
    try:
        yield here
    finally:
        for caller in here.callers:
            await caller.close()
        await server.stop(0.2)
        await behind.writer.close()
        store.close()
        log.close()


# A process of its own.


class Child:
    """A server in a process of its own that may be made to fail."""

    def __init__(self, folder: Path, process: subprocess.Popen[str], port: int) -> None:
        self.folder, self.process, self.port = folder, process, port

    def ended(self) -> int:
        """Wait for the end of the process and return its code."""
        return self.process.wait(CALL_S)

    def stop(self) -> None:
        """End it in order."""
        self.process.send_signal(signal.SIGTERM)
        assert self.ended() == 0

    def said(self) -> list[list[str]]:
        """Return what its fail points said before they acted: point, action, method, in every process of the folder."""
        return [msgspec.json.decode(line) for line in (self.folder / "events").read_bytes().splitlines()]

    def held(self) -> Held:
        """Return what its store holds, after its end."""
        return held_at(self.folder / "store")


@contextlib.contextmanager
def child(folder: Path, *options: str) -> Iterator[Child]:
    """Serve the store in `folder`, in a process that is killed at the end if it lives."""
    files = (str(folder / "store"), str(folder / "events"))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.blockservice.server_kit", *files, *options],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said = read_line(process)
        assert said.startswith("ready "), said
        yield Child(folder, process, int(said.split()[1]))
    finally:
        end(process)


@contextlib.asynccontextmanager
async def called(running: Child, tenant: str = TENANT) -> AsyncIterator[Caller]:
    """Call a process as a tenant, or as the deployment."""
    caller = Caller(running.port, tenant)
    try:
        yield caller
    finally:
        await caller.close()


async def _serve(options: argparse.Namespace) -> None:
    events = os.open(options.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(*words: str) -> None:
        os.write(events, msgspec.json.encode(words) + b"\n")

    points = None if options.no_points else FailPoints(say)
    store = Store(Path(options.store), NODE, nodes=NODES, reached=points.in_store if points else None)
    for tenant in options.tenants:
        store.publish(tenant, [GROUP])
    node, metrics = StoreNode(store), RpcMetrics()
    server = BlockServer(node, SECRET, points=points, buckets=Buckets({}), metrics=metrics, log=RpcLog(None))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("ready", await server.start("127.0.0.1", 0), flush=True)  # noqa: T201
    await stop.wait()
    await server.stop(0.2)
    await node.writer.close()
    store.close()


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("events")
    parser.add_argument("--no-points", action="store_true")
    parser.add_argument("--tenants", nargs="*", default=[TENANT])
    asyncio.run(_serve(parser.parse_args()))


assert DEPLOYMENT != TENANT
if __name__ == "__main__":
    _main()

"""The other nodes' block services, as this node's migrations call them.

Where a node is found stands in a file of the deployment's private folder, which each service writes when it listens; a
service that comes back listens at the port that it had.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

import grpc
import msgspec

from reference_impl.blockservice import blocks_pb2_grpc as rpc
from reference_impl.blockservice import wire
from reference_impl.blockservice.credentials import DEPLOYMENT, credential, metadata
from reference_impl.blockservice.migration import PeerUnreachable
from reference_impl.blockservice.wire import AcceptOrder, Copy, SettleOrder

CALL_LIMIT_S: Final = 5.0


class Address(msgspec.Struct, frozen=True):
    """Where a node's block service listens."""

    host: str
    port: int
    metrics_port: int = 0
    """Of GET /metrics."""

    @property
    def target(self) -> str:
        """What a gRPC channel is opened to."""
        return f"{self.host}:{self.port}"


def address_path(run_dir: Path, node: str) -> Path:
    """Return where a node's address stands."""
    return run_dir / f"blocks-{node}.json"


def write_address(run_dir: Path, node: str, address: Address) -> None:
    """Write down where a node is found; a reader sees the old or the new one, never a part."""
    path = address_path(run_dir, node)
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_bytes(msgspec.json.encode(address))
    partial.rename(path)


def read_address(run_dir: Path, node: str) -> Address | None:
    """Return where a node is found, None if it has not listened yet."""
    try:
        return msgspec.json.decode(address_path(run_dir, node).read_bytes(), type=Address)
    except FileNotFoundError:
        return None


class RemoteNode:
    """One other node (`migration.Peer`). One connection, made when it is needed."""

    def __init__(self, run_dir: Path, node: str, secret: bytes) -> None:
        self._run_dir, self._node = run_dir, node
        self._metadata = metadata(DEPLOYMENT, credential(secret, DEPLOYMENT))
        self._target = ""
        self._channel: grpc.aio.Channel | None = None

    async def accept(self, order: AcceptOrder) -> tuple[Copy, str]:
        """Have it fetch a copy, or ask how far that is. Raises PeerUnreachable."""
        stub = await self._stub()
        try:
            answer = await stub.Accept(wire.accept_pb(order), timeout=CALL_LIMIT_S, metadata=self._metadata)
            return wire.accepted_of(answer)
        except (grpc.aio.AioRpcError, wire.BadRequest, asyncio.CancelledError) as error:
            raise self._unreachable(error) from error

    async def settle(self, order: SettleOrder) -> Copy:
        """Tell it how a migration has ended. Raises PeerUnreachable."""
        stub = await self._stub()
        try:
            answer = await stub.Settle(wire.settle_pb(order), timeout=CALL_LIMIT_S, metadata=self._metadata)
            return wire.accepted_of(answer)[0]
        except (grpc.aio.AioRpcError, wire.BadRequest, asyncio.CancelledError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: BaseException) -> PeerUnreachable:
        """Return what a failed call means. A call whose connection another one closes under it ends as if cancelled."""
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise error
        return PeerUnreachable(f"{self._node}: {error or 'its address has changed meanwhile'}")

    async def close(self) -> None:
        """Close the connection. Harmless without one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    async def _stub(self) -> rpc.PeersStub:
        address = read_address(self._run_dir, self._node)
        if address is None:
            raise PeerUnreachable(f"{self._node} has no block service yet")
        if self._channel is None or address.target != self._target:
            before, self._channel = self._channel, grpc.aio.insecure_channel(address.target)
            self._target = address.target
            if before is not None:
                await before.close(None)
        return rpc.PeersStub(self._channel)

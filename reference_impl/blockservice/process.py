"""A block service's process: `python -m reference_impl.blockservice.process CONFIG`, a `BlockServiceConfig` as JSON.

It prints "ready" once it listens. SIGTERM ends it in order; whatever else does, its successor goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec

from reference_impl.blockservice.buckets import Bucket, Buckets
from reference_impl.blockservice.config import BlockServiceConfig
from reference_impl.blockservice.engine_link import EngineLink
from reference_impl.blockservice.failpoints import FailPoints
from reference_impl.blockservice.metrics import RpcMetrics
from reference_impl.blockservice.metrics_page import MetricsPage
from reference_impl.blockservice.migration import Migrator
from reference_impl.blockservice.node import BlockNode
from reference_impl.blockservice.peers import Address, RemoteNode, read_address, write_address
from reference_impl.blockservice.rpc_log import RpcLog
from reference_impl.blockservice.server import BlockServer
from reference_impl.blockservice.store import Store, StoreError, wall_ms
from reference_impl.blockservice.writer import QueueFull, Writer, purge
from reference_impl.event_log import EventLog
from reference_impl.processes import die_with_parent
from reference_impl.rules.events import EventKind
from reference_impl.rules.transfer_tokens import node_key
from reference_impl.secret import TOKEN_VARIABLE

GRACE_S: Final = 1.0
PURGE_S: Final = 60.0
BIND_TRIES: Final = 20
BIND_PAUSE_S: Final = 0.1
BYTES_LIMIT_S: Final = 30.0
"""How long a copy waits for its share of the migrations' bucket."""


class BlockService:
    """One node's block service from its start to its end."""

    def __init__(self, config: BlockServiceConfig, secret: bytes) -> None:
        self._config = config
        self._events = EventLog(Path(config.events_file) if config.events_file else None, f"{config.node}-blocks")
        self._points = FailPoints(self._reached) if config.fail_points else None
        self._store = Store(
            Path(config.store), config.node, nodes=frozenset(config.nodes), slots_max=config.slots_max,
            reached=self._points.in_store if self._points else None,
        )  # fmt: skip
        self._writer = Writer(self._store)
        key = node_key(secret, config.node)
        self._node = BlockNode(
            config.node, self._writer, key, self._events.say, now_ms=wall_ms, loan_ms=config.loan_ms
        )  # fmt: skip
        self._engine = EngineLink(Path(config.engine_socket), self._node.came, self._node.said)
        self._node.engine = self._engine
        self._peers = {n: RemoteNode(Path(config.run_dir), n, secret) for n in config.nodes if n != config.node}
        self._metrics = RpcMetrics(queue_length=lambda: self._writer.queue_length)
        self._buckets = Buckets(config.buckets, limited=self._metrics.rate_limited)
        self._migrator = Migrator(self._node, self._peers.__getitem__, self._take_bytes, self._points)
        self._log = RpcLog(Path(config.log_file) if config.log_file else None, config.node)
        self._server = BlockServer(
            self._node, secret, points=self._points, buckets=self._buckets,
            metrics=self._metrics, log=self._log,
        )  # fmt: skip
        self._page = MetricsPage(self._metrics)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        await self._engine.listen()
        port = await self._bind()
        metrics_port = await self._page.start(self._config.host)
        address = Address(self._config.host, port, metrics_port)
        write_address(Path(self._config.run_dir), self._config.node, address)
        await self._migrator.resume()
        purging = asyncio.create_task(self._purge())
        print("ready", flush=True)  # noqa: T201 # for the supervisor
        try:
            await stop.wait()
        finally:
            purging.cancel()
            await self._close()

    async def _bind(self) -> int:
        """Listen at the port that a predecessor had, or at any. A dead one's connections may keep it for a moment."""
        config = self._config
        before = read_address(Path(config.run_dir), config.node)
        for _ in range(BIND_TRIES if before else 0):
            try:
                return await self._server.start(config.host, before.port if before else 0)
            except RuntimeError:
                await asyncio.sleep(BIND_PAUSE_S)
        return await self._server.start(config.host, 0)

    async def _close(self) -> None:
        await self._server.stop(GRACE_S)
        await self._migrator.close()
        await self._node.close()
        await self._engine.close()
        for peer in self._peers.values():
            await peer.close()
        await self._page.close()
        await self._writer.close()
        self._log.close()
        self._events.close()

    async def _purge(self) -> None:
        """Drop, now and then, what no retry can ask for any more."""
        while True:
            await asyncio.sleep(PURGE_S)
            with contextlib.suppress(StoreError, QueueFull):  # another time
                await purge(self._writer)

    async def _take_bytes(self, tenant: str, size_bytes: int) -> None:
        """Take a copy's share of the migrations' bucket. Raises RateLimited when it is not to be had in time."""
        await self._buckets.take(Bucket.MIGRATION_BYTES, tenant, size_bytes, timeout_s=BYTES_LIMIT_S)

    def _reached(self, point: str, action: str, method: str) -> None:
        self._events.say(
            EventKind.FAIL_POINT_REACHED, point, action=action, method=method, node=self._config.node, pid=os.getpid()
        )  # fmt: skip


def main() -> None:
    """Run the service that the one argument describes."""
    config = msgspec.json.decode(sys.argv[1], type=BlockServiceConfig)
    if config.parent_pid:
        die_with_parent(config.parent_pid)
    secret = os.environb.get(TOKEN_VARIABLE.encode(), b"")
    try:
        service = BlockService(config, secret)
        asyncio.run(service.run())
    except (StoreError, OSError, ValueError, RuntimeError) as error:
        print(f"block service {config.node}: {error}", file=sys.stderr)  # noqa: T201 # the last line of its log
        sys.exit(6)


if __name__ == "__main__":
    main()

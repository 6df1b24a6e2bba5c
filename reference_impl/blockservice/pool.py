"""Connections to one server: so many, each with so many calls at a time, and how long calls waited for a place.

Calls share a connection and do not wait for each other on it (HTTP/2 streams): a slow one holds up none (KVC-IDEM-017).
What may wait is a call beyond the pool's size, and how long is measured: a pool that is too small makes a slow client
of an idle server (RPC document, "connection pool").
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import grpc
from google.protobuf.message import Message
from grpc.aio import Channel, UnaryUnaryMultiCallable, insecure_channel

from reference_impl.blockservice.calls import POOL_EXHAUSTED, Method, NotSent, Tally
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S

CHANNEL_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one address are one connection, whatever their number
    ("grpc.enable_retries", 0),  # the attempts are ours: each is counted, and has its own deadline
    ("grpc.enable_http_proxy", 0),
    # A restarted server is found again quickly. The core takes no less than 100 ms.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.client_idle_timeout_ms", 300_000),
)
_ILL: Final = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)


class Connection:
    """One channel, its calls under way, and its methods as they are first asked for."""

    def __init__(self, target: str) -> None:
        self.channel: Channel = insecure_channel(target, options=CHANNEL_OPTIONS)
        self.in_use = 0
        self._stubs: dict[str, UnaryUnaryMultiCallable[Message, Message]] = {}

    def stub(self, method: Method) -> UnaryUnaryMultiCallable[Message, Message]:
        """Return what calls `method`."""
        found = self._stubs.get(method.path)
        if found is None:
            found = self.channel.unary_unary(
                method.path, request_serializer=method.request.SerializeToString,
                response_deserializer=method.reply.FromString,
            )  # fmt: skip
            self._stubs[method.path] = found
        return found

    @property
    def rank(self) -> tuple[bool, int]:
        """Sorts those first that are not known to be broken, then those with the fewest calls."""
        return self.channel.get_state() in _ILL, self.in_use


class Pool:
    """The connections to `target`: made when they are first needed, at most `connections` of them.

    A call beyond `connections * calls_per_connection` waits, in order of arrival; more than `waiting_max` do not.
    """

    def __init__(
        self, target: str, connections: int = 2, calls_per_connection: int = 64, waiting_max: int = 1024
    ) -> None:  # fmt: skip
        for name, value in (("connections", connections), ("calls_per_connection", calls_per_connection)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.waiting = 0
        self.waits = 0
        """Calls that were given a place, most without waiting."""
        self.waited_s = 0.0
        """Of all calls together, those that gave up as well."""
        self._target = target
        self._size = connections
        self._each = calls_per_connection
        self._waiting_max = waiting_max
        self._places = asyncio.Semaphore(connections * calls_per_connection)
        self._connections: list[Connection] = []

    @property
    def in_use(self) -> int:
        """Calls that have a place."""
        return sum(connection.in_use for connection in self._connections)

    @property
    def open(self) -> int:
        """Connections made so far."""
        return len(self._connections)

    @asynccontextmanager
    async def place(self, limit_s: float, tally: Tally) -> AsyncIterator[Connection]:
        """Hold a place on a connection; `tally` counts the waiting.

        Raises NotSent (POOL_EXHAUSTED) if there is none for `limit_s`, or if too many wait already.
        """
        await self._enter(limit_s, tally)
        connection = self._best()
        connection.in_use += 1
        try:
            yield connection
        finally:
            connection.in_use -= 1
            self._places.release()

    async def close(self) -> None:
        """Close every connection; calls on them are cancelled."""
        connections, self._connections = self._connections, []
        for connection in connections:
            await connection.channel.close()

    async def _enter(self, limit_s: float, tally: Tally) -> None:
        if not self._places.locked():
            await self._places.acquire()  # at once
            self.waits += 1
            return
        if self.waiting >= self._waiting_max:
            raise NotSent(POOL_EXHAUSTED, f"{self.waiting} calls wait for a place already")
        began_ns = now_ns()
        self.waiting += 1
        try:
            async with asyncio.timeout(limit_s):
                await self._places.acquire()
        except TimeoutError:
            raise NotSent(POOL_EXHAUSTED, f"no place on {self._size} connections for {limit_s:.3f} s") from None
        finally:
            self.waiting -= 1
            waited_s = (now_ns() - began_ns) / NS_PER_S
            self.waited_s += waited_s
            tally.waited_s += waited_s
        self.waits += 1

    def _best(self) -> Connection:
        """Return where the next call goes: the connection with the fewest, or a new one while none is idle."""
        free = [connection for connection in self._connections if connection.in_use < self._each]
        best = min(free, key=lambda connection: connection.rank, default=None)
        if (best is None or best.rank[0] or best.in_use > 0) and len(self._connections) < self._size:
            best = Connection(self._target)
            self._connections.append(best)
        if best is None:
            raise AssertionError("a place was given, but every connection is full")
        return best

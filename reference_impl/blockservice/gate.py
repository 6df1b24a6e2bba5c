"""Who may act on a node's groups at the same time: operations beside each other, one on a group, a new engine alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Gate:
    """Operations enter by their group's key; `alone` waits until all have left, and keeps others out meanwhile.

    Whoever leaves waits for nothing, so that a cancellation, or two of them, cannot keep him from telling the others.
    """

    def __init__(self) -> None:
        self._inside: dict[tuple[str, str], asyncio.Lock] = {}
        self._wanting: dict[tuple[str, str], int] = {}
        self._operations = 0
        self._closed = False
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def operation(self, key: tuple[str, str]) -> AsyncIterator[None]:
        """Act on one group; whoever else wants it waits. Cancellation while waiting leaves nothing behind."""
        await self._until(lambda: not self._closed)
        self._operations += 1
        try:
            async with self._of(key):
                yield
        finally:
            self._operations -= 1
            self._tell()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Act on everything."""
        await self._until(lambda: not self._closed)
        self._closed = True
        try:
            await self._until(lambda: not self._operations)
            yield
        finally:
            self._closed = False
            self._tell()

    @asynccontextmanager
    async def _of(self, key: tuple[str, str]) -> AsyncIterator[None]:
        lock = self._inside.setdefault(key, asyncio.Lock())
        self._wanting[key] = self._wanting.get(key, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._wanting[key] -= 1
            if not self._wanting[key]:
                del self._wanting[key], self._inside[key]

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(told)
            await told

    def _tell(self) -> None:
        """Have everybody who waits look again."""
        waiting, self._waiting = self._waiting, []
        for told in waiting:
            if not told.done():
                told.set_result(None)

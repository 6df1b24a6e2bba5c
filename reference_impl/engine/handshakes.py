"""Handshakes in the background: tasks beside the step loop, so that a slow or dead peer delays nobody (KVC-HB-005)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from reference_impl.engine.connector import Shaken
from reference_impl.realclock import now_ns
from reference_impl.rules.agreement import Hello
from reference_impl.transport.hello import HandshakeClient, HandshakeFailed

LIMIT_S: Final = 3.0
RUNNING_MAX: Final = 64


class BackgroundShaker:
    """`connector.Shaker` on asyncio. `mine` introduces us; it is asked at each handshake."""

    def __init__(self, mine: Callable[[], Hello]) -> None:
        self._mine = mine
        self._client = HandshakeClient(now_ns)
        self._tasks: set[asyncio.Task[None]] = set()
        self._results: list[Shaken] = []

    def connect(self, engine_id: str, host: str, port: int) -> None:
        """Start a handshake."""
        self._start(engine_id, self._connect(engine_id, host, port), measured=False)

    def measure(self, engine_id: str, host: str, port: int) -> None:
        """Start a measurement of a peer's clock."""
        self._start(engine_id, self._measure(engine_id, host, port), measured=True)

    def results(self) -> list[Shaken]:
        """Return what has come out since the last call."""
        results, self._results = self._results, []
        return results

    async def close(self) -> None:
        """Break off what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, engine_id: str, work: Coroutine[Any, Any, None], *, measured: bool) -> None:
        if len(self._tasks) >= RUNNING_MAX:
            work.close()
            busy = f"{RUNNING_MAX} handshakes are under way already"
            self._results.append(Shaken(engine_id=engine_id, problem=busy, measured=measured))
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, engine_id: str, host: str, port: int) -> None:
        begun_ns = now_ns()
        try:
            met = await self._client.connect(host, port, self._mine(), engine_id, LIMIT_S)
        except HandshakeFailed as error:
            self._results.append(Shaken(engine_id=engine_id, problem=str(error)))
            return
        terms = met.theirs.terms
        self._results.append(
            Shaken(
                engine_id=engine_id,
                interval_ns=terms.interval_ns if terms.renews else 0,
                addresses=met.theirs.addresses,
                samples=met.samples,
                took_ns=now_ns() - begun_ns,
            )
        )

    async def _measure(self, engine_id: str, host: str, port: int) -> None:
        try:
            sample = await self._client.ping(host, port, engine_id, LIMIT_S)
        except HandshakeFailed as error:
            self._results.append(Shaken(engine_id=engine_id, problem=str(error), measured=True))
            return
        self._results.append(Shaken(engine_id=engine_id, measured=True, samples=[sample]))

"""Handshakes in the background: tasks beside the step loop, so that a slow or dead peer delays nobody (KVC-HB-005).

They wait in line, one line for each place (host and port), since places are named by hand-offs, and those by clients:
however many name a port that keeps silent, only two handshakes at a time are lost on it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from reference_impl.engine.connector import Shaken
from reference_impl.realclock import now_ns
from reference_impl.rules.agreement import Hello
from reference_impl.transport.hello import HandshakeClient, HandshakeFailed

LIMIT_S: Final = 3.0
"""From a handshake's start; it may have waited before."""
RUNNING_MAX: Final = 64
AT_ONE_PLACE_MAX: Final = 2
WAITING_MAX: Final = 4096


@dataclass(frozen=True)
class _Asked:
    """A handshake, or a measurement, to be made."""

    engine_id: str
    place: tuple[str, int]
    measured: bool


@dataclass
class _Place:
    """The line before a place."""

    waiting: deque[_Asked] = field(default_factory=deque)
    running: int = 0


class BackgroundShaker:
    """`connector.Shaker` on asyncio. `mine` introduces us, asked at each handshake; `secret` is the deployment's."""

    def __init__(self, mine: Callable[[], Hello], secret: bytes = b"") -> None:
        self._mine = mine
        self._client = HandshakeClient(now_ns, secret)
        self._tasks: set[asyncio.Task[None]] = set()
        self._places: dict[tuple[str, int], _Place] = {}
        """Those with something waiting or under way; the one whose turn was last at the end."""
        self._waiting = 0
        self._closed = False
        self._results: list[Shaken] = []

    def connect(self, engine_id: str, host: str, port: int) -> None:
        """Start a handshake, once its turn has come."""
        self._queue(_Asked(engine_id, (host, port), measured=False))

    def measure(self, engine_id: str, host: str, port: int) -> None:
        """Start a measurement of a peer's clock, once its turn has come."""
        self._queue(_Asked(engine_id, (host, port), measured=True))

    @property
    def running(self) -> int:
        """How many are under way."""
        return len(self._tasks)

    def results(self) -> list[Shaken]:
        """Return what has come out since the last call."""
        results, self._results = self._results, []
        return results

    async def close(self) -> None:
        """Break off what is under way, and start no more."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _queue(self, asked: _Asked) -> None:
        place = self._places.setdefault(asked.place, _Place())
        place.waiting.append(asked)
        self._waiting += 1
        self._fill()
        if self._waiting > WAITING_MAX:
            self._turn_away()

    def _turn_away(self) -> None:
        """Give up on the last in the longest line: who asks for a place that nobody else waits for has done no harm."""
        where, longest = max(reversed(self._places.items()), key=lambda item: len(item[1].waiting))
        asked = longest.waiting.pop()
        self._waiting -= 1
        self._forget_idle(where)
        busy = f"{WAITING_MAX} handshakes wait already"
        self._results.append(Shaken(engine_id=asked.engine_id, problem=busy, measured=asked.measured))

    def _fill(self) -> None:
        """Start what may be started; the places take turns."""
        while not self._closed and len(self._tasks) < RUNNING_MAX and (next_one := self._next()) is not None:
            place = self._places.pop(next_one)
            self._places[next_one] = place
            place.running += 1
            self._waiting -= 1
            task = asyncio.create_task(self._shake(place.waiting.popleft()))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, next_one))

    def _next(self) -> tuple[str, int] | None:
        for where, place in self._places.items():
            if place.waiting and place.running < AT_ONE_PLACE_MAX:
                return where
        return None

    def _ended(self, where: tuple[str, int], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._places[where].running -= 1
        self._forget_idle(where)
        self._fill()

    def _forget_idle(self, where: tuple[str, int]) -> None:
        place = self._places[where]
        if not place.running and not place.waiting:
            del self._places[where]

    async def _shake(self, asked: _Asked) -> None:
        host, port = asked.place
        if asked.measured:
            await self._measure(asked.engine_id, host, port)
        else:
            await self._connect(asked.engine_id, host, port)

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

"""The service's side of the link to its node's engine: a private socket (0600) at which the engine introduces itself.

At most one engine is linked; a new one takes its place, and the one before is heard no more. An engine is told
everything that is to be so before anything else is asked of it. Whenever one side cannot be sure of the other any more
(an answer that does not come, a message that could not be taken in), the connection ends, so that it is told anew.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from reference_impl.blockservice import link
from reference_impl.blockservice.errors import Unavailable

ASK_LIMIT_S: Final = 5.0
HELLO_LIMIT_S: Final = 5.0
HEARD_MAX: Final = 1024
"""Messages of an engine that wait to be taken in."""

AGAIN_S: Final = 0.5
"""Between two tries to take in an engine, while the store cannot."""
_LOGGER: Final = logging.getLogger(__name__)

Wire = link.Stream[link.FromEngine]


class NoEngine(Unavailable):
    """No engine is linked, or it did not answer: what needs it can be tried again."""


class EngineLink:
    """Where the engine is reached. `came` is awaited with its introduction, `said` with what it says by itself.

    While `came` runs the engine can be asked, by `came` only. `ask_limit_s` is how long an answer may take,
    `hello_limit_s` an introduction.
    """

    def __init__(
        self,
        path: Path,
        came: Callable[[link.Hello], Awaitable[None]],
        said: Callable[[link.Publish | link.Gone | link.Ended], Awaitable[None]],
        *,
        ask_limit_s: float = ASK_LIMIT_S,
        hello_limit_s: float = HELLO_LIMIT_S,
    ) -> None:
        self._path, self._came, self._said = path, came, said
        self._ask_limit_s, self._hello_limit_s = ask_limit_s, hello_limit_s
        self._server: asyncio.Server | None = None
        self._wire: Wire | None = None
        self._listening: asyncio.Task[None] | None = None
        """Takes in what the linked engine says, after `came`."""
        self._told = False
        """Whether `came` has run."""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[link.Said]] = {}
        self._displaced: set[Wire] = set()
        """Connections whose place another one has taken."""
        self._serving: set[asyncio.Task[None]] = set()
        self.incarnation = ""
        """Of the engine that is linked, "" if none is."""

    async def listen(self) -> None:
        """Listen at the socket, in place of a dead predecessor's."""
        self._path.unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._accept, self._path)
        finally:
            os.umask(mask)
        if stat.S_IMODE(self._path.stat().st_mode) != 0o600:
            raise PermissionError(f"{self._path} must be private (0600)")

    async def ask(self, question: link.Question) -> link.Said:
        """Return the engine's answer. Raises NoEngine; then it may have done what it was asked, and is told anew."""
        wire = self._wire
        if wire is None:
            raise NoEngine("no engine is linked to this node's block service")
        if not self._told and asyncio.current_task() is not self._listening:
            raise NoEngine("the engine has only just come, and is being told what there is")
        number = next(self._numbers)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            wire.send(link.Ask(number, question))
            said: link.Said = await asyncio.wait_for(answered, self._ask_limit_s)
            return said
        except TimeoutError as error:
            wire.part()  # it may do what it was asked later, for nobody
            raise NoEngine(f"the engine did not answer within {self._ask_limit_s:g} s") from error
        finally:
            del self._waiting[number]

    async def close(self) -> None:
        """Stop listening and let the engine go."""
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        if self._listening is not None:
            await asyncio.wait([self._listening])
        self._path.unlink(missing_ok=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        wire: Wire = link.Stream(reader, writer, link.FromEngine)
        try:
            async with asyncio.timeout(self._hello_limit_s):
                hello = await wire.receive()
            if isinstance(hello, link.Hello):
                await self._serve(wire, hello)
        except (link.LinkBroken, NoEngine, TimeoutError):
            return
        finally:
            await wire.close()

    async def _serve(self, wire: Wire, hello: link.Hello) -> None:
        """Serve one engine to its end."""
        before = self._listening
        if self._wire is not None:
            self._displaced.add(self._wire)
        self._leave()
        self._wire, self.incarnation, self._told = wire, hello.incarnation, False
        heard: asyncio.Queue[link.Publish | link.Gone | link.Ended] = asyncio.Queue(HEARD_MAX)
        self._listening = listening = asyncio.create_task(self._listen(wire, hello, heard, before))
        listening.add_done_callback(lambda _: wire.part() if self._wire is wire else None)
        try:
            while True:
                message = await wire.receive()
                if self._wire is not wire:
                    continue  # another one has its place: it is heard no more, until that one has gone
                if isinstance(message, link.Said):
                    self._answered(message)
                elif not isinstance(message, link.Hello):
                    heard.put_nowait(message)
        except asyncio.QueueFull:
            return  # it is told everything when it comes back
        finally:
            self._displaced.discard(wire)
            if self._wire is wire:
                self._leave()
                for other in self._displaced:  # whoever of them lives comes back, and is told everything
                    other.part()
            listening.cancel()

    async def _listen(
        self, wire: Wire, hello: link.Hello, heard: asyncio.Queue[link.Publish | link.Gone | link.Ended],
        before: asyncio.Task[None] | None,
    ) -> None:  # fmt: skip
        """Take in what the engine says, in order: beside what it answers, for that may be waited for meanwhile."""
        if before is not None:
            before.cancel()
            await asyncio.wait([before])
        try:
            await self._came(hello)
            self._told = self._told or self._wire is wire
            while True:
                await self._said(await heard.get())
        except NoEngine:
            return
        except Exception as error:  # of the store, as a rule: the engine comes back and is heard again
            _LOGGER.warning("what the engine says could not be taken in: %s", error)
            await asyncio.sleep(AGAIN_S)

    def _answered(self, said: link.Said) -> None:
        waiting = self._waiting.get(said.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(said)

    def _leave(self) -> None:
        """Let the engine go that is linked: whatever it was asked fails."""
        self._wire, self.incarnation, self._told = None, "", False
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(NoEngine("the engine has gone"))

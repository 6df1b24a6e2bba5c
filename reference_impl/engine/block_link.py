"""An engine's side of the link to its node's block service: answers it, and tells it what happens to the groups.

The service may end and come back: the engine connects anew and introduces itself. Groups are taken up, lent and held
whether it is there or not, so nothing in the engine waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path
from typing import Final

from reference_impl.blockservice import link
from reference_impl.engine.block_groups import BlockGroups, Fresh
from reference_impl.engine.core import EngineCore
from reference_impl.realclock import now_ns

RETRY_S: Final = 0.05
PUMP_S: Final = 0.05
CONNECT_LIMIT_S: Final = 1.0

Wire = link.Stream[link.Ask]


def checksum(core: EngineCore, blocks: list[int]) -> str:
    """Return the checksum of some blocks' bytes, block after block: blake2b-128 in hexadecimal. They must be held."""
    digest = hashlib.blake2b(digest_size=16)
    for block in blocks:
        digest.update(core.block_bytes(block))
    return digest.hexdigest()


class BlockLink:
    """Runs as long as the engine serves. `incarnation` names the engine's life: its KV dies with it (S5)."""

    def __init__(self, path: Path, core: EngineCore, groups: BlockGroups, incarnation: str) -> None:
        self._path, self._core, self._groups, self._incarnation = path, core, groups, incarnation
        self._wire: Wire | None = None
        """Of a service that knows everything that we know."""
        self._introducing = False

    async def run(self) -> None:
        """Serve until cancelled."""
        pumping = asyncio.create_task(self._pump())
        try:
            while True:
                with contextlib.suppress(OSError, TimeoutError, link.LinkBroken):
                    await self._serve()
                await asyncio.sleep(RETRY_S)
        finally:
            pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)

    async def _serve(self) -> None:
        """Answer one service from its appearance to its end."""
        async with asyncio.timeout(CONNECT_LIMIT_S):
            reader, writer = await asyncio.open_unix_connection(self._path)
        wire: Wire = link.Stream(reader, writer, link.Ask)
        try:
            self._introducing = True
            wire.send(self._groups.hello(self._incarnation))
            while True:
                ask = await wire.receive()
                wire.send(link.Said(ask.number, **self._groups.answer(ask.question, now_ns())))
                if isinstance(ask.question, link.Sync):
                    self._introducing, self._wire = False, wire
        finally:
            self._introducing, self._wire = False, None
            await wire.close()

    async def _pump(self) -> None:
        """Take up what is new and tell it, all the time but while the service is told what there is."""
        while True:
            await asyncio.sleep(PUMP_S)
            if self._introducing:
                continue
            self._groups.take_fetched()
            if self._groups.fresh:
                fresh = self._groups.fresh.popleft()
                await self._check(fresh)
            for published in self._groups.take_renamed():
                self._tell(published)
            gone, ended = self._groups.gone(), self._groups.loans_ended()
            if gone:
                self._tell(link.Gone(gone))
            if ended:
                self._tell(link.Ended(ended))

    async def _check(self, fresh: Fresh) -> None:
        computed = await asyncio.to_thread(checksum, self._core, fresh.blocks)
        while self._introducing:  # the service is being told what there is
            await asyncio.sleep(PUMP_S)
        told = self._groups.checked(fresh, computed)
        if told is not None:
            self._tell(told)

    def _tell(self, message: link.FromEngine) -> None:
        """Tell the service, if it is there; one that is not will be told everything."""
        if self._wire is not None:
            self._wire.send(message)

"""A counter in shared memory that the engine's event loop raises: its sign of life, read without asking it."""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
from typing import Final

INTERVAL_S: Final = 0.02
_WORD: Final = struct.Struct("=Q")


class TickPage:
    """One shared page. The supervisor makes it, the engine opens it by its inherited descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._page = mmap.mmap(fd, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> TickPage:
        """Make a page at zero; `fd` is close-on-exec and is passed on by name."""
        fd = os.memfd_create("pdproof:ticks", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        return cls(fd)

    @property
    def count(self) -> int:
        """Ticks so far."""
        return int(_WORD.unpack_from(self._page)[0])

    def tick(self) -> None:
        """Raise the counter by one."""
        _WORD.pack_into(self._page, 0, self.count + 1)

    async def run(self) -> None:
        """Tick for as long as the event loop turns."""
        while True:
            self.tick()
            await asyncio.sleep(INTERVAL_S)

    def close(self) -> None:
        """Unmap the page and close the descriptor."""
        self._page.close()
        os.close(self.fd)

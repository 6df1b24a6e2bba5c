"""Frees memory beside the service's loop: a dead engine's gigabytes must not keep its successor at the door.

The kernel takes tens of milliseconds a GiB to give pages back, and time for every descriptor. The loop is told when a
holding is really gone; until then its capacity stays charged.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from queue import SimpleQueue

from reference_impl.memory_service.backend import Backend, Memory
from reference_impl.memory_service.errors import BackendError
from reference_impl.rules.sessions import Holding


class Reaper:
    """A thread that releases whole holdings, in order. `fileno()` turns readable when some are done.

    Its queue is bounded by the service's limit on allocations, for everything in it is still counted.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._todo: SimpleQueue[tuple[Holding, Iterable[Memory]]] = SimpleQueue()
        self._done: deque[Holding] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        threading.Thread(target=self._work, name="reaper", daemon=True).start()

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._wake

    def free(self, holding: Holding, memories: Iterable[Memory]) -> None:
        """Have a holding's memory released. Returns at once."""
        self._todo.put((holding, memories))

    def collect(self) -> list[Holding]:
        """Return the holdings that are gone since the last call."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        return [self._done.popleft() for _ in range(len(self._done))]

    def _work(self) -> None:
        while True:
            holding, memories = self._todo.get()
            for memory in memories:
                try:
                    self._backend.release(memory)
                except (OSError, BackendError):
                    # close(2) has let go of the descriptor whatever it answers; the rest must still be freed.
                    continue
            self._done.append(holding)
            os.eventfd_write(self._wake, 1)

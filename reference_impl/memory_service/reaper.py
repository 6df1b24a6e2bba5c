"""Frees memory beside the service's loop: a dead engine's gigabytes must not keep its successor at the door.

The kernel takes tens of milliseconds a GiB to give pages back, and time for every descriptor. The loop is told when a
holding is really gone; until then its capacity stays charged.

Memory is never taken away under a living process: an engine whose session broke off (the service was stopped too long,
a frame came too late) may still compute with what it has mapped. Its holding waits here until the process has ended.
"""

from __future__ import annotations

import os
import selectors
import threading
from collections import deque
from collections.abc import Iterable
from queue import Empty, SimpleQueue

from reference_impl.memory_service.backend import Backend, Memory
from reference_impl.memory_service.errors import BackendError
from reference_impl.rules.sessions import Holding


class Reaper:
    """A thread that releases whole holdings. `fileno()` turns readable when some are done.

    Its queue is bounded by the service's limit on allocations, for everything in it is still counted.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._todo: SimpleQueue[tuple[int, int] | tuple[Holding, Iterable[Memory]]] = SimpleQueue()
        self._done: deque[Holding] = deque()
        self._asked = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._asked, selectors.EVENT_READ)
        self._living: dict[int, set[int]] = {}  # holding id -> pidfds of processes that may have it mapped
        self._waiting: dict[int, tuple[Holding, Iterable[Memory]]] = {}
        threading.Thread(target=self._work, name="reaper", daemon=True).start()

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._wake

    def watch(self, holding: Holding, pidfd: int) -> None:
        """Keep a holding until a process has ended. Takes the pidfd over. Returns at once."""
        self._todo.put((holding.id, pidfd))
        os.eventfd_write(self._asked, 1)

    def free(self, holding: Holding, memories: Iterable[Memory]) -> None:
        """Have a holding's memory released once every process watched for it has ended. Returns at once."""
        self._todo.put((holding, memories))
        os.eventfd_write(self._asked, 1)

    def collect(self) -> list[Holding]:
        """Return the holdings that are gone since the last call."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        return [self._done.popleft() for _ in range(len(self._done))]

    def _work(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._asked:
                    os.eventfd_read(self._asked)
                    self._take_in()
                else:
                    self._ended(key.fd, key.data)
            for holding_id in [number for number in self._waiting if number not in self._living]:
                self._release(*self._waiting.pop(holding_id))

    def _take_in(self) -> None:
        while True:
            try:
                subject, matter = self._todo.get_nowait()
            except Empty:
                return
            if isinstance(subject, Holding):
                assert not isinstance(matter, int)
                self._waiting[subject.id] = (subject, matter)
            else:
                assert isinstance(matter, int)
                self._living.setdefault(subject, set()).add(matter)
                self._selector.register(matter, selectors.EVENT_READ, subject)

    def _ended(self, pidfd: int, holding_id: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._living[holding_id].discard(pidfd)
        if not self._living[holding_id]:
            del self._living[holding_id]

    def _release(self, holding: Holding, memories: Iterable[Memory]) -> None:
        for memory in memories:
            try:
                self._backend.release(memory)
            except (OSError, BackendError):
                # close(2) has let go of the descriptor whatever it answers; the rest must still be freed.
                continue
        self._done.append(holding)
        os.eventfd_write(self._wake, 1)

"""The kernel takes its time to give memory back: nobody waits for it who need not, and nothing is given twice."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reference_impl.event_log import EventLog
from reference_impl.memory_service.backend import Memory, Reservation
from reference_impl.memory_service.client import MemoryClient, service_figures
from reference_impl.memory_service.errors import ServiceTimeout, ShortOfMemory
from reference_impl.memory_service.host import HostBackend
from reference_impl.memory_service.reaper import Reaper
from reference_impl.memory_service.requests import Desk
from reference_impl.memory_service.server import listening
from reference_impl.memory_service.service import Service
from reference_impl.realclock import RealClock
from reference_impl.rules.sessions import Holding, Mode, Sessions, Tag
from tests.waiting import until

SIZE = 1 << 20


class StuckBackend(HostBackend):
    """Memory that is freed only when the test says so."""

    def __init__(self) -> None:
        self.may_free = threading.Event()
        self.asked = threading.Event()

    def release(self, held: Memory | Reservation) -> None:
        self.asked.set()
        assert self.may_free.wait(20)
        super().release(held)


class InlineReaper(Reaper):
    """A mutant: frees in the loop, as if it took no time."""

    def free(self, holding: Holding, memories: Iterable[Memory]) -> None:
        for memory in memories:
            self._backend.release(memory)
        super().free(holding, ())


@contextmanager
def service_in_a_thread(backend: StuckBackend, reaper: type[Reaper] = Reaper) -> Iterator[Path]:
    rules = Sessions(device="gpu0", service="life", capacity_bytes=2 * SIZE)
    desk = Desk("gpu0", rules, backend, EventLog(None, "memory"))
    desk.reaper = reaper(backend)
    stop_read, stop_write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="mem") as folder, listening(Path(folder, "s")) as listener:
        assert listener.family is socket.AF_UNIX
        thread = threading.Thread(target=Service(listener, desk, RealClock(), stop_read).run)
        thread.start()
        try:
            yield Path(folder, "s")
        finally:
            backend.may_free.set()
            os.write(stop_write, b"x")
            thread.join(20)
            os.close(stop_read)
            os.close(stop_write)
    assert not thread.is_alive()


def writer(path: Path, timeout_s: float = 10.0) -> MemoryClient:
    return MemoryClient(path, tag=Tag.KV_CACHE, mode=Mode.WRITER, engine_id="e", timeout_s=timeout_s, wait_s=0.2)


@pytest.mark.rule("KVC-MEM-005")
def test_the_next_writer_is_admitted_while_the_memory_of_the_last_is_still_being_freed() -> None:
    """KVC-MEM-005."""
    backend = StuckBackend()
    with service_in_a_thread(backend) as path:
        with writer(path) as dead:
            dead.allocate("kv", SIZE)
        assert backend.asked.wait(10)
        with writer(path) as successor:
            assert service_figures(path).freeing_bytes == SIZE
            successor.allocate("kv", SIZE)


@pytest.mark.rule("KVC-MEM-010")
def test_capacity_comes_back_only_when_the_kernel_has_given_the_memory_back() -> None:
    """KVC-MEM-010: until then a bounded wait; then the waiting one gets it."""
    backend = StuckBackend()
    with service_in_a_thread(backend) as path:
        with writer(path) as dead:
            dead.allocate("kv", SIZE)
        with writer(path) as successor:
            with pytest.raises(ShortOfMemory, match=f"{SIZE} are being freed"):
                successor.allocate("kv", 2 * SIZE, wait_s=0.05)
            assert backend.asked.wait(10)
            backend.may_free.set()
            successor.allocate("kv", 2 * SIZE, wait_s=10)
            until(lambda: service_figures(path).freeing_bytes == 0, 10, "freeing is done")
            assert service_figures(path).used_bytes == 2 * SIZE


@pytest.mark.rule("KVC-MEM-005")
def test_freeing_in_the_loop_would_keep_the_next_writer_at_the_door() -> None:
    """The broken twin of KVC-MEM-005: this is what the reaper's thread is for."""
    backend = StuckBackend()
    with service_in_a_thread(backend, InlineReaper) as path:
        dead = writer(path, timeout_s=0.3)
        dead.allocate("kv", SIZE)
        dead.close()
        with pytest.raises(ServiceTimeout):
            writer(path, timeout_s=0.3)

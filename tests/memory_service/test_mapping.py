"""Addresses, sleep and wake, and what a reader may not do."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from reference_impl.memory_service.backend import Access
from reference_impl.memory_service.errors import (
    BackendError,
    Fenced,
    LayoutChanged,
    NotMapped,
    StaleEpoch,
    UnknownName,
    WriterBusy,
)
from reference_impl.memory_service.host import HostBackend
from reference_impl.memory_service.libc import HUGE_PAGE_BYTES
from reference_impl.memory_service.mapping import private_region
from reference_impl.rules.events import EventKind
from reference_impl.rules.sessions import Mode, Tag
from tests.memory_service.running import MIB, RunningService, descriptors_of, running_service

SIZES = {"embedding": 5 * MIB, "odd": 5001, "head": 2 * MIB}


def publish(service: RunningService, fill: int = 7, metadata: bytes = b"") -> None:
    with service.client() as client:
        for name, size in SIZES.items():
            client.allocate(name, size)
        region = client.region()
        region.map()
        for name in SIZES:
            region.array(name, "uint8")[:] = fill
        client.commit(metadata)


@pytest.mark.rule("KVC-MEM-007")
@pytest.mark.parametrize("populate", [False, True])
def test_after_sleep_and_wake_every_tensor_is_where_and_what_it_was(service: RunningService, populate: bool) -> None:
    """KVC-MEM-007: while it slept other memory was mapped, and none of it fell into the reservation."""
    publish(service)
    with service.client(mode=Mode.READER) as client, client.region() as region:
        region.map(populate)
        addresses = {name: region.address(name) for name in region.names}
        for name, address in addresses.items():
            assert address % (4096 if name == "odd" else HUGE_PAGE_BYTES) == 0
        for _ in range(3):
            region.unmap()
            assert not region.mapped
            with pytest.raises(NotMapped):
                region.array("odd")
            others = [mmap.mmap(-1, 2 * MIB) for _ in range(16)]
            region.map(populate)
            region.check_current(client)
            assert {name: region.address(name) for name in region.names} == addresses
            for name, size in SIZES.items():
                found = region.array(name, "uint8")
                assert found.ctypes.data == addresses[name]
                assert (found.size, found.min(), found.max()) == (size, 7, 7)
            for other in others:
                other.close()


@pytest.mark.rule("KVC-MEM-007")
def test_a_writers_kv_stands_where_it_stood(service: RunningService) -> None:
    """KVC-MEM-007, for memory that was never committed."""
    with service.client(Tag.KV_CACHE) as client:
        client.allocate("kv", 4 * MIB)
        with client.region() as region:
            region.map()
            region.array("kv")[:] = np.arange(MIB // 2)
            region.unmap()
            region.map()
            assert np.array_equal(region.array("kv"), np.arange(MIB // 2))


@pytest.mark.parametrize("populate", [False, True])
def test_populating_keeps_what_is_there(service: RunningService, populate: bool) -> None:
    """Making huge pages of small ones copies them; nobody may see that."""
    with service.client(Tag.KV_CACHE) as client:
        client.allocate("kv", 6 * MIB + 5000)
        with client.region() as region:
            region.map(populate)
            expected = np.arange(region.size_bytes // 8, dtype="uint64")
            region.array("kv")[:] = expected
            region.unmap()
            region.map(populate=True)
            assert np.array_equal(region.array("kv"), expected)
        assert service.figures().used_bytes == -(-(6 * MIB + 5000) // 4096) * 4096


@pytest.mark.rule("KVC-MEM-008")
def test_a_changed_layout_is_refused_on_waking(service: RunningService) -> None:
    """KVC-MEM-008: other content in the same shape is another layout too."""
    publish(service)
    with service.client(mode=Mode.READER) as parked, parked.region() as region:
        region.check_current(parked)
        publish(service, fill=9)
        with pytest.raises(LayoutChanged, match=r"generation 1 .* generation 2") as caught:
            region.check_current(parked)
        assert "\n" not in str(caught.value)
        region.map()
        assert region.array("odd", "uint8")[0] == 7, "an older generation lasts as long as its readers"
    assert service.settled().allocations == len(SIZES)


@pytest.mark.rule("KVC-MEM-008")
def test_another_life_of_the_service_is_another_layout(service: RunningService) -> None:
    """KVC-MEM-008: generation and hash may agree by accident; the service's life does not."""
    publish(service)
    with service.client(mode=Mode.READER) as parked, parked.region() as region, running_service() as successor:
        publish(successor)
        with successor.client(mode=Mode.READER) as client:
            theirs = client.layout()
            assert (theirs.generation, theirs.hash) == (parked.layout().generation, parked.layout().hash)
            with pytest.raises(LayoutChanged):
                region.check_current(client)


@pytest.mark.rule("KVC-MEM-004")
def test_a_reader_gets_nothing_that_it_could_write_through(service: RunningService) -> None:
    """KVC-MEM-004: not by its descriptor, not by re-opening it, and the writer loses its own right by the commit."""
    with service.client() as writer:
        writer.allocate("w", 4096)
        early = writer.export("w")
        with mmap.mmap(early, 4096) as still_allowed:
            still_allowed[0] = 5
        region = writer.region()
        region.map()
        writer.commit()
        assert not region.array("w").flags.writeable
        with service.client(mode=Mode.READER) as reader:
            descriptor = reader.export("w")
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            for attempt in (descriptor, early, again):
                with pytest.raises(PermissionError):
                    mmap.mmap(attempt, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
                    os.pwrite(attempt, b"x", 0)
                with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
                    os.ftruncate(attempt, 0)
                assert os.pread(attempt, 1, 0) == b"\x05"
                os.close(attempt)
            view = reader.region()
            view.map()
            array = view.array("w")
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


@pytest.mark.rule("KVC-LOCK-004")
def test_a_fenced_writer_may_do_nothing_more(service: RunningService) -> None:
    """KVC-LOCK-004: over the wire, and in the history."""
    with service.client(Tag.KV_CACHE, epoch=4, engine_id="old") as old:
        old.allocate("kv", 4096)
        with pytest.raises(WriterBusy):
            service.client(Tag.KV_CACHE, epoch=4, engine_id="twin")
        with service.client(Tag.KV_CACHE, epoch=5, engine_id="new") as new:
            for forbidden in (lambda: old.allocate("more", 1), old.commit, lambda: old.export("kv")):
                with pytest.raises(Fenced, match=r"epoch 4.* replaced by epoch 5"):
                    forbidden()
            new.allocate("kv", 4096)
        with pytest.raises(StaleEpoch, match="has seen 5"):
            service.client(Tag.KV_CACHE, epoch=4, engine_id="old")
    refused = [event.detail["reason"] for event in service.events(EventKind.SESSION_REFUSED)]
    assert refused == ["writer_busy", "fenced", "fenced", "fenced", "stale_epoch"]


def test_a_reader_waits_for_the_first_commit(service: RunningService) -> None:
    """Two engines that start at once: the second waits at the door for what the first loads."""
    found: list[int] = []

    def read() -> None:
        with service.client(mode=Mode.READER, wait_s=10) as client:
            found.append(client.layout().generation)

    thread = threading.Thread(target=read)
    thread.start()
    publish(service)
    thread.join(10)
    assert found == [1]


@pytest.mark.rule("KVC-MEM-009")
def test_five_hundred_cycles_gain_nothing(service: RunningService) -> None:
    """KVC-MEM-009: attach, export, map, unmap, detach; the benchmark does 10,000."""
    publish(service)

    def cycle() -> None:
        with service.client(mode=Mode.READER) as client:
            os.close(client.export("odd"))
            with client.region() as region:
                region.map()
                assert region.array("odd", "uint8")[5000] == 7
                region.unmap()

    cycle()
    mine, figures = descriptors_of(os.getpid()), service.settled()
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    theirs = service.idle_descriptors()
    for _ in range(500):
        cycle()
    assert service.settled() == figures
    assert descriptors_of(os.getpid()) == mine
    assert abs(len(Path("/proc/self/maps").read_text().splitlines()) - maps) < 10
    service.descriptors_become(theirs)


def test_a_private_region_has_the_same_face() -> None:
    with private_region({"a": 3 * MIB, "b": 100}) as region:
        assert region.size_bytes == 3 * MIB + 100
        region.map(populate=True)
        region.array("a")[:] = 1
        at = region.address("a")
        region.unmap()
        region.map()
        assert region.address("a") == at
        assert region.writable
    assert region.closed
    with pytest.raises(NotMapped):
        region.map()
    with pytest.raises(BackendError):
        private_region({})
    with pytest.raises(BackendError):
        private_region({"a": 0})


def test_what_is_not_there_is_told(service: RunningService) -> None:
    publish(service)
    with service.client(mode=Mode.READER) as client, client.region() as region:
        for call in (region.address, client.export):
            with pytest.raises(UnknownName, match="nothing"):
                call("nothing")


def test_memory_that_could_shrink_is_not_taken() -> None:
    """A region over an unsealed file would be a SIGBUS in waiting."""
    backend = HostBackend()
    before = descriptors_of(os.getpid())
    loose = os.memfd_create("loose", os.MFD_CLOEXEC)
    os.ftruncate(loose, 4096)
    with pytest.raises(BackendError, match="sealed memory"):
        backend.import_(loose, 4096)
    memory = backend.create(4096, "name\0with a hole" + "ü" * 200)
    with pytest.raises(BackendError, match="sealed memory"):
        backend.import_(backend.export(memory, Access.WRITE), 8192)
    backend.release(memory)
    assert descriptors_of(os.getpid()) == before

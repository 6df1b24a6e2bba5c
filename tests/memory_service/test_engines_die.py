"""Engines are killed at every step, and the service is none the worse."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest

from reference_impl.memory_service import wire
from reference_impl.memory_service.client import MemoryClient, commit_status
from reference_impl.memory_service.errors import (
    NothingCommitted,
    ServiceGone,
    ServiceTimeout,
    ShortOfMemory,
    WriterBusy,
)
from reference_impl.realclock import now_ns
from reference_impl.rules.events import EventKind
from reference_impl.rules.sessions import Mode, Tag
from tests.memory_service.running import (
    MIB,
    RunningService,
    go_on,
    pss_bytes,
    reached,
    read_line,
    running_engine,
    running_service,
    sigkill,
)
from tests.waiting import until

COUNT, SIZE = 4, 64 * 1024
SUM = sum(int((np.arange(SIZE // 8, dtype="uint64") + number).sum()) for number in range(COUNT))


@pytest.mark.rule("KVC-MEM-005")
@pytest.mark.parametrize("tag", list(Tag))
@pytest.mark.parametrize("step", ["open", "allocate", "map", "fill"])
def test_a_writer_killed_before_its_commit_leaves_nothing(service: RunningService, tag: Tag, step: str) -> None:
    """KVC-MEM-005."""
    before = service.idle_descriptors()
    every = ["open", "allocate", "map", "fill"]
    with running_engine(service, *every[1 : every.index(step) + 1], tag=tag) as engine:
        reached(engine, step)
        sigkill(engine)
    assert service.settled().used_bytes == 0
    service.descriptors_become(before)
    with pytest.raises(NothingCommitted):
        service.client(tag, Mode.READER)
    with service.client(tag) as successor:
        successor.allocate("a0", SIZE)
        region = successor.region()
        region.map()
        assert not region.array("a0").any(), "a dead writer's bytes show in its successor's memory"


@pytest.mark.rule("KVC-MEM-001")
@pytest.mark.parametrize("steps", [("commit",), ("commit", "unmap")])
def test_weights_outlive_every_engine_byte_for_byte(service: RunningService, steps: tuple[str, ...]) -> None:
    """KVC-MEM-001: the writer dies after its commit, a reader dies too, and a third finds every byte."""
    with running_engine(service, "allocate", "map", "fill", *steps) as writer:
        reached(writer, steps[-1])
        with running_engine(service, "map", mode=Mode.READER) as reader:
            reached(reader, "map")
            sigkill(writer)
            sigkill(reader)
    assert service.settled().used_bytes == COUNT * SIZE
    with service.client(mode=Mode.READER) as client:
        region = client.region()
        region.map()
        found = [region.array(f"a{number}") for number in range(COUNT)]
        for number, array in enumerate(found):
            assert np.array_equal(array, np.arange(SIZE // 8, dtype="uint64") + number)


@pytest.mark.rule("KVC-MEM-006")
def test_a_commit_whose_reply_nobody_read_is_still_a_commit(service: RunningService) -> None:
    """KVC-MEM-006: the engine dies between its commit and the answer."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(service.path))
        for request in (wire.Open(Tag.WEIGHTS, Mode.WRITER, "e", 0, 0.0), wire.Allocate("w", 4096, 0.0)):
            raw.sendall(wire.frame(request))
            assert raw.recv(1 << 16)
        assert commit_status(service.path, "mine") is None
        raw.sendall(wire.frame(wire.Commit("mine", b"m")))
        raw.shutdown(socket.SHUT_WR)
    until(lambda: commit_status(service.path, "mine"), 5, "the commit shows")
    layout = commit_status(service.path, "mine")
    assert layout is not None
    assert layout.metadata == b"m"
    with service.client(mode=Mode.READER) as reader:
        assert reader.layout() == layout
        assert commit_status(service.path, "mine") == layout


@pytest.mark.rule("KVC-MEM-006")
def test_a_commit_that_never_arrived_is_none(service: RunningService) -> None:
    """KVC-MEM-006: half a commit is no commit."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(service.path))
        for request in (wire.Open(Tag.WEIGHTS, Mode.WRITER, "e", 0, 0.0), wire.Allocate("w", 4096, 0.0)):
            raw.sendall(wire.frame(request))
            assert raw.recv(1 << 16)
        raw.sendall(wire.frame(wire.Commit("mine", b"m"))[:-1])
    assert service.settled().used_bytes == 0
    assert commit_status(service.path, "mine") is None


@pytest.mark.rule("KVC-MEM-005")
def test_the_next_writer_is_admitted_while_the_dead_one_held_thousands(service: RunningService) -> None:
    """KVC-MEM-005: the successor waits at the door from before the death on."""
    with running_engine(service, "allocate", tag=Tag.KV_CACHE, epoch=1, count=2000, size_bytes=4096) as engine:
        reached(engine, "allocate")
        assert service.figures().allocations == 2000
        sigkill(engine)
        with service.client(Tag.KV_CACHE, epoch=1, wait_s=5) as successor:
            successor.allocate("kv", MIB)
            assert service.settled(sessions=1).used_bytes == MIB


@pytest.mark.rule("KVC-MEM-010")
def test_short_memory_is_waited_for_and_given_when_its_holder_dies() -> None:
    """KVC-MEM-010."""
    with (
        running_service(capacity_bytes=4 * SIZE) as service,
        running_engine(service, "allocate", tag=Tag.KV_CACHE) as engine,
        service.client(Tag.WEIGHTS) as client,
    ):
        reached(engine, "allocate")
        with pytest.raises(ShortOfMemory, match="0 free of 262144"):
            client.allocate("w", 1, wait_s=0.05)
        with running_engine(service, tag=Tag.KV_CACHE, epoch=1) as shadow:
            reached(shadow, "open")
            sigkill(engine)
            client.allocate("w", 4 * SIZE, wait_s=10)
        assert service.settled(sessions=1).used_bytes == 4 * SIZE


@pytest.mark.rule("KVC-MEM-010")
def test_the_service_caps_a_wait() -> None:
    """KVC-MEM-010: a client that asks for a minute waits no longer than the service lets it."""
    with running_service("--wait-s-max", "0.05") as service, service.client():
        start_ns = now_ns()
        with pytest.raises(WriterBusy):
            service.client(wait_s=60)
        assert 0.05e9 <= now_ns() - start_ns < 30e9


@pytest.mark.rule("KVC-MEM-010")
def test_a_wait_ends_when_the_asker_dies() -> None:
    """KVC-MEM-010: and what it waited for is not given to the dead."""
    with running_service(capacity_bytes=SIZE) as service, service.client(Tag.WEIGHTS) as holder:
        holder.allocate("w", SIZE)
        with running_engine(service, "ask", tag=Tag.KV_CACHE) as asker:
            reached(asker, "asking")
            sigkill(asker)
        service.settled(sessions=1)
        holder.close()
        assert service.settled().used_bytes == 0


@pytest.mark.rule("KVC-MEM-009")
def test_a_killed_client_costs_no_descriptor_and_no_page(service: RunningService) -> None:
    """KVC-MEM-009."""
    with running_engine(service, "allocate", "map", "fill", "commit") as writer:
        reached(writer, "commit")
    figures = service.settled()
    before = service.idle_descriptors()
    for _ in range(3):
        with running_engine(service, "map", "read", mode=Mode.READER) as reader:
            reached(reader, str(SUM))
            sigkill(reader)
    assert service.settled() == figures
    service.descriptors_become(before)


@pytest.mark.rule("KVC-MEM-002")
@pytest.mark.parametrize(("how", "at_least", "at_most"), [("read", -0.05, 0.05), ("copy", 0.9, 1.1)])
def test_a_second_engine_shares_the_pages_of_the_first(
    service: RunningService, how: str, at_least: float, at_most: float
) -> None:
    """KVC-MEM-002: measured by PSS; the broken twin copies what it should share, and is found out."""
    size = 64 * MIB
    with (
        running_engine(service, "allocate", "map", "fill", "commit", "read", count=1, size_bytes=size) as first,
        running_engine(service, "wait", "map", how, mode=Mode.READER, count=1, size_bytes=size) as second,
    ):
        reached(first, "commit")
        assert read_line(first)
        reached(second, "open")
        before = pss_bytes(first.pid) + pss_bytes(second.pid)
        go_on(second)
        reached(second, "map")
        assert read_line(second)
        added = pss_bytes(first.pid) + pss_bytes(second.pid) - before
    assert at_least * size <= added <= at_most * size


@pytest.mark.rule("KVC-MEM-004")
def test_a_read_only_mapping_kills_a_writer_of_it(service: RunningService) -> None:
    """KVC-MEM-004: whatever a reader tries, the page is not writable; the writer's own page was, until its commit."""
    with running_engine(service, "allocate", "map", "poke", "commit", "poke") as writer:
        reached(writer, "poke")
        reached(writer, "commit")
        assert writer.wait(20) == -11
    with running_engine(service, "map", "poke", mode=Mode.READER) as reader:
        reached(reader, "map")
        assert reader.wait(20) == -11


@pytest.mark.rule("KVC-MEM-007")
def test_an_unmapped_region_is_not_there(service: RunningService) -> None:
    """KVC-MEM-007: its addresses stay reserved, and to touch them is a fault and no one else's memory."""
    with running_engine(service, "allocate", "map", "poke", "unmap", "poke") as engine:
        reached(engine, "unmap")
        assert engine.wait(20) == -11


@pytest.mark.rule("KVC-MEM-003")
def test_the_service_is_out_of_the_path(service: RunningService) -> None:
    """KVC-MEM-003: it maps none of the memory, and stopped or dead it delays no access."""
    with running_engine(service, "allocate", "map", "fill", "commit") as writer:
        reached(writer, "commit")
    assert "memfd" not in Path(f"/proc/{service.process.pid}/maps").read_text()
    with service.client(mode=Mode.READER, timeout_s=0.2) as client:
        region = client.region()
        region.map()
        assert "memfd" in Path("/proc/self/maps").read_text()
        service.process.send_signal(19)
        assert sum(int(region.array(name).sum()) for name in region.names) == SUM
        with pytest.raises(ServiceTimeout, match="did not answer within"):
            region.check_current(client)
        with pytest.raises(ServiceGone, match="over"):
            client.current_layout()
        region.unmap()
        region.map()
        assert int(region.array("a1")[5]) == 6
        service.process.send_signal(18)


def test_memory_is_not_taken_away_under_a_living_engine(service: RunningService) -> None:
    """A session may break off while its engine computes on; its memory stays, and stays charged, until it ends."""
    with running_engine(service, "allocate", "map", "fill", "hang_up", "wait", "read", tag=Tag.KV_CACHE) as engine:
        reached(engine, "hang_up")
        until(lambda: service.figures().sessions == 0, 10, "the session is over")
        with service.client(Tag.KV_CACHE) as successor:
            successor.allocate("kv", SIZE)
        until(lambda: service.figures().used_bytes == COUNT * SIZE, 10, "the successor's memory is freed")
        assert service.figures().freeing_bytes == COUNT * SIZE
        go_on(engine)
        assert read_line(engine) == str(SUM), "a living engine lost its memory"
        sigkill(engine)
        assert service.settled().used_bytes == 0
        service.idle_descriptors()


def test_what_happened_is_in_the_history(service: RunningService) -> None:
    with running_engine(service, "allocate", "commit") as writer:
        reached(writer, "commit")
        sigkill(writer)
    service.settled()
    (opened,) = service.events(EventKind.SESSION_OPENED)
    (committed,) = service.events(EventKind.LAYOUT_COMMITTED)
    (closed,) = service.events(EventKind.SESSION_CLOSED)
    assert opened.detail["engine_id"] == "child"
    assert (committed.detail["bytes"], committed.detail["generation"]) == (COUNT * SIZE, 1)
    assert (closed.detail["session"], closed.detail["reason"]) == (opened.detail["session"], "peer gone")
    assert closed.detail["allocations"] == COUNT


def test_a_dead_service_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ServiceGone, match="No such file") as caught:
        MemoryClient(tmp_path / "none", tag=Tag.WEIGHTS, mode=Mode.READER, engine_id="e")
    assert "\n" not in str(caught.value)

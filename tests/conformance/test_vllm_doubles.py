"""What stands in for NIXL, clocks, threads and KV where vLLM's connectors are run; none of it needs vLLM."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.conformance.network import NetworkFlight
from harness.conformance.subject import Misuse, ReadState
from harness.conformance.subjects.vllm.batons import TurnTaker
from harness.conformance.subjects.vllm.content import Pages, next_token, prefix_hashes
from harness.conformance.subjects.vllm.nixl_double import NixlDouble
from harness.conformance.subjects.vllm.push_writer import UnstartedThreads, one_turn_of
from harness.conformance.subjects.vllm.virtual_time import WorldTime, put_into


class FakeHost:
    """A host whose network is a list."""

    def __init__(self, now_ns: int = 5_000_000_000) -> None:
        self.time_ns = now_ns
        self.sent: list[tuple[str, bytes, int, int]] = []
        self.gone: set[str] = set()
        self.landings: list[tuple[Callable[[], None], NetworkFlight]] = []
        self.questions: list[tuple[int, bytes, Callable[[bytes | None, int, int], None]]] = []
        self.due: list[Callable[[], None]] = []

    def now_ns(self) -> int:
        return self.time_ns

    def send(self, receiver: str, message: bytes, *, rank: int = 0, to_rank: int = 0) -> bool:
        self.sent.append((receiver, message, rank, to_rank))
        return receiver not in self.gone

    def read(self, _holder: str, land: Callable[[], None]) -> NetworkFlight:
        flight = NetworkFlight()
        self.landings.append((land, flight))
        return flight

    def ask(self, port: int, question: bytes, answer: Callable[[bytes | None, int, int], None]) -> None:
        self.questions.append((port, question, answer))

    def later(self, _delay_ns: int, act: Callable[[], None]) -> None:
        self.due.append(act)

    def run(self) -> None:
        """Do what is due, and what comes of it."""
        while self.due:
            self.due.pop(0)()


def descriptors(array: np.ndarray[Any, np.dtype[np.uint8]], rows: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    size = array.nbytes // rows
    return np.array([[array.ctypes.data + number * size, size, 0] for number in range(rows)], np.uint64)


def pair() -> tuple[NixlDouble, NixlDouble, FakeHost, np.ndarray[Any, Any], np.ndarray[Any, Any], int, int]:
    """Return a reader that knows a holder, their memory, and the reader's two lists of descriptors."""
    host = FakeHost()
    holder, reader = NixlDouble("p.1", 0, FakeHost()), NixlDouble("d.1", 0, host)
    theirs, mine = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    agent = reader.add_remote_agent(holder.get_agent_metadata())
    local = reader.prep_xfer_dlist("NIXL_INIT_AGENT", reader.get_xfer_descs(descriptors(mine, 8)))
    remote = reader.prep_xfer_dlist(agent, reader.get_xfer_descs(descriptors(theirs, 8)))
    return reader, holder, host, mine, theirs, local, remote


def test_a_read_copies_when_it_lands_and_then_tells_the_holder() -> None:
    reader, _, host, mine, theirs, local, remote = pair()
    handle = reader.make_prepped_xfer("READ", local, [0, 1], remote, [6, 7], notif_msg=b"r1:1")
    assert reader.transfer(handle) == "PROC"
    assert reader.check_xfer_state(handle) == "PROC"
    assert not mine.any()
    assert not host.sent
    land, flight = host.landings[0]
    land()
    flight.end(ReadState.DONE)
    assert mine[:16].tolist() == theirs[48:64].tolist()
    assert host.sent == [("p.1", b"r1:1", 0, 0)]
    assert reader.check_xfer_state(handle) == "DONE"
    assert reader.get_xfer_telemetry(handle).totalBytes == 16
    reader.release_xfer_handle(handle)


def test_a_write_goes_the_other_way() -> None:
    reader, _, host, mine, theirs, local, remote = pair()
    mine[:] = 9
    handle = reader.make_prepped_xfer("WRITE", local, [0], remote, [3])
    reader.transfer(handle)
    host.landings[0][0]()
    assert theirs[24:32].tolist() == [9] * 8
    assert not host.sent


def test_what_nixl_refuses_is_refused() -> None:
    reader, _, host, _, _, local, remote = pair()
    with pytest.raises(Misuse, match="do not match"):
        reader.make_prepped_xfer("READ", local, [0, 1], remote, [0])
    handle = reader.make_prepped_xfer("READ", local, [0], remote, [0])
    assert reader.check_xfer_state(handle) == "ERR"
    reader.transfer(handle)
    with pytest.raises(Misuse, match="REPOST_ACTIVE"):
        reader.release_xfer_handle(handle)
    with pytest.raises(Misuse, match="NOT_FOUND"):
        reader.send_notif("p.9/0", b"x")
    host.gone.add("p.1")
    with pytest.raises(Misuse, match="DISCONNECT"):
        reader.send_notif("p.1/0", b"x")
    reader.remove_remote_agent("p.1/0")
    assert not reader.check_remote_metadata("p.1/0")


def test_notifications_come_once_by_sender() -> None:
    agent = NixlDouble("p.1", 0, FakeHost())
    agent.arrived("d.1/0", b"a")
    agent.arrived("d.1/0", b"b")
    assert agent.get_new_notifs() == {"d.1/0": [b"a", b"b"]}
    assert agent.get_new_notifs() == {}


def test_modules_read_the_worlds_clock_however_they_imported_it() -> None:
    module = types.ModuleType("clocked")
    module.time, module.now, module.other = time, time.perf_counter, len  # type: ignore[attr-defined]
    clock, host = WorldTime(), FakeHost(7_500_000_000)
    assert put_into(module, clock) == 2
    with clock.of(host):  # type: ignore[arg-type]
        assert module.time.perf_counter() == module.now() == module.time.monotonic() == 7.5
        with clock.of(host, at_ns=1_000_000_000):  # type: ignore[arg-type]
            assert module.now() == 1.0
        host.time_ns += 1
        assert module.time.perf_counter_ns() == 7_500_000_001
        with pytest.raises(RuntimeError, match="sleeps"):
            module.time.sleep(1)
    assert module.time.strftime is time.strftime
    assert module.other is len
    assert abs(module.now() - time.perf_counter()) < 60


def test_background_work_goes_on_only_while_it_is_waited_for() -> None:
    host, clock = FakeHost(), WorldTime()
    executor = TurnTaker(host, clock)  # type: ignore[arg-type]
    said: list[tuple[str, Any]] = []

    def shake(port: int) -> str:
        said.append(("before", clock.now_ns()))
        reply = executor.ask(port, b"who are you")
        said.append(("after", clock.now_ns()))
        return f"{port} says {reply!r}"

    first, second = executor.submit(shake, 7), executor.submit(shake, 8)
    assert not said
    host.run()
    assert [port for port, _, _ in host.questions] == [7], "one at a time"
    host.time_ns += 250
    host.questions[0][2](b"me", 0, 0)
    assert first.result(0) == "7 says b'me'"
    assert said == [("before", 5_000_000_000), ("after", 5_000_000_250)]
    host.run()
    host.questions[1][2](None, 0, 0)
    assert second.result(0) == "8 says None"


def test_background_work_that_fails_says_so_and_what_waits_ends_with_its_engine() -> None:
    host = FakeHost()
    executor = TurnTaker(host, WorldTime())  # type: ignore[arg-type]

    def fail() -> None:
        raise ValueError("no")

    failed = executor.submit(fail)
    host.run()
    with pytest.raises(ValueError, match="no"):
        failed.result(0)
    waits, never = executor.submit(executor.ask, 7, b"?"), executor.submit(fail)
    host.run()
    executor.shutdown()
    assert not waits.done()
    assert not never.done()
    host.questions[0][2](b"late", 0, 0)  # an answer that nobody waits for any more
    assert not waits.done()


def test_the_writers_loop_goes_round_once() -> None:
    class Worker:
        """As vLLM's: a loop until it is told to stop, with a sleep at its end."""

        def __init__(self) -> None:
            self.rounds = 0
            threads: Any = UnstartedThreads()
            self._push_writer_wake, self._push_writer_stop = threads.Event(), threads.Event()
            self.lock = threads.Lock()
            threads.Thread(target=self._push_writer_loop, daemon=True).start()

        def _push_writer_loop(self) -> None:
            while not self._push_writer_stop.is_set():
                self.rounds += 1
                self._push_writer_wake.wait()
                self._push_writer_wake.clear()

    worker = Worker()
    assert worker.rounds == 0
    turn = one_turn_of(worker)
    turn()
    turn()
    assert worker.rounds == 2


def test_each_slot_is_right_for_one_prefix_alone() -> None:
    cache = np.zeros((6, 2, 4, 24), np.uint8)
    pages, tokens = Pages(cache), list(range(10))
    pages.write([3, 1, 5], tokens, 0, 6)
    pages.write([3, 1, 5], tokens, 6, 10)
    assert pages.wrong([3, 1, 5], tokens, 10) is None
    assert pages.wrong([3, 1, 5], [9, *tokens[1:]], 10) == 0
    assert pages.wrong([3, 1, 5], [*tokens[:7], 99, *tokens[8:]], 10) == 7
    assert pages.wrong([1, 3, 5], tokens, 10) == 0
    for block, head, slot, byte in ((3, 0, 0, 0), (3, 1, 3, 23), (1, 0, 2, 11), (5, 1, 1, 8)):
        cache[block, head, slot, byte] ^= 1
        assert pages.wrong([3, 1, 5], tokens, 10) is not None
        cache[block, head, slot, byte] ^= 1
    assert pages.wrong([3, 1, 5], tokens, 10) is None
    assert pages.wrong([], [], 0) is None


def test_what_comes_next_hangs_on_the_whole_prefix() -> None:
    assert next_token([1, 2, 3]) != next_token([2, 2, 3])
    assert prefix_hashes([1, 2, 3])[1] == prefix_hashes([1, 2])[-1]

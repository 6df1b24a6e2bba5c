"""An agent with faults around a plain one: an order strikes what it names, and all else comes over as it was."""

from __future__ import annotations

import gc
import os
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from faults.nixl import agent as agent_module
from faults.nixl import vllm_plugin
from faults.nixl.agent import FaultyAgent, HandshakeFailed, wrapped
from faults.nixl.channel import FOLDER_VARIABLE, NAME_VARIABLE, Desk, made
from faults.nixl.dialects import Reference, Vllm
from faults.nixl.orders import Action, Direction, Kind, Order, Report, Said, What
from tests.faults.fake_nixl import Descriptors, FakeNixl, Handle
from tests.waiting import until

LIMIT_S = 5.0


class Bench:
    """An agent with faults, "d", and a plain one, "p", that it talks to."""

    def __init__(self, folder: Path) -> None:
        self.desk = Desk(folder)
        self.network: dict[str, FakeNixl] = {}
        self.peer = FakeNixl("p", self.network)
        self.plain = FakeNixl("d", self.network)
        self.agent = FaultyAgent(self.plain, Vllm(), folder)
        self.here = np.arange(64, dtype=np.uint8)
        self.there = np.full(64, 7, dtype=np.uint8)
        self._local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._rows(self.here))
        self._remote = self.agent.prep_xfer_dlist("p", self._rows(self.there))

    def order(self, action: Action, *, id: str = "a", **fields: object) -> Order:
        """Place an order, and wait until it stands."""
        order = Order(id=id, action=action, **fields)  # type: ignore[arg-type]
        self.desk.place(order)
        self.until_read(lambda ids: id in ids)
        return order

    def heal(self, id: str = "a") -> None:
        self.desk.remove(id)
        self.until_read(lambda ids: id not in ids)

    def until_read(self, holds: Callable[[tuple[str, ...]], bool]) -> None:
        read = {Said.READ, Said.HELLO}
        until(lambda: holds([r.orders for r in self.desk.reports() if r.said in read][-1]), LIMIT_S, "orders are read")

    def said(self, *said: Said) -> list[Report]:
        return [report for report in self.desk.reports() if report.said in said]

    def sent(self, *messages: bytes) -> list[bytes]:
        """Send, and return what the peer has got."""
        for message in messages:
            self.agent.send_notif("p", message)
        return self.peer.get_new_notifs().get("d", [])

    def received(self, *messages: bytes) -> list[bytes]:
        """Have the peer send, and return what the engine has got."""
        for message in messages:
            self.peer.send_notif("d", message)
        return self.agent.get_new_notifs().get("p", [])

    def over(self, direction: Direction, *messages: bytes) -> list[bytes]:
        return self.sent(*messages) if direction is Direction.SENT else self.received(*messages)

    def read(self, message: bytes = b"x:1", blocks: tuple[int, ...] = (1, 2)) -> tuple[object, Handle]:
        """Make and post a read of some blocks; return the engine's handle and NIXL's."""
        handle = self.agent.make_prepped_xfer("READ", self._local, list(blocks), self._remote, list(blocks), message)
        assert self.agent.transfer(handle) == "PROC"
        return handle, self.plain.handles[-1]

    @staticmethod
    def _rows(memory: np.ndarray) -> Descriptors:  # type: ignore[type-arg]
        return Descriptors([(memory.ctypes.data + at, 16, 0) for at in range(0, 64, 16)])


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.delenv(NAME_VARIABLE, raising=False)
    return Bench(made(tmp_path / "faults"))


both = pytest.mark.parametrize("direction", list(Direction))


@both
def test_without_an_order_everything_comes_over_and_is_reported(bench: Bench, direction: Direction) -> None:
    assert bench.over(direction, b"HB:a,b", b"a:1") == [b"HB:a,b", b"a:1"]
    (hello,), passed = bench.said(Said.HELLO), bench.said(Said.PASSED)
    assert (hello.pid, hello.engine, hello.detail) == (os.getpid(), "d", "vllm")
    assert [(r.kind, r.direction, r.peer, r.requests, r.text) for r in passed] == [
        (Kind.HEARTBEAT, direction, "p", ("a", "b"), "HB:a,b"), (Kind.COMPLETION, direction, "p", ("a",), "a:1"),
    ]  # fmt: skip


@both
def test_a_message_is_dropped(bench: Bench, direction: Direction) -> None:
    bench.order(Action.DROP, direction=direction, kind=Kind.COMPLETION, request="a")
    assert bench.over(direction, b"a:1", b"b:1", b"HB:a") == [b"b:1", b"HB:a"]
    (struck,) = bench.said(Said.STRUCK)
    assert (struck.order, struck.action, struck.requests, struck.text) == ("a", Action.DROP, ("a",), "a:1")
    bench.heal()
    assert bench.over(direction, b"a:1") == [b"a:1"]


@both
def test_a_heartbeat_is_struck_for_one_request_only(bench: Bench, direction: Direction) -> None:
    bench.order(Action.DROP, direction=direction, kind=Kind.HEARTBEAT, request="b")
    assert bench.over(direction, b"HB:a,b,c", b"HB:b") == [b"HB:a,c"]
    assert [r.text for r in bench.said(Said.STRUCK)] == ["HB:b", "HB:b"]
    assert [r.text for r in bench.said(Said.PASSED)] == ["HB:a,c"]


def test_two_orders_strike_two_requests_of_a_heartbeat(bench: Bench) -> None:
    bench.order(Action.DROP, request="a")
    bench.order(Action.REPEAT, id="b", request="b")
    assert bench.received(b"HB:a,b,c") == [b"HB:c", b"HB:b", b"HB:b"]


@both
def test_a_message_comes_twice(bench: Bench, direction: Direction) -> None:
    bench.order(Action.REPEAT, direction=direction, count=1)
    assert bench.over(direction, b"a:1", b"b:1") == [b"a:1", b"a:1", b"b:1"]


@both
@pytest.mark.parametrize(
    ("action", "comes", "told"),
    [
        (Action.DAMAGE, b"cmpl,1:1", "cmpl,1:1"),
        (Action.GARBLE, b"\xe3\xed\xf0\xec\xad\xb1\xba\xb1", r"\xe3\xed\xf0\xec\xad\xb1\xba\xb1"),
    ],
)
def test_a_message_is_damaged(bench: Bench, direction: Direction, action: Action, comes: bytes, told: str) -> None:
    bench.order(action, direction=direction, skip=1)
    assert bench.over(direction, b"cmpl-1:1", b"cmpl-1:1") == [b"cmpl-1:1", comes]
    (struck,) = bench.said(Said.STRUCK)
    assert (struck.text, struck.detail) == ("cmpl-1:1", told)


@both
def test_a_message_comes_late_even_to_an_idle_engine(bench: Bench, direction: Direction) -> None:
    bench.order(Action.DELAY, direction=direction, seconds=0.3, request="a")
    assert bench.over(direction, b"a:1", b"b:1") == [b"b:1"]
    if direction is Direction.SENT:  # and the engine does nothing more
        assert until(lambda: bench.peer.get_new_notifs().get("d"), LIMIT_S, "it comes") == [b"a:1"]
    else:
        assert until(bench.received, LIMIT_S, "it comes") == [b"a:1"]
    (struck,), (gone,) = bench.said(Said.STRUCK), bench.said(Said.LET_GO)
    assert gone.t_ns - struck.t_ns >= 300_000_000


@both
def test_a_message_comes_when_its_order_goes(bench: Bench, direction: Direction) -> None:
    bench.order(Action.DELAY, direction=direction, seconds=1000)
    assert bench.over(direction, b"a:1") == []
    bench.heal()
    if direction is Direction.SENT:
        assert until(lambda: bench.peer.get_new_notifs().get("d"), LIMIT_S, "it comes") == [b"a:1"]
    else:
        assert bench.received() == [b"a:1"]


@both
def test_a_message_is_overtaken(bench: Bench, direction: Direction) -> None:
    bench.order(Action.REORDER, direction=direction, count=1)
    assert bench.over(direction, b"a:1") == []
    assert bench.over(direction, b"b:1", b"c:1") == [b"b:1", b"a:1", b"c:1"]


def test_a_completion_is_taken_off_its_transfer_and_struck_at_its_end(bench: Bench) -> None:
    bench.order(Action.REPEAT, direction=Direction.SENT, request="x")
    handle, real = bench.read()
    assert real.notification == b""
    assert bench.agent.check_xfer_state(handle) == "PROC"
    bench.plain.complete(real)
    assert bench.agent.check_xfer_state(handle) == "DONE"
    assert bench.agent.check_xfer_state(handle) == "DONE"
    assert bench.peer.get_new_notifs() == {"d": [b"x:1", b"x:1"]}


def test_a_completion_that_no_order_means_stays_with_its_transfer(bench: Bench) -> None:
    bench.order(Action.DROP, direction=Direction.SENT, request="y")
    handle, real = bench.read()
    bench.plain.complete(real)
    assert bench.agent.check_xfer_state(handle) == "DONE"
    assert bench.peer.get_new_notifs() == {"d": [b"x:1"]}
    assert bench.here[16:48].tolist() == [7] * 32


def test_handles_reach_nixl_as_its_own(bench: Bench) -> None:
    handle, real = bench.read()
    assert bench.agent.get_xfer_telemetry(handle) is real
    bench.agent.release_xfer_handle(handle)
    assert real._released


def test_a_transfer_fails_without_being_posted(bench: Bench) -> None:
    bench.order(Action.FAIL, what=What.TRANSFER, request="x", count=1)
    handle, real = bench.read()
    assert bench.agent.check_xfer_state(handle) == "ERR"
    assert real.posted == 0
    assert [(r.what, r.requests) for r in bench.said(Said.STRUCK)] == [(What.TRANSFER, ("x",))]
    assert bench.read()[1].posted == 1


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_a_transfer_stands_still_for_a_time_or_until_its_order_goes(bench: Bench, seconds: float) -> None:
    bench.order(Action.STALL, what=What.TRANSFER, seconds=seconds)
    handle, real = bench.read()
    assert (bench.agent.check_xfer_state(handle), real.posted) == ("PROC", 0)
    if not seconds:
        bench.heal()
    until(lambda: bench.agent.check_xfer_state(handle) and real.posted, LIMIT_S, "it is posted")
    bench.plain.complete(real)
    assert bench.agent.check_xfer_state(handle) == "DONE"
    assert bench.peer.get_new_notifs() == {"d": [b"x:1"]}
    assert [r.order for r in bench.said(Said.LET_GO)] == ["a"]


@pytest.mark.parametrize(("block", "at"), [(0, 16), (1, 32), (-1, 32)])
def test_a_block_of_a_transfer_is_corrupted(bench: Bench, block: int, at: int) -> None:
    bench.order(Action.CORRUPT, what=What.TRANSFER, block=block)
    handle, real = bench.read()
    assert not bench.said(Said.STRUCK)
    bench.plain.complete(real)
    assert bench.agent.check_xfer_state(handle) == "DONE"
    assert bench.here[at : at + 16].tolist() == [0] * 16
    assert np.count_nonzero(bench.here[16:48] == 7) == 16
    assert [r.detail for r in bench.said(Said.STRUCK)] == ["16 bytes are zeros now"]


def test_what_cannot_be_corrupted_is_reported_as_missed(bench: Bench) -> None:
    bench.order(Action.CORRUPT, what=What.TRANSFER, block=2)
    handle, real = bench.read()
    bench.plain.complete(real)
    assert bench.agent.check_xfer_state(handle) == "DONE"
    assert not bench.said(Said.STRUCK)
    assert [r.detail for r in bench.said(Said.MISSED)] == ["there is no block 2: the transfer has 2"]


def test_the_memory_of_a_device_is_left_alone(bench: Bench) -> None:
    bench.order(Action.CORRUPT, what=What.TRANSFER)
    rows = [(bench.here.ctypes.data, 16, 0)]
    device = bench.agent.prep_xfer_dlist("", Descriptors(rows, "nixl_mem_t.VRAM_SEG"))
    remote = bench.agent.prep_xfer_dlist("p", Descriptors([(bench.there.ctypes.data, 16, 0)]))
    handle = bench.agent.make_prepped_xfer("READ", device, [0], remote, [0], b"x:1")
    bench.agent.transfer(handle)
    bench.plain.complete(bench.plain.handles[-1])
    assert bench.agent.check_xfer_state(handle) == "DONE"
    assert "only DRAM" in bench.said(Said.MISSED)[0].detail
    assert bench.here[:16].tolist() == [7] * 16


def test_in_the_reference_only_reads_of_kv_are_struck(tmp_path: Path) -> None:
    desk = Desk(made(tmp_path / "faults"))
    desk.place(Order(id="a", action=Action.FAIL, what=What.TRANSFER))
    network: dict[str, FakeNixl] = {}
    FakeNixl("p", network)
    agent = FaultyAgent(FakeNixl("d", network), Reference(), desk.folder)
    pool, scratch = np.zeros(64, dtype=np.uint8), np.zeros(16, dtype=np.uint8)
    for memory in (pool, scratch):
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    states = []
    for memory in (pool, scratch):
        here = Descriptors([(memory.ctypes.data, 16, 0)])
        handle = agent.initialize_xfer("READ", here, here, "p")
        agent.transfer(handle)
        states.append(agent.check_xfer_state(handle))
    assert states == ["ERR", "PROC"]


def test_a_handshake_fails(bench: Bench) -> None:
    bench.order(Action.FAIL, what=What.HANDSHAKE, count=1)
    with pytest.raises(HandshakeFailed, match="'a'"):
        bench.agent.add_remote_agent(b"p")
    assert not bench.plain.known
    assert bench.agent.add_remote_agent(b"p") == "p"
    assert [r.said for r in bench.desk.reports() if r.what is What.HANDSHAKE] == [Said.STRUCK, Said.PASSED]


def test_a_handshake_takes_long_and_holds_nothing_else_up(bench: Bench) -> None:
    bench.order(Action.DELAY, what=What.HANDSHAKE, seconds=1000)
    meeting = threading.Thread(target=bench.agent.add_remote_agent, args=(b"p",), daemon=True)
    meeting.start()
    until(lambda: bench.said(Said.STRUCK), LIMIT_S, "it is struck")
    assert bench.received(b"a:1") == [b"a:1"]
    assert meeting.is_alive()
    bench.heal()
    meeting.join(LIMIT_S)
    assert bench.plain.known == [b"p"]


def test_damaged_orders_leave_those_before(bench: Bench) -> None:
    bench.order(Action.DROP)
    (bench.desk.folder / "orders.json").write_bytes(b"[")
    until(lambda: bench.said(Said.REFUSED), LIMIT_S, "they are refused")
    assert bench.received(b"a:1") == []


def test_an_order_for_another_engine_strikes_nothing(bench: Bench) -> None:
    bench.order(Action.DROP, engine="p0")
    assert bench.received(b"a:1") == [b"a:1"]


def test_an_agent_that_nobody_needs_goes(bench: Bench) -> None:
    gone = weakref.ref(bench.agent)
    del bench.agent
    until(lambda: gc.collect() >= 0 and gone() is None, LIMIT_S, "it has gone")


def test_without_a_folder_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    plain = FakeNixl("d", {})
    assert wrapped(plain, Vllm()) is plain


def test_a_folder_that_others_can_see_wraps_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    plain = FakeNixl("d", {})
    assert wrapped(plain, Vllm()) is plain
    assert "0755" in capsys.readouterr().err


def test_an_agent_of_another_make_is_left_alone_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(made(tmp_path / "faults"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(desk.folder))
    other = object()
    assert wrapped(other, Vllm()) is other
    (report,) = desk.reports()
    assert report.said is Said.UNFIT
    assert "send_notif" in report.detail


def module_like_vllms(made_agents: list[str]) -> types.ModuleType:
    module = types.ModuleType(vllm_plugin.MODULE)

    def make(name: str, config: object) -> FakeNixl:
        made_agents.append(name)
        return FakeNixl(name, {})

    def look_up(name: str) -> object:
        module.__dict__[name] = make
        return make

    module.__dict__.update(__all__=[vllm_plugin.NAME], __getattr__=look_up)
    return module


def test_vllms_agents_are_wrapped_when_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_agents: list[str] = []
    module = module_like_vllms(made_agents)
    monkeypatch.setattr(vllm_plugin.importlib, "import_module", lambda _: module)
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    vllm_plugin.register()
    assert vllm_plugin.NAME not in vars(module)
    monkeypatch.setenv(FOLDER_VARIABLE, str(made(tmp_path / "faults")))
    vllm_plugin.register()
    vllm_plugin.register()
    assert made_agents == []
    for name in ("a", "b"):
        assert isinstance(module.NixlWrapper(name, None), FaultyAgent)
    assert made_agents == ["a", "b"]


@pytest.mark.parametrize("module", [types.ModuleType("another"), None])
def test_a_vllm_without_the_seam_is_left_alone_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None
) -> None:
    def load(_: str) -> types.ModuleType:
        if module is None:
            raise ImportError("no vllm")
        return module

    desk = Desk(made(tmp_path / "faults"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(desk.folder))
    monkeypatch.setattr(vllm_plugin.importlib, "import_module", load)
    vllm_plugin.register()
    assert [report.said for report in desk.reports()] == [Said.UNFIT]
    assert module is None or not hasattr(module, vllm_plugin.NAME)


def test_the_wrapper_needs_of_an_agent_what_it_uses() -> None:
    assert all(hasattr(FakeNixl, name) for name in agent_module.NEEDED)

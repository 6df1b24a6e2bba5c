"""Faults between two real NIXL agents: what a peer that is none of ours sees of them, and what lands in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults.nixl.agent import FaultyAgent
from faults.nixl.channel import Desk, made
from faults.nixl.dialects import Vllm
from faults.nixl.fault import NixlFault
from faults.nixl.orders import Action, Direction, Order, What
from tests.waiting import until, until_async

pytestmark = [pytest.mark.nixl]
LIMIT_S = 20.0
BLOCK = 4096
BLOCKS = 4


class Two:
    """A plain holder and a faulty reader, connected, each with a buffer of four blocks."""

    def __init__(self, folder: Path) -> None:
        from nixl import nixl_agent, nixl_agent_config

        self.desk = Desk(folder)
        self.holder: Any = nixl_agent("holder", nixl_agent_config(backends=["UCX"]))
        self.reader: Any = FaultyAgent(nixl_agent("reader", nixl_agent_config(backends=["UCX"])), Vllm(), folder)
        self.there = np.arange(1, BLOCK * BLOCKS // 8 + 1, dtype=np.uint64)
        self.here = np.zeros_like(self.there)
        for agent, memory in ((self.holder, self.there), (self.reader, self.here)):
            agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        assert self.reader.add_remote_agent(self.holder.get_agent_metadata()) in {"holder", b"holder"}
        assert self.holder.add_remote_agent(self.reader.get_agent_metadata()) in {"reader", b"reader"}
        self._local = self.reader.prep_xfer_dlist("NIXL_INIT_AGENT", self._descriptors(self.here))
        self._remote = self.reader.prep_xfer_dlist("holder", self._descriptors(self.there))

    def _descriptors(self, memory: np.ndarray) -> Any:  # type: ignore[type-arg]
        rows = np.array([[memory.ctypes.data + n * BLOCK, BLOCK, 0] for n in range(BLOCKS)], dtype=np.uint64)
        return self.reader.get_xfer_descs(rows, "DRAM")

    def read(self, message: bytes) -> Any:
        """Post a read of every block, as vLLM does."""
        every = np.arange(BLOCKS)
        handle = self.reader.make_prepped_xfer("READ", self._local, every, self._remote, every, notif_msg=message)
        self.reader.transfer(handle)
        return handle

    def state(self, handle: Any) -> str:
        """Wait for the end of a transfer."""
        found: str = until(lambda: self._ended(handle), LIMIT_S, "the transfer ends")
        self.reader.release_xfer_handle(handle)
        return found

    def _ended(self, handle: Any) -> str:
        state: str = self.reader.check_xfer_state(handle)
        return "" if state == "PROC" else state

    def heard(self) -> list[bytes]:
        """Return what the holder hears up to a mark that is sent now."""
        self.reader.send_notif("holder", b"end:1")
        found: list[bytes] = []

        def marked() -> bool:
            found.extend(self.holder.get_new_notifs().get("reader", []))
            return b"end:1" in found

        until(marked, LIMIT_S, "the mark comes")
        return [message for message in found if message != b"end:1"]


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(made(tmp_path / "faults"))


def test_without_orders_a_read_lands_and_tells_its_end(two: Two) -> None:
    assert two.state(two.read(b"a:1")) == "DONE"
    assert np.array_equal(two.here, two.there)
    assert two.heard() == [b"a:1"]


@pytest.mark.parametrize(("action", "heard"), [(Action.DROP, []), (Action.REPEAT, [b"a:1"] * 2)])
async def test_a_completion_is_struck_on_its_way_out(two: Two, action: Action, heard: list[bytes]) -> None:
    fault = NixlFault(two.desk, Order(id="x", action=action, direction=Direction.SENT, request="a"), within_s=LIMIT_S)
    await fault.inject()
    assert two.state(two.read(b"a:1")) == "DONE"
    assert np.array_equal(two.here, two.there)
    assert two.heard() == heard
    evidence = await fault.prove()
    assert evidence.holds
    assert "a:1" in evidence.shown_by
    await fault.heal()
    assert (await fault.prove_healed()).holds
    assert two.state(two.read(b"a:1")) == "DONE"
    assert two.heard() == [b"a:1"]


async def test_a_notification_from_a_plain_peer_is_struck_on_its_way_in(two: Two) -> None:
    fault = NixlFault(two.desk, Order(id="x", action=Action.DAMAGE, request="cmpl-1"), within_s=LIMIT_S)
    await fault.inject()
    two.holder.send_notif("reader", b"cmpl-1:1")
    found = await until_async(two.reader.get_new_notifs, LIMIT_S, "it comes")
    assert list(found.values()) == [[b"cmpl,1:1"]]


async def test_one_block_of_a_read_is_corrupted(two: Two) -> None:
    fault = NixlFault(two.desk, Order(id="x", action=Action.CORRUPT, what=What.TRANSFER, block=2), within_s=LIMIT_S)
    await fault.inject()
    assert two.state(two.read(b"a:1")) == "DONE"
    same = (two.here == two.there).reshape(BLOCKS, -1)
    assert same.all(axis=1).tolist() == [True, True, False, True]
    assert not two.here.reshape(BLOCKS, -1)[2].any()
    assert (await fault.prove()).holds


async def test_a_failed_read_moves_nothing_and_tells_nobody(two: Two) -> None:
    fault = NixlFault(two.desk, Order(id="x", action=Action.FAIL, what=What.TRANSFER, request="a"), within_s=LIMIT_S)
    await fault.inject()
    assert two.state(two.read(b"a:1")) == "ERR"
    assert not two.here.any()
    assert two.heard() == []


async def test_a_read_that_stands_still_lands_when_it_is_let_go(two: Two) -> None:
    fault = NixlFault(two.desk, Order(id="x", action=Action.STALL, what=What.TRANSFER), within_s=LIMIT_S)
    await fault.inject()
    handle = two.read(b"a:1")
    assert two.reader.check_xfer_state(handle) == "PROC"
    assert not two.here.any()
    await fault.heal()
    assert two.state(handle) == "DONE"
    assert np.array_equal(two.here, two.there)
    assert two.heard() == [b"a:1"]

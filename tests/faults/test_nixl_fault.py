"""`NixlFault`: an order counts as given, carried out and gone only when living agents have said so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.fault import FaultMissed
from faults.nixl import fault as fault_module
from faults.nixl.agent import FaultyAgent, unfit
from faults.nixl.channel import FOLDER_VARIABLE, Desk, Reporter, made
from faults.nixl.dialects import Vllm
from faults.nixl.fault import NixlFault
from faults.nixl.orders import Action, Order, Report, Said, What
from reference_impl.failover.pidfd import start_ticks
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import s_to_ns
from reference_impl.time_namespace import available
from tests.faults.fake_nixl import FakeNixl

AHEAD_S = 5000
SHIFTED = """
import subprocess, sys
from reference_impl.time_namespace import enter_for_children
enter_for_children(float(sys.argv[1]))
sys.exit(subprocess.run([sys.executable, "-c", *sys.argv[2:]], stdin=sys.stdin).returncode)
"""
AGENT = """
import pathlib, sys
from faults.nixl.agent import FaultyAgent
from faults.nixl.dialects import Vllm
from tests.faults.fake_nixl import FakeNixl
agent = FaultyAgent(FakeNixl("d", {}), Vllm(), pathlib.Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""
DROP = Order(id="a", action=Action.DROP, request="x")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(made(tmp_path / "faults"))


def pair(desk: Desk) -> tuple[FaultyAgent, FakeNixl]:
    network: dict[str, FakeNixl] = {}
    return FaultyAgent(FakeNixl("d", network), Vllm(), desk.folder), FakeNixl("p", network)


def hello(desk: Desk, engine: str, pid: int, ticks: int) -> None:
    """Write the greeting of an agent that then says nothing more."""
    reporter = Reporter(desk.folder)
    reporter.say(Report(t_ns=1, pid=pid, agent=engine, engine=engine, said=Said.HELLO, start_ticks=ticks))
    reporter.close()


async def test_an_order_is_given_carried_out_and_taken_back(desk: Desk) -> None:
    agent, peer = pair(desk)
    fault = NixlFault(desk, DROP, within_s=5)
    assert fault.available() is None
    await fault.inject()
    peer.send_notif("d", b"x:1")
    assert agent.get_new_notifs() == {}
    evidence = await fault.prove()
    assert evidence.holds
    assert evidence.shown_by == "d reports drop of notification x 1, the first: x:1"
    await fault.heal()
    assert (await fault.prove_healed()).holds
    peer.send_notif("d", b"x:1")
    assert agent.get_new_notifs() == {"p": [b"x:1"]}


async def test_what_never_comes_is_not_proved(desk: Desk) -> None:
    agent, peer = pair(desk)
    fault = NixlFault(desk, DROP, within_s=0.2)
    await fault.inject()
    peer.send_notif("d", b"y:1")
    assert agent.get_new_notifs() == {"p": [b"y:1"]}
    assert not (await fault.prove()).holds


async def test_too_few_do_not_prove_it(desk: Desk) -> None:
    agent, peer = pair(desk)
    fault = NixlFault(desk, Order(id="a", action=Action.DROP, count=2), within_s=0.2)
    await fault.inject()
    peer.send_notif("d", b"y:1")
    agent.get_new_notifs()
    evidence = await fault.prove()
    assert not evidence.holds
    assert "struck 1 of 2" in evidence.shown_by


async def test_without_an_agent_an_order_is_not_given(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(desk.folder))
    unfit("another vLLM")
    with pytest.raises(FaultMissed, match=r"no NIXL agent has reported .*another vLLM"):
        await NixlFault(desk, DROP, within_s=1).inject()
    assert desk.orders() == []


async def test_the_dead_are_not_waited_for(desk: Desk) -> None:
    agent, _ = pair(desk)
    assert agent is not None
    hello(desk, "dead", os.getpid(), 1)  # of an earlier process of this pid
    fault = NixlFault(desk, DROP, within_s=1)
    await fault.inject()
    with pytest.raises(FaultMissed, match="named 'dead'"):
        await NixlFault(desk, Order(id="b", action=Action.DROP, engine="dead"), within_s=1).inject()


async def test_one_who_does_not_read_keeps_an_order_from_being_in_force(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_module, "READ_LIMIT_S", 0.2)
    hello(desk, "deaf", os.getpid(), start_ticks(os.getpid()) or 0)
    with pytest.raises(FaultMissed, match="deaf did not read"):
        await NixlFault(desk, DROP, within_s=1).inject()
    assert desk.orders() == []


async def test_what_was_missed_is_told(desk: Desk) -> None:
    agent, _ = pair(desk)
    assert agent is not None
    fault = NixlFault(desk, Order(id="a", action=Action.CORRUPT, what=What.TRANSFER), within_s=0.2)
    await fault.inject()
    reporter = Reporter(desk.folder)
    reporter.say(Report(t_ns=1, pid=1, agent="d", engine="d", said=Said.MISSED, order="a", detail="device memory"))
    reporter.close()
    assert "missed: device memory" in (await fault.prove()).shown_by


async def test_several_faults_stand_side_by_side(desk: Desk) -> None:
    agent, peer = pair(desk)
    faults = [NixlFault(desk, Order(id=each, action=Action.DROP, request=each), within_s=5) for each in "ab"]
    for fault in faults:
        await fault.inject()
    await faults[0].heal()
    assert (await faults[0].prove_healed()).holds
    for message in (b"a:1", b"b:1"):
        peer.send_notif("d", message)
    assert agent.get_new_notifs() == {"p": [b"a:1"]}
    evidence = await asyncio.gather(*(fault.prove() for fault in faults[1:]))
    assert all(each.holds for each in evidence)


@pytest.mark.skipif(available() is not None, reason=f"no time namespace here: {available()}")
async def test_an_agent_with_a_clock_of_its_own_reports_on_the_hosts(desk: Desk) -> None:
    began_ns = now_ns()
    with subprocess.Popen(  # noqa: ASYNC220 # nothing else runs in this test's loop
        [sys.executable, "-c", SHIFTED, str(AHEAD_S), AGENT, str(desk.folder)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        fault = NixlFault(desk, DROP, within_s=1)
        await fault.inject()
        assert child.stdin is not None
        child.stdin.close()
    hello, read = desk.reports()
    assert began_ns < hello.t_ns < read.t_ns < now_ns()
    assert hello.clock_ns - hello.t_ns == pytest.approx(s_to_ns(AHEAD_S), abs=s_to_ns(60))

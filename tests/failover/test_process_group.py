"""Groups of processes: found whoever their parent is by now, watched for the first death, ended to the last."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from reference_impl.failover.pidfd import can_run, process_state, start_ticks
from reference_impl.failover.process_group import Member, descendants, end_all, first_death, in_session, silence_all

SLEEP = "import time; print('ready', flush=True); time.sleep(60)"
NAMED = (
    "import ctypes, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "ctypes.CDLL(None).prctl(15, b'VLLM::Worker', 0, 0, 0)\n"
    "print('ready', flush=True)\n"
    "time.sleep(60)\n"
)


def start(code: str = SLEEP) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    child.stdout.readline()
    return child


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [start() for _ in range(3)]
    yield started
    for child in started:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def member(child: subprocess.Popen[bytes], role: str = "") -> Member:
    return Member(role, child.pid, start_ticks(child.pid) or 0)


async def test_the_first_death_is_told_and_whose_it_was(children: list[subprocess.Popen[bytes]]) -> None:
    watching = asyncio.create_task(first_death([member(c, str(n)) for n, c in enumerate(children)]))
    await asyncio.sleep(0.1)
    assert not watching.done()
    children[1].kill()
    async with asyncio.timeout(10):
        assert (await watching).role == "1"


async def test_one_that_has_gone_before_anybody_looked_is_the_first_death(
    children: list[subprocess.Popen[bytes]],
) -> None:
    members = [member(c, str(n)) for n, c in enumerate(children)]
    children[2].kill()
    children[2].wait()
    assert (await first_death(members)).role == "2"


@pytest.mark.rule("KVC-LOCK-004")
async def test_all_are_silenced_also_one_that_stands_still(children: list[subprocess.Popen[bytes]]) -> None:
    members = [member(c) for c in children]
    children[0].send_signal(signal.SIGSTOP)
    assert await silence_all(members) == []
    assert not [m for m in members if can_run(m.pid, m.start_ticks)]
    assert await end_all(members) == []
    assert all(process_state(m.pid) in ("Z", "X", None) for m in members)


async def test_another_process_of_the_same_pid_is_left_alone(children: list[subprocess.Popen[bytes]]) -> None:
    other = Member("", children[0].pid, (start_ticks(children[0].pid) or 0) + 1)
    assert await silence_all([other]) == []
    assert await end_all([other]) == []
    assert children[0].poll() is None


async def test_a_session_holds_those_whose_parent_has_died() -> None:
    leader = start(NAMED)
    session = leader.pid
    found = descendants(os.getpid(), {"VLLM::Worker": "worker"}, "first")
    assert {m.role for m in found if m.pid == session} == {"worker"}
    assert "helper" in {m.role for m in found}
    leader.kill()
    leader.wait()
    left = in_session(session)
    assert left
    assert await end_all(left) == []
    assert in_session(session) == []
    assert leader.stdout is not None
    leader.stdout.close()

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from reference_impl.failover import pidfd
from reference_impl.failover.pidfd import ProcessWatch, can_run, process_state, start_ticks
from tests.failover.children import PATIENCE_S, Board, Child, Family
from tests.waiting import until

LOOPS = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]


@pytest.fixture
def family() -> Iterator[Family]:
    family = Family()
    yield family
    family.end()


@pytest.fixture
def sleeper(family: Family) -> Child:
    return family.start(signal.pause)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def gone_pid() -> int:
    child = Child(lambda: None)
    child.wait()
    return child.pid


@pytest.mark.parametrize("new_loop", LOOPS)
def test_all_who_wait_for_an_exit_are_woken(sleeper, new_loop):
    async def main() -> None:
        with ProcessWatch(sleeper.pid) as watch:
            waiting = [asyncio.create_task(watch.exited()) for _ in range(3)]
            done, _ = await asyncio.wait(waiting, timeout=0.02)
            assert not done
            watch.send(signal.SIGKILL)
            done, pending = await asyncio.wait(waiting, timeout=PATIENCE_S)
            assert len(done) == 3
            assert not pending

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert sleeper.wait() == -signal.SIGKILL


async def test_an_exit_before_the_wait_is_seen(sleeper):
    fd = os.pidfd_open(sleeper.pid)
    sleeper.kill()
    async with asyncio.timeout(PATIENCE_S):
        await pidfd.wait_exit(fd)
    os.close(fd)
    assert sleeper.status == -signal.SIGKILL


async def test_a_process_that_is_not_our_child_can_be_waited_for(family, tmp_path):
    board = Board(tmp_path / "board")

    def parent() -> None:
        board.say(f"grandchild {Child(signal.pause).pid}")
        signal.pause()

    family.start(parent)
    pid = int(board.wait_for("grandchild"))
    board.close()
    with ProcessWatch(pid) as watch:
        waiting = asyncio.create_task(watch.exited())
        watch.send(signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            await waiting
        stat = watch.stat()
    assert stat is None or stat.is_dead


async def test_a_cancelled_wait_leaves_no_descriptor(sleeper):
    with ProcessWatch(sleeper.pid) as watch:
        before = open_files()
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(watch.exited(), 0.005)
        assert open_files() == before


def test_states_are_told_apart(sleeper):
    until(lambda: pidfd.process_state(sleeper.pid) == "S", PATIENCE_S, "it sleeps")
    sleeper.signal(signal.SIGSTOP)
    until(lambda: pidfd.process_state(sleeper.pid) == "T", PATIENCE_S, "it is stopped")
    sleeper.signal(signal.SIGKILL)
    until(lambda: pidfd.process_state(sleeper.pid) == "Z", PATIENCE_S, "it is a zombie")
    stat = pidfd.read_stat(sleeper.pid)
    assert stat is not None
    assert stat.is_dead
    sleeper.wait()
    assert pidfd.process_state(sleeper.pid) is None


def test_of_a_process_that_has_gone_nothing_is_known():
    pid = gone_pid()
    assert pidfd.read_stat(pid) is None
    assert pidfd.start_ticks(pid) is None
    assert pidfd.cpu_ns(pid) is None
    assert pidfd.process_state(pid) is None
    assert not pidfd.same_process(pid, 1)
    with pytest.raises(ProcessLookupError):
        ProcessWatch(pid)


def test_a_process_is_known_by_its_start(sleeper):
    ticks = pidfd.start_ticks(sleeper.pid)
    assert ticks is not None
    now_ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    assert 0 <= now_ticks - ticks < 10 * os.sysconf("SC_CLK_TCK")
    assert pidfd.same_process(sleeper.pid, ticks)
    assert not pidfd.same_process(sleeper.pid, ticks + 1)
    with ProcessWatch(sleeper.pid, ticks) as watch:
        assert watch.start_ticks == ticks
        assert watch.stat() is not None


def test_a_reused_pid_is_not_taken_for_the_process(sleeper):
    before = open_files()
    ticks = pidfd.start_ticks(sleeper.pid)
    assert ticks is not None
    with pytest.raises(ProcessLookupError, match="has gone"):
        ProcessWatch(sleeper.pid, ticks - 1)
    assert open_files() == before


@pytest.mark.parametrize("name", [b"a b", b") R 1 1 1", b"((", b"x) Z 9 9", b"\xff\n)"])
def test_a_command_name_cannot_forge_the_fields(family, name):
    def body() -> None:
        ctypes.CDLL(None).prctl(15, name)  # PR_SET_NAME
        signal.pause()

    child = family.start(body)
    honest = pidfd.start_ticks(child.pid)
    comm = Path(f"/proc/{child.pid}/comm")
    until(lambda: comm.read_bytes() == name + b"\n", PATIENCE_S, "it has its name")
    until(lambda: pidfd.process_state(child.pid) == "S", PATIENCE_S, "it sleeps")
    assert pidfd.start_ticks(child.pid) == honest


def test_cpu_time_counts_all_threads_and_stands_still_in_a_sleeper(family, sleeper):
    def spin() -> None:
        while True:
            pass

    def burn() -> None:
        threading.Thread(target=spin, daemon=True).start()
        signal.pause()

    burner = family.start(burn)
    until(lambda: (pidfd.cpu_ns(burner.pid) or 0) >= 100_000_000, PATIENCE_S, "it has burnt 100 ms")
    used = pidfd.cpu_ns(sleeper.pid)
    assert used is not None
    assert used < 100_000_000


def test_a_signal_to_a_reaped_process_reaches_nobody(sleeper):
    with ProcessWatch(sleeper.pid) as watch:
        assert watch.send(signal.SIGKILL)
        sleeper.wait()
        assert not watch.send(signal.SIGKILL)
        assert watch.stat() is None
    watch.close()
    assert watch.pidfd == -1


def test_a_live_process_can_run_and_a_killed_one_cannot_long_before_it_is_gone() -> None:
    code = "import time; big = bytearray(300 * 2**20); print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        ticks = start_ticks(child.pid)
        assert ticks is not None
        assert can_run(child.pid, ticks)
        assert not can_run(child.pid, ticks + 1)  # another process of that pid
        child.kill()
        while can_run(child.pid, ticks):
            time.sleep(0.0005)
        seen_as = process_state(child.pid)
        child.wait()
        assert not can_run(child.pid, ticks)
        assert seen_as in ("R", "D", "Z", "X", "S", None)


def test_a_stopped_process_can_still_run() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        ticks = start_ticks(child.pid)
        assert ticks is not None
        child.send_signal(signal.SIGSTOP)
        assert can_run(child.pid, ticks)  # somebody may let it go on
        child.kill()


def test_a_process_whose_first_thread_has_ended_can_run_as_long_as_another_does() -> None:
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('ready', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        ticks = start_ticks(child.pid)
        assert ticks is not None
        while process_state(child.pid) != "Z":
            time.sleep(0.001)
        assert can_run(child.pid, ticks)
        child.kill()
        child.wait()
        assert not can_run(child.pid, ticks)

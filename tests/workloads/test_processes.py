"""`--processes`: no worker's start is missed, no end is waited for without a limit, and two loads share a machine."""

from __future__ import annotations

import concurrent.futures
import signal
from pathlib import Path

import psutil
import pytest

from tests.golden import RUN_S, golden, load, running_load, wait_for_lines
from tests.golden_server import Fault, Plan

SMALL = ("--input-tokens", 50, "--output-tokens", 40, "--processes", 2)
QUICK = Plan(first_ms=1, gap_ms=1)


def with_file(name: str) -> str:
    return f"workloads/pd.py,tests/workloads/{name}.py"


def test_a_worker_that_is_told_to_start_before_it_is_ready_starts(tmp_path: Path) -> None:
    """Found at CI: a load that never began in one worker, and a master that waited for ever."""
    with golden(tmp_path, [QUICK]) as server:
        done = load("--host", server.url, "--rate-per-s", 30, "--requests", 9, *SMALL, file=with_file("late_init"))
    assert done.returncode == 0, done.stderr
    assert "9 requests: 9 ok" in done.stdout


def test_the_master_waits_no_longer_than_the_plan_can_take(tmp_path: Path) -> None:
    files = f"{with_file('mute_worker')},tests/workloads/short_patience.py"
    with golden(tmp_path, [QUICK]) as server:
        options = ("--rate-per-s", 30, "--requests", 9, "--drain-s", 1)
        done = load("--host", server.url, *options, *SMALL, file=files)
    assert done.returncode == 4, done.stderr
    assert "2 of 2 workers never said how they ended: their rows are not whole" in done.stderr


@pytest.mark.parametrize("frozen", [1, 2])
def test_workers_that_stand_still_are_given_up_and_ended(tmp_path: Path, frozen: int) -> None:
    with golden(tmp_path, [Plan(fault=Fault.STALL, after_chunks=1)]) as server:
        options = ("--host", server.url, "--rate-per-s", 20, "--requests", 8, "--drain-s", 60, *SMALL)
        with running_load(*options, file=with_file("short_patience")) as client:
            wait_for_lines(server.arrived, 8)
            workers = psutil.Process(client.pid).children()
            assert len(workers) == 2
            for worker in workers[:frozen]:
                worker.send_signal(signal.SIGSTOP)
            _, err = client.communicate(timeout=RUN_S)
    assert client.returncode == 4, err
    assert "workers never said how they ended: their rows are not whole" in err
    assert not any(worker.is_running() for worker in workers)


def test_two_loads_on_one_machine_do_not_meet(tmp_path: Path) -> None:
    with golden(tmp_path, [QUICK]) as server, concurrent.futures.ThreadPoolExecutor() as both:
        options = ("--host", server.url, "--rate-per-s", 30, "--requests", 9, *SMALL)
        for done in [running.result() for running in [both.submit(load, *options) for _ in range(2)]]:
            assert done.returncode == 0, done.stderr
            assert "9 requests: 9 ok" in done.stdout

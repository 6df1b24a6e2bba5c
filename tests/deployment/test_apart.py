"""A deployment with prefill and decode apart, of real processes: roles, terms, and clocks of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from reference_impl.announcement import Announcement
from reference_impl.engine.config import EngineConfig
from reference_impl.failover.worker import ProcessInfo, read_status, status_path
from reference_impl.realclock import now_ns
from reference_impl.rules.events import Event, EventKind
from reference_impl.rules.routing import Role
from reference_impl.time_namespace import available
from tests.waiting import until

PROBLEM = available()
AHEAD_S = 5000


class Running(NamedTuple):
    """A deployment that serves."""

    said: Announcement
    folder: Path
    began_ns: int

    def processes(self, worker_id: str) -> list[ProcessInfo]:
        status = read_status(status_path(Path(self.said.run_dir), worker_id))
        return status.processes if status else []

    def engine(self, worker_id: str, state: str) -> ProcessInfo | None:
        return next((p for p in self.processes(worker_id) if p.state == state), None)

    def events(self) -> list[Event]:
        lines = [line for path in (self.folder / "parts").glob("*.jsonl") for line in path.read_bytes().splitlines()]
        return [msgspec.json.decode(line, type=Event) for line in lines]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("apart")
    offset = [] if PROBLEM else ["--decode-clock-offset-s", str(AHEAD_S)]
    began_ns = now_ns()
    with subprocess.Popen(
        [sys.executable, "-m", "reference_impl.deployment", "--profile", "tiny", "--prefill", "1", "--decode", "1",
         "--kv-lease-duration", "6", "--time-scale", "2", *offset, "--folder", str(folder), "--announce",
         "--end-with-stdin"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line, "it did not come up"
            yield Running(msgspec.json.decode(line, type=Announcement), folder, began_ns)
        finally:
            child.terminate()
            child.wait(20)


def test_it_tells_who_does_what_and_on_which_terms(running: Running) -> None:
    said = running.said
    assert said.workers == ["p0", "d0"]
    assert said.roles == {"p0": Role.PREFILL, "d0": Role.DECODE}
    assert said.ranks == {"p0": 1, "d0": 1}
    assert said.terms.kv_lease_duration == 3.0


@pytest.mark.parametrize(("worker_id", "role"), [("p0", Role.PREFILL), ("d0", Role.DECODE)])
def test_engines_are_told_their_role_and_terms(running: Running, worker_id: str, role: Role) -> None:
    engines = [p for p in running.processes(worker_id) if p.role == "engine"]
    assert len(engines) == 2
    for engine in engines:
        argument = Path(f"/proc/{engine.pid}/cmdline").read_bytes().split(b"\0")[3]
        told = msgspec.json.decode(argument, type=EngineConfig)
        assert (told.role, told.terms, told.ranks) == (role, running.said.terms, 1)


@pytest.mark.skipif(PROBLEM is not None, reason=f"no time namespace here: {PROBLEM}")
def test_the_decode_workers_clock_is_ahead_and_nobody_elses(running: Running) -> None:
    assert running.said.clock_offsets_s == {"p0": 0.0, "d0": AHEAD_S}
    for worker_id, ahead_s in running.said.clock_offsets_s.items():
        for process in running.processes(worker_id):
            clock, seconds, _ = Path(f"/proc/{process.pid}/timens_offsets").read_text().splitlines()[0].split()
            assert (process.name, clock, float(seconds)) == (process.name, "monotonic", ahead_s)


def test_the_death_of_an_engine_is_survived_and_all_stamps_are_of_one_clock(running: Running) -> None:
    """The probe, the lock and the promotion, with the engine's clock another than its supervisor's."""
    active = until(lambda: running.engine("d0", "active"), 10, "d0 serves")
    shadow = until(lambda: running.engine("d0", "standby"), 10, "d0 has a shadow")
    assert active is not None
    assert shadow is not None
    os.kill(active.pid, signal.SIGKILL)
    until(lambda: (now := running.engine("d0", "active")) is not None and now.name == shadow.name, 20, "it is promoted")
    until(lambda: running.engine("d0", "standby"), 30, "redundancy is restored")
    events, now = running.events(), now_ns()
    assert [e for e in events if not running.began_ns < e.t_ns < now] == []
    phases = [e.detail for e in events if e.kind in (EventKind.INIT_PHASE, EventKind.PROMOTION_PHASE)]
    assert phases
    for phase in phases:
        start_ns, end_ns = phase["start_ns"], phase["end_ns"]
        assert isinstance(start_ns, int)
        assert isinstance(end_ns, int)
        assert running.began_ns < start_ns <= end_ns < now


def test_the_router_knows_the_roles(running: Running) -> None:
    with urllib.request.urlopen(running.said.url + "/health", timeout=10) as response:
        workers = json.load(response)["workers"]
    assert {w["worker_id"]: w["role"] for w in workers} == {"p0": "prefill", "d0": "decode"}

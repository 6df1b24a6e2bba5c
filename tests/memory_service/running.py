"""Real services and real engines for the tests: processes that are started, watched, killed and always reaped."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from reference_impl.memory_service.client import MemoryClient, service_figures
from reference_impl.rules.events import Event, EventKind
from reference_impl.rules.sessions import Figures, Mode, Tag
from tests.waiting import until

MIB = 1 << 20
START_S = 20.0  # a shared machine may be slow; nothing is measured by it


def read_line(process: subprocess.Popen[str], timeout_s: float = START_S) -> str:
    """Return the next line of a process's stdout, or '' at its end. Raises AssertionError at the deadline.

    Reads byte by byte: what a buffer had swallowed, no selector would tell of.
    """
    assert process.stdout is not None
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            assert selector.select(timeout_s), f"process {process.pid} said {line!r} and no more for {timeout_s} s"
            byte = os.read(process.stdout.fileno(), 1)
            if not byte:
                break
            line += byte
    return line.decode().strip()


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process if it lives, reap it, and close its pipes."""
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=START_S)


@dataclass
class RunningService:
    """A memory service that answers at `path`."""

    process: subprocess.Popen[str]
    path: Path
    events_path: Path
    may_end: bool = False

    def client(
        self, tag: Tag = Tag.WEIGHTS, mode: Mode = Mode.WRITER, engine_id: str = "engine", **more: Any
    ) -> MemoryClient:
        return MemoryClient(self.path, tag=tag, mode=mode, engine_id=engine_id, **more)

    def figures(self) -> Figures:
        return service_figures(self.path)

    def expect_end(self) -> None:
        """Let the test end this service itself."""
        self.may_end = True

    def settled(self, sessions: int = 0) -> Figures:
        """Return the figures once `sessions` are open and nothing is being freed."""

        def ready() -> bool:
            found = self.figures()
            return found.sessions == sessions and not found.freeing_bytes

        until(ready, 10, f"{sessions} sessions are open and freeing is done")
        return self.figures()

    def idle_descriptors(self, connections: int = 0) -> int:
        """Return how many descriptors the service holds with so many connections, once those that end have ended.

        What a session before this one held is counted until the reaper has freed it, so that is waited for first.
        """
        until(lambda: not self.figures().freeing_bytes, 10, "what was held before has been freed")
        socket, stop, standard, events = 1, 2, 3, 1
        selectors, reaper = 2, 2
        idle = socket + stop + standard + events + selectors + reaper + self.figures().allocations + connections
        self.descriptors_become(idle)
        return idle

    def descriptors_become(self, count: int) -> None:
        """Wait until the service holds so many descriptors: it closes a connection a moment after its peer."""
        until(lambda: descriptors_of(self.process.pid) == count, 10, f"the service holds {count} descriptors")

    def events(self, kind: EventKind) -> list[Event]:
        lines = self.events_path.read_bytes().splitlines()
        return [event for event in (msgspec.json.decode(line, type=Event) for line in lines) if event.kind is kind]


def server_command(path: Path, *options: str, capacity_bytes: int = 256 * MIB) -> list[str]:
    return [
        *(sys.executable, "-m", "reference_impl.memory_service.server", "--socket", str(path), "--device", "gpu0"),
        *("--capacity-bytes", str(capacity_bytes), *options),
    ]


@contextmanager
def running_service(*options: str, capacity_bytes: int = 256 * MIB) -> Iterator[RunningService]:
    """Run a service in a directory of its own (pytest's are too long for a socket's path)."""
    with tempfile.TemporaryDirectory(prefix="mem") as directory:
        path, events = Path(directory, "s"), Path(directory, "events")
        process = subprocess.Popen(
            server_command(path, "--events", str(events), *options, capacity_bytes=capacity_bytes),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        running = RunningService(process, path, events)
        try:
            assert read_line(process) == "ready"
            yield running
            assert running.may_end or process.poll() is None, "the service died under the test"
        finally:
            end(process)


# An engine walks the steps named on its command line, says each when it is done, and then waits for its end.
_ENGINE = """
import sys
import numpy as np
from reference_impl.memory_service.client import MemoryClient, Mode, Tag
path, tag, mode, epoch, count, size, *steps = sys.argv[1:]
count, size = int(count), int(size)
if "open" in steps:
    client = MemoryClient(path, tag=Tag(tag), mode=Mode(mode), engine_id="child", epoch=int(epoch), timeout_s=20,
                          wait_s=20.0 if mode == "reader" else 0.0)
for step in steps:
    if step == "allocate":
        for number in range(count):
            client.allocate(f"a{number}", size)
    elif step == "map":
        region = client.region()
        region.map()
    elif step == "fill":
        for number in range(count):
            region.array(f"a{number}")[:] = np.arange(size // 8, dtype="uint64") + number
    elif step == "read":
        print(sum(int(region.array(name).sum()) for name in region.names), flush=True)
        continue
    elif step == "unmap":
        region.unmap()
    elif step == "commit":
        client.commit(b"meta")
    elif step == "ask":
        print("asking", flush=True)
        client.allocate("wanted", size, wait_s=60)
    elif step == "copy":
        copies = [region.array(name).copy() for name in region.names]
    elif step == "hang_up":
        client._channel.close()
    elif step == "wait":
        sys.stdin.readline()
        continue
    elif step == "poke":
        import ctypes
        ctypes.c_uint64.from_address(region.address("a0")).value = 1
    print(step, flush=True)
sys.stdin.read()
"""


@contextmanager
def running_engine(
    service: RunningService,
    *steps: str,
    tag: Tag = Tag.WEIGHTS,
    mode: Mode = Mode.WRITER,
    epoch: int = 0,
    count: int = 4,
    size_bytes: int = 64 * 1024,
) -> Iterator[subprocess.Popen[str]]:
    """Run an engine that stands still after the last of its steps; nobody has read what it says yet."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", _ENGINE, str(service.path), tag, mode),
            *(str(epoch), str(count), str(size_bytes), "open", *steps),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        end(process)


def reached(process: subprocess.Popen[str], step: str) -> None:
    """Wait until an engine says that it has done a step. Raises AssertionError if it ends before."""
    while (said := read_line(process)) != step:
        assert said, f"the engine ended with {process.wait(START_S)} before {step!r}"


def go_on(process: subprocess.Popen[str]) -> None:
    """Let an engine pass its step `wait`."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def sigkill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.wait(START_S) == -signal.SIGKILL


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - the names alone count


def pss_bytes(pid: int | str) -> int:
    """Return a process's proportional set size: pages that n processes share count a n-th each."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss in smaps_rollup")

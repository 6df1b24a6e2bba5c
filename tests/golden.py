"""Runs a load client against the golden server, each in a process of its own, and compares what they say."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.golden_server import Plan, Renewal, Truth
from tests.waiting import until
from workloads.rows import RequestRecord, read_records

ROOT = Path(__file__).parents[1]
NS_PER_MS = 1e6
START_S = 20.0
RUN_S = 60.0


class Golden(NamedTuple):
    """A golden server that runs."""

    url: str
    truth: Path

    @property
    def arrived(self) -> Path:
        """One line for each request whose answer began."""
        return self.truth.with_suffix(".arrived")

    def truths(self) -> dict[str, Truth]:
        """What it knows so far, by request."""
        decoder = msgspec.json.Decoder(Truth)
        truths = [decoder.decode(line) for line in self.truth.read_bytes().splitlines()]
        return {truth.request_id: truth for truth in truths}

    def renewals(self) -> list[Renewal]:
        """The renewals that it got so far, in order."""
        decoder = msgspec.json.Decoder(Renewal)
        return [decoder.decode(line) for line in self.truth.with_suffix(".renewed").read_bytes().splitlines()]


@contextlib.contextmanager
def golden(
    folder: Path, plans: Sequence[Plan] = (Plan(),), core: int = -1, renew_status: int = 200
) -> Iterator[Golden]:
    """A golden server for as long as the block runs."""
    truth = folder / "truth.jsonl"
    command = [sys.executable, "-m", "tests.golden_server", "--truth", str(truth), "--core", str(core)]
    command += ["--plans", msgspec.json.encode(list(plans)).decode(), "--renew-status", str(renew_status)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            yield Golden(f"http://127.0.0.1:{port}", truth)
        finally:
            server.kill()


def locust_command(*options: object, file: str = "workloads/pd.py") -> list[str]:
    """The command line of the load."""
    return [sys.executable, "-m", "locust", "-f", file, "--headless", "--only-summary", *map(str, options)]


def load(*options: object, core: int = -1, file: str = "workloads/pd.py") -> subprocess.CompletedProcess[str]:
    """Run the load to its end. One that does not end says where it stands."""
    pin = ["taskset", "-c", str(core)] if core >= 0 else []
    limits = ("--request-timeout-s", 20, "--drain-s", 20)
    with running_load(*limits, *options, before=pin, file=file) as client:
        try:
            out, err = client.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            os.killpg(client.pid, signal.SIGABRT)
            raise AssertionError(f"the load did not end within {RUN_S:g} s\n{client.communicate()}") from None
    return subprocess.CompletedProcess(client.args, client.returncode, out, err)


@contextlib.contextmanager
def running_load(
    *options: object, before: Sequence[str] = (), file: str = "workloads/pd.py"
) -> Iterator[subprocess.Popen[str]]:
    """The load in a process group of its own, killed if the block leaves it running."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*before, *locust_command(*options, file=file)], cwd=ROOT, stdout=pipe, stderr=pipe, text=True, process_group=0,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"},
    ) as client:  # fmt: skip
        try:
            yield client
        finally:
            client.kill()


def rows_of(*paths: Path) -> dict[str, RequestRecord]:
    """The client's rows, by request."""
    return {row.request_id: row for path in paths for row in read_records(path)}


class Errors(NamedTuple):
    """Client minus truth of each request that both know, in ms."""

    ttft: list[float]
    """(first chunk stamped - sent) - (first chunk written - last byte arrived)."""
    first_chunk: list[float]
    """First chunk stamped - written: what reading alone adds."""
    chunks: list[float]
    """The same of every chunk."""


def keeps_up(found: Errors, gap_ms: float) -> bool:
    """Whether stamps can be used at all: typically wrong by less than a quarter of the gap between chunks."""
    return all(abs(statistics.median(values)) < gap_ms / 4 for values in found)


def errors(rows: dict[str, RequestRecord], truths: dict[str, Truth]) -> Errors:
    """Compare. Asserts that every row's chunks are as many as were written."""
    found = Errors([], [], [])
    for request_id, row in rows.items():
        truth = truths[request_id]
        assert len(row.chunks) == len(truth.chunk_ns), f"{request_id}: chunks got lost or doubled"
        late = [
            (chunk.t_ns - written_ns) / NS_PER_MS for chunk, written_ns in zip(row.chunks, truth.chunk_ns, strict=True)
        ]
        if late:
            found.chunks.extend(late)
            found.first_chunk.append(late[0])
            found.ttft.append(late[0] - (row.sent_ns - truth.arrived_ns) / NS_PER_MS)
    return found


def wait_for_lines(path: Path, lines: int, timeout_s: float = START_S) -> None:
    """Wait until `path` holds so many lines."""
    until(lambda: path.exists() and path.read_bytes().count(b"\n") >= lines, timeout_s, f"{lines} lines in {path}")


def pinnable() -> bool:
    """Whether client and server can have a core each."""
    return len(os.sched_getaffinity(0)) >= 2

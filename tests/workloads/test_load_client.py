"""The load client, a child process, against the golden server: do its rows say what happened?"""

from __future__ import annotations

import contextlib
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.golden import (
    ROOT,
    RUN_S,
    errors,
    golden,
    keeps_up,
    load,
    locust_command,
    rows_of,
    running_load,
    wait_for_lines,
)  # fmt: skip
from tests.golden_server import Fault, Plan
from tests.waiting import until
from workloads.rows import Outcome, RequestRecord
from workloads.schedule import Arrivals, ArrivalSchedule

GAP_MS = 20.0
SMALL = ("--input-tokens", 50, "--output-tokens", 40)


def test_its_stamps_are_the_truth_and_the_broken_twins_are_not(tmp_path: Path) -> None:
    rows, twin_rows = tmp_path / "rows.jsonl", tmp_path / "twin.jsonl"
    with golden(tmp_path, [Plan(gap_ms=GAP_MS)]) as server:
        done = load("--host", server.url, "--rows", rows, "--rate-per-s", 20, "--requests", 12, *SMALL)
        twin = [sys.executable, "-m", "tests.workloads.iter_lines_client", server.url, str(twin_rows)]
        subprocess.run(twin, cwd=ROOT, check=True, timeout=RUN_S)
        truths = server.truths()
    assert done.returncode == 0, done.stderr
    assert "12 requests: 12 ok, 0 fail, 0 unknown" in done.stdout
    found = rows_of(rows)
    assert len(found) == 12
    assert keeps_up(errors(found, truths), GAP_MS)
    assert not keeps_up(errors(rows_of(twin_rows), truths), GAP_MS)
    for row in found.values():
        assert row.outcome is Outcome.OK
        assert row.output_ids == list(range(40))
        assert row.output_tokens == 40
        assert (row.node_d, row.node_p, row.http_status) == ("golden/e0", "p0", 200)
        assert row.intended_ns <= row.send_began_ns <= row.sent_ns <= row.first_byte_ns <= row.first_token_ns
        assert row.first_token_ns < row.chunks[-1].t_ns <= row.end_ns
    assert stat.S_IMODE(rows.stat().st_mode) == 0o600


PLANS = [
    Plan(),
    Plan(split_bytes=7),
    Plan(coalesce=3),
    Plan(tokens_per_chunk=4),
    Plan(status=503),
    *(Plan(fault=fault, after_chunks=2) for fault in Fault if fault),
]  # fmt: skip
SAID = {
    Fault.CUT: (Outcome.FAIL, "cut short after 2 chunks"),
    Fault.RESET: (Outcome.FAIL, "broke after 2 chunks"),
    Fault.STALL: (Outcome.UNKNOWN, "no end within 3 s"),
    Fault.ERROR: (Outcome.FAIL, "golden trouble"),
    Fault.GARBAGE: (Outcome.FAIL, "golden nonsense"),
    Fault.NO_DONE: (Outcome.FAIL, "no [DONE]"),
    Fault.NO_FINISH: (Outcome.FAIL, "no finish_reason"),
}


def test_every_way_a_stream_can_end_is_told_as_it_is(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    with golden(tmp_path, PLANS) as server:
        rate = ("--rate-per-s", 20, "--requests", len(PLANS), "--request-timeout-s", 3)
        done = load("--host", server.url, "--rows", rows, *rate, *SMALL)
        wait_for_lines(server.truth, len(PLANS))
        truths = server.truths()
    found = rows_of(rows)
    assert done.returncode == 1
    assert "4 ok, 7 fail, 1 unknown" in done.stdout
    assert "Traceback" not in done.stderr
    assert {truth.plan for truth in truths.values()} == set(PLANS)
    for request_id, truth in truths.items():
        _told_as_it_is(found[request_id], truth.plan, truth.chunk_ns)


def _told_as_it_is(row: RequestRecord, plan: Plan, written_ns: list[int]) -> None:
    assert len(row.chunks) == len(written_ns)
    assert all(chunk.t_ns > t_ns for chunk, t_ns in zip(row.chunks, written_ns, strict=True))
    if plan.fault:
        outcome, words = SAID[plan.fault]
        assert row.outcome is outcome
        assert words in row.error
        whole = plan.fault in (Fault.NO_DONE, Fault.NO_FINISH)
        assert row.output_tokens == (40 if whole else 2)
        assert row.e2e_ms is None
        assert row.ttft_ms is not None
    elif plan.status != 200:
        assert (row.outcome, row.http_status, row.error) == (Outcome.FAIL, 503, "HTTP 503: golden refusal")
    else:
        assert (row.outcome, row.error, row.output_tokens) == (Outcome.OK, "", 40)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_writes_what_runs_as_unknown(tmp_path: Path, sign: signal.Signals) -> None:
    rows = tmp_path / "rows.jsonl"
    with golden(tmp_path, [Plan(fault=Fault.STALL, after_chunks=2)]) as server:
        options = ("--host", server.url, "--rows", rows, "--rate-per-s", 20, "--requests", 3)
        with running_load(*options, *SMALL) as client:
            wait_for_lines(server.arrived, 3)
            client.send_signal(sign)
            out, err = client.communicate(timeout=RUN_S)
    assert client.returncode == 0, err
    assert "0 ok, 0 fail, 3 unknown" in out
    found = rows_of(rows)
    assert len(found) == 3
    assert {row.outcome for row in found.values()} == {Outcome.UNKNOWN}
    assert all("stopped" in row.error for row in found.values())


def test_run_time_ends_the_arrivals_and_the_drain_ends_the_rest(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    with golden(tmp_path, [Plan(), Plan(fault=Fault.STALL, after_chunks=2)]) as server:
        done = load("--host", server.url, "--rows", rows, "-t", "1s", "--rate-per-s", 10, "--drain-s", 1.5, *SMALL)
        wait_for_lines(server.truth, len(rows_of(rows)))
    assert done.returncode == 0, done.stderr
    outcomes = [row.outcome for row in rows_of(rows).values()]
    assert set(outcomes) == {Outcome.OK, Outcome.UNKNOWN}


def test_a_server_that_dies_is_told_of_every_request(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    with contextlib.ExitStack() as server_runs:
        server = server_runs.enter_context(golden(tmp_path))
        options = ("--rate-per-s", 20, "--arrivals", "constant", "--requests", 20, "--rows", rows)
        with running_load("--host", server.url, *options, *SMALL) as client:
            wait_for_lines(server.arrived, 5)
            server_runs.close()
            _, err = client.communicate(timeout=RUN_S)
    found = rows_of(rows)
    assert client.returncode == 1
    assert "Traceback" not in err
    assert len(found) == 20
    broken = [row for row in found.values() if row.sent_ns and row.outcome is Outcome.FAIL]
    unsent = [row for row in found.values() if not row.sent_ns]
    assert broken
    assert any(row.chunks for row in broken)
    assert unsent
    assert all("could not be sent" in row.error for row in unsent)


def test_rows_that_its_own_lateness_spoilt_say_so(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    with golden(tmp_path) as server:
        options = ("--host", server.url, "--rows", rows, "--rate-per-s", 20, "--requests", 1)
        with running_load(*options, *SMALL) as client:
            wait_for_lines(server.arrived, 1)
            client.send_signal(signal.SIGSTOP)
            wait_for_lines(server.truth, 1)  # the whole answer waits in the client's socket
            client.send_signal(signal.SIGCONT)
            client.communicate(timeout=RUN_S)
        truths = server.truths()
    [row] = rows_of(rows).values()
    assert row.outcome is Outcome.OK
    assert row.spoilt.startswith("loop lag ")
    assert max(errors({row.request_id: row}, truths).chunks) > 100


def test_processes_share_one_schedule(tmp_path: Path) -> None:
    with golden(tmp_path, [Plan(first_ms=1, gap_ms=1)]) as server:
        options = ("--rate-per-s", 30, "--requests", 21, "--seed", 5, "--processes", 2)
        done = load("--host", server.url, "--rows", tmp_path / "rows.jsonl", *options, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "21 requests: 21 ok" in done.stdout
    shards = [rows_of(tmp_path / f"rows-{worker}.jsonl") for worker in (0, 1)]
    assert [len(shard) for shard in shards] == [11, 10]
    schedule = ArrivalSchedule(seed=5, rate_per_s=30, arrivals=Arrivals.POISSON, count=21)
    starts = {row.prompt.index: row.intended_ns for shard in shards for row in shard.values()}
    origins = {starts[arrival.index] - arrival.offset_ns for arrival in schedule}
    assert len(starts) == 21
    assert len(origins) == 1


def test_chat_sends_text_and_reads_deltas(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    with golden(tmp_path) as server:
        done = load("--host", server.url, "--rows", rows, "--rate-per-s", 20, "--requests", 2, "--api", "chat", *SMALL)
        truths = server.truths()
    assert done.returncode == 0, done.stderr
    assert all(row.output_ids == list(range(40)) for row in rows_of(rows).values())
    assert all(b'"messages":[{"content":" ' in bytes(truth.body) for truth in truths.values())


def _one_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line.lower()]
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


def test_a_bad_value_is_refused_in_one_line() -> None:
    done = load("--host", "http://127.0.0.1:9", "--rate-per-s", "-1")
    assert done.returncode == 2
    assert "--rate-per-s: must be a number above 0" in _one_line(done.stderr)


def test_a_host_that_does_not_answer_is_refused_in_one_line() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: nobody answers there
        done = load("--host", f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert done.returncode == 7
    assert "does not answer" in _one_line(done.stderr)


def test_rows_that_cannot_be_written_end_the_load(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    with golden(tmp_path, [Plan(first_ms=1, gap_ms=1)]) as server:
        command = locust_command("--host", server.url, "--rows", rows, "--rate-per-s", 20, "--requests", 200, *SMALL)
        limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *command]
        done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 7
    assert "cannot write rows" in _one_line(done.stderr)
    assert 0 < len(rows_of(rows)) < 200


def test_gevent_stays_out_of_this_process() -> None:
    assert "gevent" not in sys.modules


@pytest.mark.parametrize("mode", [[], ["--master"]])
def test_it_listens_on_loopback_alone(tmp_path: Path, mode: list[str]) -> None:
    """Locust's own default is every interface, for the page and for workers alike."""
    with golden(tmp_path, [Plan(gap_ms=GAP_MS)]) as server, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        bind = ["--master-bind-port", str(port + 1)] if mode else []
        locustfile = [sys.executable, "-m", "locust", "-f", "workloads/pd.py"]
        command = [*locustfile, "--host", server.url, "--web-port", str(port), *mode, *bind]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as locust:
            try:
                process = psutil.Process(locust.pid)

                def listening() -> list[str]:
                    return [c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]

                addresses = until(lambda: len(found := listening()) > len(mode) and found, RUN_S, "locust listens")
                assert set(addresses) == {"127.0.0.1"}
            finally:
                locust.terminate()

"""The command line: one real run from end to end, and one clear line for whatever is wrong."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.run_folder import RunFolder
from harness.verdicts import Verdict
from reference_impl.failover.pidfd import read_stat
from reference_impl.rules.events import EventKind
from tests.harness.histories import History, clean
from tests.waiting import until

PDPROOF = str(Path(sys.executable).with_name("pdproof"))
QUICK = """
name = "quick"
title = "One kill in a few seconds"
requests_min = 10
[load]
rate_per_s = 12
arrivals = "constant"
input_tokens = 200
output_tokens = 20
[[phases]]
name = "baseline"
seconds = 2
[[phases]]
name = "fault"
seconds = 3
fault = { kind = "kill", worker = "w0" }
[[phases]]
name = "drain"
seconds = 5
"""


def alive(processes: list[psutil.Process]) -> list[int]:
    """Return the pids of those that still run. A process may end between any two looks at it, so look once."""
    stats = {p.pid: read_stat(p.pid) for p in processes if p.is_running()}
    return [pid for pid, stat in stats.items() if stat is not None and not stat.is_dead]


@contextlib.contextmanager
def started(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A quick run in its baseline phase, and every process below it; its temporary files go into `folder`."""
    (folder / "quick.toml").write_text(QUICK)
    command = [PDPROOF, "run", "quick.toml", "--profile", "tiny", "--out", "run"]
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if "baseline" in line:
                break
        below = psutil.Process(child.pid).children(recursive=True)
        assert len(below) > 8
        yield child, below


def pdproof(*arguments: str, cwd: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PDPROOF, *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
    )  # fmt: skip


@pytest.mark.parametrize("arm", ["shadow", "cold"])
def test_a_run_from_end_to_end(tmp_path: Path, arm: str) -> None:
    """Real processes, real load, a real kill, and every answer checked."""
    (tmp_path / "quick.toml").write_text(QUICK)
    done = pdproof("run", "quick.toml", "--profile", "tiny", "--arm", arm, "--out", "run", cwd=tmp_path)
    run = RunFolder(tmp_path / "run")
    assert run.incomplete is None, done.stderr
    found = {r.check: (r.verdict, r.found) for r in run.verdicts}
    # On a crowded machine the client may be late; then the run says so, and that is not this test's matter.
    late = found.pop("load-sufficient")
    assert {v for v, _ in found.values()} == {Verdict.PASS}, found
    assert done.returncode == (0 if late[0] is Verdict.PASS else 3), done.stderr
    assert run.incomplete is None
    assert len(run.requests) == 60
    assert (run.requests.content_ok.dropna()).all()
    assert set(run.requests.phase) == {"baseline", "fault"}
    assert set(run.metrics.name) >= {"memory_weights_bytes", "memory_kv_bytes", "engine_pss_bytes", "open_descriptors"}
    assert "model arithmetic" in done.stdout
    assert pdproof("check", "run", cwd=tmp_path).returncode == done.returncode


def test_kills_that_wait_until_the_deployment_is_whole(tmp_path: Path) -> None:
    """Three kills, a phase of half a second each: without the wait the second would find no shadow."""
    impatient = QUICK.replace("seconds = 3\n", "seconds = 0.5\nrepeats = 3\n")
    (tmp_path / "quick.toml").write_text(impatient.replace('worker = "w0"', 'worker = "w0", when_whole_s = 30'))
    done = pdproof("run", "quick.toml", "--profile", "tiny", "--arm", "shadow", "--out", "run", cwd=tmp_path)
    run = RunFolder(tmp_path / "run")
    assert run.incomplete is None, done.stderr
    found = {r.check: (r.verdict, r.found) for r in run.verdicts}
    assert found["recovery"][0] is found["redundancy"][0] is Verdict.PASS, found
    parked = [e.t_ns for e in run.events_of(EventKind.ENGINE_ASLEEP) if e.detail["worker_id"] == "w0"]
    kills = [e.t_ns for e in run.events_of(EventKind.FAULT_INJECTED)]
    assert len(kills) == 3
    for before, after in itertools.pairwise(kills):
        assert any(before < t < after for t in parked), "a new shadow was parked between two kills"
    # The load went on as long as the phases did, and no longer than that.
    last = max(run.requests.intended_ns if "intended_ns" in run.requests else run.requests.sent_ns)
    assert kills[-1] < last < kills[-1] + 5e9


def test_an_interrupted_run_ends_every_process_and_leaves_a_readable_incomplete_folder(tmp_path: Path) -> None:
    with started(tmp_path) as (child, below):
        child.send_signal(signal.SIGINT)
        assert child.stderr is not None
        rest = child.stderr.read()
        assert child.wait(30) == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest
    until(lambda: not alive(below), 10, "all have ended")
    run = RunFolder(tmp_path / "run")
    assert "broken off" in str(run.incomplete)
    assert run.events_of(EventKind.ROUTER_REGISTERED)
    checked = pdproof("check", "run", cwd=tmp_path)
    assert checked.returncode == 3
    assert "broken off" in checked.stdout


def test_a_harness_that_is_killed_leaves_nothing_running(tmp_path: Path) -> None:
    with started(tmp_path) as (child, below):
        child.kill()
    until(lambda: not alive(below), 20, "all have ended")
    until(lambda: not list(tmp_path.glob("pdproof-*/*")), 5, "the deployment's own folder is empty or gone")
    assert RunFolder(tmp_path / "run").incomplete is not None


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run"], 2, "Missing argument"),
        (["run", "no-such-scenario"], 5, "unknown; there are"),
        (["run", "no-such.toml"], 5, "no such file"),
        (["run", "bad.toml"], 5, "bad.toml"),
        (["run", "kill-active", "--profile", "nope"], 5, "there are default"),
        (["run", "kill-active", "--arm", "warm"], 2, "--arm"),
        (["run", "kill-active", "--time-scale", "0"], 2, "--time-scale"),
        (["run", "kill-active", "--time-scale", "nan"], 2, "--time-scale"),
        (["run", "kill-active", "--time-scale", "1e-9"], 2, "--time-scale"),
        (["run", "kill-active", "--seed", "-1"], 2, "--seed"),
        (["run", "kill-active", "--seed", "99999999999999999999"], 2, "--seed"),
        (["run", "kill-active", "--profile", "tiny"], 5, "exceed the context"),
        (["run", "kill-active", "--baseline", "single-timeout"], 2, "moves no KV"),
        (["run", "kill-active", "--single-timeout", "5"], 2, "moves no KV"),
        (["run", "kill-active", "--no-clock-correction"], 2, "moves no KV"),
        (["run", "d_crash", "--arm", "shadow"], 2, "runs without shadows"),
        (["run", "d_crash", "--time-scale", "1000"], 5, "kv_lease_duration must be at least 0.05"),
        (["run", "d_crash", "--baseline", "lease"], 2, "--baseline"),
        (["run", "d_crash", "--single-timeout", "0"], 2, "--single-timeout"),
        (["run", "d_crash", "--single-timeout", "nan"], 5, "single_timeout"),
        (["run", "two_turn", "--decode-clock-offset-s", "nan"], 5, "decode_clock_offset_s"),
        (["compare", "--time-scale", "nan"], 2, "--time-scale"),
        (["run", "kill-active", "--out", "."], 5, "exists already"),
        (["check", "nothing"], 5, "no such folder"),
        (["check", "."], 5, "manifest.json"),
        (["check", ".", "--only", "nope"], 2, "there are faults-proved"),
        (["report", "nothing"], 5, "no such folder"),
        (["compare", "--profile", "nope"], 5, "there are default"),
        (["nonsense"], 2, "No such command"),
        (["--nonsense"], 2, "No such option"),
    ],
)
def test_bad_input_gets_one_clear_line_and_its_code(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    (tmp_path / "bad.toml").write_text("name = 'x'\ntitle = 'x'\nphases = []\n")
    done = pdproof(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line and not line.startswith(("Usage", "Try"))]) == 1


def test_a_run_told_to_terminate_cleans_up_as_after_ctrl_c(tmp_path: Path) -> None:
    with started(tmp_path) as (child, below):
        child.terminate()
        assert child.stderr is not None
        rest = child.stderr.read()
        assert child.wait(30) == 130
    assert "interrupted" in rest
    assert not alive(below)
    assert not list(tmp_path.glob("pdproof-*"))


@pytest.mark.parametrize(
    ("victim", "code", "words"),
    [
        ("reference_impl.deployment", 6, "SIGKILL"),
        ("reference_impl.router", 6, "router ended with -9"),
        ("-m locust", 4, "the load was ended by SIGKILL"),
    ],
)
def test_a_part_that_dies_ends_the_run_at_once_with_its_name(
    tmp_path: Path, victim: str, code: int, words: str
) -> None:
    with started(tmp_path) as (child, below):
        next(p for p in below if victim in " ".join(p.cmdline())).kill()
        assert child.stderr is not None
        rest = child.stderr.read()
        assert child.wait(30) == code, rest
    assert words in rest.splitlines()[-1]
    assert "drain" not in rest
    assert not list(tmp_path.glob("pdproof-*"))


def test_a_port_in_use_gets_one_clear_line_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        (tmp_path / "quick.toml").write_text(QUICK)
        done = pdproof("run", "quick.toml", "--profile", "tiny", "--port", port, cwd=tmp_path)
    assert done.returncode == 7
    assert f"127.0.0.1:{port}" in done.stderr
    assert "choose another --port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_gets_one_clear_line(tmp_path: Path) -> None:
    """/dev/full stands in for a cache folder on a full disk."""
    cache = tmp_path / "cache"
    cache.symlink_to("/dev/full")
    (tmp_path / "quick.toml").write_text(QUICK)
    done = subprocess.run(
        [PDPROOF, "run", "quick.toml", "--profile", "tiny"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PDPROOF_CACHE": str(cache)}, check=False,
    )  # fmt: skip
    assert done.returncode == 7
    assert str(cache) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failed_check_shows_in_the_exit_code(tmp_path: Path) -> None:
    history = History()
    history.change_request(3, content_ok=False)
    history.write(tmp_path / "run")
    done = pdproof("check", "run", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("FAIL")


def test_a_clean_run_passes_its_check(tmp_path: Path) -> None:
    clean(tmp_path / "run")
    done = pdproof("check", "run", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("PASS")


def test_the_list_names_what_there_is(tmp_path: Path) -> None:
    done = pdproof("list", cwd=tmp_path)
    assert done.returncode == 0
    for name in ("kill-active", "glm-5.2-b200", "errors-in-window"):
        assert name in done.stdout

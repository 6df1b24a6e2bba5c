"""The service's process: how it starts, refuses to start, and ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from reference_impl.memory_service.errors import ServiceGone
from tests.memory_service.running import START_S, read_line, running_service, server_command
from tests.waiting import until


def start_and_fail(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_cleanly_and_takes_its_socket_along(number: signal.Signals) -> None:
    with running_service() as service, service.client() as client:
        client.allocate("w", 4096)
        region = client.region()
        region.map()
        region.array("w")[:] = 3
        assert stat.S_IMODE(service.path.lstat().st_mode) == 0o600
        service.process.send_signal(number)
        assert service.process.wait(START_S) == 0
        assert not service.path.exists()
        with pytest.raises(ServiceGone):
            client.allocate("more", 1)
        assert int(region.array("w")[0]) == 3, "an engine's memory is its own, even without the service"
        service.expect_end()


def test_a_live_server_keeps_its_socket() -> None:
    with running_service() as service:
        code, said = start_and_fail(*server_command(service.path))
        assert code == 7
        assert said.count("\n") == 1
        assert str(service.path) in said
        assert service.figures().sessions == 0


def test_a_dead_servers_socket_is_replaced() -> None:
    with running_service() as service:
        service.process.kill()
        service.process.wait(START_S)
        assert service.path.exists()
        again = subprocess.Popen(server_command(service.path), stdout=subprocess.PIPE, text=True)
        try:
            assert read_line(again) == "ready"
            assert service.figures().sessions == 0
        finally:
            again.terminate()
            again.communicate(timeout=START_S)
        service.expect_end()


def test_what_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("precious")
    for path in (file, tmp_path / "no" / "folder", Path("/tmp") / ("p" * 120)):
        code, said = start_and_fail(*server_command(path))
        assert (code, said.count("\n")) == (1, 1), said
    assert file.read_text() == "precious"


@pytest.mark.parametrize("option", [("--capacity-bytes", "0"), ("--capacity-bytes", "x"), ("--nonsense",)])
def test_wrong_options_end_with_2(tmp_path: Path, option: tuple[str, ...]) -> None:
    code, said = start_and_fail(*server_command(tmp_path / "s"), *option)
    assert code == 2
    assert "Traceback" not in said
    assert not (tmp_path / "s").exists()


def test_a_full_disk_costs_events_and_no_memory() -> None:
    with running_service("--events", "/dev/full") as service, service.client() as client:
        client.allocate("w", 4096)
        assert client.commit().size_bytes == 4096
        assert service.figures().sessions == 1


_PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("option", [("--die-with-parent",), ()])
def test_it_dies_with_its_parent_only_when_told_to(tmp_path: Path, option: tuple[str, ...]) -> None:
    path = Path("/tmp", f"pd{os.getpid()}")
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, *server_command(path), *option],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(read_line(parent))
    pidfd = os.pidfd_open(pid)
    try:
        parent.kill()
        parent.communicate(timeout=START_S)
        if option:
            until(lambda: _dead(pidfd), START_S, "the service dies with its parent")
        else:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(path))
            assert not _dead(pidfd)
    finally:
        if not _dead(pidfd):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        path.unlink()


def _dead(pidfd: int) -> bool:
    """Tell whether a process has ended; an orphan may have nobody who reaps it."""
    return bool(select.select([pidfd], [], [], 0)[0])


def test_a_parent_that_is_gone_already_is_noticed(tmp_path: Path) -> None:
    code, said = start_and_fail(*server_command(tmp_path / "s"), "--die-with-parent", "1")
    assert code == 1
    assert "parent 1 is gone" in said

"""`pdproof-engine`: one engine alone, told when it serves, ended by a signal with nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from reference_impl.engine import cli
from reference_impl.engine.cli import EngineAnnouncement
from reference_impl.oracle import expected_answers
from reference_impl.rules.routing import Role
from reference_impl.secret import TOKEN_VARIABLE
from tests.waiting import until

COMMAND = [sys.executable, "-m", "reference_impl.engine.cli"]
PROMPT = list(range(100, 180))


@contextmanager
def engine(folder: Path, *arguments: str, announce: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Start one whose temporary folders and weights stand in `folder`; end it in any case."""
    environment = os.environ | {"TMPDIR": str(folder), "PDPROOF_CACHE": str(folder / "cache")}
    with subprocess.Popen(
        [*COMMAND, *arguments, *(["--announce"] if announce else [])],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        try:
            yield child
        finally:
            child.kill()


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_alone_and_leaves_nothing(tmp_path: Path, signum: signal.Signals) -> None:
    with engine(tmp_path, "--profile", "tiny", "--name", "alone", "--events", str(tmp_path / "events")) as child:
        said = msgspec.json.decode(first_line(child), type=EngineAnnouncement)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(said.url + "/v1/completions", body), timeout=20) as response:
            answer = json.load(response)["choices"][0]["token_ids"]
            assert response.headers["x-pdproof-worker"] == "alone"
        assert answer == expected_answers([np.array(PROMPT)], [8], said.weights)[0].tolist()
        assert list(tmp_path.glob("pdproof-engine-*"))
        child.send_signal(signum)
        assert child.wait(20) == 0
        assert child.stderr is not None
        assert child.stderr.read() == ""
    assert not list(tmp_path.glob("pdproof-engine-*"))
    assert (tmp_path / "events").stat().st_size


@pytest.mark.nixl
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_one_part_is_served_by_an_engine_of_that_role(tmp_path: Path, role: Role) -> None:
    pytest.importorskip("nixl")
    config = '{"kv_connector": "NixlConnector", "kv_connector_extra_config": {"kv_lease_duration": 6}}'
    with engine(tmp_path, "--profile", "tiny", "--role", role, "--ranks", "2", "--kv-transfer-config", config) as child:
        said = msgspec.json.decode(first_line(child), type=EngineAnnouncement)
        assert (said.role, said.ranks, said.terms.kv_lease_duration) == (role, 2, 6.0)
        child.terminate()
        assert child.wait(20) == 0


def test_a_person_is_told_in_words(tmp_path: Path) -> None:
    with engine(tmp_path, "--profile", "tiny", announce=False) as child:
        assert first_line(child).startswith("serving at http://127.0.0.1:")
        child.terminate()
        assert child.wait(20) == 0


def test_it_ends_cleanly_while_it_makes_its_weights(tmp_path: Path) -> None:
    with engine(tmp_path) as child:  # a GiB
        until(lambda: list((tmp_path / "cache").glob("*.part")), 20, "the weights are being made")
        child.terminate()
        assert child.wait(20) == 0
        assert child.stdout is not None
        assert child.stdout.read() == ""
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--role", "chief"], "--role"),
        (["--ranks", "3"], "--ranks"),
        (["--port", "70000"], "--port must be 0 to 65535, got 70000"),
        (["--name", "two words"], "pdproof-engine: --name must be"),
        (["--name", 'quo"te'], "pdproof-engine: --name must be"),
        (["--name", "a\tb\x1b[0m"], "pdproof-engine: --name must be"),
        (["--name", "one\ntwo"], "pdproof-engine: --name must be"),
        (["--name", "x" * 200], "pdproof-engine: --name must be"),
        (["--name", "é"], "pdproof-engine: --name must be"),
        (["--host", "nohost.invalid"], "pdproof-engine: --host 'nohost.invalid'"),
        (["--host", "a" * 70], "pdproof-engine: --host 'aaa"),
        (["--host", ""], "pdproof-engine: --host ''"),
        (["--profile", "none-such"], "profile 'none-such'"),
        (["--kv-transfer-config", "{"], "--kv-transfer-config: it must be a JSON object"),
        (["--kv-transfer-config", '{"kv_lease_duration": 0}'], "kv_lease_duration must be above 0"),
        (["--kv-transfer-config", '{"lease": 1}'], "--kv-transfer-config: lease is not known"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_is_made(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    with engine(tmp_path, *arguments) as child:
        output, errors = child.communicate(timeout=20)
    assert child.returncode == 2
    assert words in errors.splitlines()[-1]
    assert len(errors.splitlines()) == 1 or errors.startswith("usage: ")
    assert output == ""
    assert not list(tmp_path.iterdir())


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with engine(tmp_path, "--profile", "tiny", "--port", str(port)) as child:
            _, errors = child.communicate(timeout=30)
    assert child.returncode == 7
    assert (
        errors.strip()
        == f"pdproof-engine: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port"
    )


def test_what_a_killed_engine_left_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    (tmp_path / "pdproof-engine-link").symlink_to(other)
    (tmp_path / "pdproof-engine-file").touch()
    (tmp_path / "pdproof-chromium-x").mkdir()
    kept = set(tmp_path.iterdir()) | {tmp_path / "cache"}
    with engine(tmp_path, "--profile", "tiny") as living:
        first_line(living)
        of_living = set(tmp_path.iterdir()) - kept
        assert len(of_living) == 1
        with engine(tmp_path, "--profile", "tiny") as killed:
            first_line(killed)
            assert len(set(tmp_path.iterdir()) - kept) == 2
            killed.kill()
            killed.wait(20)
        assert len(set(tmp_path.iterdir()) - kept) == 2
        with engine(tmp_path, "--profile", "tiny") as third:
            first_line(third)
            assert len(set(tmp_path.iterdir()) - kept) == 2
            third.terminate()
            assert third.wait(20) == 0
        assert set(tmp_path.iterdir()) == kept | of_living
        assert living.poll() is None
        living.terminate()
        assert living.wait(20) == 0
    assert set(tmp_path.iterdir()) == kept
    assert list(other.iterdir())


def test_a_folder_taken_from_under_an_engine_that_starts_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making its folder and locking it an engine looks dead to another that starts."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    swept = []

    def made(prefix: str) -> str:
        folder = mkdtemp(prefix=prefix)
        if not swept:
            swept.append(folder)
            cli._sweep()
        return folder

    mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr("tempfile.mkdtemp", made)
    with cli._folder() as folder:
        assert folder.is_dir()
        assert str(folder) not in swept
        cli._sweep()
        assert folder.is_dir()
    assert not list(tmp_path.iterdir())


def test_the_help_says_what_the_side_channel_is_sealed_with() -> None:
    told = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True).stdout
    assert TOKEN_VARIABLE in told
    assert "accident" in told

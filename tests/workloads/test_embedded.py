"""The embedded deployment: announced in time, or refused with nothing left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import until
from workloads import embedded


def child(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_it_is_known_by_its_announcement_and_ends_when_told(tmp_path: Path) -> None:
    code = (
        f"import os, sys; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()));"
        """print('{"url": "http://127.0.0.1:1", "model": "m"}', flush=True); sys.stdin.read()"""
    )
    deployment = embedded.start(20, child(code))
    assert (deployment.url, deployment.model) == ("http://127.0.0.1:1", "m")
    pid = int((tmp_path / "pid").read_text())
    assert psutil.pid_exists(pid)
    deployment.stop()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit(3)", "it ended with exit code 3"),
        ("print('hello', flush=True); input()", "its announcement is malformed"),
        ("input()", "it announced nothing within 0.5 s"),
    ],
)
def test_one_that_does_not_come_up_is_refused_and_ended(code: str, words: str) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(embedded.EmbeddedFailed) as caught:
        embedded.start(0.5 if code == "input()" else 20, child(code))
    assert words in str(caught.value)
    until(lambda: set(psutil.Process().children()) <= before, 5, "the child is gone")

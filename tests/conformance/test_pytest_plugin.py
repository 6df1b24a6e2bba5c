"""The fixed cases as pytest tests, as a connector's author runs them in a folder of his own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = Path(__file__).parents[2] / "examples" / "toy_connector" / "steps"


def ran(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest there, on the cases of a few rules."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "harness.conformance"]
    return subprocess.run(
        [*command, *options], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip


def test_the_reference_passes(tmp_path: Path) -> None:
    done = ran(tmp_path, "-k", "KVC-LEASE-001 or KVC-HB-001")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_a_connector_with_faults_fails_what_it_breaks(tmp_path: Path) -> None:
    shutil.copy(STEPS / "step_3.py", tmp_path / "my_connector.py")
    options = ("--connector", "my_connector:make_subject")
    done = ran(tmp_path, *options, "-k", "KVC-LEASE-005.expiry or KVC-REL-006.damaged or KVC-CLK-001")
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 passed, 1 skipped" in done.stdout
    assert "injects" in done.stdout, "the timeline is shown"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--connector", "no_such_module:make"), "No module named 'no_such_module'"),
        (("--connector", "nonsense"), "package.module:function"),
        (("--kv-transfer-config", "{"), "is no JSON"),
    ],
)
def test_a_subject_that_cannot_be_had_is_one_line(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    done = ran(tmp_path, *options)
    assert done.returncode == 78
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stdout

"""Fixtures' raw material: each sample run is written once, and copied by tests that break it."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from harness.run_folder import RunFolder
from reports.comparison import write_comparison
from tests.reports.sample_runs import sample, write


@functools.cache
def _originals() -> Path:
    """Both arms of both profiles, written once a session."""
    home = Path(tempfile.mkdtemp(prefix="pdproof-sample-runs-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    for profile in ("default", "glm-5.2-b200"):
        for arm in ("cold", "shadow"):
            write(home / profile / arm, sample(arm, profile))
    return home


@functools.cache
def comparison(profile: str = "default") -> Path:
    """Return the folder of a comparison of both arms, drawn once a session: only to be read."""
    home = _originals() / profile
    write_comparison(home / "cold", home / "shadow", home / "out")
    return home / "out"


def pair(tmp_path: Path, profile: str = "default") -> tuple[RunFolder, RunFolder]:
    """Return a copy of both arms that a test may break."""
    for arm in ("cold", "shadow"):
        shutil.copytree(_originals() / profile / arm, tmp_path / arm)
    return RunFolder(tmp_path / "cold"), RunFolder(tmp_path / "shadow")


def edit_events(run: RunFolder, *, without: str) -> RunFolder:
    """Remove every event of kind `without`, mend the footer's count, and return the folder read anew."""
    path = run.path / "events.jsonl"
    lines = path.read_text().splitlines()
    kept = [line for line in lines if f'"kind":"{without}"' not in line]
    events = len(kept) - 2
    before = f'"events":{len(lines) - 2},'
    path.write_text("\n".join(kept).replace(before, f'"events":{events},') + "\n")
    return RunFolder(run.path)


def cut_short(run: RunFolder) -> RunFolder:
    """Take the footer away, and return the folder read anew."""
    path = run.path / "events.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    return RunFolder(run.path)

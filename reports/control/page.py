"""The page on disk, and its summary beside it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from harness.run_folder import RunFolder
from reports.control.summary import ControlSummary, Read, read
from reports.control.view import control_view
from reports.page import render, write


def write_control_page(run: RunFolder, out: Path) -> ControlSummary:
    """Write the page of a run with a control plane to `out`, `summary.json` beside it, and return the summary.

    Raises `BadRunFolder` for a folder that holds no such run or a damaged one, `MachineLimit` where `out` cannot be
    written.
    """
    found = read(run)
    write(out, control_page(found).encode())
    write(out.with_name("summary.json"), summary_json(found.summary))
    return found.summary


def control_page(found: Read) -> str:
    """Return the page of a run that has been read."""
    return render("control.html", control_view(found))


def summary_json(summary: ControlSummary) -> bytes:
    """Return the summary as it stands on disk."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"

"""A comparison on disk: a page for people and a summary for machines."""

from __future__ import annotations

from pathlib import Path

import msgspec

from harness.run_folder import RunFolder
from reports.page import comparison_page, write
from reports.summary import Summary, summarise


def write_comparison(cold: Path, shadow: Path, out: Path) -> Summary:
    """Write `out/index.html` and `out/summary.json` for two run folders, and return the summary.

    Raises `BadRunFolder` for a folder that is none, `BadInput` for runs of the wrong arms, `MachineLimit` where `out`
    cannot be written.
    """
    left, right = RunFolder(cold), RunFolder(shadow)
    summary = summarise(left, right)
    write(out / "index.html", comparison_page(left, right, summary).encode())
    write(out / "summary.json", summary_json(summary))
    return summary


def summary_json(summary: Summary) -> bytes:
    """Return `summary.json`."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"

"""The page on disk, and its summary beside it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from harness.run_folder import RunFolder
from reports.kv.summary import KvSummary, summarise
from reports.kv.view import kv_view
from reports.page import render, write


def write_kv_page(runs: list[RunFolder], out: Path) -> KvSummary:
    """Write `out/index.html` and `out/summary.json` for prefill/decode runs of one scenario; return the summary.

    Raises `BadInput` for runs of several scenarios, `BadRunFolder` for a folder that holds no such run or a damaged
    one, `MachineLimit` where `out` cannot be written.
    """
    summary = summarise(runs)
    write_at([out / "index.html"], runs, summary)
    return summary


def write_at(places: list[Path], runs: list[RunFolder], summary: KvSummary) -> list[Path]:
    """Write the page to each of `places`, each with its `summary.json`, and return them."""
    page = kv_page(runs, summary).encode()
    text = msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
    for place in places:
        write(place, page)
        write(place.with_name("summary.json"), text)
    return places


def kv_page(runs: list[RunFolder], summary: KvSummary) -> str:
    """Return the page of `runs`; `summary` is theirs."""
    return render("kv.html", kv_view(runs, summary))

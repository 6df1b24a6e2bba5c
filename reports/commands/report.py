"""`pdproof report`: draws pages from run folders."""

from __future__ import annotations

from pathlib import Path

import click

from harness.errors import BadInput
from harness.run_folder import RunFolder
from reports.comparison import summary_json
from reports.control.page import write_control_page
from reports.control.setup import has_control
from reports.kv.page import write_at
from reports.kv.setup import moves_kv
from reports.kv.summary import summarise as kv_summary
from reports.page import comparison_page, write, write_run_page
from reports.summary import summarise


@click.command(name="report", short_help="Draw the pages of runs.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write here, not into the run folders.")
def command(runs: tuple[Path, ...], out: Path | None) -> None:
    """Draw a page for each RUN folder: RUN/report.html, one file that works offline.

    Given one cold and one shadow run, draw the page that compares them instead, with its summary.json. Runs in which
    KV moves from prefill to decode engines share one page, of one scenario, with its summary.json. A run with a control
    plane has a page of its own, with its summary.json. With --out DIR a comparison or a single page becomes
    DIR/index.html, several pages DIR/<name of the run folder>.html (of control planes: DIR/<that name>/index.html).
    """
    for path in _made([RunFolder(path) for path in runs], out):
        click.echo(path)


def _made(folders: list[RunFolder], out: Path | None) -> list[Path]:
    if any(has_control(folder) for folder in folders):
        return _control(folders, out)
    return _kv(folders, out) if any(moves_kv(folder) for folder in folders) else _others(folders, out)


def _control(folders: list[RunFolder], out: Path | None) -> list[Path]:
    """Write a page for each run, with its summary beside it."""
    if other := [folder.path for folder in folders if not has_control(folder)]:
        raise BadInput(f"there is no control plane in {other[0]}, as there is in others of these runs; draw them apart")
    places = [folder.path / "report.html" for folder in folders]
    if out is not None:
        places = [out / "index.html"] if len(folders) == 1 else [out / n / "index.html" for n in _names(folders, out)]
    for folder, place in zip(folders, places, strict=True):
        write_control_page(folder, place)
    return places


def _kv(folders: list[RunFolder], out: Path | None) -> list[Path]:
    """Write one page to `out`, or into each run folder."""
    if other := [folder.path for folder in folders if not moves_kv(folder)]:
        raise BadInput(f"no KV moves in {other[0]}, as it does in others of these runs; draw them apart")
    places = [out / "index.html"] if out else [folder.path / "report.html" for folder in folders]
    return write_at(places, folders, kv_summary(folders))


def _others(folders: list[RunFolder], out: Path | None) -> list[Path]:
    by_arm = {folder.manifest.arm: folder for folder in folders}
    pair = len(folders) == 2 and by_arm.keys() == {"cold", "shadow"}
    return _comparison(by_arm["cold"], by_arm["shadow"], out) if pair else _pages(folders, out)


def _comparison(cold: RunFolder, shadow: RunFolder, out: Path | None) -> list[Path]:
    """Write the comparison to `out`, or into both run folders: each can then be handed on alone."""
    summary = summarise(cold, shadow)
    page = comparison_page(cold, shadow, summary).encode()
    places = [out / "index.html"] if out else [run.path / "report.html" for run in (cold, shadow)]
    for place in places:
        write(place, page)
        write(place.with_name("summary.json"), summary_json(summary))
    return places


def _pages(folders: list[RunFolder], out: Path | None) -> list[Path]:
    if out is None:
        return [write_run_page(run, run.path / "report.html") for run in folders]
    if len(folders) == 1:
        return [write_run_page(folders[0], out / "index.html")]
    return [write_run_page(run, out / f"{name}.html") for run, name in zip(folders, _names(folders, out), strict=True)]


def _names(folders: list[RunFolder], out: Path) -> list[str]:
    """Return the folders' names, each of which must be one page's alone."""
    names = [run.path.resolve().name for run in folders]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"two run folders are called {twice[0]}, and so would be their pages in {out}; draw them apart")
    return names

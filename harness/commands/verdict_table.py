"""Verdicts on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.checks import overall
from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict

_STYLE = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.INCONCLUSIVE: "yellow", Verdict.ERROR: "bold red"}


def print_verdicts(run: RunFolder, results: Sequence[CheckResult]) -> None:
    """Print the overall verdict first, then one line a check."""
    console = Console(width=None if Console().is_terminal else 160)
    verdict = overall(list(results))
    console.print(
        f"[{_STYLE[verdict]}]{verdict.upper()}[/]  {escape(run.manifest.title)} [dim]{escape(str(run.path))}[/]"
    )
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for result in results:
        table.add_row(f"[{_STYLE[result.verdict]}]{result.verdict}[/]", escape(result.title), escape(result.found))
    console.print(table)
    if run.manifest.emulated:
        console.print(f"[dim]emulated: {escape('; '.join(run.manifest.emulated))}[/]")

"""`pdproof findings DIR`: which rules a system keeps and which it breaks, from the run folders of its cases."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from harness.commands.exit_codes import exit_code
from harness.expectations import load_expectations
from reports.findings.markdown import markdown
from reports.findings.model import gather
from reports.findings.page import write_findings
from reports.findings.words import lead, reasons
from reports.page import write

_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)


@click.command("findings")
@click.argument("folder", type=_FOLDER)
@click.option("--reference", type=_FOLDER, help="cases of the reference implementation, to set beside each failure")
@click.option(
    "--twins", type=_FOLDER, help="the cases' twins (`pdproof conform --twins`): which checks were seen to fail"
)
@click.option("--recovery", type=click.Path(path_type=Path, dir_okay=False, exists=True),
              help="summary.json of a comparison of cold start and shadow")  # fmt: skip
@click.option("--known", default="", metavar="NAME|FILE",
              help="expectations; default: those that come with pdproof for this system and version")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=None,
              help="where index.html and findings.json go; default: FOLDER")  # fmt: skip
@click.option("--markdown", "document", type=click.Path(path_type=Path, dir_okay=False), default=None,
              help="write the findings as a Markdown document too")  # fmt: skip
def command(
    folder: Path, reference: Path | None, twins: Path | None, recovery: Path | None, known: str, out: Path | None,
    document: Path | None,
) -> int:  # fmt: skip
    """Read the run folders of cases below FOLDER (`pdproof conform --out FOLDER`) and write what they came to.

    A known failure decides nothing; one that passes is stale, and fails as a new failure does.
    """
    expectations = load_expectations(known) if known else None
    found = gather(folder, reference=reference, twins=twins, known=expectations, recovery=recovery)
    place = out or folder
    write_findings(found, place)
    if document is not None:
        write(document, markdown(found).encode())
    console = Console(stderr=True)
    console.print(f"[bold]{found.verdict}[/]: {lead(found)}", highlight=False, soft_wrap=True)
    for reason in reasons(found):
        console.print(reason, highlight=False, soft_wrap=True, markup=False)
    console.print(f"page: {(place / 'index.html').resolve()}", highlight=False, soft_wrap=True)
    return exit_code(found.verdict)

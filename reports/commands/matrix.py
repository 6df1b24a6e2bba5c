"""`pdproof matrix RESULTS...`: rules by subjects, from the results of in-process conformance runs."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from harness.commands.sysexits import SysexitsCommand
from harness.conformance import said
from harness.conformance.junit import junit
from harness.conformance.known import BadKnown, Decision, KnownCases, decided, known_for, load_known
from harness.conformance.stream import ConformanceRun, read_results
from reports.conformance.markdown import markdown
from reports.conformance.model import merged
from reports.conformance.page import write_matrix
from reports.page import write

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("matrix", cls=SysexitsCommand, short_help="Draw rules by subjects, from results of conformance runs.")
@click.argument("results", metavar="RESULTS.jsonl...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=_FILE, metavar="FILE.html", help="the page: one file that works offline")
@click.option("--markdown", "document", type=_FILE, default=None, metavar="FILE.md", help="the same as Markdown")
@click.option("--junit", "xml", type=_FILE, default=None, metavar="FILE.xml", help="the same as JUnit XML")
@click.option("--known", "names", multiple=True, metavar="NAME|FILE",
              help="expectations; default: those that come with pdproof for each subject and version")  # fmt: skip
@click.option("--allow-known", is_flag=True, help="let a run pass whose only failures are known")
def command(
    results: tuple[Path, ...], out: Path, document: Path | None, xml: Path | None, names: tuple[str, ...],
    allow_known: bool,
) -> int:  # fmt: skip
    """Merge RESULTS, each the file of one run, into one matrix. Each cell leads to its evidence and its timeline.

    Ends as the worst of the runs: 0 conformant, 1 not, 2 inconclusive (also: nothing was run, or a run was cut short),
    3 expectations are stale, 64 wrong usage, 65 results that cannot be read, 70 our own fault, 78 expectations that
    cannot be used.
    """
    places = [path.resolve() for path in results]
    if twice := next((path for path in results if places.count(path.resolve()) > 1), None):
        raise click.UsageError(f"{twice} is given twice; give each run's file once")
    runs = [read_results(path) for path in results]
    decisions = _decided(runs, names, allow_known=allow_known)
    matrix = merged(decisions)
    write_matrix(matrix, out)
    if document is not None:
        write(document, markdown(matrix).encode("utf-8", "backslashreplace"))
    if xml is not None:
        write(xml, junit(decisions).encode())
    console = Console(stderr=True)
    for decision in decisions:
        console.print(said.sentence(decision), highlight=False, soft_wrap=True, markup=False)
        for reason in said.reasons(decision):
            console.print(f"  {reason}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"page: {out.resolve()}", highlight=False, soft_wrap=True, markup=False)
    return int(matrix.exit)


def _decided(runs: list[ConformanceRun], names: tuple[str, ...], *, allow_known: bool) -> list[Decision]:
    given = [(name, load_known(name)) for name in names]
    for name, known in given:
        if not any(known.speaks_of(run.header) for run in runs):
            raise BadKnown(
                f"expectations {name}: they are of {known.subject} {', '.join(known.versions)}, and no result is"
            )

    def known_of(run: ConformanceRun) -> KnownCases | None:
        if not given:
            return known_for(run.header)
        return next((known for _, known in given if known.speaks_of(run.header)), None)

    return [decided(run, known_of(run), allow_known=allow_known) for run in runs]

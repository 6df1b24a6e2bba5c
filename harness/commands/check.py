"""`pdproof check RUN`: judge a run folder anew."""

from __future__ import annotations

from pathlib import Path

import click

from harness.checks import CHECKS, judge, overall
from harness.commands.exit_codes import exit_code
from harness.commands.verdict_table import print_verdicts
from harness.run_folder import RunFolder


@click.command("check")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--only", multiple=True, help="judge by this check alone (may be given several times)")
def command(run: Path, only: tuple[str, ...]) -> int:
    """Judge the run folder RUN by today's checks, and write its verdicts.json (not with --only)."""
    if unknown := [name for name in only if name not in CHECKS]:
        raise click.BadParameter(
            f"no check is called {unknown[0]!r}; there are {', '.join(CHECKS)}", param_hint="--only"
        )
    folder = RunFolder(run)
    results = judge(folder)
    if only:
        results = [r for r in results if r.check in only]
    else:
        folder.write_verdicts(results)
    print_verdicts(folder, results)
    return exit_code(overall(results))

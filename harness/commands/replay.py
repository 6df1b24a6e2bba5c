"""`pdproof replay`: run a failure again, from the file that the run wrote."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from harness.commands.run import ended_like_ctrl_c
from harness.commands.sysexits import OurFault, SysexitsCommand
from harness.conformance.exits import Exit
from harness.conformance.interpreter import interpreter_of
from harness.conformance.orders import Tried
from harness.conformance.process import SubjectLost, SubjectProcess
from harness.conformance.run import CASE_LIMIT_S
from harness.conformance.search.history import signature
from harness.conformance.search.replay import FixedCase, Recorded, load
from harness.conformance.timeline import lines
from harness.conformance.watch import Breach
from harness.verdicts import Verdict


@click.command("replay", cls=SysexitsCommand)
@click.argument("file", type=click.Path(path_type=Path))
def command(file: Path) -> int:
    """Run a failure of `pdproof conform` again, and print what happens.

    FILE is one that the run wrote below replays/ in its folder. Exit codes: 1 the breach is there again, 0 it is not,
    2 nothing can be concluded, 64 wrong usage, 65 a file that no run wrote, 70 our own fault, 78 a subject that cannot
    be had.
    """
    recorded = load(file)
    with ended_like_ctrl_c():
        tried = _tried(recorded)
    for line in lines(tried.timeline):
        click.echo(line)
    if tried.verdict is Verdict.ERROR:
        raise OurFault(tried.found)
    click.echo(f"recorded: {recorded.rule}: {recorded.found}" if recorded.rule else f"recorded: {recorded.found}")
    click.echo(f"now:      {tried.found}")
    if _again(recorded, tried):
        click.echo("It is there again.")
        return int(Exit.NOT_CONFORMANT)
    if tried.verdict is Verdict.INCONCLUSIVE:
        click.echo("Nothing can be concluded.")
        return int(Exit.INCONCLUSIVE)
    click.echo("It is not there any more.")
    return int(Exit.CONFORMANT)


def _tried(recorded: Recorded) -> Tried:
    """Run it. A subject that is lost has broken R1."""
    with tempfile.TemporaryDirectory(prefix="pdproof-replay-") as folder:
        python, environment = interpreter_of(recorded.subject)
        process = SubjectProcess(recorded.subject, python, Path(folder) / "subject.log", environment)
        try:
            process.start()
            reply = process.ask(recorded.order(), CASE_LIMIT_S)
        except SubjectLost as lost:
            breach = Breach(rule="R1", what=f"the subject's process was lost: {lost}", t_ns=0, where="lost")
            return Tried(verdict=Verdict.FAIL, found=f"R1: {breach.what}", breaches=[breach])
        finally:
            process.close()
    assert isinstance(reply, Tried)
    return reply


def _again(recorded: Recorded, tried: Tried) -> bool:
    """Whether what was recorded is broken again; a fixed case is judged by its verdict, a twin was not caught."""
    if isinstance(recorded.run, FixedCase):
        return tried.verdict is (Verdict.PASS if recorded.run.twin else Verdict.FAIL)
    return any(signature(breach) == (recorded.rule, recorded.where) for breach in tried.breaches)

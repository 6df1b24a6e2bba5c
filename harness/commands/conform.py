"""`pdproof conform`: cases against a pair of servers, or a connector in process, and what they say of the rules."""

from __future__ import annotations

import asyncio
import sys
from datetime import datetime
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.cases.bench import Maker
from harness.cases.case import Case
from harness.cases.makers import maker_of
from harness.cases.registry import CASES, chosen
from harness.cases.runner import Outcome, Plan, run_cases
from harness.cases.terms import SIZES
from harness.commands.options import SEED
from harness.commands.run import ended_like_ctrl_c
from harness.commands.sysexits import SysexitsCommand
from harness.conformance.exits import Exit
from harness.progress import RunProgress
from harness.verdicts import Verdict, worst

_EXITS = {
    Verdict.PASS: Exit.CONFORMANT, Verdict.FAIL: Exit.NOT_CONFORMANT, Verdict.INCONCLUSIVE: Exit.INCONCLUSIVE,
    Verdict.ERROR: Exit.OUR_FAULT,
}  # fmt: skip
_STYLE = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.INCONCLUSIVE: "yellow", Verdict.ERROR: "bold red"}


@click.command("conform", cls=SysexitsCommand)
@click.option("--target", default="reference", show_default=True, metavar="NAME|FILE",
              help="servers to test from outside: reference, vllm, or a .toml file that describes a vLLM, or servers "
              "that somebody else runs")  # fmt: skip
@click.option("--connector", default="", metavar="reference|MODULE:FUNCTION",
              help="test a connector in process: the reference's, or what a function of yours makes")  # fmt: skip
@click.option("--kv-transfer-config", default="", metavar="JSON",
              help="test a connector of vLLM's in process, named as vLLM names it")  # fmt: skip
@click.option("--in-process", is_flag=True, help="with --list or --twins: of the cases in process")
@click.option("--known", default="", metavar="NAME|FILE", help="in process: expectations; default: those of pdproof")
@click.option("--allow-known", is_flag=True, help="in process: end with 0 if all failures are known ones")
@click.option("--case", "patterns", multiple=True, metavar="NAME",
              help="run these alone: a name, its beginning up to an underscore, or a shell pattern")  # fmt: skip
@click.option("--search", "search_s", type=click.FloatRange(0, 86_400), default=0.0, show_default=True,
              metavar="SECONDS", help="in process: search generated histories for so long as well")  # fmt: skip
@click.option("--size", type=click.Choice(list(SIZES)), default="small", show_default=True,
              help="of requests and queues: small (2,000 in, 64 out) or full (32,000 in, 1,000 out)")  # fmt: skip
@click.option("--twins", is_flag=True, help="run the broken twins of the cases: each must be caught")
@click.option("--list", "listed", is_flag=True, help="list the cases, and run none")
@click.option("--out", type=click.Path(path_type=Path), default=None,
              help="the folder to make, with a run folder for each case; default: a new one under runs/")  # fmt: skip
@click.option("--seed", type=SEED, default=2, show_default=True, help="of all chance")
def command(
    target: str, connector: str, kv_transfer_config: str, in_process: bool, known: str, allow_known: bool,
    patterns: tuple[str, ...], search_s: float, size: str, twins: bool, listed: bool, out: Path | None, seed: int,
) -> int:  # fmt: skip
    """Run cases, judge them, and print a table of cases and verdicts.

    From outside (--target) it takes minutes, in process (--connector, --kv-transfer-config) seconds. Exit codes:
    0 conformant, 1 not, 2 inconclusive, 3 expectations are stale, 64 wrong usage, 65 bad data, 70 our own fault,
    78 a subject or expectations that cannot be used.
    """
    if connector and kv_transfer_config:
        raise click.UsageError("--connector and --kv-transfer-config: give one of them")
    if connector or kv_transfer_config or in_process:
        from harness.commands import in_process as inside

        if listed:
            click.echo("\n".join(inside.listed(patterns)))
            return 0
        return inside.conform_in_process(
            connector, kv_transfer_config, patterns, twins=twins, out=out, seed=seed, known=known,
            allow_known=allow_known, search_s=search_s,
        )  # fmt: skip
    cases = chosen(patterns)
    unmatched = [p for p in patterns if not chosen((p,))]
    if unmatched:
        raise click.UsageError(f"--case {unmatched[0]}: no case fits; there are {', '.join(CASES)}")
    if listed:
        _list(cases)
        return 0
    maker = maker_of(target)
    folder = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-conform-{maker.name}{'-twins' if twins else ''}"
    if folder.exists():
        raise click.UsageError(f"--out {folder}: exists already; choose another name or remove it")
    plan = Plan(size=SIZES[size], seed=seed, out=folder, twins=twins, command=["pdproof", *sys.argv[1:]])
    outcomes = _performed(cases, maker, plan)
    _print(outcomes, folder, twins=twins)
    return _EXITS[worst(o.verdict for o in outcomes if o.verdict is not None)]


def _performed(cases: list[Case], maker: Maker, plan: Plan) -> list[Outcome]:
    console = Console(stderr=True)

    def tell(outcome: Outcome) -> None:
        console.print(f"{_verdict(outcome)}  {escape(_name(outcome))}", highlight=False, soft_wrap=True)

    with RunProgress(console, maker.name) as progress, ended_like_ctrl_c():
        return asyncio.run(run_cases(cases, maker, plan, progress.say, tell))


def _list(cases: list[Case]) -> None:
    for case in cases:
        click.echo(f"{case.name:28} {case.title}. {' '.join(case.rules)}")
        for twin in case.twins:
            click.echo(f"{'':28}   twin {twin.name}: {twin.title} (must fail: {twin.fails})")


def _print(outcomes: list[Outcome], folder: Path, *, twins: bool) -> None:
    console = Console(width=None if Console().is_terminal else 180)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("case", "verdict", "check", "rules", "found"):
        table.add_column(column, no_wrap=column in ("case", "verdict"), overflow="fold")
    for outcome in outcomes:
        if twins or not outcome.results:
            table.add_row(_name(outcome), _verdict(outcome), "", "", escape(outcome.reason))
            continue
        table.add_row(_name(outcome), _verdict(outcome), "", "", escape(outcome.title))
        for result in outcome.results:
            style = _STYLE[result.verdict]
            rules = " ".join(result.rules)
            table.add_row("", f"[{style}]{result.verdict}[/]", result.check, rules, escape(result.found))
    console.print(table)
    console.print(f"[dim]{escape(str(folder))}[/]")


def _name(outcome: Outcome) -> str:
    return f"{outcome.case}.{outcome.twin}" if outcome.twin else outcome.case


def _verdict(outcome: Outcome) -> str:
    if outcome.verdict is None:
        return "[dim]not run[/]"
    if outcome.twin:
        caught = outcome.verdict is Verdict.PASS
        return "[green]caught[/]" if caught else f"[bold red]not caught ({outcome.verdict})[/]"
    return f"[{_STYLE[outcome.verdict]}]{outcome.verdict}[/]"

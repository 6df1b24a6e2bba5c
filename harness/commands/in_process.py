"""The part of `pdproof conform` that tests a connector in process, on a clock turned by hand."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.commands.run import ended_like_ctrl_c
from harness.commands.sysexits import WrongUsage
from harness.conformance.case import Case
from harness.conformance.interpreter import interpreter_of
from harness.conformance.junit import junit
from harness.conformance.known import decided, known_for, load_known
from harness.conformance.naming import named
from harness.conformance.registry import CASES, chosen
from harness.conformance.results import CaseResult
from harness.conformance.run import Plan, run
from harness.conformance.said import reasons, sentence
from harness.progress import RunProgress
from harness.verdicts import Verdict

_STYLE: Final = {
    Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.INCONCLUSIVE: "yellow", Verdict.ERROR: "bold red",
}  # fmt: skip


def listed(patterns: tuple[str, ...]) -> list[str]:
    """Return the fixed cases that fit, a line each."""
    return [
        f"{case.name:32} {case.title}. {case.level}; {case.source}; twins: {', '.join(case.twins)}"
        for case in _cases(patterns)
    ]


def conform_in_process(
    connector: str, kv_transfer_config: str, patterns: tuple[str, ...], *, twins: bool, out: Path | None, seed: int,
    known: str, allow_known: bool, search_s: float = 0.0,
) -> int:  # fmt: skip
    """Run the fixed cases, and the search if there is to be one; write results.jsonl and junit.xml, print a table.

    Returns the exit code.
    """
    subject = named("" if twins else connector, "" if twins else kv_transfer_config)
    cases = _cases(patterns)
    expectations = load_known(known) if known else None
    name = "twins" if twins else (subject.kv_transfer_config or {}).get("kv_connector") or connector.partition(":")[0]
    folder = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-conform-{name or 'reference'}"
    if folder.exists():
        raise WrongUsage(f"--out {folder}: exists already; choose another name or remove it")
    console = Console(stderr=True)
    python, environment = interpreter_of(subject)
    plan = Plan(
        subject=subject, python=python, seed=seed, out=folder, twins=twins, search_s=search_s,
        command=["pdproof", *sys.argv[1:]], environment=environment,
    )  # fmt: skip
    with RunProgress(console, name or "reference") as progress, ended_like_ctrl_c():
        progress.say("making the subject")

        def tell(result: CaseResult) -> None:
            progress.say(f"{result.case} {result.twin}".strip())

        ran = run(cases, plan, tell, lambda text: progress.say(f"search: {text}"))
    decision = decided(ran, expectations or known_for(ran.header), allow_known=allow_known)
    (folder / "junit.xml").write_text(junit([decision]), encoding="utf-8")
    _print(ran.results)
    console.print(sentence(decision), highlight=False, soft_wrap=True, markup=False)
    for reason in reasons(decision):
        console.print(reason, highlight=False, soft_wrap=True, markup=False)
    console.print(f"results: {folder / 'results.jsonl'}", highlight=False, soft_wrap=True, markup=False)
    return int(decision.exit)


def _cases(patterns: tuple[str, ...]) -> list[Case]:
    for pattern in patterns:
        if not chosen((pattern,)):
            raise WrongUsage(f"--case {pattern}: no case fits; `pdproof conform --list --in-process` lists them")
    return chosen(patterns) if patterns else list(CASES.values())


def _print(results: list[CaseResult]) -> None:
    console = Console(width=None if Console().is_terminal else 160)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("case", "verdict", "found"):
        table.add_column(column, no_wrap=column != "found", overflow="fold")
    for result in results:
        name = f"{result.case} · {result.twin}" if result.twin else result.case
        if result.verdict is None:
            table.add_row(name, "[dim]n/a[/]", f"[dim]{escape(result.found)}[/]")
            continue
        table.add_row(name, f"[{_STYLE[result.verdict]}]{result.verdict}[/]", escape(result.found))
    console.print(table)

"""The catalogue of rules on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.rules import Rule, catalogue, checkout_tests, marked_tests


def print_rules(*, names: bool) -> None:
    """Print every rule with the number of its tests, or why it has none; with `names`, the tests themselves."""
    console = Console(width=None if Console().is_terminal else 160)
    folder = checkout_tests()
    rules = catalogue()
    found = marked_tests(folder) if folder else {}
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("rule", "level", "faces", "what it asks", "tests"):
        table.add_column(column, no_wrap=column == "rule", overflow="fold")
    for rule in rules:
        tests = _tests(rule, found.get(rule.id, []), names=names) if folder else escape(rule.untested) or "?"
        table.add_row(rule.id, rule.level, " ".join(rule.faces), escape(rule.rule), tests)
    console.print(table)
    if folder is None:
        console.print("This is no checkout: its tests, which say what they show, are not here.")
    else:
        shown = sum(rule.id in found for rule in rules)
        console.print(f"{shown} of {len(rules)} rules have tests. M must, S should; I in process, B black box, R ours.")


def _tests(rule: Rule, tests: list[str], *, names: bool) -> str:
    if not tests:
        return f"[yellow]none: {escape(rule.untested or 'nobody says why')}[/]"
    return escape("\n".join([str(len(tests)), *tests])) if names else str(len(tests))

"""`pdproof list`: what there is to run and to judge by."""

from __future__ import annotations

import click

from harness.cases.registry import CASES
from harness.checks import CHECKS
from harness.commands.rule_table import print_rules
from harness.scenario import load_scenario, scenario_names
from reference_impl.engine.profile import load_profile, profile_names


@click.command("list")
@click.argument("what", required=False, type=click.Choice(["rules"]), metavar="[rules]")
@click.option("-v", "--verbose", is_flag=True, help="With `rules`: name the tests of each.")
def command(what: str | None, *, verbose: bool) -> None:
    """List scenarios, cases, profiles and checks; or the rules of the catalogue, and which have tests."""
    if what == "rules":
        print_rules(names=verbose)
        return
    click.echo("Scenarios (pdproof run NAME)")
    for name in scenario_names():
        scenario = load_scenario(name)
        click.echo(f"  {name:20} {scenario.title}. {scenario.about}")
    click.echo("Black-box cases (pdproof conform --case NAME)")
    for name, case in CASES.items():
        click.echo(f"  {name:26} {case.title}")
    click.echo("Profiles (--profile NAME)")
    for name in profile_names():
        click.echo(f"  {name:20} {load_profile(name).about}")
    click.echo("Checks (pdproof check RUN --only NAME)")
    for name, check in CHECKS.items():
        click.echo(f"  {name:20} {(check.__doc__ or '').partition('.')[0]}")

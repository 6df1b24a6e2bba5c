"""`pdproof list`: what there is to run and to judge by."""

from __future__ import annotations

import click

from harness.checks import CHECKS
from harness.scenario import load_scenario, scenario_names
from reference_impl.engine.profile import load_profile, profile_names


@click.command("list")
def command() -> None:
    """List scenarios, profiles and checks."""
    click.echo("Scenarios (pdproof run NAME)")
    for name in scenario_names():
        scenario = load_scenario(name)
        click.echo(f"  {name:20} {scenario.title}. {scenario.about}")
    click.echo("Profiles (--profile NAME)")
    for name in profile_names():
        click.echo(f"  {name:20} {load_profile(name).about}")
    click.echo("Checks (pdproof check RUN --only NAME)")
    for name, check in CHECKS.items():
        click.echo(f"  {name:20} {(check.__doc__ or '').partition('.')[0]}")

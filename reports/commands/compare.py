"""`pdproof compare`: the main job. Runs both arms of a scenario and sets them side by side on one page."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from harness.commands.exit_codes import exit_code
from harness.commands.options import PORT, SEED, TimeScale
from harness.commands.run import new_run_folder, perform
from harness.commands.verdict_table import print_verdicts
from harness.errors import BadInput
from harness.run_folder import RunFolder
from harness.runner import RunPlan
from harness.scenario import Arm, Scenario, load_scenario
from reference_impl.engine.profile import Profile, ProfileError, load_profile
from reports.comparison import write_comparison
from reports.summary import Summary


def default_scenario(profile: Profile) -> str:
    """Return the scenario that suits a profile: one whose watch is longer than the profile's cold start."""
    return "kill-active-600s" if profile.init else "kill-active"


@click.command("compare")
@click.option("--scenario", default="", help="default: kill-active; for profiles that emulate their cold start "
              "kill-active-600s")  # fmt: skip
@click.option("--profile", default="default", show_default=True, help="compute profile: a name or a .toml file")
@click.option("--time-scale", type=TimeScale(), default=1.0, show_default=True,
              help="divide every emulated duration by this; arrivals come so many times faster")  # fmt: skip
@click.option("--seed", type=SEED, default=2, show_default=True, help="of all chance")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/compare"), show_default=True,
              help="folder for index.html and summary.json; the two run folders go below it")  # fmt: skip
@click.option("--port", type=PORT, default=0, help="the router's port; default: any free one")
def command(scenario: str, profile: str, time_scale: float, seed: int, out: Path, port: int) -> int:
    """Kill engines of a cold-restart deployment and of one with shadows, under the same load; write one page.

    Both arms run the same build, profile, seed and schedule. Exits with 0 if both pass and the page was written.
    """
    try:
        name = scenario or default_scenario(load_profile(profile))
    except ProfileError as error:
        raise BadInput(str(error)) from error
    data = load_scenario(name)
    console = Console(stderr=True)
    runs = {arm: _run(data, arm, profile, time_scale, seed, out, port, console) for arm in Arm}
    summary = write_comparison(runs[Arm.COLD].path, runs[Arm.SHADOW].path, out)
    for run in runs.values():
        print_verdicts(run, run.verdicts)
    _print_result(console, summary, out)
    return exit_code(summary.verdict)


def _run(
    scenario: Scenario, arm: Arm, profile: str, time_scale: float, seed: int, out: Path, port: int, console: Console
) -> RunFolder:
    plan = RunPlan(
        scenario=scenario, arm=arm, profile=profile, time_scale=time_scale, seed=seed, port=port,
        folder=new_run_folder(out / "runs", scenario.name, arm, seed), command=["pdproof", *sys.argv[1:]],
    )  # fmt: skip
    return perform(plan, console)


def _print_result(console: Console, summary: Summary, out: Path) -> None:
    ratio = "no ratio" if summary.ratio_recovery is None else f"{summary.ratio_recovery:.0f} times"
    cold, shadow = summary.cold.recovery_s.median, summary.shadow.recovery_s.median
    times = "" if cold is None or shadow is None else f" ({cold:.3f} s against {shadow:.3f} s)"
    emulated = " (cold start emulated)" if any(line.startswith("cold start") for line in summary.emulated) else ""
    result = f"[bold]{summary.verdict}[/]: cold start against shadow recovery: {ratio}{times}{emulated}"
    console.print(result, highlight=False, soft_wrap=True)
    console.print(f"page: {(out / 'index.html').resolve()}", highlight=False, soft_wrap=True)

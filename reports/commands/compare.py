"""`pdproof compare`: the main job. Runs the arms of a scenario and sets them side by side on one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.console import Console

from harness.commands.exit_codes import exit_code
from harness.commands.options import PORT, SEED, TARGET, TimeScale
from harness.commands.run import calibrate, new_run_folder, perform, profile_of
from harness.commands.verdict_table import print_verdicts
from harness.errors import BadInput
from harness.plan import RunPlan
from harness.run_folder import RunFolder
from harness.scenario import Arm, load_scenario, with_kv
from harness.targets.reference import REFERENCE
from harness.targets.systems import system_of
from reference_impl.engine.profile import Profile, ProfileError, load_profile
from reference_impl.rules.terms import LeaseDesign
from reports.comparison import write_comparison
from reports.kv.lead import lead as kv_lead
from reports.kv.page import write_kv_page
from reports.summary import Summary


def default_scenario(profile: Profile) -> str:
    """Return the scenario that suits a profile: one whose watch is longer than the profile's cold start."""
    return "kill-active-600s" if profile.init else "kill-active"


SHORT_TIMEOUT_S: Final = 5.0
"""The single timeout, shortened: it frees the blocks of dead readers soon, and those of waiting ones as well."""


@click.command("compare")
@click.option("--scenario", default="", help="default: kill-active; for profiles that emulate their cold start "
              "kill-active-600s; of vllm kill-vllm")  # fmt: skip
@TARGET
@click.option("--profile", default="", help="compute profile: a name or a .toml file; default: the scenario's")
@click.option("--time-scale", type=TimeScale(), default=1.0, show_default=True,
              help="divide every emulated duration by this; arrivals come so many times faster")  # fmt: skip
@click.option("--seed", type=SEED, default=2, show_default=True, help="of all chance")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/compare"), show_default=True,
              help="folder for index.html and summary.json; the run folders go below it")  # fmt: skip
@click.option("--port", type=PORT, default=0, help="the router's port; default: any free one")
def command(scenario: str, target: str, profile: str, time_scale: float, seed: int, out: Path, port: int) -> int:
    """Run a scenario in every arm under the same load, and set the arms side by side on one page.

    Of a scenario that kills engines: a deployment with cold restarts and one with shadows. Of one in which KV moves
    from prefill to decode engines: leases, and the old single timeout of 480 s and of 5 s. All arms run the same build,
    profile, seed and schedule. Exits with 0 if the page was written and what must pass has passed.
    """
    try:
        name = scenario or _default_scenario(target, profile)
    except ProfileError as error:
        raise BadInput(str(error)) from error
    data, system = load_scenario(name), system_of(target)
    plan = RunPlan(
        scenario=data, system=system, arm=Arm.COLD, profile=profile_of(system, profile, data), time_scale=time_scale,
        seed=seed, port=port, folder=out, command=["pdproof", *sys.argv[1:]],
    )  # fmt: skip
    console = Console(stderr=True)
    plan = calibrate(plan, console)
    return _compare_designs(plan, out, console) if data.kv else _compare_recoveries(plan, out, console)


def _default_scenario(target: str, profile: str) -> str:
    return default_scenario(load_profile(profile or "default")) if target == REFERENCE.name else "kill-vllm"


def _compare_recoveries(plan: RunPlan, out: Path, console: Console) -> int:
    runs = {arm: _run(msgspec.structs.replace(plan, arm=arm), out, console) for arm in Arm}
    summary = write_comparison(runs[Arm.COLD].path, runs[Arm.SHADOW].path, out)
    for run in runs.values():
        print_verdicts(run, run.verdicts)
    _print_result(console, summary, out)
    return exit_code(summary.verdict)


def _compare_designs(plan: RunPlan, out: Path, console: Console) -> int:
    """Run leases, and the old design with its long timeout and with a short one."""
    short = with_kv(plan.scenario, single_timeout=SHORT_TIMEOUT_S)
    plans = [
        plan,
        msgspec.structs.replace(plan, design=LeaseDesign.SINGLE_TIMEOUT),
        msgspec.structs.replace(plan, design=LeaseDesign.SINGLE_TIMEOUT, scenario=short),
    ]
    runs = [_run(each, out, console) for each in plans]
    summary = write_kv_page(runs, out)
    for run in runs:
        print_verdicts(run, run.verdicts)
    console.print(f"[bold]{summary.verdict}[/]: {kv_lead(summary)}", highlight=False, soft_wrap=True)
    console.print(f"page: {(out / 'index.html').resolve()}", highlight=False, soft_wrap=True)
    return exit_code(summary.verdict)


def _run(plan: RunPlan, out: Path, console: Console) -> RunFolder:
    folder = new_run_folder(out / "runs", plan.scenario.name, plan.label, plan.seed)
    return perform(msgspec.structs.replace(plan, folder=folder), console)


def _print_result(console: Console, summary: Summary, out: Path) -> None:
    ratio = "no ratio" if summary.ratio_recovery is None else f"{summary.ratio_recovery:.0f} times"
    cold, shadow = summary.cold.recovery_s.median, summary.shadow.recovery_s.median
    times = "" if cold is None or shadow is None else f" ({cold:.3f} s against {shadow:.3f} s)"
    emulated = " (cold start emulated)" if any(line.startswith("cold start") for line in summary.emulated) else ""
    result = f"[bold]{summary.verdict}[/]: cold start against shadow recovery: {ratio}{times}{emulated}"
    console.print(result, highlight=False, soft_wrap=True)
    console.print(f"page: {(out / 'index.html').resolve()}", highlight=False, soft_wrap=True)

"""`pdproof run SCENARIO`: one run, its folder, and what the checks say of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import click
import msgspec
from click.core import ParameterSource
from rich.console import Console

from harness.calibration import calibrated
from harness.checks import judge, overall
from harness.commands.exit_codes import exit_code
from harness.commands.options import PORT, SEED, TARGET, TimeScale
from harness.commands.verdict_table import print_verdicts
from harness.plan import RunPlan, System
from harness.progress import RunProgress
from harness.run_folder import RunFolder
from harness.runner import execute
from harness.scenario import Arm, Scenario, load_scenario, with_kv
from harness.targets.reference import REFERENCE
from harness.targets.systems import system_of
from reference_impl.rules.terms import LeaseDesign


def new_run_folder(parent: Path, scenario: str, arm: str, seed: int) -> Path:
    """Return the path of a run folder that does not exist yet: time, scenario, arm and seed."""
    path = parent / f"{datetime.now():%Y%m%d-%H%M%S}-{scenario}-{arm}-{seed}"
    return path.with_name(f"{path.name}-{os.getpid()}") if path.exists() else path


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a run as Ctrl-C does: everything that was started is ended first."""

    def interrupt(_signum: int, _frame: object) -> None:
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def calibrate(plan: RunPlan, console: Console) -> RunPlan:
    """Return the plan with its rate found, where its scenario says by how much the machine is to be used."""
    with RunProgress(console, "calibration") as progress, ended_like_ctrl_c():
        return asyncio.run(calibrated(plan, progress))


def perform(plan: RunPlan, console: Console) -> RunFolder:
    """Execute a plan with progress on the terminal, judge it, write the verdicts, and return the folder."""
    with RunProgress(console, plan.label) as progress, ended_like_ctrl_c():
        run = asyncio.run(execute(plan, progress))
        progress.say("judging")
        run.write_verdicts(judge(run))
    return run


def profile_of(system: System, chosen: str, scenario: Scenario) -> str:
    """Return the compute profile of a run: only the reference implementation emulates its compute."""
    if system.name == REFERENCE.name:
        return chosen or scenario.profile
    if chosen:
        raise click.UsageError(f"--profile {chosen}: {system.name} computes for real")
    return system.name


@click.command("run")
@click.argument("scenario")
@TARGET
@click.option("--arm", type=click.Choice([a.value for a in Arm]), default=Arm.SHADOW.value, show_default=True,
              help="what stands behind an engine")  # fmt: skip
@click.option("--baseline", type=click.Choice([LeaseDesign.SINGLE_TIMEOUT.value]), default=None,
              help="where KV moves: run the old design in place of leases, for comparison")  # fmt: skip
@click.option("--single-timeout", type=click.FloatRange(0, 86_400, min_open=True), default=None,
              help="seconds of the old design, at full scale; default: the scenario's (480)")  # fmt: skip
@click.option("--decode-clock-offset-s", type=click.FloatRange(-1e6, 1e6), default=None,
              help="how far the decode workers' clock is ahead (below 0: behind); default: the scenario's")  # fmt: skip
@click.option("--no-clock-correction", is_flag=True,
              help="compare peers' deadlines uncorrected, to see what happens then")  # fmt: skip
@click.option("--profile", default="", help="compute profile: a name or a .toml file; default: the scenario's")
@click.option("--time-scale", type=TimeScale(), default=1.0, show_default=True,
              help="divide every emulated duration by this; arrivals come so many times faster")  # fmt: skip
@click.option("--seed", type=SEED, default=2, show_default=True, help="of all chance")
@click.option("--out", type=click.Path(path_type=Path), default=None,
              help="the run folder to make; default: a new one under runs/")  # fmt: skip
@click.option("--port", type=PORT, default=0, help="the router's port; default: any free one")
def command(
    scenario: str,
    target: str,
    arm: str,
    baseline: str | None,
    single_timeout: float | None,
    decode_clock_offset_s: float | None,
    no_clock_correction: bool,
    profile: str,
    time_scale: float,
    seed: int,
    out: Path | None,
    port: int,
) -> int:
    """Run SCENARIO (a name from `pdproof list`, or a .toml file), judge it, and print the verdicts."""
    data, system = load_scenario(scenario), system_of(target)
    chosen = click.get_current_context().get_parameter_source("arm") is ParameterSource.COMMANDLINE
    if data.kv is not None and chosen:
        raise click.UsageError(f"scenario {data.name} runs without shadows: --arm has no place here; see --baseline")
    given = {"single_timeout": single_timeout, "decode_clock_offset_s": decode_clock_offset_s}
    changes = {name: value for name, value in given.items() if value is not None}
    if data.kv is None and (changes or baseline or no_clock_correction):
        raise click.UsageError(f"scenario {data.name} moves no KV: options of leases and clocks have no place here")
    if changes:
        data = with_kv(data, **changes)
    plan = RunPlan(
        scenario=data, system=system, arm=Arm(arm) if data.kv is None else Arm.COLD,
        profile=profile_of(system, profile, data), time_scale=time_scale, seed=seed, port=port, folder=Path(),
        command=["pdproof", *sys.argv[1:]], design=LeaseDesign(baseline or LeaseDesign.LEASE),
        clock_correction=not no_clock_correction,
    )  # fmt: skip
    folder = out or new_run_folder(Path("runs"), data.name, plan.label, seed)
    console = Console(stderr=True)
    run = perform(msgspec.structs.replace(calibrate(plan, console), folder=folder), console)
    print_verdicts(run, run.verdicts)
    return exit_code(overall(run.verdicts))

"""What the page shows, gathered from run folders and their summary, ready to be printed."""

from __future__ import annotations

import datetime

import msgspec

from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict
from reports import words
from reports.figures.style import Panel
from reports.heading import Heading
from reports.kills import fault_rows
from reports.kv.arms import KvArm
from reports.kv.clocks import Clock
from reports.kv.designs import Design, designs, in_order
from reports.kv.figures.drawing import Sized
from reports.kv.figures.held import dead_chart, held_chart
from reports.kv.figures.think import think_panels
from reports.kv.figures.waiting import waiting_chart
from reports.kv.lead import lead
from reports.kv.setup import setup
from reports.kv.summary import KvSummary, held_s
from reports.kv.tables import Table, tables, turn_rows
from reports.kv.turns import Think
from reports.tables import Row, is_emulated
from reports.view import Checks, Faults, RunFacts, client_errors, run_facts


class ReclaimBar(msgspec.Struct, frozen=True):
    """How long a design held a dead reader's blocks, on a scale that all designs share."""

    title: str
    tone: str
    percent: float
    text: str


class Baseline(msgspec.Struct, frozen=True):
    """A design that is there to be compared with: what its checks found against it."""

    title: str
    tone: str
    verdict: Verdict
    judged: bool
    failed: list[CheckResult]


class ClockRow(msgspec.Struct, frozen=True):
    """One pair of clocks, in words."""

    pair: str
    design: str
    set: str
    estimate: str
    off: str
    bound: str
    within: bool


class ThinkRow(msgspec.Struct, frozen=True):
    """Later turns of one design and range of think times, in words."""

    design: str
    title: str
    judged: str
    loaded: str
    tokens: str
    answered: str
    cached: str
    ttft: str


class KvView(Heading, frozen=True, kw_only=True):
    """Everything on the page."""

    designs: list[Design]
    bars: list[ReclaimBar]
    held: list[Sized]
    dead: list[Sized]
    waiting: list[Sized]
    tables: list[Table]
    two_turn: bool
    turn_rows: list[Row]
    think: list[Panel]
    think_rows: list[ThinkRow]
    clocks: list[ClockRow]
    baselines: list[Baseline]
    checks: list[Checks]
    faults: list[Faults]
    runs: list[RunFacts]


def kv_view(runs: list[RunFolder], summary: KvSummary) -> KvView:
    """Return what the page of `runs` shows; `summary` is theirs."""
    runs = in_order(runs)
    looks, arms, manifest = designs(runs), list(summary.runs.values()), runs[0].manifest
    started = datetime.datetime.fromtimestamp(manifest.started_wall_ns / 1e9, tz=datetime.UTC)
    keeping = [arm for arm in arms if arm.turns is not None]
    return KvView(
        verdict=summary.verdict, lead=lead(summary), reasons=summary.reasons, emulated=summary.emulated,
        compute_emulated=is_emulated(summary.emulated, "compute time"), title=manifest.title or manifest.scenario,
        about=setup(runs[0]).deployment, profile=manifest.profile, time_scale=f"{manifest.time_scale:g}",
        seed=manifest.seed, started=f"{started:%Y-%m-%d %H:%M} UTC", version=manifest.versions.get("pdproof", ""),
        sources=[run.manifest.run_id for run in runs], sections=_sections(two_turn=bool(keeping)), designs=looks,
        bars=_bars(arms), held=held_chart(runs, looks), dead=dead_chart(runs, looks),
        waiting=waiting_chart(runs, looks), tables=tables(arms), two_turn=bool(keeping),
        turn_rows=turn_rows(keeping) if keeping else [], think=think_panels(runs, looks),
        think_rows=[_think_row(arm, think) for arm in keeping for think in arm.think],
        clocks=[_clock_row(arm, clock) for arm in keeping for clock in arm.clocks],
        baselines=[_baseline(run, arm) for run, arm in zip(runs, arms, strict=True) if _beside(arm, arms)],
        checks=[Checks(d.title, run.verdicts) for run, d in zip(runs, looks, strict=True)],
        faults=[Faults(d.title, fault_rows(run), client_errors(run)) for run, d in zip(runs, looks, strict=True)],
        runs=[msgspec.structs.replace(run_facts(run), title=d.title) for run, d in zip(runs, looks, strict=True)],
    )  # fmt: skip


def _sections(*, two_turn: bool) -> list[tuple[str, str]]:
    return [
        *([("turns", "Two turns")] if two_turn else []), ("held", "Blocks held"), ("designs", "By design"),
        ("checks", "Checks"), ("faults", "Faults"), ("reading", "How to read"), ("about", "What ran"),
    ]  # fmt: skip


def _beside(arm: KvArm, arms: list[KvArm]) -> bool:
    """Whether a run is there to be compared with one that must pass."""
    return not arm.must_pass and any(other.must_pass for other in arms)


def _bars(arms: list[KvArm]) -> list[ReclaimBar]:
    held = [(arm, seconds) for arm in arms if (seconds := held_s(arm)) is not None]
    longest = max((seconds for _, seconds in held), default=0.0)
    return [
        ReclaimBar(arm.title, arm.tone, 100 * seconds / longest if longest else 0.0,
                   ("more than " if arm.crash and arm.crash.standing else "") + words.duration(seconds))
        for arm, seconds in held
    ]  # fmt: skip


def _baseline(run: RunFolder, arm: KvArm) -> Baseline:
    return Baseline(
        arm.title, arm.tone, arm.verdict, bool(run.verdicts), [c for c in run.verdicts if c.verdict is not Verdict.PASS]
    )


def _clock_row(arm: KvArm, clock: Clock) -> ClockRow:
    return ClockRow(
        pair=f"{clock.holder} as seen by {clock.reader}", design=arm.title, set=_signed_s(clock.set_s),
        estimate=_signed_s(clock.estimate_s), off=words.milliseconds(clock.off_ms_max),
        bound=words.milliseconds(clock.error_ms_max), within=clock.within,
    )  # fmt: skip


def _signed_s(seconds: float) -> str:
    return f"{seconds:+,.3f} s".replace("-", "−")


def _think_row(arm: KvArm, think: Think) -> ThinkRow:
    return ThinkRow(
        design=arm.title, title=think.title, judged=words.count(think.judged), loaded=words.count(think.loaded),
        tokens=words.count(think.tokens_loaded.p50), answered=words.count(think.rows),
        cached=words.count(think.cached_tokens.p50), ttft=words.milliseconds(think.ttft_ms.p50),
    )  # fmt: skip

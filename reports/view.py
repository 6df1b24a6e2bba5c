"""What a page shows, gathered from run folders and a summary, ready to be printed: templates compute nothing."""

from __future__ import annotations

import datetime
import shlex

import msgspec

from harness.run_folder import RunFolder
from harness.verdicts import CheckResult
from reports import words
from reports.arms import ArmSummary, OverLimit
from reports.differences import differences
from reports.figures.decode import decode_panels, throughput_panels
from reports.figures.footprint import memory_panels
from reports.figures.phases import Phases, phases
from reports.figures.style import Panel
from reports.figures.ttft import ttft_panels
from reports.heading import RunHead
from reports.kills import NAMES, FaultRow, KillTable, fault_rows, kill_table
from reports.lead import comparison_lead, run_lead
from reports.published import WINDOW_S, Published
from reports.summary import Summary
from reports.tables import (
    Row,
    comparison_rows,
    count_rows,
    is_emulated,
    latency_rows,
    memory_rows,
    weights_rows,
)
from reports.victims import Victim
from reports.weights import SharedWeights

SECTIONS = [
    ("recovery", "Recovery"), ("ttft", "TTFT"), ("decode", "Decode rate"), ("limits", "Limits"), ("memory", "Memory"),
    ("tables", "In figures"), ("checks", "Checks"), ("faults", "Faults"), ("reading", "How to read"),
    ("about", "What ran"),
]  # fmt: skip
ERRORS_MAX = 12


class LimitBar(msgspec.Struct, frozen=True):
    """Share of requests over a limit; `published` is the published share in percent."""

    arm: str
    title: str
    percent: float
    open_percent: float
    text: str
    share: str
    published: float | None


class Limit(msgspec.Struct, frozen=True):
    """A limit and who broke it."""

    title: str
    bars: list[LimitBar]


class Checks(msgspec.Struct, frozen=True):
    """What the checks said of one run."""

    title: str
    results: list[CheckResult]


class ErrorCount(msgspec.Struct, frozen=True):
    """An error text that clients saw, and how often."""

    text: str
    count: int


class Faults(msgspec.Struct, frozen=True):
    """The faults of one run."""

    title: str
    rows: list[FaultRow]
    errors: list[ErrorCount]


class RunFacts(msgspec.Struct, frozen=True):
    """What ran, and how to run it again."""

    title: str
    facts: list[tuple[str, str]]
    command: str
    configuration: str


class Weights(msgspec.Struct, frozen=True):
    """How the engines of one run share their weights: in a sentence where all are alike, else in rows."""

    title: str
    text: str
    rows: list[Row]


class VictimRow(msgspec.Struct, frozen=True):
    """The kills of one process, as a row: title, how many in each arm, and each figure with its range."""

    title: str
    kills: str
    cells: list[tuple[str, str]]


class View(RunHead, frozen=True, kw_only=True):
    """Everything that both pages show."""

    sections: list[tuple[str, str]]
    window: str
    phases: list[Phases]
    ttft: list[Panel]
    decode: list[Panel]
    throughput: list[Panel]
    memory: list[Panel]
    limits: list[Limit]
    memory_rows: list[Row]
    weights: list[Weights]
    latency_rows: list[Row]
    count_rows: list[Row]
    kill_names: list[str]
    kills: list[KillTable]
    checks: list[Checks]
    faults: list[Faults]
    runs: list[RunFacts]
    comparison: list[Row] = msgspec.field(default_factory=list)
    differences: list[tuple[str, str]] = msgspec.field(default_factory=list)
    published_source: str = ""
    victims: list[VictimRow] = msgspec.field(default_factory=list)
    run_title: str = ""


def comparison_view(cold: RunFolder, shadow: RunFolder, summary: Summary) -> View:
    """Return what the comparison page shows."""
    view = _view([cold, shadow], [summary.cold, summary.shadow], summary.published)
    return msgspec.structs.replace(
        view, verdict=summary.verdict, lead=comparison_lead(summary),
        reasons=summary.reasons,
        emulated=summary.emulated, sections=_sections(summary),
        comparison=comparison_rows(summary), differences=differences(summary, cold, shadow),
        published_source=summary.published.source, victims=[victim_row(v) for v in summary.victims],
    )  # fmt: skip


def _sections(summary: Summary) -> list[tuple[str, str]]:
    first = [("victims", "By process")] if summary.victims else []
    return [*first, ("published", "Beside the published"), *SECTIONS]


def victim_row(victim: Victim) -> VictimRow:
    """Return one victim as a row of the page."""
    spreads = (
        victim.cold_recovery_s, victim.shadow_recovery_s, victim.shadow_detection_s, victim.shadow_promotion_s,
        victim.shadow_first_service_s,
    )  # fmt: skip
    cells = [(words.duration(s.median), words.span(s.min, s.max) if s.n > 1 else "") for s in spreads]
    least = victim.ratio_recovery_min
    cells.insert(2, (words.ratio(victim.ratio_recovery), "" if least is None else f"at least {words.ratio(least)}"))
    kills = f"{victim.cold_recovery_s.n} and {victim.shadow_recovery_s.n} kills"
    return VictimRow(victim.process.replace("_", " "), kills, cells)


def run_view(run: RunFolder, arm: ArmSummary) -> View:
    """Return what a single run's page shows."""
    return msgspec.structs.replace(
        _view([run], [arm], None),
        lead=run_lead(arm),
        reasons=arm.reasons,
        run_title=run.manifest.title or run.manifest.scenario,
    )


def _view(runs: list[RunFolder], arms: list[ArmSummary], published: Published | None) -> View:
    manifest, arm = runs[0].manifest, arms[0]
    started = datetime.datetime.fromtimestamp(manifest.started_wall_ns / 1e9, tz=datetime.UTC)
    return View(
        verdict=arm.verdict, lead="", reasons=arm.reasons, emulated=arm.emulated,
        compute_emulated=is_emulated([line for a in arms for line in a.emulated], "compute time"),
        profile=manifest.profile, time_scale=f"{manifest.time_scale:g}", seed=manifest.seed,
        started=f"{started:%Y-%m-%d %H:%M} UTC", version=manifest.versions.get("pdproof", ""),
        sources=[run.manifest.run_id for run in runs], sections=SECTIONS,
        window=words.given(words.duration(WINDOW_S / manifest.time_scale)), phases=phases(runs), ttft=ttft_panels(runs),
        decode=decode_panels(runs), throughput=throughput_panels(runs), memory=memory_panels(runs),
        limits=_limits(arms, published), memory_rows=memory_rows(arms),
        weights=[weights_of(arm) for arm in arms if arm.weights], latency_rows=latency_rows(arms),
        count_rows=count_rows(arms), kill_names=[title for title, _ in NAMES],
        kills=[kill_table(run, a) for run, a in zip(runs, arms, strict=True)],
        checks=[Checks(words.arm_title(run.manifest.arm), run.verdicts) for run in runs],
        faults=[Faults(words.arm_title(r.manifest.arm), fault_rows(r), client_errors(r)) for r in runs],
        runs=[run_facts(run) for run in runs],
    )  # fmt: skip


def _limits(arms: list[ArmSummary], published: Published | None) -> list[Limit]:
    limits = []
    for name, title, say in (
        ("ttft_over_limit", "TTFT over", words.duration), ("decode_under_limit", "Decode rate under", words.rate),
    ):  # fmt: skip
        limit: OverLimit = getattr(arms[0], name)
        heading = f"{title} {words.given(say(limit.limit))}"
        limits.append(Limit(heading, [_limit_bar(arm, name, published) for arm in arms]))
    return limits


def _limit_bar(arm: ArmSummary, name: str, published: Published | None) -> LimitBar:
    value: OverLimit = getattr(arm, name)
    whole = max(1, value.n + value.undetermined)
    theirs = None
    if published is not None:
        column = getattr(published, arm.arm)
        theirs = 100 * getattr(column, name) / column.requests
    return LimitBar(
        arm=arm.arm, title=words.arm_title(arm.arm), percent=100 * value.over / whole,
        open_percent=100 * (value.over + value.undetermined) / whole, text=words.share(value.over, value.n),
        share=words.percent(value.over, value.n), published=theirs,
    )  # fmt: skip


def weights_of(arm: ArmSummary) -> Weights:
    """Return how the engines of a run, which must have said it, share their weights."""
    title = words.arm_title(arm.arm)
    if len(arm.weights) == 1:
        return Weights(title, _weights_sentence(arm.weights[0]), [])
    text = "What each engine maps from the memory service is shared by all engines of its worker."
    return Weights(title, text, weights_rows(arm.weights))


def _weights_sentence(alike: SharedWeights) -> str:
    mapped, copied = words.plural(alike.bytes_mapped, "byte"), words.plural(alike.bytes_copied, "byte")
    twice = f" ({words.plural(alike.bytes_duplicated, 'byte')} of them with a private copy beside)"
    return (
        f"Weights: {mapped} mapped from the memory service and shared by all engines of a worker"
        f"{twice if alike.bytes_duplicated else ''}, {copied} copied by each. So said "
        f"{words.plural(len(alike.engines), 'engine')}."
    )


def client_errors(run: RunFolder) -> list[ErrorCount]:
    """Return what the client saw of failed requests, the most frequent first."""
    texts = run.requests.error[run.requests.outcome == "fail"].fillna("")
    counts = texts.where(texts != "", "no error text").value_counts()
    return [ErrorCount(str(text), int(count)) for text, count in counts.head(ERRORS_MAX).items()]


def run_facts(run: RunFolder) -> RunFacts:
    """Return what ran."""
    m = run.manifest
    facts = [
        ("Run", m.run_id), ("Scenario", m.scenario), ("Profile", m.profile), ("Time scale", f"{m.time_scale:g}"),
        ("Seed", str(m.seed)), ("Commit", m.commit or "not known"),
        ("Machine", _pairs({k: words.scalar(k, v) for k, v in m.machine.items()})), ("Versions", _pairs(m.versions)),
        ("Rows", f"{len(run.requests):,} requests, {len(run.chunks):,} chunks, {len(run.events):,} events, "
                 f"{len(run.metrics):,} samples of gauges"),
        ("Run folder", "whole" if run.incomplete is None else f"incomplete: {run.incomplete}"),
    ]  # fmt: skip
    configuration = msgspec.json.format(msgspec.json.encode(m.configuration), indent=2).decode()
    return RunFacts(words.arm_title(m.arm), facts, shlex.join(m.command), configuration)


def _pairs(values: dict[str, str]) -> str:
    names = {name: name.removesuffix("_bytes").removesuffix("_gib").replace("_", " ") for name in values}
    return " · ".join(f"{names[name]} {value}" for name, value in values.items())

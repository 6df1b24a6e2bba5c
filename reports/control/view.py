"""What the page shows, gathered from a run that has been read, ready to be printed."""

from __future__ import annotations

import datetime
from typing import Final

import msgspec

from harness.run_folder import RunFolder
from reports import words
from reports.control.figures.storm import storm_panels
from reports.control.figures.timeline import NodeChart, bin_s, node_charts
from reports.control.lead import lead
from reports.control.migrations import Move
from reports.control.outages import Outage
from reports.control.questions import Asked, Status
from reports.control.rpc_lines import FIELDS, RpcLine
from reports.control.storms import WITH, WITHOUT, Storm
from reports.control.story import Story, story
from reports.control.summary import ControlSummary, Read
from reports.control.tables import (
    Table,
    fate_table,
    method_table,
    metric_table,
    move_tables,
    outage_table,
    storm_table,
    user_counts,
    user_table,
)
from reports.figures.style import Panel
from reports.heading import Heading
from reports.kills import fault_rows
from reports.tables import is_emulated
from reports.view import Checks, Faults, RunFacts, client_errors, run_facts

SECTIONS: Final = [
    ("time", "Over time"), ("lost", "Lost replies"), ("latency", "Latency"), ("moves", "Migrations"),
    ("storm", "Retry storm"), ("questions", "14 questions"), ("logs", "Logs"), ("metrics", "Metrics"),
    ("checks", "Checks"), ("faults", "Faults"), ("reading", "How to read"), ("about", "What ran"),
]  # fmt: skip
MOVES_MAX: Final = 200
"""Migrations that are listed; the figures are of all."""
WORDS: Final = {Status.SHOWN: "pass", Status.BROKEN: "fail", Status.NOT_SHOWN: "inconclusive"}


class OutageRow(msgspec.Struct, frozen=True):
    """One crash, in words."""

    at: str
    node: str
    cause: str
    status: str
    started: str
    linked: str
    applied: str


class MoveRow(msgspec.Struct, frozen=True):
    """One migration, in words."""

    operation_id: str
    group: str
    way: str
    status: str
    at: str
    took: str
    size: str
    steps: str
    owner: str


class Case(msgspec.Struct, frozen=True):
    """A test, as a sentence, and where it stands."""

    sentence: str
    file: str


class QuestionRow(msgspec.Struct, frozen=True):
    """One question of the checklist, in words."""

    number: int
    key: str
    question: str
    status: str
    word: str
    """A class of the style sheet."""
    answer: str
    rules: str
    checks: list[str]
    cases: list[Case]


class StepRow(msgspec.Struct, frozen=True):
    """One step of the story."""

    at: str
    who: str
    what: str
    of_operation: bool


class StoryView(msgspec.Struct, frozen=True):
    """The operation that is followed."""

    title: str
    steps: list[StepRow]
    left_out: int
    heads: list[str]
    fields: list[tuple[str, list[str]]]
    lines: list[RpcLine]


class ControlView(Heading, frozen=True, kw_only=True):
    """Everything on the page."""

    nodes: list[NodeChart]
    bin: str
    outage_table: Table
    outages: list[OutageRow]
    fates: Table
    methods: Table
    users: Table
    user_counts: Table
    move_tables: list[Table]
    moves: list[MoveRow]
    moves_left_out: int
    storm: str
    storm_panels: list[Panel]
    storm_table: Table
    tally: str
    questions: list[QuestionRow]
    story: StoryView | None
    log: str
    metrics: Table
    checks: list[Checks]
    faults: list[Faults]
    runs: list[RunFacts]


def control_view(found: Read) -> ControlView:
    """Return what the page of a run shows."""
    run, summary, manifest = found.run, found.summary, found.run.manifest
    started = datetime.datetime.fromtimestamp(manifest.started_wall_ns / 1e9, tz=datetime.UTC)
    return ControlView(
        verdict=summary.verdict, lead=lead(summary), reasons=summary.reasons, emulated=summary.emulated,
        compute_emulated=is_emulated(summary.emulated, "compute time"), title=manifest.title or manifest.scenario,
        about=found.made.about, profile=manifest.profile, time_scale=f"{manifest.time_scale:g}", seed=manifest.seed,
        started=f"{started:%Y-%m-%d %H:%M} UTC", version=manifest.versions.get("pdproof", ""),
        sources=[manifest.run_id], sections=SECTIONS, nodes=node_charts(found), bin=_bin(found),
        outage_table=outage_table(summary), outages=[_outage(run, o) for o in found.outages],
        fates=fate_table(summary), methods=method_table(summary), users=user_table(summary),
        user_counts=user_counts(summary), move_tables=move_tables(summary),
        moves=[_move(run, m) for m in found.moves[:MOVES_MAX]], moves_left_out=max(0, len(found.moves) - MOVES_MAX),
        storm=_storm(summary), storm_panels=storm_panels(run.storm), storm_table=storm_table(summary),
        tally=_tally(summary), questions=[_question(n, *each) for n, each in enumerate(summary.questions.items(), 1)],
        story=_story(story(run, found.lines)), log=_log(summary), metrics=metric_table(summary, found.made.nodes),
        checks=[Checks("This run", run.verdicts)],
        faults=[Faults("This run", fault_rows(run), client_errors(run))], runs=[run_facts(run)],
    )  # fmt: skip


def _bin(found: Read) -> str:
    return words.given(words.duration(bin_s((found.end_ns - found.run.origin_ns) / 1e9)))


def _outage(run: RunFolder, o: Outage) -> OutageRow:
    status = f"signal {-o.status}" if o.status < 0 else f"exit code {o.status}"
    return OutageRow(
        at=words.duration(run.seconds(o.exited_ns)), node=o.node, cause=o.cause or "no fault of the run", status=status,
        started=words.duration(o.started_s), linked=words.duration(o.linked_s), applied=words.duration(o.applied_s),
    )  # fmt: skip


def _move(run: RunFolder, m: Move) -> MoveRow:
    status = f"{m.status}: {m.reason}" if m.reason else str(m.status)
    return MoveRow(
        operation_id=m.operation_id, group=m.block_group_id, way=f"{m.src} → {m.dst}", status=status,
        at=words.duration(run.seconds(m.started_ns)), took=words.duration(m.seconds), size=words.size(m.size_bytes),
        steps=" · ".join(m.steps) or words.NONE, owner=m.owner or "nobody",
    )  # fmt: skip


def _storm(summary: ControlSummary) -> str:
    with_, without = summary.storms.get(WITH), summary.storms.get(WITHOUT)
    if with_ is None or without is None:
        return ""
    return (
        f"{with_.clients:,} clients, a server that does {with_.capacity_per_s:,.0f} attempts a second and stands still "
        f"for {words.given(words.duration(with_.outage_s))}. In the outage the budget held the clients to "
        f"{with_.outage_amplification:.2f} attempts a call; without it there were {without.outage_amplification:.2f}. "
        f"{_back('With it', with_)}; {_back('without it', without)}."
    )


def _back(who: str, storm: Storm) -> str:
    if storm.recovered_s is None:
        return f"{who} goodput was not back when the storm ended"
    return f"{who} goodput was back {f'after {words.duration(storm.recovered_s)}' if storm.recovered_s else 'at once'}"


def _tally(summary: ControlSummary) -> str:
    ends = [q.status for q in summary.questions.values()]
    counts = [(f"{ends.count(status)} {status}") for status in Status if ends.count(status)]
    return ", ".join(counts)


def _question(number: int, key: str, q: Asked) -> QuestionRow:
    return QuestionRow(
        number=number, key=key, question=q.question, status=str(q.status), word=WORDS[q.status], answer=q.answer,
        rules=", ".join(q.rules), checks=q.checks, cases=[_case(test) for test in q.tests],
    )  # fmt: skip


def _case(test: str) -> Case:
    file, _, name = test.partition("::")
    return Case(name.removeprefix("test_").replace("_", " "), f"tests/{file}")


def _story(found: Story | None) -> StoryView | None:
    if found is None:
        return None
    title = f"{found.method} of {found.operation_id}, tenant {found.tenant}, at {found.node}"
    steps = [
        StepRow(f"+{words.duration((s.t_ns - found.start_ns) / 1e9)}", s.who, s.what, s.of_operation)
        for s in found.steps
    ]
    fields = [(name, [line.of(name) or words.NONE for line in found.lines]) for name in FIELDS]
    heads = [f"{line.owner}-rpc.jsonl, line {line.number:,}" for line in found.lines]
    return StoryView(title, steps, found.left_out, heads, fields, found.lines)


def _log(summary: ControlSummary) -> str:
    log = summary.log
    if not log.files:
        return "The run folder holds no RPC log."
    told = (
        f"{words.plural(log.files, 'log')}, {log.lines:,} lines of the services, {log.retries:,} of attempts that "
        "were not the first"
    )
    return told + (f", {log.unreadable:,} unreadable" if log.unreadable else "") + "."

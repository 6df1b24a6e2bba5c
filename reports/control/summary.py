"""A run of the control plane in figures, for machines (`summary.json`) and for the page: both print from this."""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from harness.group_timeline import Breach
from harness.new_engines import engines_of
from harness.operation_history import Counts, judge_history, judge_ownership
from harness.run_folder import RunFolder
from harness.verdicts import Verdict, worst
from reference_impl.rules.events import EventKind
from reports import words
from reports.control.caught import Fate, fates
from reports.control.gauges import Breaker, Gauge, breaker, gauges
from reports.control.methods import Method, Users, methods, users
from reports.control.migrations import Move, Moves, moves, summarise_moves
from reports.control.outages import Outage, Outages, away, outages, summarise_outages
from reports.control.questions import Asked, Facts, checklist
from reports.control.rpc_lines import RpcLine, RpcLog, rpc_lines, summarise_lines
from reports.control.setup import Setup, setup
from reports.control.storms import Storm, storms
from reports.control.strikes import Sort, Strike, strikes

FORMAT: Final = "pdproof-control-summary/1"
BREACHES_TOLD: Final = 5


class Proved(msgspec.Struct, frozen=True, kw_only=True):
    """Faults of which the run holds proof."""

    crashes: int
    """Ends of block services."""
    replies: int
    """Replies that were dropped, or held back."""
    repeats: int
    full: int
    other: int
    unproved: int
    """Faults that were to happen and have no proof, of any sort."""


class ControlSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Durations are as measured."""

    format: str
    verdict: Verdict
    reasons: list[str]
    """Why it is not a pass."""
    run_id: str
    scenario: str
    profile: str
    time_scale: float
    seed: int
    emulated: list[str]
    seconds: float
    """First call begun -> last call ended."""
    counts: Counts
    breaches: dict[str, int]
    """Of the history's rules, by rule; empty: none."""
    proved: Proved
    faults: dict[str, Fate]
    outages: Outages
    methods: dict[str, Method]
    users: Users
    moves: Moves
    storms: dict[str, Storm]
    metrics: dict[str, Gauge]
    breaker: Breaker
    log: RpcLog
    questions: dict[str, Asked]


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """A run folder, read once: the summary, and the rows that the page lists beside it."""

    run: RunFolder
    made: Setup
    strikes: list[Strike]
    outages: list[Outage]
    moves: list[Move]
    lines: list[RpcLine]
    end_ns: int
    """The end of the time axes: the last call, or the last that a service said of an operation."""
    summary: ControlSummary


def read(run: RunFolder) -> Read:
    """Return everything that the page of `run` shows. Raises `BadRunFolder` for a damaged folder."""
    made, struck, rows = setup(run), strikes(run), run.control
    end_ns = _end_ns(run)
    gone, moved = outages(run, struck, end_ns), moves(run)
    lines, unreadable = rpc_lines(run)
    engines = engines_of(run)
    judged = judge_history(rows, engines=engines)
    breaches = [*judged.breaches, *judge_ownership(rows, engines=engines)]
    facts = Facts(
        run=run, counts=judged.counts, breaches=dict(sorted(Counter(b.rule for b in breaches).items())),
        methods=methods(rows.invocations), users=users(run, away(gone, end_ns)), moves=summarise_moves(run, moved),
        storms=storms(run.storm), gauges=gauges(run), breaker=breaker(run),
        log=summarise_lines(run, lines, unreadable), policy=made.policy,
    )  # fmt: skip
    proved = _proved(struck)
    reasons, m = [*_reasons(run, facts, breaches), *_doubts(run, facts, proved, gone)], run.manifest
    summary = ControlSummary(
        format=FORMAT, verdict=_verdict(run, facts, reasons), reasons=reasons, run_id=m.run_id, scenario=m.scenario,
        profile=m.profile, time_scale=m.time_scale, seed=m.seed, emulated=list(m.emulated),
        seconds=_seconds(run), counts=facts.counts,
        breaches=facts.breaches, proved=proved, faults=fates(run, struck),
        outages=summarise_outages(gone), methods=facts.methods, users=facts.users, moves=facts.moves,
        storms=facts.storms, metrics=facts.gauges, breaker=facts.breaker, log=facts.log, questions=checklist(facts),
    )  # fmt: skip
    return Read(
        run=run, made=made, strikes=struck, outages=gone, moves=moved, lines=lines, end_ns=end_ns, summary=summary
    )


def _end_ns(run: RunFolder) -> int:
    said = run.events_of(EventKind.OPERATION_APPLIED, EventKind.OPERATION_REPLAYED, EventKind.FAULT_INJECTED)
    moments = [i.end_ns for i in run.control.invocations] + [e.t_ns for e in said[-1:]]
    return max(moments, default=run.events[-1].t_ns if run.events else 0)


def _seconds(run: RunFolder) -> float:
    rows = run.control.invocations
    return (max(i.end_ns for i in rows) - min(i.start_ns for i in rows)) / 1e9 if rows else 0.0


def _proved(struck: list[Strike]) -> Proved:
    shown = [s for s in struck if s.proved]
    of = Counter({sort: sum(s.sort is sort for s in shown) for sort in Sort})
    return Proved(
        crashes=of[Sort.CRASH], replies=sum(len(s.moments) for s in shown if s.sort is Sort.LOST),
        repeats=sum(len(s.moments) for s in shown if s.sort is Sort.TWICE),
        full=sum(len(s.moments) for s in shown if s.sort is Sort.FULL), other=of[Sort.OTHER],
        unproved=len(struck) - len(shown),
    )  # fmt: skip


def _verdict(run: RunFolder, facts: Facts, reasons: list[str]) -> Verdict:
    verdicts = [c.verdict for c in run.verdicts]
    if facts.breaches or facts.counts.double_effects or facts.users.wrong:
        verdicts.append(Verdict.FAIL)
    return worst([*verdicts, *([Verdict.INCONCLUSIVE] if reasons else [])])


def _reasons(run: RunFolder, facts: Facts, breaches: list[Breach]) -> list[str]:
    """Say what is wrong: effects that should not be, answers, then what the checks say, worst first."""
    reasons = []
    if facts.counts.double_effects:
        reasons.append(f"{words.plural(facts.counts.double_effects, 'effect')} came a second time.")
    if facts.users.wrong:
        reasons.append(f"{words.plural(facts.users.wrong, 'answer')} of the engines had wrong tokens.")
    first = {b.rule: b for b in reversed(breaches)}
    reasons += [f"{rule}: {first[rule].text}." for rule in sorted(first)[:BREACHES_TOLD]]
    order = [Verdict.ERROR, Verdict.FAIL, Verdict.INCONCLUSIVE]
    reasons += [f"{c.title}: {c.verdict}. {c.found}" for v in order for c in run.verdicts if c.verdict is v]
    return reasons


def _doubts(run: RunFolder, facts: Facts, proved: Proved, gone: list[Outage]) -> list[str]:
    """Say what keeps this run from proving anything."""
    reasons = []
    if run.incomplete:
        reasons.append(f"The run is incomplete: {run.incomplete}.")
    if not run.verdicts:
        reasons.append("No check has judged this run; `pdproof check` does.")
    if not facts.counts.invocations:
        reasons.append("It holds no operation.")
    if proved.unproved:
        reasons.append(f"{proved.unproved:,} of its faults left no proof that they happened.")
    if crashed := [o.node for o in gone if not o.cause]:
        nodes = ", ".join(dict.fromkeys(crashed))
        reasons.append(
            f"The block service of {nodes} ended {words.plural(len(crashed), 'time')} without a fault that explains it."
        )
    return reasons

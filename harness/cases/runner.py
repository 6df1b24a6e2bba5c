"""Runs cases, one run folder each, and writes what their judges say. It keeps pairs as long as terms stay the same."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from harness import machine
from harness.cases.bench import Bench, Maker, Misfit, Pair
from harness.cases.case import Case, CaseInfo, Hindered, Twin
from harness.cases.client import Client
from harness.cases.judging import judge
from harness.cases.stage import Stage
from harness.cases.steps import StepLog
from harness.cases.terms import PairTerms, Size
from harness.errors import PdproofError
from harness.run_folder import Manifest, RunFolder, RunWriter
from harness.verdicts import CheckResult, Verdict, worst
from reference_impl.event_log import EventLog
from reference_impl.realclock import now_ns, wall_ns
from reference_impl.rules.terms import KvTerms, LeaseDesign, LoadPolicy
from workloads.rows import read_records

WARM_TRIES: Final = 3
"""The first transfer of a fresh pair sets the connection up, which may take tens of seconds and fail at first."""
CALIBRATION_TOKENS: Final = 48


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one case, or of its twin."""

    case: str
    twin: str
    """"" for the case itself."""
    title: str
    verdict: Verdict | None
    """Of a twin: pass if the check that must fail did. None: it was not run."""
    reason: str
    """Why it was not run, or could not be; of a twin, what the check said that must fail."""
    folder: str = ""
    results: list[CheckResult] = []


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    size: Size
    seed: int
    out: Path
    twins: bool
    """Run the twins, and not the cases themselves."""
    command: list[str]


async def run_cases(
    cases: Sequence[Case], maker: Maker, plan: Plan, say: Callable[[str], None], tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run cases, those with equal terms after one another, and return what came of each. Ends what it started."""
    work: list[tuple[Case, Twin | None]] = []
    for case in cases:
        work += [(case, twin) for twin in case.twins] if plan.twins else [(case, None)]
    work.sort(key=_terms_in_order)
    outcomes = []
    bench = Bench(maker, plan.out / "pairs", say)
    try:
        for case, twin in work:
            outcome = await _run(case, twin, bench, plan, say)
            outcomes.append(outcome)
            tell(outcome)
    finally:
        say("ending the pair")
        await asyncio.shield(bench.close())
    return outcomes


def _terms_in_order(work: tuple[Case, Twin | None]) -> tuple[str, bool]:
    """Sort by the pair's terms; within them, what spoils the pair comes last."""
    case, twin = work
    return msgspec.json.encode(_terms(case, twin)).decode(), case.spoils


def _terms(case: Case, twin: Twin | None) -> PairTerms:
    return (twin.terms if twin else None) or case.terms


async def _run(case: Case, twin: Twin | None, bench: Bench, plan: Plan, say: Callable[[str], None]) -> Outcome:
    name = f"{case.name}.{twin.name}" if twin else case.name
    lacking = case.wants(twin) - bench.maker.offers()
    outcome = Outcome(
        case=case.name, twin=twin.name if twin else "", title=twin.title if twin else case.title, verdict=None,
        reason=f"{bench.maker.name} offers no {', '.join(sorted(lacking))}",
    )  # fmt: skip
    if lacking:
        return outcome
    try:
        case = dataclasses.replace(case, terms=bench.maker.adapted(case.terms))
    except Misfit as misfit:
        return msgspec.structs.replace(outcome, reason=str(misfit))
    try:
        pair = await bench.pair(_terms(case, twin), plan.size)
    except (PdproofError, TimeoutError) as error:
        await bench.spoil()
        return msgspec.structs.replace(outcome, verdict=Verdict.ERROR, reason=f"no pair came up: {error}")
    say(name)
    folder = plan.out / name
    run = await _record(case, twin, pair, bench.maker, plan, folder, say)
    if case.spoils or _terms(case, twin).design != "lease":  # what such a twin strands is stranded for minutes
        await bench.spoil()
    results = judge(run)
    run.write_verdicts(results)
    outcome = msgspec.structs.replace(outcome, folder=str(folder), results=results, reason="")
    if twin is None:
        return msgspec.structs.replace(outcome, verdict=worst(r.verdict for r in results))
    return _of_twin(outcome, twin, results)


def _of_twin(outcome: Outcome, twin: Twin, results: list[CheckResult]) -> Outcome:
    meant = next((r for r in results if r.check == twin.fails), None)
    if meant is None:
        return msgspec.structs.replace(
            outcome, verdict=Verdict.INCONCLUSIVE, reason=f"the check {twin.fails} was never made: "
            + "; ".join(r.found for r in results if r.verdict is not Verdict.PASS),
        )  # fmt: skip
    caught = {Verdict.FAIL: Verdict.PASS, Verdict.PASS: Verdict.FAIL}.get(meant.verdict, meant.verdict)
    return msgspec.structs.replace(outcome, verdict=caught, reason=f"{meant.check}: {meant.verdict}: {meant.found}")


async def _record(
    case: Case, twin: Twin | None, pair: Pair, maker: Maker, plan: Plan, folder: Path, say: Callable[[str], None]
) -> RunFolder:
    writer = RunWriter(folder, _manifest(case, twin, pair, maker, plan, folder.name))
    steps = StepLog(folder)
    hindered = ""
    begun_ns = now_ns()
    seed = plan.seed * 1_000_003 + begun_ns % 1_000_000_007  # a pair's caches remember what earlier cases sent
    rows = writer.parts / "requests-0.jsonl"
    async with Client(pair.said.model, rows, steps, pair.headers()) as client:
        stage = Stage(pair, writer, steps, client, terms=case.terms, size=plan.size, seed=seed,
                      settle_s=_settle_s(_terms(case, twin)))  # fmt: skip
        async with stage.observed():
            try:
                await _warm(stage)
                await stage.rest()
                await stage.begin()
                if twin is not None and twin.sabotage is not None:
                    await twin.sabotage(stage)
                async with asyncio.timeout(case.limit_s + plan.size.queue_leases * case.terms.lease_s):
                    await case.drive(stage)
            except Hindered as error:
                hindered = str(error)
            except TimeoutError:
                hindered = "the case did not come to its end in time"
            say(f"{folder.name}: the finale")
            await stage.finale()
    steps.close(hindered)
    _copy_events(pair, writer, begun_ns)
    records = [r for path in sorted(writer.parts.glob("requests-*.jsonl")) for r in read_records(path)]
    say(f"{folder.name}: its answers are judged")
    verdicts = await pair.judged(records, folder)
    return writer.finish((r, "", ok) for r, ok in zip(records, verdicts, strict=True))


def _settle_s(terms: PairTerms) -> float:
    """Return how long a pair may hold what a case left behind; what a single timeout strands is not waited for."""
    held_s = max(terms.lease_s, terms.ttl_s if terms.bidirectional else 0)
    return held_s if terms.design == "lease" else 0.0


async def _warm(stage: Stage) -> None:
    """Send requests through a fresh pair until one takes, and find out how fast an undisturbed answer comes."""
    for attempt in range(0 if stage.pair.warm else WARM_TRIES):
        if (await stage.request(f"warm-{attempt}", tokens=CALIBRATION_TOKENS)).call.leg == "decode":
            break
    call = (await stage.request("calm", tokens=CALIBRATION_TOKENS)).call
    if call.leg != "decode" or not call.ok:
        raise Hindered(f"the pair does not even answer an undisturbed request: {call.error}")
    stage.pair.warm = True
    stage.rate_per_s = call.output_tokens / max(1e-9, call.seconds)


def _copy_events(pair: Pair, writer: RunWriter, since_ns: int) -> None:
    """Add what the deployment's own processes said meanwhile: for people; no judge of a case reads it."""
    logs: dict[str, EventLog] = {}
    with contextlib.ExitStack() as opened:
        for event in pair.events(since_ns, now_ns()):
            if event.actor not in logs:
                logs[event.actor] = EventLog(writer.events_part(event.actor), event.actor)
                opened.callback(logs[event.actor].close)
            logs[event.actor].say_at(event.t_ns, event.kind, event.subject, **event.detail)


def _manifest(case: Case, twin: Twin | None, pair: Pair, maker: Maker, plan: Plan, run_id: str) -> Manifest:
    described = maker.describe()
    info = CaseInfo(
        name=case.name, twin=twin.name if twin else "", size=plan.size.name, terms=case.terms, prefill=pair.prefill,
        decode=pair.decode,
    )  # fmt: skip
    title = f"{case.title}; twin: {twin.title}" if twin else case.title
    return Manifest(
        run_id=run_id, scenario=case.name, arm=twin.name if twin else "", title=title, profile=described.profile,
        time_scale=1.0, seed=plan.seed, started_wall_ns=wall_ns(), command=plan.command,
        versions=machine.versions() | described.versions, commit=machine.commit(), machine=machine.machine(),
        configuration={
            "case": msgspec.to_builtins(info), "target": maker.name,
            "terms": msgspec.to_builtins(_kv_terms(case.terms)),
            "roles": {pair.prefill: "prefill", pair.decode: "decode"}, **described.configuration,
        },
        emulated=described.emulated,
    )  # fmt: skip


def _kv_terms(terms: PairTerms) -> KvTerms:
    return KvTerms(
        design=LeaseDesign(terms.design), kv_lease_duration=terms.lease_s, single_timeout=terms.single_timeout_s,
        bidirectional_kv_xfer=terms.bidirectional, decoder_kv_blocks_ttl=terms.ttl_s,
        kv_load_failure_policy=LoadPolicy(terms.load_failure_policy), clock_correction=terms.clock_correction,
    )  # fmt: skip

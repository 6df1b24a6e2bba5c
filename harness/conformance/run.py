"""Runs cases on a subject, one after the other, and writes what came of each. A subject lost in one is made anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from harness import machine
from harness.conformance.case import Case
from harness.conformance.interpreter import interpreter_of
from harness.conformance.naming import BadSubject, SubjectName
from harness.conformance.orders import Ready, Tried, Try
from harness.conformance.process import SubjectLost, SubjectProcess
from harness.conformance.results import CaseResult, Header
from harness.conformance.search import verdicts
from harness.conformance.search.asked import searched
from harness.conformance.search.history import signature
from harness.conformance.search.replay import FixedCase, Recorded, save
from harness.conformance.stream import ConformanceRun, ResultWriter, read_results
from harness.verdicts import Verdict
from reference_impl.realclock import now_ns, wall_ns
from reference_impl.rules.clock import NS_PER_S

CASE_LIMIT_S: Final = 60.0
"""Real seconds; the fixed cases take less than one on any subject that ships."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    subject: SubjectName
    python: str
    seed: int
    out: Path
    twins: bool
    """The cases' twins, on the reference implementation, and not the cases."""
    command: list[str]
    environment: dict[str, str] = {}
    case_limit_s: float = CASE_LIMIT_S
    search_s: float = 0.0
    """For how long generated histories are searched when the cases are done; 0: not at all."""

    @property
    def searches(self) -> bool:
        """Whether there is to be a search. Twins are of the cases."""
        return self.search_s > 0 and not self.twins


def run(
    cases: Sequence[Case], plan: Plan, tell: Callable[[CaseResult], None], say: Callable[[str], None] = lambda _: None
) -> ConformanceRun:
    """Run cases, and the search if there is to be one; return what their file then holds.

    `say` is told how far the search is. Raises BadSubject, MachineLimit, BadResults, SearchFailed.
    """
    plan.out.mkdir(parents=True, exist_ok=True)
    process = SubjectProcess(plan.subject, plan.python, plan.out / "subject.log", plan.environment)
    try:
        ready = process.start()
        with ResultWriter(plan.out / "results.jsonl", _header(cases, plan, ready)) as writer:
            for case in cases:
                for twin in case.twins if plan.twins else ("",):
                    result = _result(case, twin, process, ready, plan)
                    writer.add(result)
                    tell(result)
            for result in _search_results(process, ready, plan, say):
                writer.add(result)
                tell(result)
            writer.finish(wall_ns())
    finally:
        process.close()
    return read_results(plan.out / "results.jsonl")


class Trier:
    """Tries single cases on one subject, for whoever brings a loop of his own. Raises BadSubject; use `close`."""

    def __init__(self, subject: SubjectName, seed: int, out: Path) -> None:
        python, environment = interpreter_of(subject)
        self._plan = Plan(
            subject=subject, python=python, seed=seed, out=out, twins=False, command=[], environment=environment
        )  # fmt: skip
        self._process = SubjectProcess(subject, python, out / "subject.log", environment)
        self._ready = self._process.start()

    def result(self, case: Case) -> CaseResult:
        """Return what comes of a case."""
        return _result(case, "", self._process, self._ready, self._plan)

    def close(self) -> None:
        """End the subject."""
        self._process.close()


def _result(case: Case, twin: str, process: SubjectProcess, ready: Ready, plan: Plan) -> CaseResult:
    lacking = sorted(case.needs - set(ready.capabilities))
    if lacking:
        return _of(case, twin, 0.0, verdict=None, found=f"{ready.subject} does not claim: {', '.join(lacking)}")
    begun_ns = now_ns()
    try:
        if not process.alive:
            process.start()
        reply = process.ask(Try(case=case.name, seed=plan.seed, twin=twin), plan.case_limit_s)
        assert isinstance(reply, Tried)
        tried = reply
    except (SubjectLost, BadSubject) as lost:  # it can be made once, and not again: its own fault
        tried = Tried(verdict=Verdict.FAIL, found=f"R1: {lost}")
    seconds = (now_ns() - begun_ns) / NS_PER_S
    if twin:
        tried = _caught(tried)
    if tried.verdict is Verdict.FAIL:
        _record(plan, ready, f"{case.name}.{twin}" if twin else case.name, Recorded(
            subject=plan.subject, run=FixedCase(name=case.name, seed=plan.seed, twin=twin), found=tried.found,
            rule=tried.breaches[0].rule if tried.breaches else "",
        ))  # fmt: skip
    return _of(case, twin, seconds, verdict=tried.verdict, found=tried.found, note=tried.note, breaches=tried.breaches,
               timeline=tried.timeline, needs=sorted(case.needs))  # fmt: skip


def _search_results(process: SubjectProcess, ready: Ready, plan: Plan, say: Callable[[str], None]) -> list[CaseResult]:
    if not plan.searches:
        return []
    figures, found = searched(process, plan.seed, plan.search_s, plan.out, say)
    for number, each in enumerate(found, 1):
        rule, where = signature(each.breach)
        _record(plan, ready, f"{verdicts.PREFIX}{rule}.{number}", Recorded(
            subject=plan.subject, run=each.history, rule=rule, where=where, found=each.breach.what,
        ))  # fmt: skip
    return verdicts.results(ready.subject, ready.capabilities, figures, found)


def _record(plan: Plan, ready: Ready, name: str, recorded: Recorded) -> None:
    """Write down how to run a failure again."""
    save(msgspec.structs.replace(recorded, versions=ready.versions), plan.out / "replays" / f"{name}.json")


def _caught(tried: Tried) -> Tried:
    """Turn a twin's verdict round: it is to fail."""
    turned = {Verdict.FAIL: Verdict.PASS, Verdict.PASS: Verdict.FAIL}.get(tried.verdict, tried.verdict)
    word = "caught" if turned is Verdict.PASS else "not caught"
    return msgspec.structs.replace(tried, verdict=turned, found=f"{word}: {tried.found}")


def _of(case: Case, twin: str, seconds: float, **more: Any) -> CaseResult:
    return CaseResult(
        case=case.name, rule=case.rule, title=case.title, level=case.level, source=case.source, twin=twin,
        seconds=seconds, **more,
    )  # fmt: skip


def _header(cases: Sequence[Case], plan: Plan, ready: Ready) -> Header:
    return Header(
        subject=ready.subject, versions=ready.versions, capabilities=ready.capabilities,
        configuration=plan.subject.configuration(), seed=plan.seed,
        cases=[*(case.name for case in cases), *(verdicts.names() if plan.searches else ())],
        twins=plan.twins, commit=machine.commit(), machine=machine.machine(), started_wall_ns=wall_ns(),
        command=plan.command,
    )  # fmt: skip

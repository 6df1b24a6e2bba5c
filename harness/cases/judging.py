"""The verdicts on a case's run folder: its own checks, and those that every case must pass."""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from harness import golden
from harness.cases.case import Case, Judge
from harness.cases.metrics import USAGE
from harness.cases.observations import CaseRun, told
from harness.cases.registry import CASES
from harness.errors import BadRunFolder
from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict

LATE_MS_MAX: Final = 1_000.0
RATE_PER_S_MIN: Final = 15.0
"""Two servers that starve each other on the same cores decode 4.5 tokens/s, where 145 is usual."""
_TIMED: Final = {
    "released", "freed", "reclaimed", "kept", "leases-kept", "one-expires", "calm", "harmless", "idle", "told",
    "stalled", "clean", "in-time",
}  # fmt: skip
"""Checks that hang on somebody's being in time, which nobody can be on a starved machine."""


def judge(run: RunFolder) -> list[CheckResult]:
    """Return every check's verdict on a case's run, without writing them."""
    seen = CaseRun(run)
    case = CASES.get(seen.info.name)
    if case is None:
        raise BadRunFolder(run.path, f"the case {seen.info.name!r} is not known any more")
    machine = machine_was_fit(seen)
    results = [_judged(check, seen) for check in _checks(case, seen)]
    if machine.verdict is Verdict.PASS:
        return [*results, machine]
    doubted = [_doubted(result, machine.found) for result in results]
    if doubted == results:  # what was kept on an unfit machine was kept
        machine = msgspec.structs.replace(machine, verdict=Verdict.PASS, found=f"{machine.found}; nothing hung on it")
    return [*doubted, machine]


def _checks(case: Case, seen: CaseRun) -> list[Judge]:
    own = [drive_came_to_its_end] if seen.hindered else list(case.checks)
    return [*own, content_is_right, servers_serve_afterwards, blocks_return]


def _judged(check: Judge, seen: CaseRun) -> CheckResult:
    """Run one check. One that stumbles over what the folder holds has no verdict: `error`, and the rest go on."""
    try:
        return check(seen)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        title = (check.__doc__ or "").partition(".")[0]
        found = f"the check stumbled over what the folder holds: {type(error).__name__}: {error}"
        name = check.__name__.strip("_").replace("_", "-")
        return CheckResult(check=name, title=title, rules=[], verdict=Verdict.ERROR, found=found)


def _doubted(result: CheckResult, why: str) -> CheckResult:
    """A failure to be in time says nothing of the servers on a machine that starved them."""
    if result.verdict is not Verdict.FAIL or result.check not in _TIMED:
        return result
    return msgspec.structs.replace(
        result, verdict=Verdict.INCONCLUSIVE, found=f"{result.found} (but the machine was not fit: {why})"
    )


def drive_came_to_its_end(seen: CaseRun) -> CheckResult:
    """Inconclusive where the case could not do what it was to do."""
    return told("setup", "The case could do what it is about", [], [], "", unknown=seen.hindered)


def content_is_right(seen: CaseRun) -> CheckResult:
    """Fail for any answer, or beginning of one, that is not what the model answers to its prompt."""
    known = {name for name, ok in seen.content.items() if ok is not None}
    wrong = [name for name, ok in seen.content.items() if ok is False]
    reasons = golden.findings(seen.run.path)
    why = f": {reasons[wrong[0]].why}" if wrong and wrong[0] in reasons else ""
    problems = [f"{len(wrong)} answers are wrong, {wrong[0]} for one{why}"] if wrong else []
    source = seen.run.manifest.configuration.get("right_answers", "the right ones")
    found = f"{len(known)} answers were compared with {source}"
    if unjudged := Counter(finding.why for finding in reasons.values() if finding.right is None):
        found += f"; {unjudged.total()} could not be judged; the usual reason: {unjudged.most_common(1)[0][0]}"
    decoded = {call.request_id for call in seen.calls(leg="decode") if call.output_tokens}
    unknown = "" if known else "no answer could be judged"
    if decoded and known and not decoded & known:  # what the prefill side answers says nothing of KV that moved
        unknown = "no answer of the decode side could be judged"
    return told(
        "content", "No answer was made from foreign or damaged KV", ["S2", "KVC-XFER-001"], problems, found,
        unknown=unknown, answers=len(known), wrong=len(wrong),
    )  # fmt: skip


def servers_serve_afterwards(seen: CaseRun) -> CheckResult:
    """Fail if a normal request behind the case is not answered rightly."""
    title, rules = "The servers serve afterwards", ["R1", "L6"]
    calls = seen.calls("after")
    last = calls[-1] if calls else None
    if last is None:
        return told("serves-after", title, rules, ["no request could be sent any more"], "")
    good = last.leg == "decode" and seen.right(last)
    return told(
        "serves-after", title, rules, [] if good else [f"a normal request failed: {seen.ended(last)}"], seen.ended(last)
    )


def blocks_return(seen: CaseRun) -> CheckResult:
    """Fail if a server holds more blocks at the end than at the beginning (K1)."""
    problems, figures = [], []
    for worker in (seen.p, seen.d):
        end = seen.looks("end", worker)
        if not end:
            problems.append(f"{worker} could not be looked at in the end")
            continue
        base, last = seen.usage("baseline", worker), end[-1].values[USAGE]
        most = max((v for _, v in seen.sampled(worker, USAGE)), default=last)
        figures.append(f"{worker} {last:.2%} (before {base:.2%}, at most {most:.2%})")
        if seen.holds("end", worker):
            problems.append(f"{worker} still holds {last:.2%} of its blocks, {base:.2%} before")
    return told("conserved", "Every block is free at the end", ["K1"], problems, "in use: " + ", ".join(figures))


def machine_was_fit(seen: CaseRun) -> CheckResult:
    """Inconclusive where the machine starved this client or the servers while the drive went on."""
    title = "The machine was fit to measure on"
    marks = seen.marks("machine")
    if not marks:
        return told("machine", title, [], [], "", unknown="nothing was written down of it")
    late_ms, rate = float(marks[-1].detail["late_ms"] or 0), float(marks[-1].detail["rate_per_s"] or 0)
    doubts = [f"this client stood still for {late_ms:.0f} ms"] if late_ms > LATE_MS_MAX else []
    doubts += [f"one undisturbed answer came at {rate:.1f} tokens/s"] if rate < RATE_PER_S_MIN else []
    found = f"{rate:.0f} tokens/s undisturbed; this client was late by {late_ms:.0f} ms at most"
    return told("machine", title, [], [], found, unknown="; ".join(doubts), late_ms=late_ms, rate_per_s=rate)

"""Turns that came too late, read from the run folders of the cases that are about them: a row a case."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from harness.cases.case import Case
from harness.cases.clocks import RECOMPUTED, late_is_recomputed, late_turn
from harness.cases.observations import Came, CaseRun
from harness.cases.registry import CASES
from harness.cases.steps import Call
from harness.cases.terms import PairTerms
from harness.errors import BadRunFolder
from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict

NOT_RUN: Final = "not run"


class LateTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the turn on one system. With no verdict there are no figures, and `why` says what is lacking."""

    verdict: Verdict | None
    """Of the check `recomputed`."""
    why: str = ""
    came: Came = Came.NONE
    """What the client got in the end."""
    status: int = 0
    """The HTTP status of the leg that decided it; 0: none came."""
    seconds: float = 0.0
    """From the first leg's start to the last one's end."""
    usage_before: float | None = None
    """The share of the prefill side's blocks in use before the turn came, at most since then, and in the end."""
    usage_most: float | None = None
    usage_end: float | None = None
    declined: float | None = None
    late: float | None = None
    reads: float | None = None


class LateTurnRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case."""

    case: str
    policy: str
    """What a server is to do where KV cannot be loaded."""
    skew_s: float
    """By how much the decode side's clock is ahead."""
    system: LateTurn
    reference: LateTurn | None
    """None: it was not asked."""


def late_turns(runs: Iterable[RunFolder], reference: Iterable[RunFolder] | None) -> list[LateTurnRow]:
    """Return a row a case that has the check `recomputed`, also for those that did not run; [] if none of them did."""
    ours = _by_name(runs)
    theirs = None if reference is None else _by_name(reference)
    known = [case.name for case in CASES.values() if late_is_recomputed in case.checks]
    names = dict.fromkeys([*known, *(name for name, run in ours.items() if _judged(run) is not None)])
    if not names.keys() & ours.keys():
        return []
    return [_row(name, ours.get(name), theirs, CASES.get(name)) for name in names]


def _by_name(runs: Iterable[RunFolder]) -> dict[str, RunFolder]:
    return {CaseRun(run).info.name: run for run in runs}


def _row(name: str, run: RunFolder | None, theirs: dict[str, RunFolder] | None, case: Case | None) -> LateTurnRow:
    terms = CaseRun(run).terms if run else case.terms if case else PairTerms()
    return LateTurnRow(
        case=name, policy=terms.load_failure_policy, skew_s=terms.decode_clock_offset_s, system=_turn(run),
        reference=None if theirs is None else _turn(theirs.get(name)),
    )  # fmt: skip


def _turn(run: RunFolder | None) -> LateTurn:
    if run is None:
        return LateTurn(verdict=None, why=NOT_RUN)
    try:
        return _read(run)
    except (BadRunFolder, LookupError) as error:
        return LateTurn(verdict=None, why=f"its folder does not show it: {error}")


def _read(run: RunFolder) -> LateTurn:
    seen, result = CaseRun(run), _judged(run)
    if lacking := run.incomplete or seen.hindered or _undecided(result):
        return LateTurn(verdict=None, why=lacking)
    turn = late_turn(seen)
    if not turn.calls:
        return LateTurn(verdict=None, why="the turn was never sent")
    came, decisive = _came(seen, turn.calls)
    return LateTurn(
        verdict=result.verdict if result else None, came=came, status=decisive.status,
        seconds=(turn.calls[-1].end_ns - turn.calls[0].sent_ns) / 1e9, usage_before=turn.usage_before,
        usage_most=turn.usage_most, usage_end=turn.usage_end, declined=turn.declined, late=turn.late, reads=turn.reads,
    )  # fmt: skip


def _judged(run: RunFolder) -> CheckResult | None:
    return next((result for result in run.verdicts if result.check == RECOMPUTED), None)


def _undecided(result: CheckResult | None) -> str:
    """Return why there is no verdict on the turn, "" if there is one."""
    if result is None:
        return f"the check {RECOMPUTED!r} was not made"
    return "" if result.verdict in (Verdict.PASS, Verdict.FAIL) else result.found


def _came(seen: CaseRun, calls: list[Call]) -> tuple[Came, Call]:
    """Return what the client got, and the leg that decided it: the first that went wrong, else the last."""
    decisive = next((call for call in calls if not seen.right(call)), calls[-1])
    handed_nothing_over = decisive.leg == "prefill" and seen.right(decisive)
    return (Came.NONE if handed_nothing_over else seen.came(decisive)), decisive

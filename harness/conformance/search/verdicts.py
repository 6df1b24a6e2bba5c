"""What a search says of each invariant: a breach, none, or that it cannot tell because too little happened."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from harness.conformance.case import Level, Source
from harness.conformance.results import CaseResult
from harness.conformance.search.found import Figures, Found
from harness.conformance.subject import Capability
from harness.verdicts import Verdict

PREFIX: Final = "search."
HISTORIES_MIN: Final = 50
TIMES_MIN: Final = 3
"""What happened less often than this in a whole search was not tried."""


@dataclass(frozen=True)
class Invariant:
    """One that a search looks at."""

    title: str
    needs: frozenset[Capability]
    happened: tuple[str, ...]
    """What must have happened for its silence to mean anything: names of `Figures.happened`."""


_LEASES: Final = frozenset({Capability.LEASES})
INVARIANTS: Final[dict[str, Invariant]] = {
    "S1": Invariant("Blocks under a lease are given to nobody else, and not used after it", _LEASES,
                    ("loaded", "expired", "released")),
    "S2": Invariant("Nobody is answered from KV that is not his prompt's", frozenset(), ("answered", "decode")),
    "S3": Invariant("A lease that several readers share waits for all of them", _LEASES | {Capability.READERS},
                    ("samples", "released")),
    "S4": Invariant("A lease ends once", _LEASES, ("released", "expired", "again")),
    "S5": Invariant("Nothing of a dead engine is used", _LEASES, ("crash", "restart", "loaded")),
    "S6": Invariant("A destination is nobody else's while something can land in it", _LEASES,
                    ("reads: slow", "abort")),
    "L1": Invariant("A lease ends when nobody renews it", _LEASES, ("expired",)),
    "L2": Invariant("A lease does not end early, nor while its reader waits", _LEASES, ("released", "local")),
    "L3": Invariant("Every request comes to an end", frozenset(), ("answered", "decode", "pass")),
    "L4": Invariant("A lease ends with its last reader's report", _LEASES, ("released",)),
    "K1": Invariant("When all is over, nothing is held", frozenset(), ("answered", "abort")),
    "O1": Invariant("Counters say what happened", _LEASES | {Capability.METRICS}, ("expired", "released")),
    "C1": Invariant("Messages name requests by their holder's ids", _LEASES, ("released",)),
    "C2": Invariant("A turn is used while it lives, and not later, whatever the clocks show",
                    _LEASES | {Capability.TWO_TURN}, ("kept turns", "turn")),
    "R1": Invariant("Nothing that a client or a peer sends ends an engine", frozenset(), ("inject", "decode")),
    "R2": Invariant("What cannot be loaded ends as the policy says", _LEASES, ("reads: fail", "answered")),
}  # fmt: skip


def names() -> list[str]:
    """Return what the results of a search are called."""
    return [f"{PREFIX}{rule}" for rule in INVARIANTS]


def results(
    subject: str, claims: Collection[str], figures: Figures, found: Sequence[Found], note: str = ""
) -> list[CaseResult]:
    """Return a result an invariant. `note` is said beside each that is not broken."""
    return [_result(subject, claims, rule, figures, found, note) for rule in INVARIANTS]


def _result(
    subject: str, claims: Collection[str], rule: str, figures: Figures, found: Sequence[Found], note: str
) -> CaseResult:
    invariant = INVARIANTS[rule]
    mine = sorted((f for f in found if f.breach.rule == rule), key=lambda f: f.history.size)
    lacking = sorted(invariant.needs - set(claims))
    verdict: Verdict | None
    verdict, told = _judged(invariant, figures, mine)
    if lacking and not mine:
        verdict, told = None, f"{subject} does not claim: {', '.join(lacking)}"
    return CaseResult(
        case=f"{PREFIX}{rule}", rule=rule, title=invariant.title, level=Level.MUST, source=Source.OURS, verdict=verdict,
        found=told, note="" if mine else note, breaches=[f.breach for f in mine],
        timeline=mine[0].timeline if mine else [], needs=sorted(invariant.needs), seconds=figures.seconds,
    )  # fmt: skip


def _judged(invariant: Invariant, figures: Figures, mine: Sequence[Found]) -> tuple[Verdict, str]:
    if mine:
        others = f" (and {len(mine) - 1} other kinds)" if len(mine) > 1 else ""
        actions = len(mine[0].history.actions)
        return Verdict.FAIL, f"{mine[0].breach.what}{others}; the shortest history has {actions} actions"
    did = f"{figures.histories} histories, median {figures.median_ms:.1f} ms"
    if figures.histories < HISTORIES_MIN:
        return Verdict.INCONCLUSIVE, f"too few histories to tell: {did}"
    idle = [name for name in invariant.happened if figures.happened.get(name, 0) < TIMES_MIN]
    if idle:
        return Verdict.INCONCLUSIVE, f"hardly ever happened: {', '.join(idle)} ({did})"
    return Verdict.PASS, f"no breach in {did}"

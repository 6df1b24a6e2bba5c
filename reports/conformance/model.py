"""Several runs as one matrix: rules by runs, and the rules that no case speaks of."""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeVar

from harness.conformance.exits import Exit, worst
from harness.conformance.known import Decision, Stood
from harness.expectations import Standing
from harness.rules import Face, Level, Rule, catalogue
from harness.verdicts import Verdict
from reports.findings.model import INVARIANTS

FAMILIES: Final = {
    "LEASE": "Leases", "HB": "Heartbeats", "REL": "Release", "XFER": "Transfers", "HSK": "Handshakes", "CLK": "Clocks",
    "OBS": "What can be seen", "ROUT": "Routing", "MEM": "Memory service", "LOCK": "The lock", "SHDW": "Shadow engines",
    "IDEM": "The control plane",
}  # fmt: skip
"""The catalogue's groups, for people."""
OTHERS: Final = "Other rules"
T = TypeVar("T")
_LEVELS: Final = {
    Level.MUST: "must", Level.SHOULD: "should", Level.STOCHASTIC: "by chance", Level.UNTESTED: "untested",
}  # fmt: skip


class State(enum.StrEnum):
    """What a cell says; what outweighs the others first."""

    ERROR = "error"
    FAIL = "fail"
    STALE = "stale"
    KNOWN = "known"
    INCONCLUSIVE = "inconclusive"
    NOT_RUN = "not run"
    FLAKY = "flaky"
    PASS = "pass"
    NOT_APPLICABLE = "n/a"


_STATES: Final = {
    Standing.AS_EXPECTED: State.PASS, Standing.NEW: State.FAIL, Standing.KNOWN: State.KNOWN,
    Standing.STALE: State.STALE, Standing.FLAKY: State.FLAKY, Standing.OPEN: State.INCONCLUSIVE,
    Standing.NOT_APPLICABLE: State.NOT_APPLICABLE,
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One rule in one run. Empty where the run chose no case of it."""

    state: State
    stood: list[Stood]
    """What outweighs the others first."""
    missing: list[str]
    """Cases that were to run, and have no result."""

    @property
    def share(self) -> tuple[int, int]:
        """How many of its cases say what the cell says, and how many there are."""
        same = len(self.missing) if self.state is State.NOT_RUN else sum(state_of(s) is self.state for s in self.stood)
        return same, len(self.stood) + len(self.missing)


@dataclass(frozen=True)
class Row:
    """One rule, and a cell a column."""

    rule_id: str
    text: str
    level: str
    cells: list[Cell]


@dataclass(frozen=True)
class Family:
    """Rules that belong together."""

    title: str
    rows: list[Row]


@dataclass(frozen=True)
class Column:
    """One run. `name` is its alone on the page, `versions` are what was tested."""

    name: str
    versions: str
    decision: Decision


@dataclass(frozen=True)
class Uncovered:
    """A rule without a result, and why."""

    rule_id: str
    text: str
    why: str


@dataclass(frozen=True)
class Matrix:
    """All that is to be shown."""

    columns: list[Column]
    families: list[Family]
    uncovered: list[tuple[str, list[Uncovered]]]
    """By family."""
    rules: int
    """Of the catalogue."""

    @property
    def exit(self) -> Exit:
        """What the runs come to together."""
        return worst(column.decision.exit for column in self.columns)

    @property
    def covered(self) -> int:
        """How many of the catalogue's rules have a result."""
        return self.rules - sum(len(rules) for _, rules in self.uncovered)


def merged(decisions: Sequence[Decision], cases: Iterable[str] | None = None) -> Matrix:
    """Return the matrix of some runs. `cases`: the names of all that there are; None: the registry's."""
    rules = catalogue()
    families = [
        Family(title, rows) for title, rows in _by_family(_rows(decisions, rules), lambda row: row.rule_id)
    ]  # fmt: skip
    tried = {rule_of(stood.result.case) for decision in decisions for stood in decision.stood}
    uncovered = _uncovered(rules, tried, {rule_of(name) for name in (_registered() if cases is None else cases)})
    return Matrix(_columns(decisions), families, _by_family(uncovered, lambda rule: rule.rule_id), len(rules))


def rule_of(case: str) -> str:
    """Return the id of the rule that a case is about."""
    return case.partition(".")[0]


def state_of(stood: Stood) -> State:
    """Return what a result says in its cell."""
    return State.ERROR if stood.result.verdict is Verdict.ERROR else _STATES[stood.standing]


def _registered() -> Iterable[str]:
    from harness.conformance.registry import CASES

    return CASES


def _columns(decisions: Sequence[Decision]) -> list[Column]:
    """Return the runs with names of their own: a subject that comes twice in the same versions is counted through."""
    names = [_name(decision) for decision in decisions]
    totals, seen = Counter(names), Counter[tuple[str, str]]()
    columns = []
    for decision, key in zip(decisions, names, strict=True):
        seen[key] += 1
        suffix = f" #{seen[key]}" if totals[key] > 1 else ""
        columns.append(Column(key[0] + suffix, key[1], decision))
    return columns


def _name(decision: Decision) -> tuple[str, str]:
    header = decision.run.header
    versions = " · ".join(f"{package} {version}" for package, version in header.versions.items())
    return header.subject + (", twins" if header.twins else ""), versions


def _rows(decisions: Sequence[Decision], rules: Sequence[Rule]) -> list[Row]:
    cells = [_cells(decision) for decision in decisions]
    there = {rule_id for column in cells for rule_id in column}
    texts = {rule.id: (rule.rule, _LEVELS[rule.level]) for rule in rules}
    texts |= {rule_id: (text, "must") for rule_id, text in INVARIANTS.items()}
    order = {rule_id: place for place, rule_id in enumerate(texts)}
    nothing = Cell(State.NOT_RUN, [], [])
    return [
        Row(rule_id, *texts.get(rule_id, ("this catalogue does not know it", "")),
            [column.get(rule_id, nothing) for column in cells])
        for rule_id in sorted(there, key=lambda rule_id: (order.get(rule_id, len(order)), rule_id))
    ]  # fmt: skip


def _cells(decision: Decision) -> dict[str, Cell]:
    """Return one run's cells by rule."""
    order = list(State)
    stood: dict[str, list[Stood]] = defaultdict(list)
    missing: dict[str, list[str]] = defaultdict(list)
    for each in sorted(decision.stood, key=lambda each: order.index(state_of(each))):
        stood[rule_of(each.result.case)].append(each)
    for name in decision.missing:
        missing[rule_of(name)].append(name)
    found = {}
    for rule_id in {*stood, *missing}:
        states = [*map(state_of, stood[rule_id]), *(State.NOT_RUN for _ in missing[rule_id])]
        found[rule_id] = Cell(min(states, key=order.index), stood[rule_id], missing[rule_id])
    return found


def _uncovered(rules: Sequence[Rule], tried: set[str], cased: set[str]) -> list[Uncovered]:
    return [Uncovered(rule.id, rule.rule, _why(rule, cased)) for rule in rules if rule.id not in tried]


def _why(rule: Rule, cased: set[str]) -> str:
    """Say why a rule has no result."""
    if rule.id in cased:
        return "it has cases, and none of them is in these results"
    if rule.untested:
        return rule.untested
    if Face.IN_PROCESS in rule.faces:
        plane = rule.group == "IDEM"
        return "a connector has no control plane" if plane else "no in-process case speaks of it yet"
    if Face.BLACK_BOX in rule.faces:
        return "in process it cannot be seen: it shows on real servers, to black-box cases"
    return "the reference implementation's own: its tests hold it"


def _by_family(items: Iterable[T], rule_id: Callable[[T], str]) -> list[tuple[str, list[T]]]:
    """Return items, which are in the catalogue's order, under the title of their family."""
    return [(title, list(group)) for title, group in groupby(items, lambda item: _family(rule_id(item)))]


def _family(rule_id: str) -> str:
    if rule_id in INVARIANTS:
        return "Invariants"
    parts = rule_id.split("-")
    return FAMILIES.get(parts[1], parts[1]) if len(parts) > 2 else OTHERS

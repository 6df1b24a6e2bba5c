"""What a run and the process of its subject say to each other, a JSON line each."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from harness.conformance.naming import SubjectName
from harness.conformance.search.found import Figures, Found, History
from harness.conformance.timeline import Entry
from harness.conformance.watch import Breach
from harness.verdicts import Verdict


class Make(msgspec.Struct, frozen=True, kw_only=True, tag="make"):
    """Make the subject."""

    subject: SubjectName


class Try(msgspec.Struct, frozen=True, kw_only=True, tag="try"):
    """Run one case; with `twin`, on a subject that has this defect."""

    case: str
    seed: int
    twin: str = ""


class Search(msgspec.Struct, frozen=True, kw_only=True, tag="search"):
    """Search generated histories for so long; answers with `Searching` now and then, and `Searched` in the end."""

    seed: int
    seconds: float
    current: str
    """A file into which each history is written before it is run: one that ends the process can be told then."""
    twin: str = ""


class Replay(msgspec.Struct, frozen=True, kw_only=True, tag="replay"):
    """Run one generated history, to its end or until it breaks a rule in one way; answers with `Tried`."""

    history: History
    rule: str = ""
    where: str = ""
    twin: str = ""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The subject is there."""

    subject: str
    versions: dict[str, str]
    capabilities: list[str]


class Unfit(msgspec.Struct, frozen=True, kw_only=True, tag="unfit"):
    """There is no such subject; why, and what to do, in one line."""

    problem: str


class Tried(msgspec.Struct, frozen=True, kw_only=True, tag="tried"):
    """What came of a case."""

    verdict: Verdict
    found: str
    note: str = ""
    breaches: list[Breach] = []
    timeline: list[Entry] = []


class Searching(msgspec.Struct, frozen=True, kw_only=True, tag="searching"):
    """How far a search is."""

    figures: Figures
    found: list[Found]


class Searched(msgspec.Struct, frozen=True, kw_only=True, tag="searched"):
    """What came of a search. `problem`: why it could not be made, "" if it could."""

    figures: Figures
    found: list[Found]
    problem: str = ""


Order: TypeAlias = Make | Try | Search | Replay
Reply: TypeAlias = Ready | Unfit | Tried | Searching | Searched

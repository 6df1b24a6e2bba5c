"""What a run and the process of its subject say to each other, a JSON line each."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from harness.conformance.naming import SubjectName
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


Order: TypeAlias = Make | Try
Reply: TypeAlias = Ready | Unfit | Tried

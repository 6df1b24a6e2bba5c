"""What stands at the head of a page about a run, or about several: the verdict, and what was run."""

from __future__ import annotations

import msgspec

from harness.verdicts import Verdict


class RunHead(msgspec.Struct, frozen=True, kw_only=True):
    """What every page tells."""

    verdict: Verdict
    lead: str
    reasons: list[str]
    emulated: list[str]
    compute_emulated: bool
    profile: str
    time_scale: str
    seed: int
    started: str
    version: str
    sources: list[str]


class Heading(RunHead, frozen=True, kw_only=True):
    """The same, of a page with a title of its own and a list of its sections."""

    title: str
    about: str
    sections: list[tuple[str, str]]

"""Every fixed case by name."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

from harness.conformance.case import Case
from harness.conformance.cases import heartbeats, leases, release, transfer, turns

CASES: Final[dict[str, Case]] = {
    case.name: case for chapter in (leases, heartbeats, release, transfer, turns) for case in chapter.CASES
}


def chosen(patterns: tuple[str, ...]) -> list[Case]:
    """Return the cases that fit a pattern, all if there are none: a name, a rule's id, or a shell pattern."""
    return [c for c in CASES.values() if not patterns or any(fnmatchcase(c.name, p) or c.rule == p for p in patterns)]

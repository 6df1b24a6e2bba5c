"""Every case by name, chapter by chapter."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

from harness.cases import clocks, crashes, leases, release, transfer
from harness.cases.case import Case

CASES: Final[dict[str, Case]] = {
    case.name: case for chapter in (release, leases, transfer, crashes, clocks) for case in chapter.CASES
}


def chosen(patterns: tuple[str, ...]) -> list[Case]:
    """Return the cases whose names fit any of the patterns (all, if there are none).

    A pattern is a name, the beginning of one up to an underscore, or a shell pattern.
    """
    return [case for case in CASES.values() if not patterns or any(_fits(case.name, p) for p in patterns)]


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}_")

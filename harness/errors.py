"""Errors that end a command with one clear line, and the exit code of each.

Exit codes of `pdproof`: 0 pass · 1 fail · 2 wrong usage · 3 inconclusive · 4 the harness's own error · 5 bad or
missing input file · 6 a process did not start · 7 a resource of the machine (port, disk, memory) · 130 interrupted.
"""

from __future__ import annotations

from pathlib import Path


class PdproofError(Exception):
    """Base of all errors that are shown as one line: what, where, what to do."""

    exit_code = 4


class BadRunFolder(PdproofError):
    """A run folder is missing, malformed or in the way."""

    exit_code = 5

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"run folder {path}: {problem}")


class BadInput(PdproofError):
    """A file or value that the user gave cannot be used."""

    exit_code = 5


class StartFailed(PdproofError):
    """A process of the deployment did not come up."""

    exit_code = 6


class MachineLimit(PdproofError):
    """A port is taken, a disk is full, memory is short."""

    exit_code = 7

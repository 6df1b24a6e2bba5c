"""A failure as a file: what was run on which subject, and what it broke. `pdproof replay FILE` runs it again."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

import msgspec

from harness.conformance.exits import Exit
from harness.conformance.naming import SubjectName
from harness.conformance.orders import Order, Replay, Try
from harness.conformance.search.found import History
from harness.errors import BadInput, MachineLimit

FORMAT: Final = "pdproof-replay-1"
FILE_MAX: Final = 1 << 20


class BadReplay(BadInput):
    """A file is not one that a run wrote."""

    exit_code = Exit.BAD_DATA

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


class FixedCase(msgspec.Struct, frozen=True, kw_only=True, tag="case", forbid_unknown_fields=True):
    """A fixed case, or one of its twins."""

    name: str
    seed: int
    twin: str = ""


class Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replay file."""

    format: str = FORMAT
    subject: SubjectName
    versions: dict[str, str] = {}
    """Of what it was found in."""
    run: History | FixedCase
    twin: str = ""
    """The defect that the subject had, of a generated history."""
    rule: str = ""
    """What was broken; "": a case's own expectations."""
    where: str = ""
    found: str = ""

    def order(self) -> Order:
        """Return what to ask of the subject's process."""
        if isinstance(self.run, FixedCase):
            return Try(case=self.run.name, seed=self.run.seed, twin=self.run.twin)
        return Replay(history=self.run, twin=self.twin, rule=self.rule, where=self.where)


class _Beginning(msgspec.Struct):
    """What a file of every format has."""

    format: str = ""


_FILES: Final[msgspec.json.Decoder[Recorded]] = msgspec.json.Decoder(Recorded)
_BEGINNINGS: Final[msgspec.json.Decoder[_Beginning]] = msgspec.json.Decoder(_Beginning)


def save(recorded: Recorded, path: Path) -> None:
    """Write a file that nobody else may read. Raises MachineLimit if it cannot be written, or is there already."""
    data = msgspec.json.format(msgspec.json.encode(recorded), indent=2) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
    except OSError as error:
        raise MachineLimit(f"{path}: cannot be written ({error.strerror}); give another place") from error


def load(path: Path) -> Recorded:
    """Return what a file holds. Raises BadReplay."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise BadReplay(path, "is no file; give one that a run wrote below replays/")
        with path.open("rb") as file:
            data = file.read(FILE_MAX + 1)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)
        raise BadReplay(path, f"{reason}; give one that a run wrote below replays/") from error
    if len(data) > FILE_MAX:
        raise BadReplay(path, f"is larger than {FILE_MAX >> 20} MiB; no run writes so much")
    try:
        beginning = _BEGINNINGS.decode(data)
        if beginning.format != FORMAT:
            raise BadReplay(path, f"format {beginning.format!r} is unknown, this pdproof reads {FORMAT!r}")
        recorded = _FILES.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadReplay(path, f"is no replay file: {error}") from error
    problem = _unknown(recorded)
    if problem:
        raise BadReplay(path, problem)
    return recorded


def _unknown(recorded: Recorded) -> str:
    """Return what a file names that there is not."""
    from harness.conformance.defects import DEFECTS
    from harness.conformance.registry import CASES

    run = recorded.run
    twin = run.twin if isinstance(run, FixedCase) else recorded.twin
    if isinstance(run, FixedCase) and run.name not in CASES:
        return f"names the case {run.name!r}, which this pdproof does not have"
    return f"names the twin {twin!r}, which this pdproof does not have" if twin and twin not in DEFECTS else ""

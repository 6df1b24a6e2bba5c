"""The results of a run as a stream of JSON lines: written while it runs, and read back by somebody who distrusts it.

A header, a line a case as soon as it has its verdict, a footer. A run that was killed leaves whole lines and no footer:
that can be shown, and never counts as conformant. Everything else that is not as it was written is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from harness.conformance.exits import Exit
from harness.conformance.results import FORMAT, CaseResult, Footer, Header, Line
from harness.conformance.timeline import Entry
from harness.errors import MachineLimit, PdproofError
from harness.verdicts import Verdict

FILE_MAX: Final = 256 * 2**20
LINE_MAX: Final = 8 * 2**20
FOOTER_MAX: Final = 1_024
AGAIN: Final = "take the file that the run wrote, or run it again"
_INT64: Final = range(-(2**63), 2**63)


class BadResults(PdproofError):
    """A file is not, or no longer, what a run wrote. `line` is 0 where it is no line's fault."""

    exit_code = Exit.BAD_DATA

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")


@dataclass(frozen=True)
class ConformanceRun:
    """What a run said."""

    header: Header
    results: list[CaseResult]
    complete: bool
    """Whether it came to its end, and said so."""
    source: str = ""
    """The file that it was read from."""

    @property
    def unexercised(self) -> list[str]:
        """What the subject claims, and no case used that came to a verdict."""
        judged = [r for r in self.results if r.verdict in (Verdict.PASS, Verdict.FAIL)]
        used = {need for result in judged for need in result.needs}
        return [claim for claim in self.header.capabilities if claim not in used]


class ResultWriter:
    """Writes a stream, its header at once; left without `finish`, as by an error, the stream has no footer.

    Raises BadResults if the file is there already, MachineLimit if it cannot be written.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self._cases = frozenset(header.cases)
        self._written: set[tuple[str, str]] = set()
        self._bytes = 0
        if path.exists() or path.is_symlink():
            raise BadResults(path, 0, "exists already; choose another name or remove it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unwritable(error) from error
        self._write(_encoded(header))

    def add(self, result: CaseResult) -> None:
        """Write a result. A history too long for the reader loses its beginning, and says so."""
        if result.case not in self._cases:
            raise ValueError(f"{result.case} was not announced in the header")
        if (result.case, result.twin) in self._written:
            raise ValueError(f"{result.case} {result.twin} has its result already")
        self._written.add((result.case, result.twin))
        left = max(1, len(self._cases) - len({case for case, _ in self._written}))
        room = min(LINE_MAX, (FILE_MAX - FOOTER_MAX - self._bytes) // (left + 1))
        line = _encoded(result)
        while len(line) > room and len(result.timeline) > 1:
            result = _shortened(result)
            line = _encoded(result)
        if len(line) > room:
            raise ValueError(f"the result of {result.case} takes {len(line)} bytes, and there is room for {room}")
        self._write(line)

    def finish(self, ended_wall_ns: int) -> None:
        """Write the footer: all that was to be run was run."""
        self._write(_encoded(Footer(results=len(self._written), ended_wall_ns=ended_wall_ns)))
        self.close()

    def close(self) -> None:
        """Close the file. Harmless when it is closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, line: bytes) -> None:
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            raise self._unwritable(error) from error
        self._bytes += len(line)

    def _unwritable(self, error: OSError) -> MachineLimit:
        return MachineLimit(f"{self.path}: cannot be written ({error.strerror}); give another place")

    def __enter__(self) -> ResultWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_results(path: Path) -> ConformanceRun:
    """Return what a file holds. Raises BadResults, of the first line that cannot be."""
    header: Header | None = None
    announced: frozenset[str] = frozenset()
    footer: Footer | None = None
    results: dict[tuple[str, str], CaseResult] = {}
    for number, text in _lines(path):
        if header is None:
            header = _header(path, text)
            announced = frozenset(header.cases)
            continue
        if footer is not None:
            raise BadResults(path, number, f"something follows the footer; {AGAIN}")
        line = _decoded(path, number, text)
        if isinstance(line, Header):
            raise BadResults(path, number, "a second header; give each run's file by itself")
        if isinstance(line, Footer):
            footer = line
            if footer.results != len(results):
                problem = f"the footer promises {footer.results} results, {len(results)} stand above it"
                raise BadResults(path, number, f"{problem}; {AGAIN}")
            continue
        if line.case not in announced or (line.twin and not header.twins):
            what = f"twin {line.twin!r} of {line.case!r}" if line.twin else f"case {line.case!r}"
            raise BadResults(path, number, f"{what}: the header does not announce it; {AGAIN}")
        if (line.case, line.twin) in results:
            what = f"{line.case!r}, twin {line.twin!r}," if line.twin else repr(line.case)
            raise BadResults(path, number, f"a second result of {what} in one run; {AGAIN}")
        results[line.case, line.twin] = line
    if header is None:
        raise BadResults(path, 0, f"is empty; {AGAIN}")
    return ConformanceRun(header, list(results.values()), footer is not None, str(path))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its number; none longer than a reader can bear."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise BadResults(path, 0, "is no file; give the file that a conformance run wrote")
        read = 0
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_MAX + 1), b""), 1):
                read += len(line)
                if read > FILE_MAX:
                    raise BadResults(
                        path, number, f"the file is larger than {FILE_MAX // 2**20} MiB; no run writes so much"
                    )
                if len(line) > LINE_MAX:
                    raise BadResults(
                        path, number, f"the line is longer than {LINE_MAX // 2**20} MiB; no run writes so much"
                    )
                if not line.endswith(b"\n"):
                    raise BadResults(path, number, f"the line is cut off in the middle; {AGAIN}")
                yield number, line
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)
        raise BadResults(path, 0, f"{reason}; give the file that a conformance run wrote") from error


class _Beginning(msgspec.Struct):
    """What a header of every format has."""

    type: str
    format: str = ""


_BEGINNINGS: Final[msgspec.json.Decoder[_Beginning]] = msgspec.json.Decoder(_Beginning)
_LINES: Final[msgspec.json.Decoder[Header | CaseResult | Footer]] = msgspec.json.Decoder(Header | CaseResult | Footer)


def _header(path: Path, text: bytes) -> Header:
    """Return the header. What it is of is looked at before the rest, which another format may have otherwise."""
    try:
        beginning = _BEGINNINGS.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadResults(path, 1, "is no header of results; give the file that a conformance run wrote") from error
    if beginning.type != "header":
        raise BadResults(path, 1, f"the header is missing; {AGAIN}")
    if beginning.format != FORMAT:
        problem = f"format {beginning.format!r} is unknown, this pdproof reads {FORMAT!r}"
        raise BadResults(path, 1, f"{problem}; use the pdproof that wrote it")
    header = _decoded(path, 1, text)
    assert isinstance(header, Header)
    if len(set(header.cases)) < len(header.cases):
        raise BadResults(path, 1, f"the header announces a case twice; {AGAIN}")
    return header


def _decoded(path: Path, number: int, text: bytes) -> Line:
    try:
        return _LINES.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadResults(path, number, f"cannot be read: {error}; {AGAIN}") from error


def _shortened(result: CaseResult) -> CaseResult:
    """Return a result with the later half of its history."""
    kept = result.timeline[-(len(result.timeline) // 2) :]
    cut = Entry(t_ns=kept[0].t_ns, who="results", what="cut", subject="the beginning is left out: it was too long")
    return msgspec.structs.replace(result, timeline=[cut, *kept[1:]])


def _encoded(line: Line) -> bytes:
    """Return a line. A subject's words may hold what JSON cannot: they are spelt out, and not the run's end."""
    try:
        return msgspec.json.encode(line) + b"\n"
    except (UnicodeEncodeError, OverflowError):
        return msgspec.json.encode(_plain(msgspec.to_builtins(line))) + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not isinstance(value, bool) and value not in _INT64:
        return str(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value

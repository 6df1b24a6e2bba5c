"""What a case's drive wrote down, in `steps.jsonl` of its run folder: the only thing that its judge sees besides.

One JSON line a step; the last says how many there are, so that a file cut short is noticed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from harness.errors import BadRunFolder
from reference_impl.rules.events import Scalar

FILE: Final = "steps.jsonl"


class Mark(msgspec.Struct, frozen=True, kw_only=True, tag="mark"):
    """A moment with a name."""

    t_ns: int
    name: str
    detail: dict[str, Scalar] = {}


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """One HTTP request to one server. Its answer's tokens are in `requests.parquet`, under the same id."""

    request_id: str
    label: str
    worker: str
    leg: str
    """"prefill", "decode", "plain" (no KV is to move) or "poke" (a token asked of a server so that it tells news)."""
    sent_ns: int
    first_ns: int = 0
    """When the first token came; 0: never."""
    end_ns: int
    input_tokens: int
    max_tokens: int
    output_tokens: int = 0
    status: int = 0
    outcome: str
    """As in the rows: ok, fail, unknown (broken off by the client, or out of time)."""
    error: str = ""
    """What the server said of its refusal, shortened; or what broke."""
    cached_tokens: int | None = None
    given: dict[str, Any] | None = None
    """The `kv_transfer_params` that were sent, and those that came back."""
    returned: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """Whether a whole answer came."""
        return self.outcome == "ok"

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.sent_ns) / 1e9


class Look(msgspec.Struct, frozen=True, kw_only=True, tag="look"):
    """A server's metrics at a moment, labels summed up. `{}`: it gave none."""

    t_ns: int
    name: str
    worker: str
    poked: bool
    """Whether the server was asked for a token just before, so that what it shows is new."""
    values: dict[str, float]


class Line(msgspec.Struct, frozen=True, kw_only=True, tag="line"):
    """A line of a server's log, with the moment at which it was seen there."""

    t_ns: int
    worker: str
    file: str
    text: str


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The last line. `hindered`: why the drive could not do what it was to do; "": it could."""

    steps: int
    hindered: str = ""


Step: TypeAlias = Mark | Call | Look | Line
_DECODER: Final[msgspec.json.Decoder[Mark | Call | Look | Line | End]] = msgspec.json.Decoder(
    Mark | Call | Look | Line | End
)


class StepLog:
    """Appends steps to a run folder's file, one write a line."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._count = 0

    def add(self, step: Step) -> None:
        """Write a step down."""
        os.write(self._fd, msgspec.json.encode(step) + b"\n")
        self._count += 1

    def close(self, hindered: str = "") -> None:
        """Write the last line, and close the file."""
        os.write(self._fd, msgspec.json.encode(End(steps=self._count, hindered=hindered)) + b"\n")
        os.close(self._fd)


def read_steps(folder: Path) -> tuple[list[Step], End]:
    """Return a run folder's steps and their end. Raises BadRunFolder if the file is missing or cut short."""
    path = folder / FILE
    steps: list[Step] = []
    end: End | None = None
    try:
        for line in path.read_bytes().splitlines():
            step = _DECODER.decode(line)
            if isinstance(step, End):
                end = step
            else:
                steps.append(step)
    except (OSError, msgspec.DecodeError) as error:
        raise BadRunFolder(folder, f"{FILE}: {error}") from error
    if end is None or end.steps != len(steps):
        raise BadRunFolder(folder, f"{FILE} was cut short: {len(steps)} steps, and {end} at the end")
    return steps, end

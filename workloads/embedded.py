"""The reference deployment as a child process, for a load that was given no host."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from typing import Final

import msgspec

from reference_impl.realclock import now_ns

START_DEADLINE_S: Final = 60.0
STOP_DEADLINE_S: Final = 10.0
ANNOUNCEMENT_BYTES_MAX: Final = 65536
COMMAND: Final = [
    sys.executable, "-m", "reference_impl.deployment", "--workers", "2", "--shadow", "--announce", "--end-with-stdin",
]  # fmt: skip


class EmbeddedFailed(RuntimeError):
    """The deployment did not come up."""


class Announcement(msgspec.Struct, frozen=True):
    """The one line that a deployment writes to its standard output once it serves."""

    url: str
    model: str


class Embedded:
    """A running deployment. `stop` ends it; its standard input ends when this process dies, however it dies."""

    def __init__(self, process: subprocess.Popen[bytes], announcement: Announcement) -> None:
        self._process = process
        self.url = announcement.url
        self.model = announcement.model

    def stop(self) -> None:
        """End the deployment: SIGTERM, and SIGKILL if it does not heed it."""
        _end(self._process)


def start(deadline_s: float = START_DEADLINE_S, command: list[str] = COMMAND) -> Embedded:
    """Start the deployment and wait until it serves. Raises `EmbeddedFailed`; nothing is left running then."""
    # A session of its own: Ctrl-C at the terminal must reach it through `stop`, after the last row was written.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        line = _first_line(process, now_ns() + round(deadline_s * 1e9))
        return Embedded(process, msgspec.json.decode(line, type=Announcement))
    except TimeoutError:
        problem = f"it announced nothing within {deadline_s:g} s"
    except EOFError:
        problem = f"it ended with exit code {process.wait(STOP_DEADLINE_S)} before it served"
    except msgspec.DecodeError as error:
        problem = f"its announcement is malformed: {error}"
    except BaseException:
        _end(process)
        raise
    _end(process)
    raise EmbeddedFailed(f"the embedded deployment did not start: {problem}; its messages are above")


def _first_line(process: subprocess.Popen[bytes], deadline_ns: int) -> bytes:
    if process.stdout is None:
        raise EOFError
    descriptor = process.stdout.fileno()
    line = b""
    while not line.endswith(b"\n"):
        left_s = (deadline_ns - now_ns()) / 1e9
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            raise TimeoutError
        piece = os.read(descriptor, ANNOUNCEMENT_BYTES_MAX)
        if not piece:
            raise EOFError
        line += piece
        if len(line) > ANNOUNCEMENT_BYTES_MAX:
            raise msgspec.DecodeError("it is longer than a line should be")
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    for signal in (process.terminate, process.kill):
        signal()
        try:
            process.wait(STOP_DEADLINE_S)
            break
        except subprocess.TimeoutExpired:
            continue
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()

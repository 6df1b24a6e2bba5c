"""The process of a subject, seen from the run: started when it is needed, ended when it hangs, and started anew."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from harness.conformance.naming import BadSubject, SubjectName
from harness.conformance.orders import Make, Order, Ready, Reply, Searched, Searching, Tried, Unfit
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S, s_to_ns

START_LIMIT_S: Final = 180.0
"""vLLM is imported in ten seconds on a quiet machine."""
END_LIMIT_S: Final = 5.0
_READ_BYTES: Final = 1 << 16
_REPLY_BYTES_MAX: Final = 64 << 20
_DECODER: Final[msgspec.json.Decoder[Ready | Unfit | Tried | Searching | Searched]] = msgspec.json.Decoder(
    Ready | Unfit | Tried | Searching | Searched
)


class SubjectLost(Exception):
    """The subject's process has ended, or does not answer; the message says which."""


class SubjectProcess:
    """See above. `log` gets what the subject prints. Use `close` in any case."""

    def __init__(self, name: SubjectName, python: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._name, self._python, self._log = name, python, log
        self._environment = dict(os.environ) | dict(environment or {})
        self._child: subprocess.Popen[bytes] | None = None
        self._replies_fd = -1
        self._kept = b""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> Ready:
        """Start it, and have it make the subject. Raises BadSubject."""
        self.close()
        # A folder of its own: vLLM finds no plugins where the sources of this package lie.
        self._folder = tempfile.TemporaryDirectory(prefix="pdproof-subject-")
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                [self._python, "-m", "harness.conformance.child", str(write_fd), str(os.getpid())],
                stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[write_fd], cwd=self._folder.name,
                env=self._environment | {"PYTHONPATH": os.pathsep.join(_paths(self._environment))},
                start_new_session=True,
            )  # fmt: skip
        os.close(write_fd)
        self._replies_fd, self._kept = read_fd, b""
        try:
            reply = self.ask(Make(subject=self._name), START_LIMIT_S)
        except SubjectLost as lost:
            raise BadSubject(f"the subject could not be made: {lost}; see {self._log}") from lost
        if isinstance(reply, Ready):
            return reply
        problem = reply.problem if isinstance(reply, Unfit) else "it answers nonsense"
        self.close()
        raise BadSubject(f"the subject could not be made: {problem}; see {self._log}")

    @property
    def alive(self) -> bool:
        """Whether it is there."""
        return self._child is not None and self._child.poll() is None

    def ask(self, order: Order, limit_s: float) -> Reply:
        """Send an order and return the answer. Raises SubjectLost; the process is ended then."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        try:
            child.stdin.write(msgspec.json.encode(order) + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            raise SubjectLost(self._how_it_ended()) from None
        return self.more(limit_s)

    def more(self, limit_s: float) -> Reply:
        """Return the next answer to an order that has several. Raises SubjectLost; the process is ended then."""
        try:
            return _DECODER.decode(self._line(limit_s))
        except msgspec.DecodeError as error:
            self.close()
            raise SubjectLost(f"its process answers nonsense: {error}") from error

    def _line(self, limit_s: float) -> bytes:
        until_ns = now_ns() + s_to_ns(limit_s)
        while b"\n" not in self._kept:
            left_s = (until_ns - now_ns()) / NS_PER_S
            if left_s <= 0:
                self.close()
                raise SubjectLost(f"it did not come to an end within {limit_s:g} s")
            ready, _, _ = select.select([self._replies_fd], [], [], left_s)
            if not ready:
                continue
            data = os.read(self._replies_fd, _READ_BYTES)
            self._kept += data
            if not data or len(self._kept) > _REPLY_BYTES_MAX:
                raise SubjectLost(self._how_it_ended())
        line, _, self._kept = self._kept.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        child = self._child
        assert child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(END_LIMIT_S)
            self.close()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return f"its process ended {how}"
        self.close()
        return "its process closed its answers"

    def close(self) -> None:
        """End it, and whatever it has started."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if child.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.close()
        if self._replies_fd >= 0:
            os.close(self._replies_fd)
            self._replies_fd = -1
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _paths(environment: Mapping[str, str]) -> list[str]:
    """Return where a subject's modules are looked for: in the folder that the run was started in, too."""
    given = environment.get("PYTHONPATH", "")
    return [str(Path.cwd()), *(str(Path(path).absolute()) for path in given.split(os.pathsep) if path)]

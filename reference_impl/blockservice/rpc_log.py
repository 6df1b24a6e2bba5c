"""One JSON line a call, with the RPC document's fields (KVC-IDEM-018): what tells a retry from a first call.

A thread writes, so that a slow disk slows no call; what it cannot keep up with is dropped and counted, for a log must
not grow in memory either. Nothing but these fields is written, so no credential and no transfer token can be.
"""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import Final

import msgspec

FIELD_CHARS_MAX: Final = 128
LINES_MAX: Final = 4096
_CLOSE_S: Final = 5.0


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One call. Fields that do not apply to it are empty.

    `epoch` is the one that the caller has seen; `dst_node` the node that worked on the call, or a migration's target;
    `timeout_ms` what was left when it arrived; `error_code` gRPC's, or the rule by which a write was refused.
    """

    request_id: str = ""
    operation_id: str = ""
    block_group_id: str = ""
    src_node: str = ""
    dst_node: str = ""
    epoch: int | None = None
    rpc_method: str = ""
    timeout_ms: int | None = None
    retry_count: int = 0
    error_code: str = ""
    latency_ms: float = 0.0


class RpcLog:
    """Appends lines to `path` (mode 0600), in the name of `node`. With `path=None` they go nowhere."""

    def __init__(self, path: Path | None, node: str = "", *, lines_max: int = LINES_MAX) -> None:
        self.node = node
        self.dropped = 0
        """Lines for which there was no room, or which could not be written."""
        self._lines: queue.Queue[Line | None] = queue.Queue(lines_max)
        self._thread: threading.Thread | None = None
        if path is not None:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.fchmod(fd, 0o600)
            self._thread = threading.Thread(target=self._write_all, args=(fd,), name="rpc-log", daemon=True)
            self._thread.start()

    def say(self, line: Line) -> None:
        """Have a line written. Never waits."""
        if self._thread is None:
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is left and close the file. Closing twice is harmless."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                self._lines.put(None, timeout=_CLOSE_S)
            except queue.Full:
                return  # its disk stands still; the thread is a daemon
            thread.join(_CLOSE_S)

    def _write_all(self, fd: int) -> None:
        while (line := self._lines.get()) is not None:
            try:
                os.write(fd, _encoded(line))  # one write a line: SIGKILL leaves no half of one
            except OSError:
                self.dropped += 1
        os.close(fd)


def _encoded(line: Line) -> bytes:
    fields = {
        name: _bounded(value) if isinstance(value := getattr(line, name), str) else value
        for name in line.__struct_fields__
    }
    return msgspec.json.encode({name: "" if value is None else value for name, value in fields.items()}) + b"\n"


def _bounded(text: str) -> str:
    """Return a text that takes one byte a character and no more than its share of a line."""
    return "".join(c if " " <= c <= "~" else "?" for c in text[:FIELD_CHARS_MAX])

"""Where the rows go: one `RequestRecord` a JSON line, in a file that only its owner may read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from workloads.rows import RequestRecord

MODE: Final = 0o600
"""Prompts and answers of a real deployment are nobody else's business."""


class RowFile:
    """Appends rows to `path`. Each is handed to the kernel when its request ends, so that a killed client loses none.

    Raises OSError, also from `write` (a full disk).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        os.fchmod(self._descriptor, MODE)
        self._encode = msgspec.json.Encoder().encode

    def write(self, record: RequestRecord) -> None:
        """Append one row."""
        line = memoryview(self._encode(record) + b"\n")
        while line:
            line = line[os.write(self._descriptor, line) :]

    def close(self) -> None:
        """Close the file; it is complete."""
        os.close(self._descriptor)

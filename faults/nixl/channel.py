"""The folder through which a harness gives orders and agents report: `orders.json`, and `reports-PID.jsonl` each.

It is private (0700), named by the environment, and needs no process of its own: an engine may die at any time and
leaves what it had said. Orders are replaced whole, by a rename; a report is one line and one `write`.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from faults.nixl.orders import Order, Report

FOLDER_VARIABLE: Final = "PDPROOF_FAULTS_DIR"
NAME_VARIABLE: Final = "PDPROOF_FAULTS_NAME"
"""What an engine is called in reports; optional."""
_ORDERS: Final = "orders.json"
_REPORTS: Final = "reports-*.jsonl"
_NO_FILE: Final = (0, 0)
_UNSEEN: Final = (0, 1)
Mark = tuple[int, int]
"""Tells one version of the orders from another."""


class BadFolder(Exception):
    """The folder is not private, or not there."""


class BadOrders(Exception):
    """The orders are none."""


def made(folder: Path) -> Path:
    """Make the folder, for this user alone, and return it."""
    folder.mkdir(mode=0o700)
    return folder


def checked(folder: Path) -> Path:
    """Return `folder`, if it belongs to this user and to nobody else. Raises BadFolder."""
    try:
        found = folder.lstat()
    except OSError as error:
        raise BadFolder(f"{folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise BadFolder(f"{folder} is no folder")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise BadFolder(f"{folder} must be this user's alone (0700), is {stat.S_IMODE(found.st_mode):04o}")
    return folder


class Orders:
    """The orders as an agent reads them."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _ORDERS
        self._mark: Mark | None = None

    def changed(self) -> list[Order] | None:
        """Return the orders if they are others than last time, else None. Raises BadOrders, once a version."""
        mark, problem = self._found()
        if mark == self._mark:
            return None
        self._mark = mark
        if problem:
            raise BadOrders(problem)
        if mark == _NO_FILE:
            return []
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[Order])
        except (OSError, msgspec.DecodeError, ValueError) as error:
            raise BadOrders(f"{self._path}: {error}") from error

    def _found(self) -> tuple[Mark, str]:
        """Return the mark of what is there, and what keeps it from being looked at."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return _NO_FILE, ""
        except OSError as error:
            return _UNSEEN, str(error)
        return (found.st_mtime_ns, found.st_ino), ""


class Reporter:
    """Appends reports of this process."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"reports-{os.getpid()}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def say(self, report: Report) -> None:
        """Write one report. A full disk must not end the engine: the line is lost then."""
        try:
            os.write(self._fd, msgspec.json.encode(report) + b"\n")
        except OSError:
            return

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Desk:
    """The harness's end. One a folder: it alone writes the orders. Raises BadFolder."""

    def __init__(self, folder: Path) -> None:
        self.folder = checked(folder)
        self._path = folder / _ORDERS
        self._offsets: dict[Path, int] = {}
        self._reports: list[Report] = []

    def orders(self) -> list[Order]:
        """Return the orders that stand. Raises BadOrders."""
        return Orders(self.folder).changed() or []

    def place(self, *orders: Order) -> None:
        """Add orders. Raises ValueError if the id of one stands already."""
        standing = self.orders()
        taken = {order.id for order in standing}
        for order in orders:
            if order.id in taken:
                raise ValueError(f"an order {order.id!r} stands already")
            taken.add(order.id)
        self._write([*standing, *orders])

    def remove(self, *ids: str) -> None:
        """Take orders back. Harmless if they do not stand."""
        standing = self.orders()
        left = [order for order in standing if order.id not in ids]
        if len(left) != len(standing):
            self._write(left)

    def reports(self) -> list[Report]:
        """Return all that agents have said so far, each process's in its order. Reads only what is new."""
        for path in sorted(self.folder.glob(_REPORTS)):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            self._reports += [msgspec.json.decode(line, type=Report) for line in whole.splitlines()]
        return list(self._reports)

    def _write(self, orders: list[Order]) -> None:
        descriptor, name = tempfile.mkstemp(prefix="orders-", suffix=".tmp", dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(orders))
            Path(name).replace(self._path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

"""The services' RPC logs, read as an on-call engineer would: one line a call, with the RPC document's fields."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from harness.errors import BadRunFolder
from harness.run_folder import RunFolder

PATTERN: Final = "*-rpc.jsonl"
LINES_MAX: Final = 200_000
"""Of all logs together."""
FIELDS: Final = (
    "request_id", "operation_id", "block_group_id", "src_node", "dst_node", "epoch", "rpc_method", "timeout_ms",
    "retry_count", "error_code", "latency_ms",
)  # fmt: skip
"""That the RPC document asks for."""
WRITES: Final = frozenset({"Reserve", "Pin", "Unpin", "Evict", "PrepareGet", "StartMigrate", "CancelMigrate"})
NAMED: Final = ("request_id", "operation_id", "block_group_id", "epoch")
"""What the document wants every line of a write to say."""
CLIENTS: Final = "clients"


class RpcLine(msgspec.Struct, frozen=True):
    """One line: the file's owner, its place there, its text, and the document's fields in it."""

    owner: str
    number: int
    text: str
    fields: dict[str, str | int | float | None]

    def of(self, name: str) -> str:
        """Return a field as text; "" where it is not there or empty."""
        value = self.fields.get(name)
        return "" if value is None else str(value)

    @property
    def is_write(self) -> bool:
        """Whether it is of a call that may change something."""
        return self.of("rpc_method") in WRITES


class RpcLog(msgspec.Struct, frozen=True, kw_only=True):
    """What the logs hold, in figures."""

    files: int
    lines: int
    unreadable: int
    writes: int
    whole: int
    """Lines that have every field of the document (which may be empty)."""
    named: int
    """Lines of writes with request id, operation id, block group and epoch."""
    retries: int
    """Lines of calls that said that they were not the first attempt."""
    timed: int
    """Lines with what was left when the call arrived."""
    served_untimed: int
    """Lines without, of calls that were answered."""
    timeout_ms_min: int | None
    timeout_ms_max: int | None
    write_timeout_ms_max: int | None
    """Of writes alone."""
    matched: int
    """Attempts at services that stand beside a line of the client's own log of the same call."""
    over_upstream: int
    """Of them, those that had more time than their call."""


def rpc_lines(run: RunFolder) -> tuple[list[RpcLine], int]:
    """Return the lines of every log in the order of the files, and how many could not be read."""
    found: list[RpcLine] = []
    unreadable = 0
    for path in sorted((run.path / "logs").glob(PATTERN)):
        owner = path.name.removesuffix(PATTERN[1:])
        for number, text in enumerate(_texts(run, path), 1):
            if len(found) >= LINES_MAX:
                return found, unreadable
            fields = _fields(text)
            if fields is None:
                unreadable += 1
            else:
                found.append(RpcLine(owner, number, text, fields))
    return found, unreadable


def _texts(run: RunFolder, path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(errors="replace").split("\n") if line]
    except OSError as error:
        raise BadRunFolder(run.path, f"logs/{path.name}: {error}") from error


def _fields(text: str) -> dict[str, str | int | float | None] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, str | int | float | None])
    except msgspec.DecodeError:
        return None


def summarise_lines(run: RunFolder, lines: list[RpcLine], unreadable: int) -> RpcLog:
    """Return the figures of the logs."""
    services = [line for line in lines if line.owner != CLIENTS]
    writes = [line for line in services if line.is_write]
    given, of_writes = _timeouts_ms(services), _timeouts_ms(writes)
    matched, over = _against_upstream(lines)
    return RpcLog(
        files=len(list((run.path / "logs").glob(PATTERN))), lines=len(services), unreadable=unreadable,
        writes=len(writes), whole=sum(all(name in line.fields for name in FIELDS) for line in services),
        named=sum(all(line.of(name) for name in NAMED) for line in writes),
        retries=sum(line.of("retry_count") not in ("", "0") for line in services), timed=len(given),
        served_untimed=sum(not line.of("timeout_ms") and not line.of("error_code") for line in services),
        timeout_ms_min=min(given, default=None), timeout_ms_max=max(given, default=None),
        write_timeout_ms_max=max(of_writes, default=None), matched=matched, over_upstream=over,
    )  # fmt: skip


def _timeouts_ms(lines: list[RpcLine]) -> list[int]:
    return [int(line.of("timeout_ms")) for line in lines if line.of("timeout_ms").isdigit()]


def _against_upstream(lines: list[RpcLine]) -> tuple[int, int]:
    """Hold what attempts had left at the services against what their call had in all, by request id."""
    limits = {line.of("request_id"): int(line.of("timeout_ms")) for line in lines
              if line.owner == CLIENTS and line.of("request_id") and line.of("timeout_ms").isdigit()}  # fmt: skip
    held = [
        (int(line.of("timeout_ms")), limits[line.of("request_id")])
        for line in lines
        if line.owner != CLIENTS and line.of("request_id") in limits and line.of("timeout_ms").isdigit()
    ]
    return len(held), sum(left > limit for left, limit in held)

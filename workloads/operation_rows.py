"""The rows of a control plane's history: what clients asked and were told, what changed, what is kept, what is left.

A client appends one `Invocation` as a JSON line when it ends, however it ends, and one `Look` for a read that it was
answered. The other three are read from a node's store after the run: `EffectRow` is written there by the database
itself, beside the code that is to be judged.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar, get_type_hints

import msgspec

from reference_impl.blockservice.store import Store
from reference_impl.rules.blockgroups import Answer, Group

Row = TypeVar("Row", bound=msgspec.Struct)

OF_CLIENT: Final = "client"
"""The cause of an effect that a client's operation had."""
OF_ENGINE: Final = "engine"
OF_MIGRATION: Final = "migration"
DONE: Final = "DONE"
"""What is said of an operation whose answer is there."""
_DTYPES: Final[dict[object, str]] = {str: "string", int: "int64", float: "float64", bool: "bool"}


class Invocation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One logical write by one client, with all its retries inside. The same id may be invoked again, by anybody."""

    client: str
    tenant: str
    node: str
    """That was asked."""
    operation_id: str
    method: str
    """A request's tag in `reference_impl.rules.blockgroups`: reserve, pin, ..."""
    block_group_id: str
    epoch: int
    params: str
    """`reference_impl.rules.operations.canonical` of the request, as text."""
    start_ns: int
    """When the first attempt began and, below, when it had an answer or gave up: CLOCK_MONOTONIC of the host."""
    end_ns: int
    outcome: str
    """ok: applied, now or before. fail: it was refused, or no attempt can have had an effect. unknown: either."""
    replayed: bool = False
    """Whether the answer was given before, to another attempt or another invocation."""
    refusal: str = ""
    error_code: str = ""
    answer: str = ""
    """JSON of `reference_impl.rules.blockgroups.Answer`; "": none came."""
    attempts: int = 1
    timeouts: int = 0
    latency_ms: float = 0.0


class LookKind(enum.StrEnum):
    """What a read asks for."""

    OPERATION = "operation"
    """What became of an operation (GetOperation); it says `Told`."""
    METADATA = "metadata"
    """What is known of a group (GetMetadata); it says `Seen`."""
    MIGRATION = "migration"
    """How far a migration is (GetMigrateStatus); it says `reference_impl.rules.blockgroups.Migration`."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an operation, and its answer if it is done."""

    known: str
    """One of `reference_impl.blockservice.wire.Known`."""
    answer: Answer | None = None


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A group, and how many requests pin it."""

    group: Group
    pins: int


class Look(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One read by one client, with all its retries inside. It has no effect, and must tell what was so meanwhile."""

    client: str
    tenant: str
    node: str
    """That was asked."""
    kind: str
    """One of `LookKind`."""
    operation_id: str = ""
    """Asked for: of an operation, or of a migration."""
    block_group_id: str = ""
    start_ns: int
    """When the first attempt began and, below, when it had an answer or gave up: CLOCK_MONOTONIC of the host."""
    end_ns: int
    outcome: str
    """As an invocation's."""
    error_code: str = ""
    """NOT_FOUND: there is no such group or migration. Any other: nothing was said."""
    said: str = ""
    """JSON of what came, by the kind of the read; "": nothing did."""


class EffectRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One change of one row of a node's state, in the order in which the node made them (`seq`)."""

    node: str
    seq: int
    at_ns: int
    """When the statement ran, before its commit: CLOCK_MONOTONIC of the host."""
    tenant: str
    block_group_id: str
    operation_id: str
    cause: str
    """client, engine or migration."""
    kind: str
    """group, pin, transfer or migration."""
    key: str = ""
    """The request id of a pin, the token of a transfer, the operation id of a migration."""
    before: str = ""
    """The row as JSON; "": there was none."""
    after: str = ""
    """The row as JSON; "": there is none any more."""


class RecordRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a node keeps of one operation."""

    node: str
    tenant: str
    operation_id: str
    method: str
    params: str
    outcome: str
    answer: str
    """JSON of the answer that every retry gets."""
    issued_ms: int
    """Wall clock of the caller and, below, of the node."""
    done_ms: int


class FinalRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One group as a node knew it at the end: the fields of `Group`, and who pins it."""

    node: str
    tenant: str
    block_group_id: str
    state: str
    location: str
    epoch: int
    size_bytes: int = 0
    token_start: int = 0
    token_end: int = 0
    checksum: str = ""
    reserved: int = 0
    migration: str = ""
    pins: str = "[]"
    """Request ids, sorted, as a JSON list."""


class ControlRows(msgspec.Struct, frozen=True, kw_only=True):
    """A whole history. Lists are in no promised order."""

    invocations: list[Invocation] = []
    effects: list[EffectRow] = []
    records: list[RecordRow] = []
    groups: list[FinalRow] = []
    looks: list[Look] = []


def rows_of_store(node: str, store: Store) -> ControlRows:
    """Return what a node's store holds of a history: everything but what clients saw. Raises StoreError."""
    return ControlRows(
        effects=[EffectRow(node=node, **msgspec.structs.asdict(effect)) for effect in store.effects()],
        records=[RecordRow(node=node, **msgspec.structs.asdict(kept)) for kept in store.records()],
        groups=[
            FinalRow(
                node=node, tenant=standing.tenant, pins=msgspec.json.encode(standing.pins).decode(),
                **msgspec.structs.asdict(standing.group),
            )
            for standing in store.finals()
        ],
    )  # fmt: skip


def joined(parts: Iterable[ControlRows]) -> ControlRows:
    """Return one history of several parts: what clients saw, and what each node holds."""
    whole = ControlRows()
    for part in parts:
        whole.invocations.extend(part.invocations)
        whole.effects.extend(part.effects)
        whole.records.extend(part.records)
        whole.groups.extend(part.groups)
        whole.looks.extend(part.looks)
    return whole


def columns_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the columns of a table of such rows, with pandas' names of their types."""
    hints = get_type_hints(kind)
    return {name: _DTYPES[hints[name]] for name in kind.__struct_fields__}


def read_rows(path: Path, kind: type[Row]) -> Iterator[Row]:
    """Yield the rows of a file of JSON lines. A last line cut short by a crash is left out."""
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield decoder.decode(line)


def write_rows(path: Path, rows: Iterable[msgspec.Struct]) -> None:
    """Append rows to a file of JSON lines. Raises OSError (a full disk)."""
    encode = msgspec.json.Encoder().encode
    with path.open("ab") as out:
        out.writelines(encode(row) + b"\n" for row in rows)

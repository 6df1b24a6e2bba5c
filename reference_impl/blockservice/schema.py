"""The SQL of a node's store: its tables, the triggers that witness every change, and the statements.

**Tables.** `groups`, `pins`, `transfers` and `migrations` hold the state; `operations` what was answered; `arrivals`
which migrations this node was the target of; `node` is one row of what the node itself must not forget. Everything is
scoped by tenant first (KVC-IDEM-008).

**What is forgotten leaves a bound.** `node.purged_ms`: nothing issued up to then may run, for nobody knows whether it
has. A new file starts with the moment at which it was made: what was issued before may have run in a file that is gone.
`node.epoch_floor`: the highest epoch of the groups that were forgotten; one that is new here starts above.

**Effects are written by triggers**, not by the code that decides: whatever changes a row of the state leaves a row in
`effects`, in the same transaction, whoever changed it. A store that applied one operation twice would show two. Every
statement names who did it (`last_operation`, `last_cause`) in the row itself, before a delete too, since a trigger
takes no parameters. Rows that the cause `purge` deletes have had their effect long ago and leave none.

Source: KVC-IDEM-001 to -011.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

APPLICATION_ID: Final = 0x70644247
"""Which files are ours: "pdBG", in SQLite's header."""
SCHEMA: Final = 2
"""The version that this code writes and reads, in SQLite's `user_version`."""

_TABLES: Final = """
CREATE TABLE node (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    name TEXT NOT NULL,
    incarnation TEXT NOT NULL DEFAULT '',
    purged_ms INTEGER NOT NULL,
    epoch_floor INTEGER NOT NULL DEFAULT 0,
    reserved INTEGER NOT NULL DEFAULT 0 CHECK (reserved >= 0)
) STRICT;
CREATE TABLE groups (
    tenant TEXT NOT NULL, block_group_id TEXT NOT NULL, state TEXT NOT NULL, location TEXT NOT NULL,
    epoch INTEGER NOT NULL, size_bytes INTEGER NOT NULL, token_start INTEGER NOT NULL, token_end INTEGER NOT NULL,
    checksum TEXT NOT NULL, reserved INTEGER NOT NULL CHECK (reserved >= 0), migration TEXT NOT NULL,
    changed_ms INTEGER NOT NULL, last_operation TEXT NOT NULL, last_cause TEXT NOT NULL,
    PRIMARY KEY (tenant, block_group_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX groups_gone ON groups (changed_ms) WHERE state IN ('EVICTED', 'MOVED');
CREATE TABLE pins (
    tenant TEXT NOT NULL, block_group_id TEXT NOT NULL, request_id TEXT NOT NULL, state TEXT NOT NULL,
    at_ms INTEGER NOT NULL, last_operation TEXT NOT NULL, last_cause TEXT NOT NULL,
    PRIMARY KEY (tenant, block_group_id, request_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX pins_standing ON pins (tenant, block_group_id) WHERE state = 'PINNED';
CREATE INDEX pins_left ON pins (at_ms) WHERE state = 'UNPINNED';
CREATE TABLE transfers (
    transfer_token TEXT PRIMARY KEY NOT NULL, tenant TEXT NOT NULL, block_group_id TEXT NOT NULL,
    expires_ms INTEGER NOT NULL, ended INTEGER NOT NULL, last_operation TEXT NOT NULL, last_cause TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX transfers_standing ON transfers (tenant, block_group_id, expires_ms) WHERE ended = 0;
CREATE INDEX transfers_by_expiry ON transfers (expires_ms);
CREATE TABLE migrations (
    tenant TEXT NOT NULL, operation_id TEXT NOT NULL, block_group_id TEXT NOT NULL,
    src TEXT NOT NULL, dst TEXT NOT NULL, epoch INTEGER NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL,
    told INTEGER NOT NULL, at_ms INTEGER NOT NULL, last_operation TEXT NOT NULL, last_cause TEXT NOT NULL,
    PRIMARY KEY (tenant, operation_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX migrations_open ON migrations (tenant, operation_id) WHERE told = 0;
CREATE INDEX migrations_over ON migrations (at_ms) WHERE told = 1;
CREATE TABLE arrivals (
    tenant TEXT NOT NULL, operation_id TEXT NOT NULL, block_group_id TEXT NOT NULL,
    known_before TEXT NOT NULL, settled INTEGER NOT NULL, at_ms INTEGER NOT NULL,
    PRIMARY KEY (tenant, operation_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX arrivals_over ON arrivals (at_ms) WHERE settled = 1;
CREATE TABLE operations (
    tenant TEXT NOT NULL, operation_id TEXT NOT NULL, method TEXT NOT NULL, params BLOB NOT NULL,
    outcome TEXT NOT NULL, answer BLOB NOT NULL, issued_ms INTEGER NOT NULL, done_ms INTEGER NOT NULL,
    PRIMARY KEY (tenant, operation_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX operations_by_issue ON operations (issued_ms);
CREATE TABLE effects (
    seq INTEGER PRIMARY KEY, at_ns INTEGER NOT NULL, at_ms INTEGER NOT NULL, tenant TEXT NOT NULL,
    block_group_id TEXT NOT NULL, operation_id TEXT NOT NULL, cause TEXT NOT NULL, kind TEXT NOT NULL,
    key TEXT NOT NULL, before TEXT NOT NULL, after TEXT NOT NULL
) STRICT;
CREATE TRIGGER reserved_more AFTER INSERT ON groups WHEN NEW.reserved <> 0 BEGIN
    UPDATE node SET reserved = reserved + NEW.reserved;
END;
CREATE TRIGGER reserved_other AFTER UPDATE OF reserved ON groups WHEN NEW.reserved <> OLD.reserved BEGIN
    UPDATE node SET reserved = reserved + NEW.reserved - OLD.reserved;
END;
CREATE TRIGGER reserved_less AFTER DELETE ON groups WHEN OLD.reserved <> 0 BEGIN
    UPDATE node SET reserved = reserved - OLD.reserved;
END;
"""

GROUP: Final = (
    "block_group_id", "state", "location", "epoch", "size_bytes", "token_start", "token_end", "checksum", "reserved",
    "migration",
)  # fmt: skip
MIGRATION: Final = ("operation_id", "block_group_id", "src", "dst", "epoch", "status", "reason", "told")

_BOOLEANS: Final = frozenset({"told", "ended"})
_WITNESSED: Final[tuple[tuple[str, str, str, tuple[str, ...]], ...]] = (
    ("groups", "group", "", GROUP),
    ("pins", "pin", "request_id", ("request_id", "state")),
    ("transfers", "transfer", "transfer_token", ("transfer_token", "expires_ms", "ended")),
    ("migrations", "migration", "operation_id", MIGRATION),
)
"""Table, the kind of its effects, their key (a group needs none), and what is told of a row, as the rules name it."""


def _as_json(row: str, columns: Sequence[str]) -> str:
    """Return the SQL of a row as JSON, which the structs of the rules can be read from."""
    pairs = []
    for name in columns:
        value = f"{row}.{name}"
        pairs.append(f"'{name}', " + (f"json(iif({value}, 'true', 'false'))" if name in _BOOLEANS else value))
    return f"json_object({', '.join(pairs)})"


def _witness(table: str, kind: str, key: str, columns: Sequence[str]) -> str:
    """Return the three triggers that write a table's effects."""

    def trigger(event: str, row: str, condition: str, before: str, after: str) -> str:
        return f"""
CREATE TRIGGER {kind}_{event.lower()} AFTER {event} ON {table} {condition} BEGIN
    INSERT INTO effects (at_ns, at_ms, tenant, block_group_id, operation_id, cause, kind, key, before, after)
    VALUES (host_ns(), wall_ms(), {row}.tenant, {row}.block_group_id, {row}.last_operation, {row}.last_cause,
            '{kind}', {f"{row}.{key}" if key else "''"}, {before}, {after});
END;"""  # noqa: S608 - names of columns, from this file

    changed = " OR ".join(f"NEW.{name} <> OLD.{name}" for name in columns)
    return "".join((
        trigger("INSERT", "NEW", "", "''", _as_json("NEW", columns)),
        trigger("UPDATE", "NEW", f"WHEN {changed}", _as_json("OLD", columns), _as_json("NEW", columns)),
        trigger("DELETE", "OLD", "WHEN OLD.last_cause <> 'purge'", _as_json("OLD", columns), "''"),
    ))  # fmt: skip


CREATE: Final = _TABLES + "".join(_witness(*witnessed) for witnessed in _WITNESSED)
"""Everything that a new file gets, in one transaction."""

SELECT_RECORD: Final = "SELECT params, answer, issued_ms FROM operations WHERE tenant = ? AND operation_id = ?"
INSERT_RECORD: Final = "INSERT INTO operations VALUES (?, ?, ?, ?, ?, ?, ?, ?)"

_GROUP_COLUMNS: Final = ", ".join(GROUP)
_MIGRATION_COLUMNS: Final = ", ".join(MIGRATION)

SELECT_VIEW: Final = f"""
SELECT {", ".join(f"g.{name}" for name in GROUP)},
    (SELECT count(*) FROM pins p
     WHERE p.tenant = g.tenant AND p.block_group_id = g.block_group_id AND p.state = 'PINNED'),
    (SELECT state FROM pins p
     WHERE p.tenant = g.tenant AND p.block_group_id = g.block_group_id AND p.request_id = ?),
    (SELECT count(*) FROM transfers t
     WHERE t.tenant = g.tenant AND t.block_group_id = g.block_group_id AND t.ended = 0 AND t.expires_ms > ?),
    n.reserved, n.purged_ms
FROM node n LEFT JOIN groups g ON g.tenant = ? AND g.block_group_id = ?"""  # noqa: S608 - names of columns, from this file
"""Everything that a decision looks at, of one moment, always one row: request id, now in ms, tenant, group."""

SELECT_GROUP: Final = f"SELECT {_GROUP_COLUMNS} FROM groups WHERE tenant = ? AND block_group_id = ?"  # noqa: S608
SELECT_GROUPS: Final = f"""
SELECT {_GROUP_COLUMNS} FROM groups
WHERE tenant = ? AND block_group_id > ? AND (? = '' OR state = ?) ORDER BY block_group_id LIMIT ?"""  # noqa: S608
SELECT_ALL_GROUPS: Final = f"SELECT tenant, {_GROUP_COLUMNS} FROM groups ORDER BY tenant, block_group_id"  # noqa: S608
SELECT_HERE: Final = f"""
SELECT tenant, {_GROUP_COLUMNS}, EXISTS (
    SELECT 1 FROM pins p WHERE p.tenant = g.tenant AND p.block_group_id = g.block_group_id AND p.state = 'PINNED')
FROM groups g WHERE state IN ('RESIDENT', 'MIGRATING_OUT', 'MIGRATING_IN')
ORDER BY tenant, block_group_id"""  # noqa: S608
PUT_GROUP: Final = f"""
INSERT INTO groups (tenant, {_GROUP_COLUMNS}, changed_ms, last_operation, last_cause)
VALUES ({", ".join("?" * (len(GROUP) + 4))})
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in GROUP[1:])},
    changed_ms = excluded.changed_ms, last_operation = excluded.last_operation, last_cause = excluded.last_cause"""  # noqa: S608
SIGN_GROUP: Final = "UPDATE groups SET last_operation = ?, last_cause = ? WHERE tenant = ? AND block_group_id = ?"
DELETE_GROUP: Final = "DELETE FROM groups WHERE tenant = ? AND block_group_id = ?"

COUNT_PINS: Final = "SELECT count(*) FROM pins WHERE tenant = ? AND block_group_id = ? AND state = 'PINNED'"
SELECT_PINNED: Final = """
SELECT request_id FROM pins WHERE tenant = ? AND block_group_id = ? AND state = 'PINNED' ORDER BY request_id"""
PUT_PIN: Final = """
INSERT INTO pins (tenant, block_group_id, request_id, state, at_ms, last_operation, last_cause)
VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET state = excluded.state, at_ms = excluded.at_ms,
    last_operation = excluded.last_operation, last_cause = excluded.last_cause"""
SIGN_PINS: Final = "UPDATE pins SET last_operation = ?, last_cause = ? WHERE tenant = ? AND block_group_id = ?"
DELETE_PINS: Final = "DELETE FROM pins WHERE tenant = ? AND block_group_id = ?"

SELECT_OPEN_TRANSFERS: Final = "SELECT transfer_token FROM transfers WHERE ended = 0"
INSERT_TRANSFER: Final = "INSERT INTO transfers VALUES (?, ?, ?, ?, 0, ?, ?)"
END_TRANSFER: Final = """
UPDATE transfers SET ended = 1, last_operation = ?, last_cause = ? WHERE transfer_token = ? AND ended = 0"""
END_TRANSFERS_OF: Final = """
UPDATE transfers SET ended = 1, last_operation = ?, last_cause = ?
WHERE tenant = ? AND block_group_id = ? AND ended = 0"""
END_ALL_TRANSFERS: Final = "UPDATE transfers SET ended = 1, last_operation = ?, last_cause = ? WHERE ended = 0"

SELECT_MIGRATION: Final = f"""
SELECT {_MIGRATION_COLUMNS} FROM migrations WHERE tenant = ? AND operation_id = ?"""  # noqa: S608
SELECT_OPEN: Final = f"""
SELECT tenant, {_MIGRATION_COLUMNS} FROM migrations WHERE told = 0 ORDER BY tenant, operation_id"""  # noqa: S608
PUT_MIGRATION: Final = f"""
INSERT INTO migrations (tenant, {_MIGRATION_COLUMNS}, at_ms, last_operation, last_cause)
VALUES ({", ".join("?" * (len(MIGRATION) + 4))})
ON CONFLICT DO UPDATE SET status = excluded.status, reason = excluded.reason, told = excluded.told,
    at_ms = excluded.at_ms, last_operation = excluded.last_operation, last_cause = excluded.last_cause"""  # noqa: S608

SELECT_ARRIVAL: Final = """
SELECT block_group_id, known_before, settled FROM arrivals WHERE tenant = ? AND operation_id = ?"""
INSERT_ARRIVAL: Final = "INSERT INTO arrivals VALUES (?, ?, ?, ?, 0, ?)"
SETTLE_ARRIVAL: Final = "UPDATE arrivals SET settled = 1, at_ms = ? WHERE tenant = ? AND operation_id = ?"

SELECT_NODE: Final = "SELECT name, incarnation, purged_ms, epoch_floor FROM node"
INSERT_NODE: Final = "INSERT INTO node (one, name, purged_ms) VALUES (1, ?, ?)"
SET_INCARNATION: Final = "UPDATE node SET incarnation = ?"

LATEST_TO_PURGE: Final = """
SELECT max((SELECT coalesce(max(issued_ms), 0) FROM operations WHERE issued_ms < ?),
           (SELECT coalesce(max(at_ms), 0) FROM pins WHERE state = 'UNPINNED' AND at_ms < ?))"""
"""The latest moment of what a purge forgets; nothing issued up to then may run any more."""
RAISE_PURGED: Final = "UPDATE node SET purged_ms = ?1 WHERE purged_ms < ?1"
RAISE_FLOOR: Final = "UPDATE node SET epoch_floor = ?1 WHERE epoch_floor < ?1"


class Purge(NamedTuple):
    """How the oldest rows of a table are forgotten. Parameters: before which moment, and how many rows."""

    statements: tuple[str, ...]
    highest_epoch: str = ""
    """A query for the highest epoch among those rows."""


def _oldest(table: str, key: str, moment: str, over: str = "") -> str:
    return f"""
SELECT {key} FROM {table} old WHERE {over and f"{over} AND "}{moment} < ? ORDER BY {moment}, {key} LIMIT ?"""  # noqa: S608


def _purge(table: str, key: str, moment: str, over: str = "", *, witnessed: bool = True) -> Purge:
    """Return how rows are forgotten of which `over` is true; the triggers see whose doing it is."""
    those = f"WHERE ({key}) IN ({_oldest(table, key, moment, over)})"
    delete = f"DELETE FROM {table} {those}"  # noqa: S608 - names, from this file
    return Purge((f"UPDATE {table} SET last_cause = 'purge' {those}", delete) if witnessed else (delete,))  # noqa: S608


_GROUP_KEY: Final = "tenant, block_group_id"
_GONE: Final = """state IN ('EVICTED', 'MOVED') AND NOT EXISTS (
    SELECT 1 FROM migrations m WHERE m.tenant = old.tenant AND m.operation_id = old.migration AND m.told = 0)"""
"""Of a group: its blocks are not here, and nobody is still to be told where they went."""

PURGES: Final = (
    _purge("operations", "tenant, operation_id", "issued_ms", witnessed=False),
    _purge("pins", "tenant, block_group_id, request_id", "at_ms", "state = 'UNPINNED'"),
    _purge("transfers", "transfer_token", "expires_ms"),
    _purge("migrations", "tenant, operation_id", "at_ms", "told = 1"),
    _purge("arrivals", "tenant, operation_id", "at_ms", "settled = 1", witnessed=False),
    _purge("groups", _GROUP_KEY, "changed_ms", _GONE)._replace(
        highest_epoch=f"""
SELECT coalesce(max(epoch), 0) FROM groups
WHERE ({_GROUP_KEY}) IN ({_oldest("groups", _GROUP_KEY, "changed_ms", _GONE)})"""  # noqa: S608
    ),
    Purge(("""
DELETE FROM effects WHERE at_ms < ? AND seq IN (SELECT seq FROM effects ORDER BY seq LIMIT ?)
    AND seq < (SELECT max(seq) FROM effects)""",)),
)  # fmt: skip
"""What is forgotten, in this order. The newest effect stays, so that no number is given twice.

Effects are looked at from the first on, and no further than the limit: they have no index by time, and need none.
"""

SELECT_EFFECTS: Final = """
SELECT seq, at_ns, tenant, block_group_id, operation_id, cause, kind, key, before, after FROM effects ORDER BY seq"""
SELECT_RECORDS: Final = """
SELECT tenant, operation_id, method, CAST(params AS TEXT), outcome, CAST(answer AS TEXT), issued_ms, done_ms
FROM operations ORDER BY tenant, operation_id"""

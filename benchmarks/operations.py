"""What an operation costs that takes effect once, whatever is lost: a node's store beside bare SQLite transactions.

    python -m benchmarks.operations --out FILE [--quick]

Every commit is durable (WAL, synchronous=FULL), on one core, in a file beside FILE: name one on the disk that you mean,
since a file system in memory syncs for nothing. *Bare* is what anybody would write by hand for the same: SELECT the
operation, SELECT the group, UPDATE it, INSERT the operation with its answer, the trigger's INSERT of the effect, and
COMMIT; constant parameters, no rules, no retention. Bare and store take turns, so that both have the same noise.

Prints a table and writes {name: {unit, median, min, max, p99, n}} as JSON; n is repeats, of latencies operations.
Target: one at a time at least 60 % of bare; more with 64 callers, who share a sync. A replay writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.figures import Figures, figure, show, write
from reference_impl.blockservice.store import Store, Write, wall_ms
from reference_impl.blockservice.writer import Writer
from reference_impl.realclock import host_ns, now_ns
from reference_impl.rules.blockgroups import Group, Reserve

TENANT: Final = "tenant"
GROUPS: Final = 64
CALLERS: Final = 64

_BARE: Final = """
CREATE TABLE groups (
    tenant TEXT, block_group_id TEXT, epoch INTEGER, state TEXT, location TEXT, reserved INTEGER, last_operation TEXT,
    PRIMARY KEY (tenant, block_group_id)) WITHOUT ROWID;
CREATE TABLE operations (
    tenant TEXT, operation_id TEXT, params BLOB, answer BLOB, issued_ms INTEGER, PRIMARY KEY (tenant, operation_id)
) WITHOUT ROWID;
CREATE TABLE effects (
    seq INTEGER PRIMARY KEY, at_ns INTEGER, tenant TEXT, block_group_id TEXT, operation_id TEXT, before TEXT, after TEXT
);
CREATE TRIGGER effect AFTER UPDATE ON groups BEGIN
    INSERT INTO effects (at_ns, tenant, block_group_id, operation_id, before, after)
    VALUES (host_ns(), NEW.tenant, NEW.block_group_id, NEW.last_operation,
            json_object('epoch', OLD.epoch, 'state', OLD.state, 'location', OLD.location, 'reserved', OLD.reserved),
            json_object('epoch', NEW.epoch, 'state', NEW.state, 'location', NEW.location, 'reserved', NEW.reserved));
END;
"""
_PARAMS: Final = b'{"type":"reserve","block_group_id":"bg_00","epoch":7,"slots":1}'
_ANSWER: Final = b'{"outcome":"APPLIED","epoch":7,"state":"RESIDENT","location":"a","reserved":1}'


class Timed:
    """Latencies of operations, in ms, and operations a second of each repeat."""

    def __init__(self) -> None:
        self.latencies_ms: list[float] = []
        self.rates: list[float] = []

    def repeat(self, count: int, once: Callable[[int], object]) -> None:
        """Run `once` for every number below `count`."""
        began_ns = now_ns()
        for number in range(count):
            start_ns = now_ns()
            once(number)
            self.latencies_ms.append((now_ns() - start_ns) / 1e6)
        self.rates.append(count / ((now_ns() - began_ns) / 1e9))


class Bare:
    """The same transaction by hand."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.create_function("host_ns", 0, host_ns)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_BARE)
        rows = [(TENANT, group, 7, "RESIDENT", "a", 0, "") for group in map(group_id, range(GROUPS))]
        self._db.executemany("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def reserve(self, operation_id: str, group: str) -> None:
        """Commit one."""
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        record = "SELECT params, answer FROM operations WHERE tenant = ? AND operation_id = ?"
        assert db.execute(record, (TENANT, operation_id)).fetchone() is None
        view = "SELECT epoch, state, location, reserved FROM groups WHERE tenant = ? AND block_group_id = ?"
        assert db.execute(view, (TENANT, group)).fetchone()[0] == 7
        db.execute(
            "UPDATE groups SET reserved = reserved + 1, last_operation = ? WHERE tenant = ? AND block_group_id = ?",
            (operation_id, TENANT, group),
        )
        db.execute("INSERT INTO operations VALUES (?, ?, ?, ?, ?)", (TENANT, operation_id, _PARAMS, _ANSWER, 0))
        db.execute("COMMIT")


def group_id(number: int) -> str:
    """Return the id of one of the groups."""
    return f"bg_{number % GROUPS:02}"


def reserve(operation_id: str, number: int) -> Write:
    """Return an operation that sets a slot aside."""
    request = Reserve(block_group_id=group_id(number), epoch=7, slots=1)
    return Write(tenant=TENANT, operation_id=operation_id, issued_ms=wall_ms(), request=request)


@contextmanager
def store(path: Path) -> Iterator[Store]:
    """Open a store with the groups in it."""
    opened = Store(path, "a", slots_max=1 << 40)
    opened.publish(TENANT, [Group(block_group_id=group_id(n), location="a", epoch=7) for n in range(GROUPS)])
    yield opened
    opened.close()


def one_at_a_time(folder: Path, repeats: int, count: int) -> Figures:
    """Measure bare transactions, operations, and replays of them, in turns."""
    bare, ours, replayed = Timed(), Timed(), Timed()
    by_hand = Bare(folder / "bare.db")
    log = folder / "one.db-wal"
    with store(folder / "one.db") as kept:
        for repeat in range(repeats + 1):  # the first, which makes the files grow, is thrown away
            if repeat == 1:
                bare, ours, replayed = Timed(), Timed(), Timed()
            writes = [reserve(f"operation-{repeat:03}-{number:06}", number) for number in range(count)]
            bare.repeat(count, lambda n: by_hand.reserve(writes[n].operation_id, group_id(n)))  # noqa: B023
            ours.repeat(count, lambda n: kept.run([writes[n]]))  # noqa: B023
            before = log.stat().st_mtime_ns
            replayed.repeat(count, lambda n: kept.run([writes[n]]))  # noqa: B023
            assert log.stat().st_mtime_ns == before, "a replay has written to the log"
        assert sum(group.reserved for group in kept.groups(TENANT)) == (repeats + 1) * count
    share = [100 * mine / hand for mine, hand in zip(ours.rates, bare.rates, strict=True)]
    return {
        "bare_one_at_a_time": figure("/s", bare.rates),
        "operations_one_at_a_time": figure("/s", ours.rates),
        "operations_one_at_a_time_of_bare": figure("%", share),
        "replays_one_at_a_time": figure("/s", replayed.rates),
        "bare_latency": figure("ms", bare.latencies_ms),
        "operation_latency": figure("ms", ours.latencies_ms),
        "replay_latency": figure("ms", replayed.latencies_ms),
    }


async def _callers(writer: Writer, prefix: str, count: int, latencies_ms: list[float]) -> float:
    """Let `CALLERS` call one after the other, `count` operations in all; return operations a second."""

    async def caller(number: int) -> None:
        for turn in range(count // CALLERS):
            start_ns = now_ns()
            await writer.run(reserve(f"{prefix}-{turn:05}-{number:02}", number))
            latencies_ms.append((now_ns() - start_ns) / 1e6)

    began_ns = now_ns()
    async with asyncio.TaskGroup() as tasks:
        for number in range(CALLERS):
            tasks.create_task(caller(number))
    return count // CALLERS * CALLERS / ((now_ns() - began_ns) / 1e9)


async def group_commit(folder: Path, repeats: int, count: int) -> Figures:
    """Measure concurrent callers beside bare transactions one at a time, which cannot share their syncs."""
    bare, latencies_ms, rates, replays, sizes = Timed(), list[float](), list[float](), list[float](), list[float]()
    by_hand = Bare(folder / "bare-again.db")
    with store(folder / "many.db") as kept:
        writer = Writer(kept)
        await _callers(writer, "warm", count, [])
        for repeat in range(repeats):
            few = max(count // 8, CALLERS)
            bare.repeat(few, lambda n: by_hand.reserve(f"{repeat}-{n}", group_id(n)))  # noqa: B023
            batches, writes = writer.batches, writer.writes
            rates.append(await _callers(writer, f"{repeat:02}", count, latencies_ms))
            sizes.append((writer.writes - writes) / (writer.batches - batches))
            replays.append(await _callers(writer, f"{repeat:02}", count, []))
        await writer.close()
    share = [100 * mine / hand for mine, hand in zip(rates, bare.rates, strict=True)]
    return {
        f"operations_of_{CALLERS}_callers": figure("/s", rates),
        f"operations_of_{CALLERS}_callers_of_bare": figure("%", share),
        f"operation_latency_of_{CALLERS}_callers": figure("ms", latencies_ms),
        "writes_a_commit": figure("writes", sizes),
        f"replays_of_{CALLERS}_callers": figure("/s", replays),
    }


def measure(folder: Path, quick: bool) -> Figures:
    """Measure everything, on one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    repeats, count = (2, 256) if quick else (9, 2048)
    try:
        found = one_at_a_time(folder, repeats, count)
        return found | asyncio.run(group_commit(folder, repeats, 4 * count))
    finally:
        os.sched_setaffinity(0, allowed)


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="where the JSON goes, and databases meanwhile")
    options.add_argument("--quick", action="store_true", help="few repeats, to see that it runs")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.out.parent) as folder:
        found = measure(Path(folder), given.quick)
    show(found)
    write(given.out, found)


if __name__ == "__main__":
    main()

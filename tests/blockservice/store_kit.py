"""Stores for tests: what every kind of request needs, what a store shows of itself, and what it may never show."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from reference_impl.blockservice.store import Done, Effect, Store, Write
from reference_impl.rules.blockgroups import (
    CancelMigrate,
    EngineSays,
    Evict,
    Group,
    Outcome,
    Pin,
    Place,
    PrepareGet,
    Request,
    Reserve,
    StartMigrate,
    Unpin,
)

NOW_MS = 1_800_000_000_000
MADE_MS = 1_700_000_000_000
"""When the stores of tests were made: before all that is asked of them, on the machine's clock too."""
BG = "bg_1"
NODES = frozenset({"a", "b"})
PLACE = Place(node="a", handoff="{}", size_bytes=100, checksum="", transfer_token="token-1", expires_ms=NOW_MS + 60_000)

RESERVE = Reserve(block_group_id=BG, epoch=7, slots=1)
PIN = Pin(block_group_id=BG, epoch=7, request_id="r")
UNPIN = Unpin(block_group_id=BG, epoch=7, request_id="r")
EVICT = Evict(block_group_id=BG, epoch=7)
PREPARE = PrepareGet(block_group_id=BG, epoch=7, request_id="r")
START = StartMigrate(block_group_id=BG, epoch=7, src="a", dst="b")


class Clock:
    """A wall clock that stands still until it is set."""

    def __init__(self, now_ms: int = NOW_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


class Crash(Exception):
    """The process is gone, as far as the store can tell."""


def make(path: Path, *, kind: type[Store] = Store, clock: Callable[[], int] | None = None, **options: Any) -> Store:
    """Open a store of node a that knows the group of the document: epoch 7, nothing reserved."""
    Store(path, "a", now_ms=lambda: MADE_MS).close()
    store = kind(path, "a", nodes=NODES, now_ms=clock or Clock(), **options)
    if store.group("t", BG) is None:
        store.publish("t", [Group(block_group_id=BG, location="a", epoch=7)])
    return store


def make_with_small_pages(path: Path) -> Store:
    """Open a new store of which every write takes new pages soon."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA page_size = 512")
    db.execute("PRAGMA journal_mode = WAL")
    db.close()
    return make(path)


def write(
    operation_id: str, request: Request, *, tenant: str = "t", issued_ms: int = NOW_MS, engine: EngineSays | None = None
) -> Write:  # fmt: skip
    """Return an operation."""
    return Write(
        tenant=tenant, operation_id=operation_id, issued_ms=issued_ms, request=request, engine=engine or EngineSays()
    )  # fmt: skip


def ask(store: Store, operation_id: str, request: Request, **options: Any) -> Done:
    """Run one operation by itself."""
    return store.run([write(operation_id, request, **options)])[0]


class Case(msgspec.Struct, frozen=True):
    """A kind of request, and the operations that bring a store to where it does something."""

    asked: Write
    before: tuple[Write, ...] = ()
    outcome: Outcome = Outcome.APPLIED


EVERY_KIND = {
    "reserve": Case(write("op", RESERVE)),
    "pin": Case(write("op", PIN)),
    "unpin": Case(write("op", UNPIN), (write("pin", PIN),)),
    "unpin before its pin": Case(write("op", UNPIN)),
    "evict": Case(write("op", EVICT), (write("pin", PIN), write("unpin", UNPIN), write("reserve", RESERVE))),
    "evict what is evicted": Case(write("op", EVICT), (write("evict", EVICT),)),
    "prepare_get": Case(write("op", PREPARE, engine=EngineSays(place=PLACE))),
    "start_migrate": Case(write("op", START)),
    "cancel_migrate": Case(
        write("op", CancelMigrate(block_group_id=BG, epoch=7, migration_id="start")), (write("start", START),)
    ),
    "refused: stale epoch": Case(
        write("op", msgspec.structs.replace(RESERVE, epoch=6)), outcome=Outcome.REFUSED
    ),
    "refused: the engine has lost it": Case(
        write("op", PREPARE, engine=EngineSays(here=False)), (write("pin", PIN),), Outcome.REFUSED
    ),
}  # fmt: skip


def picture(store: Store) -> tuple[object, ...]:
    """Return all that a store holds, without moments: equal pictures, equal stores."""
    effects = [msgspec.structs.replace(effect, seq=0, at_ns=0) for effect in store.effects()]
    return list(store.finals()), effects, list(store.records()), store.open_migrations()


def effects_of(store: Store, operation_id: str, tenant: str = "t") -> list[Effect]:
    """Return the effects of one operation."""
    return [e for e in store.effects() if (e.tenant, e.operation_id) == (tenant, operation_id)]


@contextmanager
def pages_left(store: Store, count: int) -> Iterator[None]:
    """Let a store's file grow by so many pages and no more."""
    db = store._db
    (used,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {used + count}")
    try:
        yield
    finally:
        db.execute("PRAGMA max_page_count = 1073741823")

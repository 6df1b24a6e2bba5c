"""One process that uses a real store, and may be gone at a named point.

    python -m tests.blockservice.one_request FILE

Reads one JSON line (`Order`), prints "ready" if it is to wait for a second line, and then `Told` for every answer.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import msgspec

from reference_impl.blockservice.store import Done, Store, Write, wall_ms
from reference_impl.rules.blockgroups import Answer, Pin, Reserve, Unpin

EXIT_CODE = 86


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What this process is to do: run `writes`, or write on and on if there are none, until `exit_at`."""

    writes: list[Write] = []
    exit_at: str = ""
    unsafe: bool = False
    wait: bool = False
    loop_from: int = 0


class Told(msgspec.Struct, frozen=True):
    """An answer that left this process."""

    operation_id: str
    done: Done


class UnsafeStore(Store):
    """The document's first version: an effect in a transaction, and nobody knows whose it was."""

    def _replays(self, _writes: object) -> None:
        return None

    def _replay(self, _write: Write, _now_ms: int) -> None:
        return None

    def _keep(self, _write: Write, _answer: Answer, _now_ms: int) -> None:
        return None


def tell(operation_id: str, done: Done) -> None:
    """Print an answer, in one piece."""
    os.write(1, msgspec.json.encode(Told(operation_id, done)) + b"\n")


def loop(store: Store, first: int) -> None:
    """Write until killed, in batches of three, with checkpoints every few commits."""
    store._db.execute("PRAGMA wal_autocheckpoint = 20")
    for turn in itertools.count(first):
        group = {"block_group_id": "bg_1", "epoch": 7}
        requests = (
            Reserve(**group, slots=1), Pin(**group, request_id=f"r{turn}"), Unpin(**group, request_id=f"r{turn - 1}"),
        )  # fmt: skip
        batch = [
            Write(tenant="t", operation_id=f"{turn}-{n}", issued_ms=wall_ms(), request=r)
            for n, r in enumerate(requests)
        ]
        for one, done in zip(batch, store.run(batch), strict=True):
            tell(one.operation_id, done)


def main() -> None:
    """Do as ordered."""
    order = msgspec.json.decode(sys.stdin.readline(), type=Order)
    kind = UnsafeStore if order.unsafe else Store

    def reached(point: str) -> None:
        if point == order.exit_at:
            os._exit(EXIT_CODE)

    store = kind(Path(sys.argv[1]), "a", nodes=frozenset({"a", "b"}), slots_max=1 << 40, reached=reached)
    if order.wait:
        os.write(1, b"ready\n")
        sys.stdin.readline()
    if not order.writes:
        loop(store, order.loop_from)
    for one in order.writes:
        tell(one.operation_id, store.run([one])[0])
    store.close()


if __name__ == "__main__":
    main()

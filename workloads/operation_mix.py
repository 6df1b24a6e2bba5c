"""What a control plane's clients do: a mix of writes on groups that they know of, with the mistakes that clients make.

Some operations are asked again as they were (their answer may have been lost), some with other parameters, some with an
epoch that is over or has not begun, some by a tenant whose groups these are not, under ids that another tenant uses.
Some pins are asked for again under another id, and count once all the same; some are kept to the end, so that an engine
that needs room has to go around them. A client knows groups from a listing that is a while old. Chance comes from the
generator that is given.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec
import numpy as np

from reference_impl.rules.blockgroups import (
    CancelMigrate,
    Evict,
    Pin,
    PrepareGet,
    Refusal,
    Request,
    Reserve,
    StartMigrate,
    Unpin,
)

REMEMBERED: Final = 256
"""Operations that may be asked for once more."""
SLOTS_MAX: Final = 8
LOOK_AT_MIGRATIONS: Final = 0.3
LOOK_AFTER: Final = 0.15
"""Share of settled operations that are looked at once more."""
KEPT_MAX: Final = 12
KEEP: Final = 0.04
"""Share of pins that are kept to the end, as long as there are fewer than that."""
NOT_PINNED: Final = frozenset({
    Refusal.UNKNOWN_GROUP, Refusal.STALE_EPOCH, Refusal.NOT_RESIDENT, Refusal.MIGRATING, Refusal.UNPINNED_BEFORE,
    Refusal.TOO_MANY_PINS,
})  # fmt: skip
"""Refusals of a pin that say that its request pins nothing, in the epoch that it names or one before."""
KINDS: Final = {
    "pin": 0.18, "repin": 0.03, "unpin": 0.24, "reserve": 0.24, "prepare_get": 0.012, "start_migrate": 0.08,
    "cancel_migrate": 0.02, "evict": 0.02, "again": 0.12, "changed": 0.03, "stale": 0.02, "future": 0.01,
    "foreign": 0.01,
}  # fmt: skip
"""Shares of what is done."""


class Known(msgspec.Struct, frozen=True):
    """A group, as a listing told of it."""

    node: str
    block_group_id: str
    epoch: int
    pins: int = 0


class Asked(msgspec.Struct, frozen=True):
    """One operation: whom it is asked of, in whose name, and when it was made (wall clock, ms)."""

    tenant: str
    node: str
    operation_id: str
    issued_ms: int
    request: Request


class Mix:
    """Draws one operation after the other. `owner`: the tenant whose groups are known; `strangers`: other tenants."""

    def __init__(self, rng: np.random.Generator, nodes: list[str], owner: str, strangers: list[str], run: str) -> None:
        self._rng, self._nodes, self._owner, self._strangers, self._run = rng, nodes, owner, strangers, run
        self._names = list(KINDS)
        self._shares = np.array(list(KINDS.values())) / sum(KINDS.values())
        self._asked: deque[Asked] = deque(maxlen=REMEMBERED)
        self._pins: dict[tuple[str, str, str], Asked] = {}
        """Those that may stand: by node, group and request."""
        self._kept: set[tuple[str, str, str]] = set()
        """Of those: what is taken back at the end only."""
        self._migrations: deque[Asked] = deque(maxlen=REMEMBERED)
        self._made = 0

    def next(self, known: list[Known], now_ms: int) -> Asked | None:
        """Return what is to be done next; None if there is nothing to do it with yet."""
        kind = self._names[self._rng.choice(len(self._names), p=self._shares)]
        asked = self._old(kind) or self._new(kind, known, now_ms)
        if asked is not None and kind != "changed":
            self._note(asked)
        return asked

    def look(self, known: list[Known]) -> Known | Asked | None:
        """Return what is to be looked at: a group, or a migration that was started; None: there is neither."""
        if self._migrations and self._rng.random() < LOOK_AT_MIGRATIONS:
            return self._migrations[int(self._rng.integers(len(self._migrations)))]
        return known[int(self._rng.integers(len(known)))] if known else None

    def looks_after(self) -> bool:
        """Whether an operation that has been settled is looked at once more."""
        return bool(self._rng.random() < LOOK_AFTER)

    def release(self, now_ms: int) -> list[Asked]:
        """Return an unpin for every pin that may stand: what is to be done at the end."""
        return [self._unpin(pin, now_ms) for pin in self._pins.values()]

    def ended(self, asked: Asked, outcome: str, refusal: str) -> None:
        """Note what became of an operation: a pin that was refused, or an unpin that was not, leaves none."""
        request = asked.request
        if not isinstance(request, Pin | Unpin) or asked.tenant != self._owner:
            return
        key = _pin_key(asked.node, request)
        noted = self._pins.get(key)
        if isinstance(request, Pin) and outcome == "ok":  # one with a changed epoch has not been noted before
            self._pins[key] = asked if noted is None or noted.request.epoch < request.epoch else noted
            return
        over = refusal in (Refusal.UNKNOWN_GROUP, Refusal.STALE_EPOCH)  # the group went, and its pins with it
        unpinned = isinstance(request, Unpin) and (outcome == "ok" or over)
        refused = isinstance(request, Pin) and outcome == "fail" and refusal in NOT_PINNED
        if (unpinned or refused) and noted is not None and noted.request.epoch <= request.epoch:
            del self._pins[key]
            self._kept.discard(key)

    def _note(self, asked: Asked) -> None:
        self._asked.append(asked)
        if isinstance(asked.request, Pin) and asked.tenant == self._owner:
            key = _pin_key(asked.node, asked.request)
            if key not in self._pins and len(self._kept) < KEPT_MAX and self._rng.random() < KEEP:
                self._kept.add(key)
            self._pins[key] = asked
        if isinstance(asked.request, StartMigrate):
            self._migrations.append(asked)

    def _old(self, kind: str) -> Asked | None:
        """Ask for something once more, as it was or not quite."""
        if kind not in ("again", "changed") or not self._asked:
            return None
        before = self._asked[int(self._rng.integers(len(self._asked)))]
        if kind == "again":
            return before
        changed = msgspec.structs.replace(before.request, epoch=before.request.epoch + 1)
        return msgspec.structs.replace(before, request=changed)

    def _new(self, kind: str, known: list[Known], now_ms: int) -> Asked | None:
        pins = [pin for key, pin in self._pins.items() if kind == "repin" or key not in self._kept]
        if kind in ("unpin", "repin") and pins:
            pin = pins[int(self._rng.integers(len(pins)))]
            if kind == "unpin":
                return self._unpin(pin, now_ms)
            return Asked(pin.tenant, pin.node, self._id(), now_ms, pin.request)
        if kind == "cancel_migrate" and self._migrations:
            return self._cancel(self._migrations[-1], now_ms)
        if not known:
            return None
        if kind in ("start_migrate", "evict"):  # most who ask for these look first
            known = [group for group in known if not group.pins] or known
        group = known[int(self._rng.integers(len(known)))]
        epoch = {"stale": max(0, group.epoch - 1), "future": group.epoch + 5}.get(kind, group.epoch)
        request = self._request(kind, group, epoch)
        if kind == "foreign" and self._strangers and self._asked:
            stranger = self._strangers[int(self._rng.integers(len(self._strangers)))]
            return Asked(stranger, group.node, self._asked[-1].operation_id, now_ms, request)
        return Asked(self._owner, group.node, self._id(), now_ms, request)

    def _request(self, kind: str, group: Known, epoch: int) -> Request:
        name = group.block_group_id
        match kind:
            case "pin" | "unpin" | "repin":
                return Pin(block_group_id=name, epoch=epoch, request_id=f"req-{self._made}")
            case "prepare_get":
                return PrepareGet(block_group_id=name, epoch=epoch, request_id=f"req-{self._made}")
            case "start_migrate":
                others = [node for node in self._nodes if node != group.node]
                dst = others[int(self._rng.integers(len(others)))] if others else group.node
                return StartMigrate(block_group_id=name, epoch=epoch, src=group.node, dst=dst)
            case "evict":
                return Evict(block_group_id=name, epoch=epoch)
            case _:
                return Reserve(block_group_id=name, epoch=epoch, slots=int(self._rng.integers(1, SLOTS_MAX + 1)))

    def _unpin(self, pin: Asked, now_ms: int) -> Asked:
        request = pin.request
        assert isinstance(request, Pin)
        unpin = Unpin(block_group_id=request.block_group_id, epoch=request.epoch, request_id=request.request_id)
        return Asked(pin.tenant, pin.node, self._id(), now_ms, unpin)

    def _cancel(self, migration: Asked, now_ms: int) -> Asked:
        request = migration.request
        cancel = CancelMigrate(
            block_group_id=request.block_group_id, epoch=request.epoch, migration_id=migration.operation_id
        )  # fmt: skip
        return Asked(migration.tenant, migration.node, self._id(), now_ms, cancel)

    def _id(self) -> str:
        self._made += 1
        return f"{self._run}-{self._made}"


def _pin_key(node: str, request: Pin | Unpin) -> tuple[str, str, str]:
    return node, request.block_group_id, request.request_id

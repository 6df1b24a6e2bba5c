"""Named places at which a process can be made to fail, so that what is lost is lost for certain and not by luck.

A process that was not told to have fail points holds None in their place, and each place costs one `is not None`. One
that has them does nothing either until an order is armed. What is about to happen is said first: a crash leaves
evidence, and a fault that never happened cannot pass for one. Source: KVC-IDEM-001 to -003; issue 4, reply loss.
"""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated, Final, TypeAlias

import msgspec

from reference_impl.blockservice.store import StoreError

EXIT_CODE: Final = 86
"""Of a process that a fail point ends: no other way out of it has this one."""
ORDERS_MAX: Final = 64


class Point(enum.StrEnum):
    """Where a process may fail, in the order in which a write passes."""

    RECEIVED = "received"
    """A request has been understood; nothing has been done."""
    BEFORE_COMMIT = "before_commit"
    """In the store's thread: everything is written, and would be rolled back."""
    AFTER_COMMIT = "after_commit"
    """In the store's thread: everything stays."""
    AFTER_COMMIT_BEFORE_REPLY = "after_commit_before_reply"
    """The answer is known, and not yet handed to gRPC."""
    AFTER_REPLY = "after_reply"
    """gRPC has sent the answer."""
    MIGRATION_ACCEPTED = "migration_accepted"
    MIGRATION_COPIED = "migration_copied"
    MIGRATION_DECIDED = "migration_decided"


class Action(enum.StrEnum):
    """What happens there."""

    EXIT = "exit"
    """The process ends at once, without any clean-up."""
    KILL = "kill"
    """The same by SIGKILL."""
    DROP = "drop"
    """The process lives; its caller never gets this reply."""
    DELAY = "delay"
    REPEAT = "repeat"
    """The request is worked on a second time, as if it had come twice."""
    FULL = "full"
    """The store finds its disk full."""


_ENDS: Final = frozenset({Action.EXIT, Action.KILL})
POSSIBLE: Final[Mapping[Point, frozenset[Action]]] = {
    Point.RECEIVED: _ENDS | {Action.DROP, Action.DELAY, Action.REPEAT},
    Point.BEFORE_COMMIT: _ENDS | {Action.DELAY, Action.FULL},
    Point.AFTER_COMMIT: _ENDS | {Action.DELAY},
    Point.AFTER_COMMIT_BEFORE_REPLY: _ENDS | {Action.DROP, Action.DELAY, Action.REPEAT},
    Point.AFTER_REPLY: _ENDS | {Action.REPEAT},
    Point.MIGRATION_ACCEPTED: _ENDS | {Action.DELAY},
    Point.MIGRATION_COPIED: _ENDS | {Action.DELAY},
    Point.MIGRATION_DECIDED: _ENDS | {Action.DELAY},
}
"""What can be done where: a thread of the store has no reply to drop, and what has been sent cannot be held back."""
_IN_STORE: Final = frozenset({Point.BEFORE_COMMIT, Point.AFTER_COMMIT})


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to happen: `action` at `point`, `times` times, after `skip` passages that go by unharmed."""

    point: Point
    action: Action
    times: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1
    skip: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0
    seconds: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0
    """Of a delay."""
    method: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Only passages of this method count; "": of any. The store does not know of methods."""

    def problem(self) -> tuple[str, str]:
        """Return the field at fault and why, ("", "") if the order can be carried out."""
        possible = POSSIBLE[self.point]
        if self.action not in possible:
            return "action", f"{self.action} cannot be done at {self.point}; {', '.join(sorted(possible))} can"
        if self.method and self.point in _IN_STORE:
            return "method", f"the store passes {self.point} for whole batches, whatever their methods"
        if (self.action is Action.DELAY) != (self.seconds > 0):
            return "seconds", f"must be above 0 for a delay and 0 for all else, got {self.seconds:g} with {self.action}"
        return "", ""


Say: TypeAlias = Callable[[str, str, str], None]
"""Takes point, action and method, before anything happens."""


class _Armed:
    """An order, with what is left of it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.skip = order.skip
        self.times = order.times


class FailPoints:
    """The fail points of one process. `say` is called before anything happens, from whichever thread it happens in."""

    def __init__(self, say: Say, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._say = say
        self._sleep = sleep
        self._lock = threading.Lock()
        self._armed: list[_Armed] = []
        self._acted: Counter[str] = Counter()

    def arm(self, order: Order) -> None:
        """Let an order stand, in place of one for the same point and method. Raises ValueError naming what is wrong."""
        field, message = order.problem()
        if field:
            raise ValueError(f"{field}: {message}")
        with self._lock:
            kept = [a for a in self._armed if (a.order.point, a.order.method) != (order.point, order.method)]
            if len(kept) >= ORDERS_MAX:
                raise ValueError(f"point: {ORDERS_MAX} orders stand already; disarm some")
            self._armed = [*kept, _Armed(order)]

    def disarm(self, point: Point | None = None) -> None:
        """Let the orders for a point go, or all of them."""
        with self._lock:
            self._armed = [a for a in self._armed if point is not None and a.order.point is not point]

    @property
    def armed(self) -> int:
        """Orders that have not acted as often as they were to."""
        return len(self._armed)

    @property
    def acted(self) -> dict[str, int]:
        """How often each happened in this process, by "point:action"."""
        with self._lock:
            return dict(self._acted)

    async def reach(self, point: str, method: str = "") -> Action | None:
        """Pass a point in a coroutine. Returns what its caller is to do: REPEAT the work, or DROP the reply."""
        order = self._take(point, method)
        if order is None:
            return None
        match order.action:
            case Action.DELAY:
                await asyncio.sleep(order.seconds)
            case Action.DROP | Action.REPEAT:
                return order.action
            case _:
                _end(order.action)
        return None

    def reach_now(self, point: str, method: str = "") -> Action | None:
        """Pass a point in a thread, or where nothing can be waited for. Raises StoreError of an order FULL.

        Returns what is left for its caller to do, as `reach` does; a delay stops the thread.
        """
        order = self._take(point, method)
        if order is None:
            return None
        match order.action:
            case Action.DELAY:
                self._sleep(order.seconds)
            case Action.FULL:
                raise StoreError("full", "the disk of the store is full: a fail point says so")
            case Action.DROP | Action.REPEAT:
                return order.action
            case _:
                _end(order.action)
        return None

    def in_store(self, point: str) -> None:
        """Pass a point of the store: what `Store(reached=...)` wants."""
        self.reach_now(point)

    def _take(self, point: str, method: str) -> Order | None:
        """Return the order that acts at this passage, said and counted; None if none does."""
        with self._lock:
            order = self._due(point, method)
            if order is not None:
                self._acted[f"{order.point}:{order.action}"] += 1
        if order is not None:
            self._say(order.point, order.action, method)
        return order

    def _due(self, point: str, method: str) -> Order | None:
        for armed in self._armed:
            order = armed.order
            if order.point != point or order.method not in ("", method):
                continue
            if armed.skip:
                armed.skip -= 1
                continue
            armed.times -= 1
            if not armed.times:
                self._armed.remove(armed)
            return order
        return None


def _end(action: Action) -> None:
    """End this process, with nothing flushed and nobody told."""
    if action is Action.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the signal is on its way to this thread
    os._exit(EXIT_CODE)

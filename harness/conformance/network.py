"""The network of a world: messages, reads and questions that take virtual time, and whatever goes wrong with them.

Nothing happens between two calls of `Network.deliver`. What goes wrong is decided once for each message, read or
question, by the policies that a case sets, or out of the world's seed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from harness.conformance.subject import ReadState
from reference_impl.rules.clock import NS_PER_MS, NS_PER_S

HOP_NS: Final = 2 * NS_PER_MS
"""What a message takes if nobody says otherwise."""
ASK_LIMIT_NS: Final = 5 * NS_PER_S
"""After that long whoever asked gives up: nobody listens, or nobody answers."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message on its way: `number` counts all of a world's messages."""

    number: int
    sender: str
    receiver: str
    data: bytes


class ReadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a read shall go. `lands` is the share of its time after which the bytes are copied."""

    takes_ns: int = HOP_NS
    fails: bool = False
    lands: float = 1.0
    never_ends: bool = False


Delivery: TypeAlias = tuple[int, bytes]
"""After how many ns which bytes arrive."""
LinkPolicy: TypeAlias = Callable[[Message], list[Delivery]]
"""What becomes of a message: [] is lost, two entries are repeated."""
ReadPolicy: TypeAlias = Callable[[str, str], ReadPlan]
"""(reader, holder) to how the read goes."""
AskPolicy: TypeAlias = Callable[[str, int], tuple[int, int] | None]
"""(asker, port) to the times there and back; None: the question is lost."""


def at_once(message: Message) -> list[Delivery]:
    """Deliver a message as it is, after one hop."""
    return [(HOP_NS, message.data)]


def well(_reader: str, _holder: str) -> ReadPlan:
    """Let a read end well, after one hop."""
    return ReadPlan()


def there_and_back(_asker: str, _port: int) -> tuple[int, int]:
    """Let a question and its answer take a hop each."""
    return HOP_NS, HOP_NS


class NetworkFlight:
    """A read under way (`subject.Flight`)."""

    def __init__(self) -> None:
        self._state = ReadState.RUNNING

    @property
    def state(self) -> ReadState:
        """How it stands."""
        return self._state

    def end(self, state: ReadState) -> None:
        """It has ended."""
        if self._state is ReadState.RUNNING:
            self._state = state


class Network:
    """Virtual time and what is due in it."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.link: LinkPolicy = at_once
        self.reads: ReadPolicy = well
        self.asks: AskPolicy = there_and_back
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._messages = itertools.count(1)

    def after(self, delay_ns: int, act: Callable[[], None]) -> None:
        """Have something happen `delay_ns` from now."""
        heapq.heappush(self._due, (self.now_ns + max(0, delay_ns), next(self._count), act))

    def next_ns(self) -> int | None:
        """Return when something is due next, None if nothing is."""
        return self._due[0][0] if self._due else None

    def deliver(self, until_ns: int) -> None:
        """Let time pass, and what is due by then happen in its order. Raises ValueError backwards."""
        if until_ns < self.now_ns:
            raise ValueError(f"time goes from {self.now_ns} back to {until_ns}")
        while self._due and self._due[0][0] <= until_ns:
            self.now_ns, _, act = heapq.heappop(self._due)
            act()
        self.now_ns = until_ns

    def message(self, sender: str, receiver: str, data: bytes) -> Message:
        """Return a message with its number."""
        return Message(number=next(self._messages), sender=sender, receiver=receiver, data=data)

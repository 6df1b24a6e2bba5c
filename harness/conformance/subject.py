"""What a connector must bring to be tested in process: engines that a world steps, feeds and asks. No thread, no clock.

A third party writes a module with `make_subject() -> Subject`. Its engines are told the time by their `Host`, send
through it, and do something only while one of their methods runs. Everything that a world concludes comes from what is
declared here: who holds which blocks, what was answered, what was sent, what is counted. Who has a connector and no
engine takes that of `simple_engine`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from faults.nixl.dialects import Meaning

Params: TypeAlias = dict[str, Any]
"""`kv_transfer_params`, as a client or a router passes them on."""


class Role(enum.StrEnum):
    """What an engine is for."""

    PREFILL = "prefill"
    DECODE = "decode"


class Capability(enum.StrEnum):
    """What not every connector can do. A rule for what is not claimed is `n/a`; a claim is shown with what used it."""

    LEASES = "leases"
    """Blocks are kept for a remote reader under a lease that heartbeats renew."""
    PULL = "pull"
    """The reader reads the holder's memory, and reports that it has."""
    PUSH = "push"
    """The holder writes into the reader's memory, and knows by itself when it has."""
    TWO_TURN = "two-turn"
    """The decode side keeps a finished turn's blocks, and the next turn's prefill may read them."""
    RENEWAL = "renewal"
    """A client can keep a finished turn alive."""
    RANKS = "ranks"
    """Either side may consist of several ranks."""
    READERS = "readers"
    """Several requests may read one prefill: samples of a prompt."""
    PREFIX_HITS = "prefix-hits"
    """The decode side finds in its own cache what it has computed or read before."""
    FENCE = "fence"
    """A reader notices that blocks were given away before or while it read them."""
    METRICS = "metrics"
    """The counters of `METRICS` can be read."""


class Policy(enum.StrEnum):
    """What becomes of a request whose KV cannot be loaded."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On which terms an engine exchanges KV."""

    lease_s: float = 30.0
    """`kv_lease_duration`: a heartbeat moves the end to two thirds of it from its arrival."""
    policy: Policy = Policy.RECOMPUTE
    two_turn: bool = False
    ttl_s: float = 480.0
    """`decoder_kv_blocks_ttl`: how long a finished turn's blocks are kept."""

    @property
    def extension_s(self) -> float:
        """How far a heartbeat moves a lease's end from its arrival."""
        return self.lease_s * 2 / 3

    @property
    def interval_s(self) -> float:
        """How far apart heartbeats are."""
        return self.lease_s / 6


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that a case wants. Lives of one place have the same `place` and `port`, and names of their own."""

    name: str
    """Never used before in this world."""
    place: str
    role: Role
    port: int
    """Of its side channel."""
    terms: Terms
    blocks: int = 64
    slots: int = 4
    """Requests that run at once; the others wait in the queue."""
    ranks: int = 1
    model: str = "world"
    """Engines of unlike models do not suit each other."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks of an engine."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    params: Params | None = None
    """None: nothing is to be handed over; it computes by itself."""
    external_id: str = ""
    """What the router calls it: the same on all its legs."""


class How(enum.StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    FAILED = "failed"
    """With an error that its client was told."""
    ABORTED = "aborted"


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request."""

    request_id: str
    how: How
    hand_off: Params | None = None
    answer: list[int] = []
    """The tokens that it was answered."""
    right: bool | None = None
    """Whether the answer, and all KV that it was made from, is what the prompt asks for; None: nobody can tell."""
    loaded: int = 0
    """Tokens whose KV came from another engine, and was used."""
    error: str = ""


class Refused(Exception):
    """An engine refuses a request at its door, as with a 4xx; the message is what its client reads."""


class Misuse(Exception):
    """An error that the transport would have, told by what stands in for it: it is the connector's to handle."""


class ReadState(enum.StrEnum):
    """How a read of another engine's memory stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Flight(Protocol):
    """A read of another engine's memory, under way."""

    @property
    def state(self) -> ReadState:
        """How it stands now. What `read` was told to land has landed when it is DONE."""
        ...


class Host(Protocol):
    """What a world gives an engine: its clock and its network."""

    def now_ns(self) -> int:
        """What this engine's clock shows."""
        ...

    def send(self, receiver: str, message: bytes, *, rank: int = 0, to_rank: int = 0) -> bool:
        """Send a message to an engine by name, from one of our ranks to one of its.

        False if it demonstrably did not leave (its receiver is gone).
        """
        ...

    def read(self, holder: str, land: Callable[[], None]) -> Flight:
        """Start a read of an engine's memory. `land` copies what is there, once, at a moment of the network's."""
        ...

    def ask(self, port: int, question: bytes, answer: Callable[[bytes | None, int, int], None]) -> None:
        """Ask whoever listens at a port.

        `answer` gets what came (None: nothing, in the time allowed), and what this engine's clock showed when the
        question left and when the answer came.
        """
        ...

    def later(self, delay_ns: int, act: Callable[[], None]) -> None:
        """Have something of this engine happen after a while, unless it is dead by then."""
        ...


class Engine(Protocol):
    """One life of an engine. A method that raises anything but `Refused` has ended it."""

    def submit(self, request: Request) -> None:
        """Take a request in. Raises Refused."""
        ...

    def abort(self, request_id: str) -> None:
        """Its client has gone. Harmless for what has ended."""
        ...

    def deliver(self, sender: str, message: bytes, rank: int, to_rank: int) -> None:
        """A message has arrived, from one of the sender's ranks to one of ours."""
        ...

    def answer(self, question: bytes) -> bytes | None:
        """Answer at the side channel; None: no answer. Called at this engine's own time."""
        ...

    def step(self) -> None:
        """Do what one turn of the engine's loop does, also when there is nothing to compute."""
        ...

    def ended(self) -> list[Ending]:
        """Return the requests that ended since the last call."""
        ...

    def renew(self, hand_off: Params) -> Params | None:
        """Keep a finished turn alive; return its new hand-off, None if it is gone. Only where RENEWAL is claimed."""
        ...

    def holds(self) -> dict[str, list[int]]:
        """Return who holds which blocks now: request id to block numbers. Who waits for blocks is not in it."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return its counters, by the names of `METRICS`; what it does not count is not in it."""
        ...

    def close(self) -> None:
        """End it, and give back what it has of the machine."""
        ...


class Subject(Protocol):
    """A connector under test."""

    name: str
    versions: dict[str, str]
    """Of what is tested: package to version."""
    capabilities: frozenset[Capability]

    def engine(self, spec: EngineSpec, host: Host) -> Engine:
        """Return a new engine."""
        ...

    def meaning(self, message: bytes) -> Meaning:
        """Return what a message of its own says, whatever its bytes are."""
        ...

    def close(self) -> None:
        """Give back what all its engines share."""
        ...


EXPIRED: Final = "expired"
"""Leases and turns that ended by time, at their holder."""
LATE: Final = "late"
"""Reports of reads of what the holder no longer kept."""
DECLINED: Final = "declined"
"""Turns that the reader found expired."""
FAILED_READS: Final = "failed_reads"
FAILED_HANDSHAKES: Final = "failed_handshakes"
UNSENT_HEARTBEATS: Final = "unsent_heartbeats"
BAD_MESSAGES: Final = "bad_messages"
METRICS: Final = (EXPIRED, LATE, DECLINED, FAILED_READS, FAILED_HANDSHAKES, UNSENT_HEARTBEATS, BAD_MESSAGES)

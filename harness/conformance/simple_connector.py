"""What a third party writes to have its connector tested without writing an engine: a `Connector` for a `SimpleEngine`.

The hooks are those of vLLM's `KVConnectorBase_V1`, made small: one object an engine, no thread, nothing that waits. The
engine calls it, and it does something only while it is called. Block numbers are those of an engine's pool, `0` up to
`EngineSpec.blocks - 1`; block i of a request holds its tokens `16 i` to `16 i + 15`. Times are ns of this engine's own
clock (`Host.now_ns`). A hook that raises ends the engine, which is a breach of R1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from harness.conformance.checked import is_text, shown
from harness.conformance.simple_pool import Pool
from harness.conformance.subject import EngineSpec, Flight, Host, Misuse, Params, ReadState, Request

HOOKS: Final = {
    "new_request": ("request",), "scheduled": ("request", "blocks", "cached"),
    "request_finished": ("request", "blocks"), "aborted": ("request_id",), "message": ("sender", "data"),
    "question": ("data",), "step": (), "metrics": (),
}  # fmt: skip
"""What a connector has, and what each is called with."""


class Progress(msgspec.Struct, kw_only=True):
    """What became of requests since the last step; each by its id at this engine."""

    released: list[str] = []
    """Finished requests whose blocks were kept, and are needed no longer."""
    loaded: list[str] = []
    """Their KV is in their blocks."""
    failed: dict[str, str] = {}
    """Their KV will not come, and why; nothing can land in their blocks any more. The engine's policy says whether they
    are computed here or end with an error."""
    declined: dict[str, str] = {}
    """As `failed`, but computed here whatever the policy says: there is nothing to be had any more."""
    abandoned: dict[str, str] = {}
    """As `failed`, but something may still land: the engine goes on with other blocks, and leaves these alone until
    `loaded` or `failed` names the request once more."""


class Connector(Protocol):
    """One engine's connector. It may hold KV for others, read from others, or both."""

    def new_request(self, request: Request) -> None:
        """See a request enter the queue; it may wait there for long. `request.params` is what its client sent.

        Raises `subject.Refused` for what its client cannot ask; its text is what the client reads.
        """
        ...

    def scheduled(self, request: Request, blocks: list[int], cached: int) -> int:
        """Say how many tokens are to be loaded behind the first `cached` ones, which this engine has itself.

        `blocks` hold the prompt, in its order, and are this request's alone from `cached` on. Return 0 to have the rest
        computed here; otherwise as many tokens as fill whole blocks or reach the prompt's end. The request then waits
        until `step` names it, also if it is aborted: its blocks are not used again before that.
        """
        ...

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, Params | None]:
        """See a request answered. Return whether its blocks are to be kept, and the hand-off for its client.

        `blocks` hold the KV of its prompt and of all of its answer but the last token. Kept ones stay as they are until
        `Progress.released` names the request. A hand-off is JSON.
        """
        ...

    def aborted(self, request_id: str) -> None:
        """See a request given up: in the queue, while it loads or runs, or when its blocks are kept.

        A request that the engine refuses at its door is new and aborted at once.
        """
        ...

    def message(self, sender: str, data: bytes) -> None:
        """Take a message from another engine, or from who knows whom. All that have arrived come before `step`."""
        ...

    def question(self, data: bytes) -> bytes | None:
        """Answer at the side channel; None: no answer."""
        ...

    def step(self) -> Progress:
        """Do what is due; called at every turn of the engine's loop, also when it has nothing to compute."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return what is counted, by the names of `subject.METRICS`; {} if nothing is."""
        ...


class Reading:
    """A read under way."""

    def __init__(self) -> None:
        self.generations: list[int] = []
        """Of the holder's blocks, in the moment in which they were copied; [] before."""
        self._flight: Flight | None = None

    @property
    def state(self) -> ReadState:
        """How it stands."""
        return ReadState.RUNNING if self._flight is None else self._flight.state

    def started(self, flight: Flight) -> Reading:
        """It is on its way."""
        self._flight = flight
        return self


class Memory:
    """The engine's own blocks, and those of others as far as they can be read: all in one moment, chosen by the world.

    A block has a generation: how often it was given to somebody new. It is raised before the new owner writes.
    """

    def __init__(self, pool: Pool, host: Host, pool_of: Callable[[str], Pool | None]) -> None:
        self._pool, self._host, self._pool_of = pool, host, pool_of

    def generations(self, blocks: Sequence[int]) -> list[int]:
        """Return the generations of own blocks."""
        return [self._pool.blocks.generation[block] for block in _numbers("generations()", blocks, self._pool)]

    def read(self, holder: str, remote: Sequence[int], local: Sequence[int]) -> Reading:
        """Start to copy blocks `remote` of the engine `holder` into own blocks `local`, in that order.

        A holder that is gone, or never was, is a read that fails. Raises Misuse for blocks that there are not.
        """
        if not is_text(holder):
            raise Misuse(f"read() needs the name of an engine, got {shown(holder)}")
        theirs = self._pool_of(holder)
        to = _numbers("read() into", local, self._pool)
        of = _numbers("read() of", remote, theirs)
        if len(of) != len(to):
            raise Misuse(f"read() needs as many blocks to copy as places, got {len(of)} and {len(to)}")
        reading = Reading()

        def land() -> None:
            if theirs is not None:
                self._pool.slots[to] = theirs.slots[of]
                reading.generations = [theirs.blocks.generation[block] for block in of]

        return reading.started(self._host.read(holder, land))


Factory: TypeAlias = Callable[[EngineSpec, Host, Memory], Connector]
"""Makes the connector of one new engine. Of its host it needs `now_ns`, `send` and `ask`; reads go through its memory.
"""


def _numbers(what: str, blocks: Any, pool: Pool | None) -> list[int]:
    if not isinstance(blocks, list | tuple) or not all(type(block) is int for block in blocks):
        raise Misuse(f"{what} takes a list of block numbers, got {shown(blocks)}")
    there = pool.blocks.blocks if pool is not None else None
    strange = [block for block in blocks if block < 0 or (there is not None and block >= there)]
    if strange:
        raise Misuse(f"{what} blocks that there are not: {shown(strange)}; the pool has {there}")
    return list(blocks)

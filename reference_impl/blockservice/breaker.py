"""The breaker before one server: CLOSED, OPEN, HALF_OPEN (KVC-IDEM-014; RPC document, "circuit breaking").

CLOSED: calls go through; so many failures in a row, and it opens. OPEN: attempts fail at once, none reaches the server,
callers recompute. When it has been OPEN for its time, the next attempt finds it HALF_OPEN and probes: success closes
it, failure opens it again. What counts as failure is a server that does not answer; an error that it chose to send
(a bad argument, a limit) shows that it lives.

The library decides the states. Added here: few probes at a time (the library lets any number through), and no verdict
from an attempt that was given up by its caller, did not leave, or left before the breaker opened. The library measures
the OPEN time on the wall clock: if that is set back, it lasts longer by as much.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import grpc
import msgspec
from grpc.aio import AioRpcError
from purgatory import AsyncCircuitBreakerFactory
from purgatory.domain.model import OpenedState
from purgatory.service._async.circuitbreaker import AsyncCircuitBreaker

from reference_impl.blockservice.calls import CIRCUIT_OPEN, NotSent

DOWN: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)


class BreakerState(enum.StrEnum):
    """The document's words."""

    CLOSED = "CLOSED"
    HALF_OPEN = "HALF_OPEN"
    OPEN = "OPEN"


_WORDS: Final = {
    "closed": BreakerState.CLOSED,
    "half-opened": BreakerState.HALF_OPEN,
    "opened": BreakerState.OPEN,
}


class BreakerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When it opens, for how long, and how many attempts probe at a time."""

    failures: int = 5
    """In a row."""
    open_s: float = 1.0
    probes: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("failures", "open_s", "probes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


class Breaker:
    """One server's breaker. `changed(before, after)` is called at every change of state."""

    def __init__(
        self, target: str, limits: BreakerLimits, changed: Callable[[BreakerState, BreakerState], None] | None = None
    ) -> None:
        self.refused = 0
        """Attempts that it stopped."""
        self._target = target
        self._limits = limits
        self._changed = changed
        self._factory = AsyncCircuitBreakerFactory(default_threshold=limits.failures, default_ttl=limits.open_s)
        self._circuit: AsyncCircuitBreaker | None = None
        self._state = BreakerState.CLOSED
        self._probes = 0

    @property
    def state(self) -> BreakerState:
        """What it is; OPEN until the first attempt after its time."""
        return self._state

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        """Run an attempt and learn from its end. Raises NotSent (CIRCUIT_OPEN) at once if none may leave."""
        circuit = await self._enter()
        entered = self._state
        self._probes += entered is BreakerState.HALF_OPEN
        verdict: tuple[AioRpcError | None] | None = None
        try:
            yield
            verdict = (None,)
        except AioRpcError as error:
            verdict = (error if error.code() in DOWN else None,)
            raise
        finally:
            self._probes -= entered is BreakerState.HALF_OPEN
            if verdict is not None and not (entered is BreakerState.CLOSED and self._state is BreakerState.HALF_OPEN):
                await self._say(circuit, verdict[0])

    def check(self) -> None:
        """Raise NotSent (CIRCUIT_OPEN) if it has opened since the attempt began: it waited for a place meanwhile."""
        if self._state is BreakerState.OPEN:
            raise self._refusal()

    async def _enter(self) -> AsyncCircuitBreaker:
        if self._state is BreakerState.HALF_OPEN and self._probes >= self._limits.probes:
            raise self._refusal()
        if self._circuit is None:
            self._circuit = await self._factory.get_breaker(self._target)
        try:
            await self._circuit.__aenter__()
        except OpenedState:
            raise self._refusal() from None
        self._look(self._circuit)
        return self._circuit

    async def _say(self, circuit: AsyncCircuitBreaker, failure: AioRpcError | None) -> None:
        await circuit.__aexit__(type(failure) if failure else None, failure, None)
        self._look(circuit)

    def _look(self, circuit: AsyncCircuitBreaker) -> None:
        before, self._state = self._state, _WORDS[circuit.context.state]
        if before is not self._state and self._changed is not None:
            self._changed(before, self._state)

    def _refusal(self) -> NotSent:
        self.refused += 1
        return NotSent(CIRCUIT_OPEN, f"{self._target} has failed {self._limits.failures} times in a row; left alone")

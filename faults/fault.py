"""What a fault is: something that can be caused, proved, undone, and proved undone, each within a time limit."""

from __future__ import annotations

from typing import Protocol

import msgspec


class ProcessRef(msgspec.Struct, frozen=True, kw_only=True):
    """A process that a fault may aim at. `pid` and `start_ticks` together name it for good."""

    name: str
    role: str
    worker_id: str
    pid: int
    start_ticks: int


class Evidence(msgspec.Struct, frozen=True):
    """Whether something demonstrably happened, and what shows it (or what is missing), in one sentence."""

    holds: bool
    shown_by: str


class Fault(Protocol):
    """A fault with its target chosen. Every method returns within its own limit."""

    name: str

    def available(self) -> str | None:
        """Return why this fault cannot be caused here, or None if it can."""
        ...

    async def inject(self) -> int:
        """Cause it, and return the moment (monotonic ns). Raises FaultMissed if the target has gone."""
        ...

    async def prove(self) -> Evidence:
        """Say whether it demonstrably happened."""
        ...

    async def heal(self) -> None:
        """Undo it, where it does not pass by itself."""
        ...

    async def prove_healed(self) -> Evidence:
        """Say whether it demonstrably no longer acts."""
        ...


class FaultMissed(Exception):
    """The fault had no target any more when it was to be injected."""

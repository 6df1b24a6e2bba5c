"""Fencing: a service refuses whoever comes with an epoch below the highest it has admitted (KVC-LOCK-004).

The lock alone cannot stop a late predecessor, one that was frozen while its lock passed on. The services can.
"""

from __future__ import annotations

import msgspec


class Admission(msgspec.Struct, frozen=True):
    """The answer to a request for admission. `epoch` is the highest admitted so far, 0 if none."""

    accepted: bool
    epoch: int
    reason: str = ""
    """Why it was refused; empty if accepted."""


class EpochFence:
    """Remembers, for each key (a worker, a device), the highest epoch admitted and the engine that came with it."""

    def __init__(self) -> None:
        self._highest: dict[str, tuple[int, str]] = {}

    def admit(self, key: str, epoch: int, engine_id: str) -> Admission:
        """Admit `engine_id` to `key` with the `epoch` of its lock, or refuse it.

        A higher epoch is admitted and fences all lower ones from now on. The same epoch is admitted again for the same
        engine, which may have lost our answer, and refused for another: one epoch has one holder.
        """
        highest, holder = self._highest.get(key, (0, ""))
        if epoch <= 0:
            return Admission(False, highest, f"epoch {epoch} was never given out: epochs start at 1")
        if epoch < highest:
            return Admission(False, highest, f"epoch {epoch} of {engine_id} is fenced: {holder} came with {highest}")
        if epoch == highest and engine_id != holder:
            return Admission(False, highest, f"epoch {epoch} belongs to {holder}, not to {engine_id}")
        self._highest[key] = (epoch, engine_id)
        return Admission(True, epoch)

    def epoch(self, key: str) -> int:
        """Return the highest epoch admitted to `key`; 0 if none was."""
        return self._highest.get(key, (0, ""))[0]

    def is_current(self, key: str, epoch: int, engine_id: str) -> bool:
        """Whether `engine_id` was admitted to `key` with `epoch` and nobody has come with a higher one since."""
        return self._highest.get(key) == (epoch, engine_id)

"""The push connector's writer thread, one turn of its loop at a time, so that a world decides when it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class UnstartedThreads:
    """Stands in for the module `threading`: locks and events are real, a thread is made and never starts."""

    def Thread(self, **_: Any) -> UnstartedThreads:  # noqa: N802 # the module's name
        """Return what can be started without effect."""
        return self

    def start(self) -> None:
        """Start nothing."""

    def join(self, *_: Any, **__: Any) -> None:
        """There is nothing to wait for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class _Once:
    """An event that lets a loop `while not stop.is_set()` go round once."""

    def __init__(self) -> None:
        self._looks = 0

    def is_set(self) -> bool:
        """False at the first look, and true at the next."""
        self._looks += 1
        return self._looks > 1

    def set(self) -> None:
        """It stops by itself."""

    def wait(self, *_: Any, **__: Any) -> bool:
        """Do not wait."""
        return True


class _Never:
    """An event for which nobody waits."""

    def set(self) -> None:
        """Nobody sleeps."""

    def clear(self) -> None:
        """Nobody sleeps."""

    def wait(self, *_: Any, **__: Any) -> bool:
        """Do not wait."""
        return True


def one_turn_of(worker: Any) -> Callable[[], None]:
    """Return what lets a worker's writer loop go round once."""
    worker._push_writer_wake = _Never()

    def turn() -> None:
        worker._push_writer_stop = _Once()
        worker._push_writer_loop()

    return turn

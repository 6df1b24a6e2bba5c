"""One NIXL agent: memory it offers, peers it knows, reads in flight. Everything NIXL raises ends here.

What NIXL 1.5.1 does, and what follows from it:

- With its progress thread an agent spins one core, connected or not. So we have none: `receive` and `advance` make
  progress, and a peer's connection comes up only while somebody calls them.
- Releasing a transfer in progress *succeeds, and its data lands later* (seen over TCP with a stopped peer), even after
  the peer was removed. So no handle is released before its transfer has ended, and nothing here can be cut short.
- Damaged metadata can end the process (SIGSEGV in its parser). So ours travels with its digest, against accident, and
  only in frames that the deployment's secret seals (`hello`), against ill will: a digest anybody can make.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from reference_impl.transport.base import PeerRefused
from reference_impl.transport.plan import Descriptors

POST_DESCRIPTORS_MAX: Final = 512
POST_BYTES_MAX: Final = 16 << 20
"""At most so much is read in one call of `advance`, about 2 ms: shared memory is copied within the call."""
SCRATCH_WORDS_MIN: Final = 4096
_DIGEST_BYTES: Final = 32
WRAPPER_VARIABLE: Final = "PDPROOF_NIXL_WRAPPER"
"""Names a function, `module:function`, that gets NIXL's agent and returns what is used in its place: for tests of
faults, which this package knows nothing of."""

T = TypeVar("T")


def agent_name(engine_id: str, rank: int) -> str:
    """Return the NIXL name of a rank: unique, since an engine's id is never used again."""
    return f"{engine_id}/{rank}"


def sealed(metadata: bytes) -> bytes:
    """Return metadata behind its digest."""
    return hashlib.sha256(metadata).digest() + metadata


def opened(data: bytes) -> bytes:
    """Return the metadata in `data`. Raises `PeerRefused` if it is damaged."""
    digest, metadata = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if hashlib.sha256(metadata).digest() != digest:
        raise PeerRefused(f"metadata of {len(data)} bytes is damaged: its digest does not match")
    return metadata


@dataclass(eq=False)
class Get:
    """One list of descriptors being read from a peer, one NIXL transfer after the other."""

    peer: str
    remote: Descriptors
    local: Descriptors
    done: Callable[[str], None]
    """Called once nothing can land any more, with "" or what went wrong."""
    keep: bool = False
    """Keep the transfer when it is done, to be posted `again`. Only for a list that fits into one part."""
    next: int = 0
    handle: Any = None
    in_flight: bool = False
    stopped: bool = False
    """Set to start no further part: it then ends when what is in flight has landed."""


@dataclass
class _Budget:
    """What one call of `advance` may still post."""

    descriptors: int = POST_DESCRIPTORS_MAX
    size_bytes: int = POST_BYTES_MAX

    @property
    def spent(self) -> bool:
        return self.descriptors <= 0 or self.size_bytes <= 0


@dataclass
class Scratch:
    """Registered words to read into for a while."""

    words: NDArray[np.uint64]
    address: int
    in_use: bool = True


class NixlAgent:
    """An agent named `name`. Takes 0.4 s for the first of a process. Raises ImportError without NIXL, RuntimeError."""

    def __init__(self, name: str) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # both are read when the libraries are loaded
        os.environ.setdefault("UCX_LOG_LEVEL", "error")
        from nixl import nixl_agent, nixl_agent_config

        self.name = name
        self._disconnected: type[Exception] = _disconnect_error()
        try:
            self._nixl: Any = _wrapped(nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"])))
        except Exception as error:
            raise RuntimeError(f"NIXL made no agent {name!r}: {_told(error)}") from error
        self._gets: list[Get] = []
        self._kept: set[Get] = set()
        self._peers: set[str] = set()
        self._lost: set[str] = set()
        self._forgotten: set[str] = set()
        self._scratch: list[Scratch] = []

    def register(self, array: NDArray[Any]) -> None:
        """Let peers read `array`, and us read into it. It must stay where it is. Raises RuntimeError."""
        try:
            self._nixl.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
        except Exception as error:
            raise RuntimeError(f"NIXL registered no {array.nbytes} bytes: {_told(error)}") from error

    def metadata(self) -> bytes:
        """Return what a peer must know of us, after all memory is registered."""
        return sealed(self._nixl.get_agent_metadata())

    def scratch(self, words: int) -> Scratch:
        """Return registered room for `words`; give it back by `in_use = False` once nothing can land in it."""
        for scratch in self._scratch:
            if not scratch.in_use and len(scratch.words) >= words:
                scratch.in_use = True
                return scratch
        room = max(SCRATCH_WORDS_MIN, 1 << (words - 1).bit_length())
        array = np.zeros(room, dtype=np.uint64)
        self.register(array)
        made = Scratch(array, array.ctypes.data)
        self._scratch.append(made)
        return made

    def load(self, name: str, data: bytes) -> None:
        """Know the peer `name`. Raises `PeerRefused`."""
        metadata = opened(data)
        if name in self._forgotten:
            self._forgotten.discard(name)
            if name not in self._lost:  # still connected, since something of it is in flight
                self._peers.add(name)
                return
            self._drop(name)
        self._lost.discard(name)
        try:
            found = self._nixl.add_remote_agent(metadata)
        except Exception as error:
            raise PeerRefused(f"NIXL cannot use the metadata of {name!r}: {_told(error)}") from error
        found = found.decode(errors="replace") if isinstance(found, bytes) else found
        if found != name:
            if found not in self._peers:
                self._drop(found)
            raise PeerRefused(f"the metadata of {name!r} is that of {found!r}")
        self._peers.add(name)
        self._attempt(lambda: self._nixl.make_connection(name))

    def lost(self, name: str) -> bool:
        """Whether a peer's connection has ended."""
        return name in self._lost

    def forget(self, name: str) -> None:
        """Forget a peer, once its reads have ended."""
        if name in self._peers:
            self._peers.discard(name)
            self._forgotten.add(name)
            for get in self._gets:
                get.stopped |= get.peer == name
            self._drop_forgotten()

    def start(
        self, peer: str, remote: Descriptors, local: Descriptors, done: Callable[[str], None], *, keep: bool = False
    ) -> Get:
        """Read from `peer`; `advance` does it, and calls `done` when it has ended. With `keep`, `leave` it at last."""
        get = Get(peer, remote, local, done, keep)
        self._gets.append(get)
        if keep:
            self._kept.add(get)
        return get

    def again(self, get: Get, done: Callable[[str], None]) -> None:
        """Read the same once more, by the transfer that was kept: a quarter of the time of a new one."""
        get.next, get.done = 0, done
        self._gets.append(get)

    def leave(self, get: Get) -> None:
        """Give a kept transfer back, once it has ended."""
        self._kept.discard(get)
        _release(get.handle)
        get.handle = None

    def advance(self) -> bool:
        """Take every read a step further; return whether any moved."""
        budget = _Budget()
        at, ended = 0, 0
        while at < len(self._gets):  # what a `done` starts comes last, and is reached
            get = self._gets[at]
            error = self._step(get, budget)
            if error is None:
                at += 1
            else:
                self._gets.remove(get)
                ended += 1
                get.done(error)
        if self._forgotten:
            self._drop_forgotten()
        self._gets = self._gets[1:] + self._gets[:1]  # a long read must not keep a short one waiting
        return ended > 0 or budget.descriptors < POST_DESCRIPTORS_MAX

    def send(self, peer: str, message: bytes) -> bool:
        """Send a notification; False if it did not leave."""
        if peer not in self._peers or peer in self._lost:
            return False
        try:
            self._nixl.send_notif(peer, message)
        except Exception as error:
            self._note(peer, error)
            return False
        return True

    def receive(self) -> list[tuple[str, bytes]]:
        """Return notifications with their senders' names, and let connections progress."""
        found = self._attempt(self._nixl.get_new_notifs)
        return [(sender, message) for sender, messages in (found or {}).items() for message in messages]

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._gets

    def close(self) -> None:
        """End the agent: nothing is read or answered any more."""
        for get in {*self._gets, *self._kept}:
            _release(get.handle)
        self._gets.clear()
        self._kept.clear()
        self._nixl = None

    def _step(self, get: Get, budget: _Budget) -> str | None:
        """Take a read further within the budget; return how it ended ("" or an error), None if it goes on."""
        try:
            while True:
                if get.in_flight and not self._landed(get, self._nixl.check_xfer_state(get.handle)):
                    return None
                if get.next == len(get.remote):
                    return ""
                if get.stopped:
                    return "stopped"
                if get.peer in self._lost or get.peer not in self._peers:
                    return f"{get.peer} is gone"
                if budget.spent:
                    return None
                self._post(get, budget)
        except Exception as error:
            self._note(get.peer, error)
            _release(get.handle)
            get.handle, get.in_flight = None, False
            return _told(error)

    def _landed(self, get: Get, state: str) -> bool:
        """Whether the transfer in flight has ended; then its handle is given back. Raises RuntimeError if it failed."""
        if state == "PROC":
            return False
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state}")
        get.in_flight = False
        if not get.keep:
            _release(get.handle)
            get.handle = None
        return True

    def _post(self, get: Get, budget: _Budget) -> None:
        """Post the next part of a read: at least one descriptor, else as many as the budget has room for."""
        if get.keep:
            count, size_bytes = len(get.remote), 0  # a few KiB
        else:
            count, size_bytes = _affordable(get.remote[get.next : get.next + budget.descriptors, 1], budget.size_bytes)
        if get.handle is None:
            part = slice(get.next, get.next + count)
            get.handle = self._nixl.initialize_xfer(
                "READ",
                self._nixl.get_xfer_descs(get.local[part], "DRAM"),
                self._nixl.get_xfer_descs(get.remote[part], "DRAM"),
                get.peer,
            )
        get.next += count
        budget.descriptors -= count
        budget.size_bytes -= size_bytes
        get.in_flight = True
        self._landed(get, self._nixl.transfer(get.handle))  # in shared memory it often has

    def _note(self, peer: str, error: Exception) -> None:
        """Remember that a peer has gone: its id never comes back, and each try would write a line to the log."""
        if isinstance(error, self._disconnected):
            self._lost.add(peer)

    def _drop_forgotten(self) -> None:
        busy = {get.peer for get in (*self._gets, *self._kept)}
        for name in self._forgotten - busy:
            self._forgotten.discard(name)
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._attempt(lambda: self._nixl.remove_remote_agent(name))

    def _attempt(self, act: Callable[[], T]) -> T | None:
        """Do something whose failure shows elsewhere."""
        try:
            return act()
        except Exception:
            return None


def _wrapped(agent: Any) -> Any:
    """Return what the environment has in the agent's place: itself, unless told otherwise."""
    module, _, function = os.environ.get(WRAPPER_VARIABLE, "").partition(":")
    return getattr(importlib.import_module(module), function)(agent) if module else agent


def _disconnect_error() -> type[Exception]:
    import nixl

    found: type[Exception] = nixl.nixlRemoteDisconnectError
    return found


def _affordable(sizes: NDArray[np.uint64], limit_bytes: int) -> tuple[int, int]:
    """Return how many descriptors come first that are within the limit together, one at least, and their bytes."""
    whole_bytes = int(sizes.sum())
    if whole_bytes <= limit_bytes or len(sizes) == 1:
        return len(sizes), whole_bytes
    sums = np.cumsum(sizes)
    count = max(1, int(np.searchsorted(sums, limit_bytes, side="right")))
    return count, int(sums[count - 1])


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__


def _release(handle: Any) -> None:
    """Give a transfer's handle back. Its own finaliser would write to the log."""
    if handle is not None:
        try:
            handle.release()
        except Exception:
            handle._released = True

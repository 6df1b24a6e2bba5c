"""Stands in for a NIXL agent: the calls that vLLM makes of one, over a world's network. Memory is copied for real."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from harness.conformance.subject import Flight, Host, Misuse, ReadState

INIT_AGENT: Final = "NIXL_INIT_AGENT"
_STATES: Final = {ReadState.RUNNING: "PROC", ReadState.DONE: "DONE", ReadState.FAILED: "ERR"}


class NixlError(Misuse):
    """What NIXL raises where a call cannot be done."""


@dataclass
class Telemetry:
    """What NIXL tells of a transfer."""

    xferDuration: int  # noqa: N815 # NIXL's names
    postDuration: int  # noqa: N815
    totalBytes: int  # noqa: N815
    descCount: int  # noqa: N815


@dataclass
class _Transfer:
    operation: str
    peer: str
    mine: NDArray[np.uint64]
    theirs: NDArray[np.uint64]
    notification: bytes
    flight: Flight | None = None
    begun_ns: int = 0


class NixlDouble:
    """One rank's agent. `name` is its engine's, and `rank` which of its ranks it is."""

    def __init__(self, name: str, rank: int, host: Host) -> None:
        self.name, self.rank = name, rank
        self._host = host
        self._numbers = itertools.count(1)
        self._lists: dict[int, tuple[str, NDArray[np.uint64]]] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._peers: dict[str, tuple[str, int]] = {}
        self._inbox: dict[str, list[bytes]] = {}

    # Memory.

    def get_reg_descs(self, descs: Any, mem_type: str = "", **_: Any) -> Any:  # noqa: ARG002
        """Take descriptors as they are."""
        return descs

    def register_memory(self, descs: Any, **_: Any) -> Any:
        """Nothing has to be pinned."""
        return descs

    def deregister_memory(self, descs: Any, **_: Any) -> None:
        """Nothing was pinned."""

    def get_xfer_descs(self, descs: Any, mem_type: str = "", **_: Any) -> NDArray[np.uint64]:  # noqa: ARG002
        """Return descriptors as rows of address, length and device."""
        return np.asarray(descs, np.uint64).reshape(-1, 3)

    def prep_xfer_dlist(self, agent: str, descs: Any, mem_type: str = "", **_: Any) -> int:  # noqa: ARG002
        """Keep a list of descriptors; return its handle."""
        handle = next(self._numbers)
        self._lists[handle] = agent, np.asarray(descs, np.uint64).reshape(-1, 3)
        return handle

    def release_dlist_handle(self, handle: int) -> None:
        """Forget a list."""
        self._lists.pop(handle, None)

    # Peers.

    def get_agent_metadata(self) -> bytes:
        """Return what a peer needs to reach this agent."""
        return f"{self.name}/{self.rank}".encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        """Take up a peer; return its name."""
        address = metadata.decode()
        name, _, rank = address.rpartition("/")
        self._peers[address] = name, int(rank)
        return address

    def remove_remote_agent(self, agent: str) -> None:
        """Forget a peer."""
        self._peers.pop(agent, None)

    def check_remote_metadata(self, agent: str, *_: Any, **__: Any) -> bool:
        """Whether a peer is known."""
        return agent in self._peers

    # Notifications.

    def send_notif(self, agent: str, notif_msg: bytes, **_: Any) -> None:
        """Send one. Raises NixlError where NIXL would."""
        if agent not in self._peers:
            raise NixlError(f"NIXL_ERR_NOT_FOUND: {agent}")
        name, rank = self._peers[agent]
        if not self._host.send(name, bytes(notif_msg), rank=self.rank, to_rank=rank):
            raise NixlError("NIXL_ERR_REMOTE_DISCONNECT")

    def arrived(self, sender: str, message: bytes) -> None:
        """Take one in."""
        self._inbox.setdefault(sender, []).append(message)

    def get_new_notifs(self, *_: Any, **__: Any) -> dict[str, list[bytes]]:
        """Return what has arrived, by sender."""
        inbox, self._inbox = self._inbox, {}
        return inbox

    # Transfers.

    def make_prepped_xfer(
        self, operation: str, local: int, local_ids: Any, remote: int, remote_ids: Any, notif_msg: bytes = b"", **_: Any
    ) -> int:
        """Prepare a transfer; return its handle."""
        agent, theirs = self._lists[remote]
        mine = self._lists[local][1]
        mine, theirs = mine[np.asarray(local_ids, np.int64)], theirs[np.asarray(remote_ids, np.int64)]
        if len(mine) != len(theirs) or (mine[:, 1] != theirs[:, 1]).any():
            raise NixlError("NIXL_ERR_INVALID_PARAM: the two sides' descriptors do not match")
        handle = next(self._numbers)
        self._transfers[handle] = _Transfer(operation, agent, mine, theirs, bytes(notif_msg))
        return handle

    def transfer(self, handle: int, *_: Any, **__: Any) -> str:
        """Begin a transfer."""
        transfer = self._transfers[handle]
        if transfer.peer not in self._peers:
            raise NixlError(f"NIXL_ERR_NOT_FOUND: {transfer.peer}")
        transfer.begun_ns = self._host.now_ns()
        transfer.flight = self._host.read(self._peers[transfer.peer][0], partial(self._land, transfer))
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        """Return how a transfer stands."""
        flight = self._transfers[handle].flight
        return "ERR" if flight is None else _STATES[flight.state]

    def get_xfer_telemetry(self, handle: int) -> Telemetry:
        """Return what a transfer took."""
        transfer = self._transfers[handle]
        took_us = (self._host.now_ns() - transfer.begun_ns) // 1_000
        return Telemetry(took_us, 1, int(transfer.mine[:, 1].sum()), len(transfer.mine))

    def release_xfer_handle(self, handle: int) -> None:
        """Forget a transfer. Raises NixlError while it runs, as NIXL does."""
        flight = self._transfers[handle].flight
        if flight is not None and flight.state is ReadState.RUNNING:
            raise NixlError("NIXL_ERR_REPOST_ACTIVE")
        del self._transfers[handle]

    def _land(self, transfer: _Transfer) -> None:
        """Copy, and tell the other side, as the transport does without either side's doing."""
        reading = transfer.operation == "READ"
        for mine, theirs in zip(transfer.mine.tolist(), transfer.theirs.tolist(), strict=True):
            to, source = (mine, theirs) if reading else (theirs, mine)
            ctypes.memmove(to[0], source[0], to[1])
        if transfer.notification:
            peer, rank = self._peers.get(transfer.peer, ("", 0))
            self._host.send(peer, transfer.notification, rank=self.rank, to_rank=rank)

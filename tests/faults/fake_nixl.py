# ruff: noqa: ARG002 # the arguments are those of NIXL
"""An agent that does what NIXL's does, in one process and at once: for tests of what is put around it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any


class Descriptors:
    """A list of descriptors: address, length, device."""

    def __init__(self, rows: list[tuple[int, ...]], kind: str = "nixl_mem_t.DRAM_SEG") -> None:
        self.rows = rows
        self.kind = kind

    def getType(self) -> str:  # noqa: N802 # NIXL's name
        return self.kind

    def descCount(self) -> int:  # noqa: N802
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return self.rows[index]


@dataclass(eq=False)
class Prepared:
    descriptors: Descriptors


@dataclass(eq=False)
class Handle:
    """A transfer: what it copies, and what it says at its end."""

    peer: FakeNixl
    copies: list[tuple[int, int, int]]
    notification: bytes
    state: str = "PROC"
    posted: int = 0
    _released: bool = False

    def release(self) -> None:
        self._released = True


@dataclass(eq=False)
class FakeNixl:
    """An agent. `network` knows all of them by name; a transfer posted ends when `complete` says so."""

    name: str
    network: dict[str, FakeNixl]
    inbox: list[tuple[str, bytes]] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    known: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.network[self.name] = self

    def send_notif(self, remote_agent_name: str, notif_msg: bytes, backend: str | None = None) -> None:
        self.network[remote_agent_name].inbox.append((self.name, notif_msg))

    def get_new_notifs(self, backends: list[str] | None = None) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        for sender, message in self.inbox:
            found.setdefault(sender, []).append(message)
        self.inbox.clear()
        return found

    def register_memory(self, reg_list: list[tuple[int, ...]], mem_type: str | None = None) -> Descriptors:
        return Descriptors(reg_list)

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Descriptors, mem_type: str | None = None) -> Prepared:
        return Prepared(xfer_list)

    def release_dlist_handle(self, handle: Prepared) -> None:
        pass

    def make_prepped_xfer(
        self, operation: str, local_xfer_side: Prepared, local_indices: list[int], remote_xfer_side: Prepared,
        remote_indices: list[int], notif_msg: bytes = b"",
    ) -> Handle:  # fmt: skip
        local = Descriptors([local_xfer_side.descriptors[i] for i in local_indices])
        remote = Descriptors([remote_xfer_side.descriptors[i] for i in remote_indices])
        peer = next(name for name in self.network if name != self.name)
        return self.initialize_xfer(operation, local, remote, peer, notif_msg)

    def initialize_xfer(
        self, operation: str, local_descs: Descriptors, remote_descs: Descriptors, remote_agent: str,
        notif_msg: bytes = b"",
    ) -> Handle:  # fmt: skip
        copies = [(here[0], there[0], here[1]) for here, there in zip(local_descs.rows, remote_descs.rows, strict=True)]
        self.handles.append(Handle(self.network[remote_agent], copies, notif_msg))
        return self.handles[-1]

    def transfer(self, handle: Handle, notif_msg: bytes = b"") -> str:
        handle.state = "PROC"
        handle.posted += 1
        handle.notification = notif_msg or handle.notification
        return "PROC"

    def complete(self, handle: Handle) -> None:
        """Let a transfer land."""
        for here, there, size in handle.copies:
            ctypes.memmove(here, there, size)
        handle.state = "DONE"
        if handle.notification:
            handle.peer.inbox.append((self.name, handle.notification))

    def check_xfer_state(self, handle: Handle) -> str:
        return handle.state

    def get_xfer_telemetry(self, handle: Handle) -> Any:
        assert isinstance(handle, Handle)  # the engine's own handle does not come so far
        return handle

    def release_xfer_handle(self, handle: Handle) -> None:
        assert isinstance(handle, Handle)
        handle.release()

    def add_remote_agent(self, metadata: bytes) -> str:
        self.known.append(metadata)
        return metadata.decode()

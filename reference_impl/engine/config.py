"""What an engine process is told when it is started."""

from __future__ import annotations

from typing import Final

import msgspec

from reference_impl.engine.profile import Profile
from reference_impl.rules.routing import Role
from reference_impl.rules.terms import KvTerms

MODEL_NAME: Final = "pdproof-oracle"
STATUS_BYTES_MAX: Final = 4096


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Handed over as JSON in one argument. Descriptors are inherited; -1 means there is none."""

    engine_id: str
    worker_id: str
    role: Role = Role.BOTH
    terms: KvTerms = KvTerms()
    """On which KV moves between engines; without effect in role `both`."""
    ranks: int = 1
    """Processes that share out every block of the KV pool: 1, 2, 4 or 8."""
    profile: Profile
    """Already scaled."""
    weights_file: str
    weights_seed: int
    lock_path: str
    memory_socket: str
    """Of the device's memory service; empty: the engine's memory is its own and dies with it (a cold start)."""
    blocks_socket: str = ""
    """Of the node's block service; empty: there is none."""
    router_url: str
    """Empty: nobody to register with; the engine serves on its own."""
    host: str = "127.0.0.1"
    port: int = 0
    events_file: str = ""
    status_fd: int = -1
    """A pipe to the supervisor: one JSON `EngineStatus` a line at each change of state."""
    ticks_fd: int = -1
    """A shared page whose first word the event loop raises; the probe reads it."""
    spawned_ns: int = 0
    """When the supervisor started this process: the start of the first init phase."""
    parent_pid: int = 0
    """The engine ends when this process does; 0: it does not care."""
    init_limit_s: float = 600.0
    """How long to wait for another engine's weights or for memory."""


class EngineStatus(msgspec.Struct, frozen=True):
    """A change of state, told to the supervisor."""

    state: str
    epoch: int = 0
    url: str = ""
    reason: str = ""

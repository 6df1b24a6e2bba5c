"""What a block service is told when it is started."""

from __future__ import annotations

import msgspec

from reference_impl.blockservice.buckets import Bucket, Limit


class BlockServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Handed over as JSON in one argument."""

    node: str
    """Its worker's name."""
    nodes: list[str]
    """All of the deployment's: groups may move between them."""
    run_dir: str
    """Private (0700): the engine's socket, the nodes' addresses."""
    engine_socket: str
    store: str
    """The SQLite file; it outlives the process."""
    events_file: str = ""
    log_file: str = ""
    """One line a call; empty: none."""
    host: str = "127.0.0.1"
    loan_ms: int = 30_000
    """What a transfer token is good for."""
    slots_max: int = 1 << 20
    """Blocks that may be reserved."""
    buckets: dict[Bucket, Limit] = {}
    fail_points: bool = False
    parent_pid: int = 0
    """The service ends when this process does; 0: it does not care."""

"""What a worker is made of: its configuration, and the status file that tells who is who in it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from reference_impl.blockservice.config import BlockServiceConfig
from reference_impl.engine.profile import Profile
from reference_impl.failover.prober import ProbeLimits
from reference_impl.rules.routing import Role
from reference_impl.rules.terms import KvTerms


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: one device, and the engines that take turns on it."""

    worker_id: str
    shadow: bool
    """True: memory service, active engine and shadow. False: one engine whose memory dies with it."""
    profile: Profile
    weights_file: str
    weights_seed: int
    router_url: str
    run_dir: str
    """Private (0700): the lock, the memory service's socket, the status file."""
    events_dir: str
    logs_dir: str
    memory_bytes: int
    """The device's capacity."""
    role: Role = Role.BOTH
    terms: KvTerms = KvTerms()
    """On which its engines keep KV for others and read theirs. Already scaled."""
    ranks: int = 1
    clock_offset_s: float = 0.0
    """How far the clock of its engines and its memory service is ahead of the host's (`time_namespace`)."""
    blocks: BlockServiceConfig | None = None
    """Of the block service beside the engines; None: there is none."""
    host: str = "127.0.0.1"
    probe: ProbeLimits = ProbeLimits()
    parent_pid: int = 0

    @property
    def lock_path(self) -> Path:
        """The failover lock."""
        return Path(self.run_dir, f"{self.worker_id}.lock")

    @property
    def memory_socket(self) -> Path:
        """The memory service's socket."""
        return Path(self.run_dir, f"{self.worker_id}.gms")

    @property
    def status_path(self) -> Path:
        """The status file."""
        return status_path(Path(self.run_dir), self.worker_id)

    @property
    def blocks_socket(self) -> Path:
        """Where the block service meets the engine."""
        return blocks_socket(Path(self.run_dir), self.worker_id)


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a worker. `pid` and `start_ticks` together name it for good."""

    name: str
    role: str
    """"engine", "memory-service" or "block-service"; of an engine's own processes what they are in it."""
    pid: int
    start_ticks: int
    state: str = ""
    """Of an engine: its life cycle's state."""
    epoch: int = 0
    engine: str = ""
    """The engine that it is a process of, where an engine has several."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """Who is in a worker at this moment."""

    worker_id: str
    processes: list[ProcessInfo]

    def engines(self, state: str) -> list[ProcessInfo]:
        """Return the engines in `state`."""
        return [p for p in self.processes if p.role == "engine" and p.state == state]


def blocks_socket(run_dir: Path, worker_id: str) -> Path:
    """Return where a worker's block service meets its engine."""
    return run_dir / f"{worker_id}.blocks"


def status_path(run_dir: Path, worker_id: str) -> Path:
    """Return where a worker's status file stands."""
    return run_dir / f"worker-{worker_id}.json"


def write_status(path: Path, status: WorkerStatus) -> None:
    """Replace the status file; a reader sees the old or the new one, never a part."""
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_bytes(msgspec.json.encode(status))
    partial.rename(path)


def read_status(path: Path) -> WorkerStatus | None:
    """Return what the status file says, None if there is none yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=WorkerStatus)
    except FileNotFoundError:
        return None

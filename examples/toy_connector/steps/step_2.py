"""Step 2: blocks are kept, handed over, read and given back. Nobody ever gets tired of waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from faults.nixl.dialects import Meaning
from faults.nixl.orders import Kind
from harness.conformance.simple_connector import Memory, Progress, Reading
from harness.conformance.simple_engine import SimpleSubject
from harness.conformance.simple_pool import BLOCK_TOKENS
from harness.conformance.subject import Capability, EngineSpec, Host, Params, ReadState, Request

REPORT = "done:"


@dataclass
class Load:
    """A request that has something to read."""

    request_id: str
    hand_off: dict[str, Any]
    first: int = 0
    """Of its blocks, the first that is to be read."""
    blocks: list[int] = field(default_factory=list)
    reading: Reading | None = None


class Connector:
    """One engine's side."""

    def __init__(self, spec: EngineSpec, host: Host, memory: Memory) -> None:
        self.spec, self.host, self.memory = spec, host, memory
        self.leases: set[str] = set()
        """Finished requests whose blocks are kept."""
        self.loads: dict[str, Load] = {}
        self.progress = Progress()

    # The holder.

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, Params | None]:
        """Keep a prefill's blocks for whoever is sent for them."""
        if not (request.params or {}).get("do_remote_decode"):
            return False, None
        self.leases.add(request.request_id)
        return True, {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.spec.name,
            "remote_request_id": request.request_id, "remote_block_ids": blocks, "remote_host": "127.0.0.1",
            "remote_port": self.spec.port, "tp_size": 1,
        }  # fmt: skip

    def message(self, sender: str, data: bytes) -> None:
        """Release what has been read."""
        self.release(data.decode().removeprefix(REPORT))

    def release(self, request: str) -> None:
        """Give a request's blocks back."""
        self.leases.remove(request)
        self.progress.released.append(request)

    def question(self, data: bytes) -> bytes | None:
        """Do not answer."""
        return None

    # The reader.

    def new_request(self, request: Request) -> None:
        """Remember what is to be read."""
        if (request.params or {}).get("do_remote_prefill"):
            self.loads[request.request_id] = Load(request.request_id, dict(request.params or {}))

    def scheduled(self, request: Request, blocks: list[int], cached: int) -> int:
        """Load what the own cache does not have."""
        load = self.loads.get(request.request_id)
        if load is None:
            return 0
        load.first, load.blocks = cached // BLOCK_TOKENS, blocks
        if cached == len(request.prompt):
            self.done(load)
        return len(request.prompt) - cached

    def aborted(self, request_id: str) -> None:
        """Nobody wants it any more."""
        if request_id in self.leases:
            self.release(request_id)
        load = self.loads.get(request_id)
        if load is not None:
            if load.blocks:
                self.progress.failed[request_id] = "aborted"
            self.done(load)

    def done(self, load: Load) -> None:
        """Tell the holder that we need its blocks no longer."""
        del self.loads[load.request_id]
        self.host.send(load.hand_off["remote_engine_id"], f"{REPORT}{load.hand_off['remote_request_id']}".encode())

    def watch(self, load: Load) -> None:
        """Start a load's read, and see its end."""
        if load.reading is None and load.blocks:
            remote = load.hand_off["remote_block_ids"][load.first :]
            load.reading = self.memory.read(load.hand_off["remote_engine_id"], remote, load.blocks[load.first :])
        elif load.reading is not None and load.reading.state is ReadState.DONE:
            self.progress.loaded.append(load.request_id)
            self.done(load)

    def step(self) -> Progress:
        """Read, and say what became of requests since the last step."""
        for load in list(self.loads.values()):
            self.watch(load)
        progress, self.progress = self.progress, Progress()
        return progress

    def metrics(self) -> dict[str, float]:
        """Count nothing."""
        return {}


def meaning(data: bytes) -> Meaning:
    """Say what a message of ours is."""
    text = data.decode(errors="replace")
    if text.startswith(REPORT):
        return Meaning(Kind.COMPLETION, (text.removeprefix(REPORT),))
    return Meaning(Kind.UNKNOWN)


def make_subject() -> SimpleSubject:
    """Return what is tested."""
    return SimpleSubject(
        "step 2", Connector, meaning=meaning, capabilities=(Capability.LEASES, Capability.PREFIX_HITS)
    )  # fmt: skip

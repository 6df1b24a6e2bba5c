"""Step 1: the least that is a connector. It keeps nothing, hands nothing over and reads nothing."""

from __future__ import annotations

from faults.nixl.dialects import Meaning
from faults.nixl.orders import Kind
from harness.conformance.simple_connector import Memory, Progress
from harness.conformance.simple_engine import SimpleSubject
from harness.conformance.subject import Capability, EngineSpec, Host, Params, Request


class Connector:
    """One engine's side."""

    def __init__(self, spec: EngineSpec, host: Host, memory: Memory) -> None:
        self.spec, self.host, self.memory = spec, host, memory
        self.progress = Progress()

    def new_request(self, request: Request) -> None:
        """A request has entered the queue."""

    def scheduled(self, request: Request, blocks: list[int], cached: int) -> int:
        """Load nothing: all is computed here."""
        return 0

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, Params | None]:
        """Keep no blocks, and hand nothing over."""
        return False, None

    def aborted(self, request_id: str) -> None:
        """A request was given up."""

    def message(self, sender: str, data: bytes) -> None:
        """A message has come."""

    def question(self, data: bytes) -> bytes | None:
        """Do not answer."""
        return None

    def step(self) -> Progress:
        """Say what became of requests since the last step."""
        progress, self.progress = self.progress, Progress()
        return progress

    def metrics(self) -> dict[str, float]:
        """Count nothing."""
        return {}


def meaning(data: bytes) -> Meaning:
    """There are no messages yet."""
    return Meaning(Kind.UNKNOWN)


def make_subject() -> SimpleSubject:
    """Return what is tested."""
    return SimpleSubject(
        "step 1", Connector, meaning=meaning, capabilities=(Capability.LEASES, Capability.PREFIX_HITS)
    )  # fmt: skip

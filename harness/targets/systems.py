"""The systems that can be put under test, by name."""

from __future__ import annotations

from typing import Final

from harness.errors import BadInput
from harness.plan import System
from harness.targets.reference import REFERENCE

NAMES: Final = ("reference", "vllm", "dynamo")


def system_of(name: str) -> System:
    """Return the system of this name, or the vLLM that the TOML file at this path describes. Raises BadInput."""
    if name == REFERENCE.name:
        return REFERENCE
    if name == "dynamo":
        from harness.targets.dynamo.system import DynamoSystem

        return DynamoSystem()
    from harness.targets.vllm.config import load_config
    from harness.targets.vllm.system import VllmSystem

    if name == "vllm":
        return VllmSystem(load_config("nixl"))
    if name.endswith(".toml"):
        return VllmSystem(load_config(name))
    raise BadInput(f"target {name!r}: unknown; there are {', '.join(NAMES)}, or give a .toml file")

"""Options and markers of the project's tests: what a machine lacks is skipped, with the reason."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

import reference_impl.blockservice  # noqa: F401 # says how gRPC is to behave, before anything loads it


def _no_gpu() -> str | None:
    if not Path("/dev/nvidiactl").exists():
        return "no NVIDIA GPU on this machine (/dev/nvidiactl is missing)"
    return None if importlib.util.find_spec("cuda") else "the package cuda-python is not installed"


def _no_package(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"the package {name} is not installed"


def _no_vllm() -> str | None:
    return None if os.environ.get("PDPROOF_VLLM_PYTHON") else "PDPROOF_VLLM_PYTHON names no interpreter with vLLM"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs hardware or packages that are not here."""
    lacks = {"gpu": _no_gpu(), "vllm": _no_vllm(), "nixl": _no_package("nixl")}
    for item in items:
        for marker, reason in lacks.items():
            if reason is not None and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))

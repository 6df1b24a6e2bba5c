"""What is written of the machine and the software into a manifest."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import psutil

from reference_impl.rules.events import Scalar

PACKAGES = ("pdproof", "aiohttp", "gevent", "locust", "numpy", "uvloop")


def versions() -> dict[str, str]:
    """Return the versions of what takes part in a measurement."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        found[package] = importlib.metadata.version(package)
    return found


def machine() -> dict[str, Scalar]:
    """Return the machine's size and kind."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str:
    """Return the commit that the code comes from, "-dirty" behind it if it was changed; "" outside a checkout."""
    here = Path(__file__).parent
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],  # noqa: S607 # the user's own git
            cwd=here, capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

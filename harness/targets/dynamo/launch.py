"""How Dynamo's processes are started: by the interpreter that has it, so that none outlives its deployment."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from harness.errors import BadInput
from reference_impl.secret import TOKEN_VARIABLE

PYTHON_VARIABLE: Final = "PDPROOF_DYNAMO_PYTHON"
HOST: Final = "127.0.0.1"
PREFIX: Final = "DYN_"
"""How the names of Dynamo's own settings begin."""
ASK_LIMIT_S: Final = 60.0
_ASK: Final = """
import importlib.metadata as m, json
found = {d.metadata["Name"].lower(): d.version for d in m.distributions() if d.metadata["Name"]}
print(json.dumps({n: v for n, v in found.items() if n in ("ai-dynamo", "ai-dynamo-runtime")}))
"""
_RUN: Final = """
import ctypes, os, runpy, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != parent:
    sys.exit("the deployment has gone")
sys.argv = sys.argv[2:]
sys.path[:] = [folder for folder in sys.path if folder]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""As `python -m`, but the process dies with its parent (PR_SET_PDEATHSIG), and imports nothing from the working folder.

One interpreter and not two: the start is part of what is measured.
"""


class Installed(msgspec.Struct, frozen=True):
    """The interpreter that has Dynamo, and what it has."""

    python: str
    versions: dict[str, str]


def installed() -> Installed:
    """Return the interpreter that PDPROOF_DYNAMO_PYTHON names, and its versions. Raises BadInput if it has none."""
    python = os.environ.get(PYTHON_VARIABLE, "")
    if not python:
        raise BadInput(f"{PYTHON_VARIABLE} names no interpreter that has Dynamo; requirements-dynamo.txt says how")
    if not Path(python).is_file():
        raise BadInput(f"{PYTHON_VARIABLE}: {python}: no such file")
    try:
        ran = subprocess.run(
            [python, "-c", _ASK], capture_output=True, text=True, timeout=ASK_LIMIT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        versions = msgspec.json.decode(ran.stdout, type=dict[str, str])
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise BadInput(f"{PYTHON_VARIABLE}: {python} could not be asked for its packages: {error}") from error
    if "ai-dynamo" not in versions:
        raise BadInput(f"{PYTHON_VARIABLE}: {python} has no ai-dynamo; requirements-dynamo.txt says how to install it")
    return Installed(python, versions)


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return Dynamo's own settings among `environment`: the user's, which a manifest must tell."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(PREFIX)}


def environment(discovery: Path, **more: str) -> dict[str, str]:
    """Return the environment of a Dynamo process: discovery by files in `discovery`, traffic over loopback.

    Its event plane listens at every address, whatever it is told; it carries gauges, and no request. The user's own
    settings of Dynamo stay, but for those that this deployment needs. Its secret is not Dynamo's.
    """
    own = {
        "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(discovery), "DYN_REQUEST_PLANE": "tcp",
        "DYN_TCP_RPC_HOST": HOST, "DYN_TCP_RESPONSE_STREAM_HOST": HOST, "DYN_EVENT_PLANE_HOST": HOST,
        "DYN_HTTP_HOST": HOST, "DYN_SDK_DISABLE_ANSI_LOGGING": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    return inherited | own | more


async def start(
    python: str, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> asyncio.subprocess.Process:
    """Start one of Dynamo's modules in a session of its own, its output going to `log`."""
    with log.open("ab") as output:  # a log on local disk
        return await asyncio.create_subprocess_exec(
            python, "-c", _RUN, str(os.getpid()), module, *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=dict(environment),
            start_new_session=True,
        )  # fmt: skip


def free_port() -> int:
    """Return a port of loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port

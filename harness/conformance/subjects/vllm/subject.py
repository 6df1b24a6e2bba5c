"""Any connector of vLLM's as a subject, named by vLLM's own JSON."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import numpy as np
import torch
import zmq
from numpy.typing import NDArray
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.version import __version__ as vllm_version

from faults.nixl.dialects import Meaning, Vllm
from harness.conformance.naming import BadSubject
from harness.conformance.subject import (
    BAD_MESSAGES,
    DECLINED,
    METRICS,
    Capability,
    Engine,
    EngineSpec,
    Host,
    Params,
    Request,
    Role,
)
from harness.conformance.subjects.vllm.batons import TurnTaker
from harness.conformance.subjects.vllm.connectors import LEFT_OUT, PUSH
from harness.conformance.subjects.vllm.engine import BLOCK_TOKENS, VllmEngine, threads_off
from harness.conformance.subjects.vllm.nixl_double import NixlDouble
from harness.conformance.subjects.vllm.push_writer import UnstartedThreads, one_turn_of
from harness.conformance.subjects.vllm.virtual_time import WorldTime, put_into
from workloads.canary.model import canary_folder

LONGEST_TOKENS: Final = 1_024
_NIXL: Final = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_LAYER: Final = "model.layers.0.self_attn.attn"
_LAYOUT: Final = "LBHNC"
"""Layer by layer, block by block, the heads outside: what the NIXL connector asks for."""
_CLOCKED: Final = "vllm.distributed.kv_transfer"
"""Modules below this read a world's clock; the connector's own as well."""


class VllmSubject:
    """See above. `config` is what `--kv-transfer-config` takes; ids, roles and terms are set for each engine."""

    whole_seconds = True
    """Its terms are whole numbers of seconds: a search is to draw no others."""

    def __init__(self, config: Params) -> None:
        self.name = str(config.get("kv_connector", ""))
        for name in _names(config):
            if name in LEFT_OUT and not config.get("kv_connector_module_path"):
                raise BadSubject(f"--kv-transfer-config: {name} cannot be run here: {LEFT_OUT[name]}")
        self.versions = {"vllm": vllm_version}
        self.time = WorldTime()
        self.longest_tokens = LONGEST_TOKENS
        self._config = config
        self._dialect = Vllm()
        self._engines: dict[str, VllmEngine] = {}
        self._kept: list[Any] = []
        self._outer: dict[str, str] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="pdproof-store-")
        threads_off()
        self._base = self._make_config(config)
        self._nixl = any(name.startswith("Nixl") for name in _names(config))
        self.capabilities = frozenset(self._claims())
        self.counted = [name for name in METRICS if name not in (DECLINED, BAD_MESSAGES)] if self._nixl else []
        self._load_class()

    def _claims(self) -> set[Capability]:
        if not self._nixl:
            return {Capability.PREFIX_HITS}
        claims = {Capability.LEASES, Capability.READERS, Capability.PREFIX_HITS, Capability.METRICS}
        if PUSH in _names(self._config):
            return claims | {Capability.PUSH}
        return claims | {Capability.PULL, Capability.TWO_TURN}

    def _make_config(self, transfer: Params) -> VllmConfig:
        arguments = EngineArgs(
            model=str(canary_folder()), block_size=BLOCK_TOKENS, enforce_eager=True, max_model_len=LONGEST_TOKENS,
            max_num_seqs=8, max_num_batched_tokens=LONGEST_TOKENS, async_scheduling=False,
            kv_transfer_config={"kv_role": "kv_both", "engine_id": "nobody", "kv_buffer_device": "cpu", **transfer},
        )  # fmt: skip
        return arguments.create_engine_config()

    def _load_class(self) -> None:
        """Import the connector's modules, and have them read the world's clock."""
        path = self._config.get("kv_connector_module_path")
        if path:
            importlib.import_module(str(path))
        if self._nixl:
            for part in (
                "base_scheduler",
                "base_worker",
                "pull_scheduler",
                "pull_worker",
                "push_scheduler",
                "push_worker",
            ):
                importlib.import_module(f"{_NIXL}.{part}")
        for name, module in list(sys.modules.items()):
            if name.startswith(_CLOCKED) or (path and name.startswith(str(path).partition(".")[0])):
                put_into(module, self.time)

    # What an engine is made of.

    def config_of(self, spec: EngineSpec) -> VllmConfig:
        """Return vLLM's configuration of an engine."""
        config = copy.copy(self._base)
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.max_num_seqs = spec.slots
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.num_gpu_blocks = spec.blocks
        if getattr(config.cache_config, "kv_cache_layout", "old") is None:  # else the engine core would resolve it
            config.cache_config.kv_cache_layout = _LAYOUT
        transfer = copy.copy(config.kv_transfer_config)
        assert transfer is not None
        extra = dict(transfer.kv_connector_extra_config)
        terms = spec.terms
        extra |= {"kv_lease_duration": _whole(terms.lease_s), "decoder_kv_blocks_ttl": _whole(terms.ttl_s)}
        extra |= {"bidirectional_kv_xfer": terms.two_turn, "shared_storage_path": self._folder.name}
        if "connectors" in extra:  # a connector of connectors: each child reads its own
            shared = {name: value for name, value in extra.items() if name != "connectors"}
            extra["connectors"] = [
                child | {"kv_connector_extra_config": extra_of(child) | shared} for child in extra["connectors"]
            ]
        transfer.kv_connector_extra_config = extra
        transfer.engine_id = spec.name
        transfer.kv_role = "kv_producer" if spec.role is Role.PREFILL and not terms.two_turn else "kv_consumer"
        if terms.two_turn:
            transfer.kv_role = "kv_both"
        transfer.kv_load_failure_policy = str(terms.policy)
        config.kv_transfer_config = transfer
        if spec.model != EngineSpec.__struct_defaults__[-1]:
            config.model_config = copy.copy(config.model_config)
            config.model_config.model = spec.model
        return config

    def layout_of(self, spec: EngineSpec) -> KVCacheConfig:
        """Return how the pool is laid out: one group, one layer."""
        page = self._layer_spec()
        return KVCacheConfig(
            num_blocks=spec.blocks,
            kv_cache_tensors=[_pool(page.page_size_bytes, spec.blocks)],
            kv_cache_groups=[KVCacheGroupSpec([_LAYER], page)],
        )

    def _layer_spec(self) -> FullAttentionSpec:
        model = self._base.model_config
        return FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=model.get_total_num_kv_heads(), head_size=model.get_head_size(),
            dtype=model.dtype,
        )  # fmt: skip

    def cache_of(self, spec: EngineSpec) -> tuple[dict[str, torch.Tensor], NDArray[np.uint8]]:
        """Return the pool as the connector is to register it, and its bytes: [blocks, heads, tokens, bytes]."""
        page = self._layer_spec()
        content = page.page_size_bytes // (BLOCK_TOKENS * page.num_kv_heads * page.dtype.itemsize)
        tensor = torch.zeros(spec.blocks, page.num_kv_heads, BLOCK_TOKENS, content, dtype=page.dtype)
        self._kept.append(tensor)
        return {_LAYER: tensor}, tensor.view(torch.uint8).numpy()

    def engine(self, spec: EngineSpec, host: Host) -> Engine:
        """Return a new engine, with doubles in the places of what reaches outside the process."""
        with set_current_vllm_config(self._base), self._doubles(spec, host):
            engine = VllmEngine(self, spec, host)
        self._engines[spec.name] = engine
        return engine

    @contextmanager
    def _doubles(self, spec: EngineSpec, host: Host) -> Iterator[None]:
        self._made: NixlDouble | None = None
        if not self._nixl:
            yield
            return
        worker = sys.modules[f"{_NIXL}.base_worker"]
        scheduler = sys.modules[f"{_NIXL}.base_scheduler"]
        push = sys.modules[f"{_NIXL}.push_worker"]

        def agent(_name: str, _config: object) -> NixlDouble:
            self._made = NixlDouble(spec.name, 0, host)
            return self._made

        replaced = {
            (worker, "NixlWrapper"): agent,
            (worker, "nixl_agent_config"): lambda **_: None,
            (push, "threading"): UnstartedThreads(),
            (worker, "get_tensor_model_parallel_rank"): lambda: 0,
            (worker, "get_tensor_model_parallel_world_size"): lambda: 1,
            (worker.current_platform, "discover_numa_topology"): lambda: [],
            (scheduler.envs, "VLLM_NIXL_SIDE_CHANNEL_PORT"): spec.port,
            (scheduler.envs, "VLLM_NIXL_SIDE_CHANNEL_HOST"): "127.0.0.1",
        }
        with _replaced(replaced):
            yield

    def introduce(self, engine: VllmEngine, scheduler_side: Any, worker_side: Any) -> None:
        """Join an engine's two sides: the handshake's data goes from the worker to whoever answers for it."""
        if not self._nixl:
            return
        scheduler_side, worker_side = _part(scheduler_side), _part(worker_side)
        worker, scheduler = worker_side.connector_worker, scheduler_side.connector_scheduler
        engine.inbox = self._made
        engine.executor = TurnTaker(engine._host, self.time)
        if hasattr(worker, "_push_writer_loop"):
            engine.background = one_turn_of(worker)
        worker._handshake_initiation_executor.shutdown(wait=False)
        worker._handshake_initiation_executor = engine.executor
        threads = _CapturedThreads()
        module = sys.modules[f"{_NIXL}.base_scheduler"]
        with _replaced({(module, "threading"): threads}):
            scheduler_side.set_xfer_handshake_metadata_pp_aware({(0, 0): worker_side.get_handshake_metadata()})
        scheduler._nixl_handshake_listener_t = None
        encoded = threads.arguments[0]
        listener = type(scheduler)._nixl_handshake_listener

        def answers(question: bytes) -> bytes | None:
            stopped = _Set()
            socket = _RouterDouble(question)
            with _replaced({(module, "zmq_ctx"): _context_of(socket)}):
                listener(encoded, stopped, stopped, "127.0.0.1", 0)
            return socket.reply

        engine.answers = answers
        # The asker is whoever's task runs.
        setattr(sys.modules[f"{_NIXL}.base_worker"], "zmq_ctx", self._asking)  # noqa: B010 # not a name that mypy knows

    def _asking(self, _kind: Any, path: str) -> Any:
        """Return a context with a socket that asks over the network of whoever's turn it is."""
        host = self.time._host
        engine = next(e for e in self._engines.values() if e._host is host)
        return _context_of(_AskDouble(engine.executor, int(path.rpartition(":")[2])))(None, path)

    def forget(self, name: str) -> None:
        """An engine has ended."""
        self._engines.pop(name, None)
        if not self._engines:  # nobody is left to read a pool: a search makes thousands of them
            self._kept.clear()

    def inner(self, request: Request) -> str:
        """Return what vLLM calls a request.

        A push connector finds the legs of a request by what its router calls it, behind which each engine's front end
        puts eight digits of its own.
        """
        if PUSH not in _names(self._config):
            return request.request_id
        inner = f"{request.external_id}-{zlib.crc32(request.request_id.encode()):08x}"
        self._outer[inner] = request.request_id
        return inner

    def outer(self, inner: str) -> str:
        """Return a request's own id."""
        return self._outer.get(inner, inner)

    def meaning(self, message: bytes) -> Meaning:
        """Return what a message says."""
        said = self._dialect.meaning(message)
        return said._replace(requests=tuple(map(self.outer, said.requests)))

    def close(self) -> None:
        """Give back all pools, and what was stored."""
        self._kept.clear()
        self._folder.cleanup()


def _pool(page_bytes: int, blocks: int) -> KVCacheTensor:
    """Return the one tensor of the pool, in the words of this version of vLLM."""
    words: dict[str, Any] = {
        "size": page_bytes * blocks, "layers": [_LAYER], "shared_by": [_LAYER], "layer_stride": page_bytes * blocks,
        "block_stride": page_bytes,
    }  # fmt: skip
    known = {field.name for field in dataclasses.fields(KVCacheTensor)}
    return KVCacheTensor(**{name: value for name, value in words.items() if name in known})


def _names(config: Params) -> list[str]:
    """Return the name of a connector, and of those that it consists of."""
    return [str(one.get("kv_connector", "")) for one in [config, *extra_of(config).get("connectors", [])]]


def extra_of(config: Params) -> Params:
    """Return a connector's own part of its configuration."""
    found: Params = config.get("kv_connector_extra_config") or {}
    return found


def _part(connector: Any) -> Any:
    """Return the NIXL connector, where a connector consists of several."""
    parts = getattr(connector, "_connectors", None) or [connector]
    return next(part for part in parts if "Nixl" in type(part).__name__)


def _whole(seconds: float) -> float:
    """Return whole seconds as a whole number, as vLLM's users write them."""
    return int(seconds) if float(seconds).is_integer() else seconds


@contextmanager
def _replaced(names: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """Put other values in the places of modules' names, for a while."""
    missing = object()
    before = {key: vars(key[0]).get(key[1], missing) for key in names}
    for (owner, name), value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in before.items():
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class _Set:
    """An event that is set."""

    def set(self) -> None:
        """It is."""

    def wait(self, *_: Any) -> bool:
        """It has come."""
        return True

    def is_set(self) -> bool:
        """It is."""
        return True


class _CapturedThreads:
    """Stands in for the module `threading` while a listener would be started: keeps what it was to be given."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()

    def Thread(self, *, args: tuple[Any, ...] = (), **_: Any) -> _CapturedThreads:  # noqa: N802 # the module's name
        """Keep a thread's arguments."""
        self.arguments = args
        return self

    def Event(self) -> _Set:  # noqa: N802 # the module's name
        """Return one that is set."""
        return _Set()

    def start(self) -> None:
        """Start nothing."""


class _RouterDouble:
    """The listener's socket: one question has come, and no other will."""

    def __init__(self, question: bytes) -> None:
        self._question: bytes | None = question
        self.reply: bytes | None = None

    def setsockopt(self, *_: Any) -> None:
        """Nothing to set."""

    def recv_multipart(self) -> list[bytes]:
        """Return the question once."""
        if self._question is None:
            raise zmq.Again
        question, self._question = self._question, None
        return [b"asker", b"", question]

    def send_multipart(self, parts: Any) -> None:
        """Keep the answer."""
        self.reply = msgspec.msgpack.encode(list(parts[2:]))


class _AskDouble:
    """The asker's socket: what is sent is asked over the world's network."""

    def __init__(self, executor: TurnTaker, port: int) -> None:
        self._executor, self._port = executor, port
        self._question = b""

    def setsockopt(self, *_: Any) -> None:
        """Nothing to set."""

    def send(self, question: bytes) -> None:
        """Keep the question until the answer is waited for."""
        self._question = question

    def recv_multipart(self) -> list[bytes]:
        """Ask, and wait. Raises zmq.Again when no answer comes in time."""
        reply = self._executor.ask(self._port, self._question)
        if reply is None:
            raise zmq.Again
        parts: list[bytes] = msgspec.msgpack.decode(reply)
        return parts


def _context_of(socket: Any) -> Callable[..., Any]:
    @contextmanager
    def context(*_: Any) -> Iterator[Any]:
        yield socket

    return context

"""vLLM's weights through the memory service: a plugin for vLLM's general plugins, and the load format `pdproof`.

    PDPROOF_MEMORY_SOCKET=PATH [PDPROOF_WEIGHTS_REPORT=FILE] ... --load-format pdproof
        [--model-loader-extra-config '{"linears": "mapped"}']

The first engine loads its model as vLLM does, moves the parameters into an allocation of the service and commits it. An
engine that comes later reads no file: its parameters are views of the same pages. After that vLLM makes itself ready,
and there its CPU build copies: it packs each matrix for oneDNN into private memory (`"linears": "packed"`, its own way
and the default). With `"mapped"` the matrices are multiplied where they stand, as vLLM does where it has no oneDNN.
What became of each parameter is measured, and written to the report file as one JSON line.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from reference_impl.memory_service import weights_report
from reference_impl.memory_service.shared_weights import Role, SharedWeights, attach_or_write
from reference_impl.memory_service.weights_report import WeightsReport, Where
from reference_impl.memory_service.weights_table import WeightsRefused, WeightsTable, check_same, identity_of, place
from reference_impl.realclock import now_ns

LOAD_FORMAT: Final = "pdproof"
SOCKET_VARIABLE: Final = "PDPROOF_MEMORY_SOCKET"
REPORT_VARIABLE: Final = "PDPROOF_WEIGHTS_REPORT"
PACKED: Final = "packed"
MAPPED: Final = "mapped"

_held: list[SharedWeights] = []  # as long as this process lives: its parameters stand in there


def register() -> None:
    """Make the load format known to vLLM. Called in each of its processes, maybe more than once."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class SharedModelLoader(BaseModelLoader):  # type: ignore[misc] # vLLM is Any to mypy
        """Builds a model over weights of the memory service."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            self._socket = memory_socket(os.environ.get(SOCKET_VARIABLE, ""))
            self._linears, rest = linears_option(load_config.model_loader_extra_config)
            self._plain = DefaultModelLoader(
                dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config=rest)
            )
            self._building: _Building | None = None

        def download_model(self, model_config: Any) -> None:
            """Do nothing: the model is a local folder."""

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            """Build the model, and tell what became of its weights."""
            must_be_one_cpu(vllm_config.device_config.device.type, vllm_config.parallel_config.world_size)
            self._building = building = _Building(self._socket, self._linears, model_config)
            try:
                with _multiplied_in_place() if self._linears == MAPPED else nullcontext():
                    model = super().load_model(vllm_config, model_config, prefix)
            finally:
                self._building = None
            building.tell(model)
            return model

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Give a model that is being built its weights. To load them again later writes to copies of the pages."""
            if self._building is None:
                self._plain.load_weights(model, model_config)
            else:
                self._building.share(model, lambda: self._plain.load_weights(model, model_config))

    register_model_loader(LOAD_FORMAT)(SharedModelLoader)


class _Building:
    """One model on its way from empty to ready."""

    def __init__(self, socket: Path, linears: str, model_config: Any) -> None:
        import vllm

        self._socket, self._linears = socket, linears
        folder = Path(model_config.model)
        self._model = folder.name
        options = (str(model_config.dtype), str(model_config.quantization), vllm.__version__)
        self._identity = identity_of(folder, *options)
        self._shared: SharedWeights | None = None
        self._load_ns = self._private_bytes = 0

    def share(self, model: Any, load: Callable[[], None]) -> None:
        """Put the weights of the service under a model; be the one who loads and commits them, if there are none."""
        from reference_impl.memory_service import torch_weights

        start_ns = now_ns()
        mine = torch_weights.shapes_of(model)

        def loaded() -> WeightsTable:
            load()
            return place(self._model, self._identity, torch_weights.shapes_of(model))

        def fill(address: int, table: WeightsTable) -> None:
            torch_weights.move_in(model, address, table)

        shared = attach_or_write(self._socket, f"vllm-{os.getpid()}", loaded, fill)
        _held.append(shared)
        if shared.role is Role.READER:
            held_by = f"the memory service at {self._socket}"
            check_same(shared.table, self._model, self._identity, mine, held_by)
            torch_weights.look_at(model, shared.address, shared.table)
        self._shared = shared
        self._load_ns = now_ns() - start_ns
        self._private_bytes = weights_report.private_bytes()

    def tell(self, model: Any) -> None:
        """Refuse weights that were replaced while vLLM made itself ready; report the others."""
        from reference_impl.memory_service import torch_weights

        shared = self._shared
        if shared is None:
            raise WeightsRefused(f"vLLM built {self._model} without asking for its weights; use another load format")
        shared.check_current()
        grown = weights_report.private_bytes() - self._private_bytes
        parameters = torch_weights.places_of(model, shared.address, shared.table)
        report = WeightsReport(
            pid=os.getpid(),
            role=shared.role,
            linears=self._linears,
            model=self._model,
            service=shared.layout.service,
            generation=shared.layout.generation,
            layout=shared.layout.hash,
            load_ns=self._load_ns,
            bytes_total=sum(parameter.bytes for parameter in parameters),
            bytes_shared=weights_report.bytes_in(parameters, Where.SHARED, Where.BOTH),
            bytes_duplicated=weights_report.bytes_in(parameters, Where.BOTH),
            bytes_copied=weights_report.bytes_in(parameters, Where.PACKED, Where.PRIVATE),
            pages=weights_report.mapped_pages(),
            private_growth_bytes=grown,
            parameters=parameters,
        )
        logging.getLogger("vllm.pdproof").info("%s", report.summary())
        if file := os.environ.get(REPORT_VARIABLE):
            weights_report.append(report, Path(file))


@contextmanager
def _multiplied_in_place() -> Iterator[None]:
    """Let vLLM multiply matrices where they stand, and pack none.

    It does so by itself for layers that it marks as not worth packing. Others than matrices it treats as ever. Raises
    `WeightsRefused` if this vLLM has no such place.
    """
    import torch
    from vllm.model_executor.layers import utils

    packing = getattr(utils, "dispatch_cpu_unquantized_gemm", None)
    if packing is None:
        raise WeightsRefused(f'this vLLM packs its matrices elsewhere; leave the option {{"linears": "{MAPPED}"}} out')

    def in_place(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            packing(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = in_place
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = packing


def memory_socket(text: str) -> Path:
    """Return where the memory service answers. Raises `WeightsRefused` if nobody said so."""
    if not text:
        raise WeightsRefused(
            f"--load-format {LOAD_FORMAT} needs {SOCKET_VARIABLE}: the socket of a memory service "
            "(python -m reference_impl.memory_service.server --socket PATH ...)"
        )
    return Path(text)


def linears_option(extra_config: Any) -> tuple[str, dict[str, Any]]:
    """Return the option `linears`, and those that are for vLLM's own loader. Raises `WeightsRefused`."""
    if not isinstance(extra_config, dict):
        raise WeightsRefused(f"the loader's extra config must be a JSON object, got {type(extra_config).__name__}")
    linears = extra_config.get("linears", PACKED)
    if linears not in (PACKED, MAPPED):
        raise WeightsRefused(f'the loader\'s option "linears" must be "{PACKED}" or "{MAPPED}", got {linears!r}')
    return linears, {key: value for key, value in extra_config.items() if key != "linears"}


def must_be_one_cpu(device: str, world_size: int) -> None:
    """Refuse an engine whose weights are not whole, or not in the host's memory. Raises `WeightsRefused`."""
    if device != "cpu":
        raise WeightsRefused(
            f"--load-format {LOAD_FORMAT} shares memory of the host, and this engine's is on {device!r}"
        )
    if world_size != 1:
        raise WeightsRefused(
            f"--load-format {LOAD_FORMAT} holds the weights of one rank, and this engine has {world_size}; "
            "start it with tensor and pipeline parallel size 1"
        )

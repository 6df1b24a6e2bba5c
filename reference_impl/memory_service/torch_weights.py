"""A torch model's parameters over an allocation of the memory service: moved in, looked at, and looked for."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from reference_impl.memory_service.weights_report import Parameter, Where
from reference_impl.memory_service.weights_table import Placed, Shape, WeightsTable


def shapes_of(model: torch.nn.Module) -> list[Shape]:
    """Return what a model keeps: its parameters, each once however many names it has, and its persistent buffers."""
    return [_shape(name, tensor) for name, tensor in _tensors(model).items()]


def move_in(model: torch.nn.Module, address: int, table: WeightsTable) -> None:
    """Copy a loaded model's tensors into the allocation, and let its parameters stand there from now on.

    One after the other, and each frees its old memory, so that the weights are never there twice.
    """
    tensors = _tensors(model)
    for placed in table.tensors:
        tensor = tensors[placed.tensor.name]
        view = _view(address, placed)
        view.copy_(tensor.data)
        if isinstance(tensor, torch.nn.Parameter):
            tensor.data = view


def look_at(model: torch.nn.Module, address: int, table: WeightsTable) -> None:
    """Let an unloaded model's parameters stand in the allocation. Buffers are copied: they are small and change."""
    tensors = _tensors(model)
    for placed in table.tensors:
        tensor = tensors[placed.tensor.name]
        view = _view(address, placed)
        if isinstance(tensor, torch.nn.Parameter):
            tensor.data = view
        else:
            tensor.data.copy_(view)


def places_of(model: torch.nn.Module, address: int, table: WeightsTable) -> tuple[Parameter, ...]:
    """Return what has become of each tensor of the allocation, after vLLM has made the model ready."""
    now = dict(model.named_parameters())
    pages = range(address, address + table.size_bytes)
    return tuple(
        Parameter(placed.tensor.name, placed.tensor.size_bytes, _where(model, now, placed, pages))
        for placed in table.tensors
    )


def _where(model: torch.nn.Module, now: dict[str, Any], placed: Placed, pages: range) -> Where:
    name = placed.tensor.name
    module, _, attribute = name.rpartition(".")
    packed = attribute == "weight" and _has_packed(model.get_submodule(module), pages)
    tensor = now.get(name)
    if tensor is not None and tensor.numel() and tensor.data_ptr() in pages:
        return Where.BOTH if packed else Where.SHARED
    return Where.PACKED if packed else Where.PRIVATE


def _has_packed(module: torch.nn.Module, pages: range) -> bool:
    """Tell whether vLLM multiplies with a copy: what it packed, it keeps only in the closure `cpu_linear`."""
    for cell in getattr(getattr(module, "cpu_linear", None), "__closure__", None) or ():
        kept = cell.cell_contents
        if hasattr(kept, "handler_tensor"):  # oneDNN's: the packed matrix is in there
            return True
        if isinstance(kept, torch.Tensor) and kept.data_ptr() not in pages:
            return True
    return False


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, kept in model.state_dict(keep_vars=True).items():
        if not isinstance(kept, torch.nn.Parameter):
            tensors[name] = kept
    return tensors


def _shape(name: str, tensor: torch.Tensor) -> Shape:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    size_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return Shape(name, str(tensor.dtype).removeprefix("torch."), shape, stride, size_bytes)


def _view(address: int, placed: Placed) -> torch.Tensor:
    wanted = placed.tensor
    dtype = getattr(torch, wanted.dtype)
    if not wanted.size_bytes:
        return torch.empty_strided(wanted.shape, wanted.stride, dtype=dtype, device="cpu")
    raw = (ctypes.c_ubyte * wanted.size_bytes).from_address(address + placed.offset)
    return torch.frombuffer(raw, dtype=dtype).as_strided(wanted.shape, wanted.stride)

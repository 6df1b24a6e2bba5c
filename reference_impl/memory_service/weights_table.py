"""What stands where in an allocation that holds a model's weights; it travels as the layout's metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from reference_impl.rules.sessions import METADATA_BYTES_MAX

_ALIGNMENT: Final = 64  # bytes: a cache line, and the widest vector register
_FORMAT: Final = "pdproof weights 1"


class WeightsRefused(Exception):
    """These weights cannot be shared, or are not the ones that the service holds; one line says why and what to do."""


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as its model has it: type, shape and strides (in items), and the bytes from its first to its last."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size_bytes: int


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A tensor and where it begins in the allocation."""

    tensor: Shape
    offset: int


class WeightsTable(msgspec.Struct, frozen=True):
    """Every tensor of a model. `model` is its folder's name, for people; `identity` tells it from all others."""

    model: str
    identity: str
    tensors: tuple[Placed, ...]
    format: str = _FORMAT

    @property
    def size_bytes(self) -> int:
        """The allocation's size."""
        return max((placed.offset + placed.tensor.size_bytes for placed in self.tensors), default=0)

    def encode(self) -> bytes:
        """Return it as a layout's metadata. Raises `WeightsRefused` if it does not fit."""
        packed = msgspec.msgpack.encode(self)
        if len(packed) > METADATA_BYTES_MAX:
            raise WeightsRefused(
                f"{self.model}: its {len(self.tensors)} tensors take {len(packed)} bytes to list, "
                f"and a layout holds {METADATA_BYTES_MAX}; use another load format"
            )
        return packed


def place(model: str, identity: str, tensors: Iterable[Shape]) -> WeightsTable:
    """Lay tensors out one after the other. Raises `WeightsRefused` if there is nothing to lay out."""
    placed, offset = [], 0
    for tensor in tensors:
        placed.append(Placed(tensor, offset))
        offset += -(-tensor.size_bytes // _ALIGNMENT) * _ALIGNMENT
    if not offset:
        raise WeightsRefused(f"{model} has no weights; there is nothing to share")
    return WeightsTable(model, identity, tuple(placed))


def decode(metadata: bytes, held_by: str) -> WeightsTable:
    """Read a layout's metadata. Raises `WeightsRefused` if it is no table, or not one that fits its own size."""
    try:
        table = msgspec.msgpack.decode(metadata, type=WeightsTable)
    except msgspec.DecodeError:
        table = None
    if table is None or table.format != _FORMAT or any(placed.offset < 0 for placed in table.tensors):
        raise WeightsRefused(f"{held_by} holds weights of another program; start a memory service for this model alone")
    return table


def check_same(found: WeightsTable, model: str, identity: str, mine: Iterable[Shape], held_by: str) -> None:
    """Refuse weights that are not this model's. Raises `WeightsRefused`, which names the first difference."""
    if found.identity != identity:
        raise WeightsRefused(
            f"{held_by} holds the weights of {found.model} ({found.identity[:8]}), not of {model} ({identity[:8]}: "
            "other files, type, quantization or version of vLLM); start a memory service for each model"
        )
    theirs = {placed.tensor.name: placed.tensor for placed in found.tensors}
    ours = {tensor.name: tensor for tensor in mine}
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise WeightsRefused(
                f"{held_by} holds {name!r} of {model} as {_told(theirs.get(name))}, and this engine has "
                f"{_told(ours.get(name))}; start both engines with the same options"
            )


def identity_of(folder: Path, *more: str) -> str:
    """Return what tells a model folder's weights from others: names, sizes and times of its files, and `more`.

    Not their content: to read it all is what a second engine wants to be spared. Raises `WeightsRefused` if there is no
    folder with safetensors.
    """
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])
    if not any(file.suffix == ".safetensors" for file in files):
        raise WeightsRefused(f"{folder} is no folder with *.safetensors; give --model as a local folder")
    seen = [(file.name, found.st_size, found.st_mtime_ns) for file in files for found in [file.stat()]]
    return hashlib.blake2b(msgspec.msgpack.encode((seen, more)), digest_size=16).hexdigest()


def _told(tensor: Shape | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)} (strides {list(tensor.stride)})"

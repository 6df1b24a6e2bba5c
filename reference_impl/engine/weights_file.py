"""The weights on disk: made once from a seed, with a checksum that every load verifies."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from reference_impl.content import Words, weight_words

WEIGHTS_SEED: Final = 20_260_601
"""Of the weights that every engine here loads, unless it is told otherwise."""
_MAKE_WORDS: Final = 2**20
_READ_BYTES: Final = 16 * 2**20


class WeightsError(Exception):
    """The weights file is missing, damaged or of another size; the message says where and what to do."""


class WeightsInfo(msgspec.Struct, frozen=True):
    """What the weights file's sidecar says."""

    seed: int
    words: int
    sha256: str


def default_weights_dir() -> Path:
    """Return where made weights are kept between runs: PDPROOF_CACHE, or the user's cache folder."""
    if folder := os.environ.get("PDPROOF_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdproof"


def weights_path(folder: Path, seed: int, size_bytes: int) -> Path:
    """Return where the weights of this seed and size stand."""
    return folder / f"weights-{seed}-{size_bytes // 2**20}mib.bin"


def ensure_weights(folder: Path, seed: int, size_bytes: int, progress: Callable[[float], None] | None = None) -> Path:
    """Return the path of the weights, making the file first if it is not there whole.

    `progress` is told the share that is made; it may raise WeightsError to break off. Raises WeightsError when the disk
    does not take it; a half-made file is never left under the final name.
    """
    path = weights_path(folder, seed, size_bytes)
    if path.is_file() and path.stat().st_size == size_bytes and _sidecar(path).is_file():
        return path
    partial = path.with_suffix(f".{os.getpid()}.part")
    words = size_bytes // 8
    digest = hashlib.sha256()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("wb", buffering=0) as out:
            for start in range(0, words, _MAKE_WORDS):
                piece = weight_words(seed, start, min(_MAKE_WORDS, words - start)).astype("<u8").tobytes()
                digest.update(piece)
                out.write(piece)
                if progress is not None:
                    progress(min(1.0, (start + _MAKE_WORDS) / words))
        _sidecar(path).write_bytes(msgspec.json.encode(WeightsInfo(seed, words, digest.hexdigest())))
        partial.rename(path)
    except OSError as error:
        raise WeightsError(
            f"weights {path}: cannot be written: {error.strerror}; free {size_bytes / 2**20:,.0f} MiB there, "
            "or name another folder with PDPROOF_CACHE"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
            if not path.exists():
                _sidecar(path).unlink(missing_ok=True)
    return path


def load_weights(path: Path, target: Words) -> WeightsInfo:
    """Read the file into `target` (words, writable, of the file's size) and verify its checksum.

    Raises WeightsError if the file is missing, of another size, or not what was once written.
    """
    try:
        info = msgspec.json.decode(_sidecar(path).read_bytes(), type=WeightsInfo)
        if info.words != len(target):
            raise WeightsError(f"weights {path}: {info.words} words, expected {len(target)}; remove the file")
        digest = hashlib.sha256()
        memory = target.view(np.uint8).data
        with path.open("rb", buffering=0) as file:
            at = 0
            while at < len(memory):
                count = file.readinto(memory[at : at + _READ_BYTES])
                if not count:
                    raise WeightsError(f"weights {path}: ends after {at} of {len(memory)} bytes; remove the file")
                digest.update(memory[at : at + count])
                at += count
    except (OSError, msgspec.DecodeError) as error:
        raise WeightsError(f"weights {path}: {error}; remove it and its .json, they are made again") from error
    if digest.hexdigest() != info.sha256:
        raise WeightsError(f"weights {path}: the checksum is wrong, the file is damaged; remove it")
    return info


def touch(memory: Words) -> int:
    """Read every page of some memory, so that it is resident; return a word that depends on all pages."""
    return int(np.bitwise_xor.reduce(memory[:: 4096 // 8]))


def _sidecar(path: Path) -> Path:
    return path.with_suffix(".json")

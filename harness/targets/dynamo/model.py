"""The model's folder as a mocker and the front end want it: no weights, but a token that ends an answer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import msgspec

from harness.errors import BadInput

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
_COPIED: Final = (CONFIG, "tokenizer.json", "tokenizer_config.json")


def mocker_model(model: Path, folder: Path) -> Path:
    """Make `folder` from a model's, and return it. Raises BadInput for what is no model's folder.

    Dynamo loads no model that names no token for the end, and the canary has none, so that its answers never end early.
    Here it gets one beyond its vocabulary: none that could be drawn.
    """
    config = _read(model / CONFIG)
    generation = _read(model / GENERATION) if (model / GENERATION).is_file() else {}
    if generation.get("eos_token_id", config.get("eos_token_id")) is None:
        generation["eos_token_id"] = config.get("vocab_size")
    folder.mkdir()
    for name in _COPIED:
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)
    (folder / GENERATION).write_bytes(msgspec.json.encode(generation))
    return folder


def _read(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}; a model's folder holds a {path.name}") from error
    except msgspec.DecodeError as error:
        raise BadInput(f"{path}: no JSON object: {error}") from error

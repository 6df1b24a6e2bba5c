"""The canary on disk: a folder that vLLM loads like any other model's, made by code."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, Final

import msgspec
from safetensors.numpy import save_file

from reference_impl.engine.weights_file import default_weights_dir
from workloads.canary.spec import CANARY, CanarySpec
from workloads.canary.tokenizer import tokenizer_config_json, tokenizer_json
from workloads.canary.weights import canary_weights

_COMPLETE: Final = "config.json"


def canary_folder(spec: CanarySpec = CANARY) -> Path:
    """Return where the canary is kept between runs. Its name is that of the tensors: others have another folder."""
    digest = hashlib.blake2b(msgspec.json.encode(config_json(spec)), digest_size=6)
    for name, tensor in sorted(canary_weights(spec).items()):
        digest.update(name.encode() + tensor.tobytes())
    return default_weights_dir() / f"canary-{digest.hexdigest()}"


def make_canary(folder: Path, spec: CanarySpec = CANARY) -> Path:
    """Return `folder` with the model in it, made now unless it is there. Raises OSError.

    The folder comes into being whole, so two that make it at the same moment do not harm each other.
    """
    if (folder / _COMPLETE).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    try:
        partial.mkdir()
        save_file(canary_weights(spec), partial / "model.safetensors", metadata={"format": "pt"})
        _write(partial / "tokenizer.json", tokenizer_json())
        _write(partial / "tokenizer_config.json", tokenizer_config_json(spec.max_positions))
        _write(partial / "generation_config.json", {"do_sample": False})
        _write(partial / _COMPLETE, config_json(spec))
        with contextlib.suppress(FileExistsError):
            folder.rmdir() if folder.is_dir() and not any(folder.iterdir()) else None
        partial.rename(folder)
    except OSError:
        if not (folder / _COMPLETE).is_file():  # nobody else has made it meanwhile
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def config_json(spec: CanarySpec) -> dict[str, Any]:
    """Return the content of config.json. No token ends an answer: all are words."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": spec.hidden,
        "vocab_size": spec.vocabulary,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))

"""A model folder with weights large enough to see: two layers, 31 MiB, seeded, so that answers hang on every part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from reference_impl import tokens
from reference_impl.tokens import VOCABULARY

HIDDEN, HEADS, INNER, LAYERS = 512, 8, 1024, 2
_SPACE = "▁"


def make_model(folder: Path, seed: int = 5) -> Path:
    """Write config, tokenizer and model.safetensors into a folder; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config", _config()),
        ("tokenizer", _tokenizer()),
        ("tokenizer_config", _tokenizer_config()),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))
    tensors, header, offset = _weights(seed), dict[str, Any](), 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    head = msgspec.json.encode(header)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
    return folder


def weights_bytes() -> int:
    """Return the sum of the tensors' sizes."""
    return sum(tensor.nbytes for tensor in _weights(0).values())


def _weights(seed: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    chance = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (chance.standard_normal((rows, columns)) * columns**-0.5).astype("f4")

    tensors = {"model.embed_tokens.weight": chance.standard_normal((VOCABULARY, HIDDEN)).astype("f4")}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{at}self_attn.{name}.weight"] = matrix(HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{at}mlp.{name}.weight"] = matrix(INNER, HIDDEN)
        tensors[f"{at}mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = np.ones(HIDDEN, "f4")
    tensors["model.norm.weight"] = np.ones(HIDDEN, "f4")
    tensors["lm_head.weight"] = matrix(VOCABULARY, HIDDEN) * 4
    return tensors


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _tokenizer() -> dict[str, Any]:
    words = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": True}
    vocabulary = {tokens.decode([number]).replace(" ", _SPACE): number for number in range(VOCABULARY)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": words,
        "post_processor": None,
        "decoder": words | {"prepend_scheme": "never"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": next(iter(vocabulary))},
    }


def _tokenizer_config() -> dict[str, Any]:
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}

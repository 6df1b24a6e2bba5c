"""The canary's weights, made from its spec.

They are random signs times powers of two, so that most of what a server computes is exact in float32, in whatever order
it adds: embeddings are signs, their norm is 1, queries, keys and values are small multiples of 1/8. What is left of
rounding, in attention and behind it, is far below what damage to one block does.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from workloads.canary.spec import CanarySpec
from workloads.chance import generator

Floats: TypeAlias = NDArray[np.float32]


def canary_weights(spec: CanarySpec) -> dict[str, Floats]:
    """Return the tensors of the checkpoint by their names in a Llama; a projection has shape (out, in)."""
    hidden, layer = spec.hidden, "model.layers.0"
    one = np.ones(hidden, np.float32)
    half = _signs(spec, "embed", spec.vocabulary // 2, hidden)
    pairs = np.where(np.arange(hidden // 2) < spec.turning_pairs, 1, spec.still_scale).astype(np.float32)
    turned = np.tile(pairs, 2)[:, None]
    scale = np.float32
    return {
        "model.embed_tokens.weight": np.concatenate([half, -half]),
        f"{layer}.input_layernorm.weight": one,
        f"{layer}.self_attn.q_proj.weight": _signs(spec, "query", hidden, hidden) * turned * scale(spec.query_scale),
        f"{layer}.self_attn.k_proj.weight": _signs(spec, "key", hidden, hidden) * turned * scale(spec.key_scale),
        f"{layer}.self_attn.v_proj.weight": _signs(spec, "value", hidden, hidden) * scale(spec.value_scale),
        f"{layer}.self_attn.o_proj.weight": _signs(spec, "output", hidden, hidden) * scale(spec.output_scale),
        f"{layer}.post_attention_layernorm.weight": one,
        f"{layer}.mlp.gate_proj.weight": _signs(spec, "gate", spec.intermediate, hidden) * scale(spec.gate_scale),
        f"{layer}.mlp.up_proj.weight": _signs(spec, "up", spec.intermediate, hidden) * scale(spec.up_scale),
        f"{layer}.mlp.down_proj.weight": _signs(spec, "down", hidden, spec.intermediate) * scale(spec.down_scale),
        "model.norm.weight": one,
        "lm_head.weight": _signs(spec, "head", spec.vocabulary, hidden) * scale(spec.head_scale),
    }


def _signs(spec: CanarySpec, name: str, rows: int, columns: int) -> Floats:
    """Return random signs, shape (rows, columns), columns a multiple of 64.

    Raw bits, because only these are promised to stay the same in every version of numpy.
    """
    raw = generator(spec.seed, "canary", name).bit_generator.random_raw(rows * columns // 64)
    bits = np.unpackbits(np.asarray(raw, dtype="<u8").view(np.uint8)).reshape(rows, columns)
    return 1 - 2 * bits.astype(np.float32)

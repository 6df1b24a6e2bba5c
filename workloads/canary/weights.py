"""The canary's weights, made from its spec.

They are random signs times scales of few bits, so that most of what a server computes is exact in float32, in whatever
order it adds: embeddings are signs, their norm is 1, queries, keys and values are small multiples of 1/16. What is left
of rounding, in attention and behind it, is far below what damage to one block does.

A token's word has two characters, and so has its embedding two halves: keys are made of the first, values of the
second. So what is found does not depend on where it is looked for, and since to every second half there is an opposite
one, the values' mean over all words is nothing whatever the scores are. What attention returns is then what chance put
into the prompt, to which each of n tokens adds about 1/n of its own; any mean of the vocabulary would drown that.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from workloads.canary.spec import CanarySpec
from workloads.chance import generator

Floats: TypeAlias = NDArray[np.float32]


def canary_weights(spec: CanarySpec) -> dict[str, Floats]:
    """Return the tensors of the checkpoint by their names in a Llama; a projection has shape (out, in)."""
    hidden, inner, layer = spec.hidden, spec.intermediate, "model.layers.0"
    one = np.ones(hidden, np.float32)
    in_first = (np.arange(hidden) < hidden // 2).astype(np.float32)
    pairs = np.where(np.arange(hidden // 2) < spec.turning_pairs, 1, spec.still_scale).astype(np.float32)
    turning = np.tile(pairs, 2)[:, None]
    return {
        "model.embed_tokens.weight": _embedding(spec),
        f"{layer}.input_layernorm.weight": one,
        f"{layer}.self_attn.q_proj.weight": _signs(spec, "query", hidden, hidden, spec.query_scale) * turning,
        f"{layer}.self_attn.k_proj.weight": _signs(spec, "key", hidden, hidden, spec.key_scale) * turning * in_first,
        f"{layer}.self_attn.v_proj.weight": _signs(spec, "value", hidden, hidden, spec.value_scale) * (1 - in_first),
        f"{layer}.self_attn.o_proj.weight": _signs(spec, "output", hidden, hidden, spec.output_scale),
        f"{layer}.post_attention_layernorm.weight": one,
        f"{layer}.mlp.gate_proj.weight": _signs(spec, "gate", inner, hidden, spec.gate_scale),
        f"{layer}.mlp.up_proj.weight": _signs(spec, "up", inner, hidden, spec.up_scale),
        f"{layer}.mlp.down_proj.weight": _signs(spec, "down", hidden, inner, spec.down_scale),
        "model.norm.weight": one,
        "lm_head.weight": _signs(spec, "head", spec.vocabulary, hidden, spec.head_scale),
    }


def _embedding(spec: CanarySpec) -> Floats:
    """Return a row of signs for each token: a half for its word's first character, and one for the second."""
    letters, half = math.isqrt(spec.vocabulary), spec.hidden // 2
    first = _signs(spec, "first", letters, half)
    second = _signs(spec, "second", letters // 2, half)
    second = np.concatenate([second, -second])
    return np.hstack([np.repeat(first, letters, axis=0), np.tile(second, (letters, 1))])


def _signs(spec: CanarySpec, name: str, rows: int, columns: int, scale: float = 1.0) -> Floats:
    """Return random signs times `scale`, shape (rows, columns); their count is a multiple of 64.

    Raw bits, because only these are promised to stay the same in every version of numpy.
    """
    raw = generator(spec.seed, "canary", name).bit_generator.random_raw(rows * columns // 64)
    bits = np.unpackbits(np.asarray(raw, dtype="<u8").view(np.uint8)).reshape(rows, columns)
    return (1 - 2 * bits.astype(np.float32)) * np.float32(scale)

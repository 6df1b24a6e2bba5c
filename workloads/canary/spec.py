"""What a canary model is made from."""

from __future__ import annotations

from typing import Final

import msgspec

from reference_impl.tokens import VOCABULARY


class CanarySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Seed, shape and scales of a Llama of one layer and one head.

    All weights are signs times a scale, and the scales are eighths or powers of two: see `weights` for why.
    """

    seed: int = 20_260_701
    hidden: int = 64
    """Of the residual, and of the one head."""
    intermediate: int = 128
    vocabulary: int = VOCABULARY
    max_positions: int = 40_960
    rope_theta: float = 2.0**32
    """With 64 dimensions the frequencies are 1, 1/2, 1/4, ...: every angle is exact in float32."""
    norm_eps: float = 1e-12
    """So small that a token's embedding, all signs, is its own norm."""
    query_scale: float = 2.0**-1
    key_scale: float = 2.0**-3
    """Scores have a standard deviation of about 1: attention is near uniform, yet each token has a look of its own."""
    turning_pairs: int = 5
    """Pairs of dimensions that a position turns within some tokens. They count most, so that a token that comes again
    looks elsewhere, and an answer does not run in a circle."""
    still_scale: float = 2.0**-1
    """Of the other pairs, in queries and in keys."""
    value_scale: float = 2.0**-3
    output_scale: float = 2.0**9
    """The mean of 32,000 random values is small, and has to outweigh the token's own embedding."""
    gate_scale: float = 2.0**-3
    up_scale: float = 2.0**-3
    down_scale: float = 2.0**-1
    head_scale: float = 0.375
    """Logits have a standard deviation of 3: answers vary, and no token's probability is nearly 1."""


CANARY: Final = CanarySpec()
"""The one that vLLM is given here."""

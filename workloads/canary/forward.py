"""The canary's forward pass in numpy, written from the definition of a Llama and not from any server's code.

One layer makes it cheap: a token's key and value are a function of the token and its position alone, so the KV of a
prompt is a table look-up, and only the positions that are asked about need attention.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workloads.canary.spec import CanarySpec
from workloads.canary.weights import Floats, canary_weights

KEYS_AT_ONCE: Final = 4096
"""Partial sums are float32 within so many keys, and float64 between them."""


class KvCache(NamedTuple):
    """Keys (with their positions turned in) and values, each of shape (tokens, hidden): slot i holds token i."""

    keys: Floats
    values: Floats


class Forward:
    """The model of a `spec`."""

    def __init__(self, spec: CanarySpec) -> None:
        tensors = canary_weights(spec)
        layer = {name.removeprefix("model.layers.0."): tensor for name, tensor in tensors.items()}
        embedded = tensors["model.embed_tokens.weight"]
        normed = _normed(embedded.astype(np.float64), spec.norm_eps)
        self._spec = spec
        self._embedded = embedded.astype(np.float64)
        self._queries, self._keys, self._values = (
            (normed @ layer[f"self_attn.{name}_proj.weight"].T).astype(np.float32) for name in "qkv"
        )
        self._output = layer["self_attn.o_proj.weight"].T.astype(np.float64)
        self._gate, self._up, self._down = (
            layer[f"mlp.{name}_proj.weight"].T.astype(np.float64) for name in ("gate", "up", "down")
        )
        self._head = tensors["lm_head.weight"].T.astype(np.float64)
        self._frequencies = spec.rope_theta ** (-np.arange(0, spec.hidden, 2) / spec.hidden)

    def cache(self, tokens: NDArray[np.int64], first_position: int = 0) -> KvCache:
        """Return the KV of `tokens` that stand from `first_position` on."""
        positions = np.arange(first_position, first_position + len(tokens))
        return KvCache(self._turned(self._keys[tokens], positions), self._values[tokens])

    def logits(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], cache: KvCache) -> NDArray[np.float64]:
        """Return the logits behind `tokens`, shape (tokens, vocabulary). Each sees the slots up to its position."""
        return self.behind(tokens, attended(self.queries(tokens, positions), positions, cache))

    def queries(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> Floats:
        """Return what `tokens` look for, scaled so that a product with a key is a score."""
        return self._turned(self._queries[tokens], positions) * np.float32(self._spec.hidden**-0.5)

    def behind(self, tokens: NDArray[np.int64], means: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the logits of `tokens` whose attention came to `means`."""
        residual = self._embedded[tokens] + means @ self._output
        normed = _normed(residual, self._spec.norm_eps)
        gate = normed @ self._gate
        residual += (gate / (1 + np.exp(-gate)) * (normed @ self._up)) @ self._down
        return _normed(residual, self._spec.norm_eps) @ self._head

    def _turned(self, rows: Floats, positions: NDArray[np.int64]) -> Floats:
        """Return queries or keys with their positions in them: dimension i turns with dimension i + half (RoPE)."""
        angles = positions[:, None] * self._frequencies
        cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = np.split(rows, 2, axis=1)
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=1)


def attended(queries: Floats, positions: NDArray[np.int64], cache: KvCache) -> NDArray[np.float64]:
    """Return each query's mean of the values up to its position. Scores are a few units: exp needs no shift."""
    total = np.zeros((len(queries), 1))
    summed = np.zeros(queries.shape)
    for start in range(0, len(cache.keys), KEYS_AT_ONCE):
        end = min(start + KEYS_AT_ONCE, len(cache.keys))
        weights = np.exp(queries @ cache.keys[start:end].T)
        if end > positions.min() + 1:
            weights[np.arange(start, end) > positions[:, None]] = 0
        total += weights.sum(axis=1, keepdims=True)
        summed += weights @ cache.values[start:end]
    return summed / total


def _normed(rows: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    """Return each row divided by the root of its mean square (RMSNorm; its weights are 1 here)."""
    normed: NDArray[np.float64] = rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + eps)
    return normed


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithm of each token's probability, along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found

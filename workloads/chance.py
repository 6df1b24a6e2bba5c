"""The project's one source of chance: a stream of random numbers for each purpose, all from one seed."""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, *stream: str | int) -> np.random.Generator:
    """Return the generator of the stream that the labels `stream` name, for a `seed` >= 0.

    Equal arguments give equal numbers in every process and on every machine. Streams with different labels are
    independent of each other, so drawing more from one never shifts another.
    """
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    labels = "\x00".join(label if isinstance(label, str) else f"#{int(label)}" for label in stream)
    key = int.from_bytes(hashlib.blake2b(labels.encode(), digest_size=16).digest())
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, key])))

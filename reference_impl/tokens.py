"""The reference engine's tokens and their text.

A vocabulary of 4,096 tokens; token `i` reads as a space and two characters. So text and tokens turn into each other
without loss, and a reader sees at once where an answer differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

VOCABULARY: Final = 4096
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_TEXT: Final = [f" {first}{second}" for first in _LETTERS for second in _LETTERS]
_ID: Final = {text[1:]: number for number, text in enumerate(_TEXT)}


def decode(tokens: Sequence[int]) -> str:
    """Return the text of `tokens`: three characters each."""
    return "".join([_TEXT[t] for t in tokens])


def encode(text: str) -> list[int]:
    """Return one token a word of `text`.

    A word that no token reads as (any word of ordinary prose) gets the token that its hash names: such a text cannot
    be got back from its tokens, but equal prompts are equal tokens.
    """
    return [_ID[word] if word in _ID else _hashed(word) for word in text.split()]


def _hashed(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest()) % VOCABULARY

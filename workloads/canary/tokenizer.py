"""The canary's tokenizer, in the format of the library `tokenizers`: the words of `reference_impl.tokens`."""

from __future__ import annotations

from typing import Any, Final

from reference_impl import tokens

_SPACE: Final = "\u2581"
"""What the library writes for a space."""

CHAT_TEMPLATE: Final = "{% for message in messages %}{{ ' ' + message['content'] | trim }}{% endfor %}"
"""A chat is its messages one after the other; a canary has no roles."""


def tokenizer_json() -> dict[str, Any]:
    """Return the content of tokenizer.json: white space parts words, and a word that is none of ours reads as id 0."""
    words = [tokens.decode([token]).strip() for token in range(tokens.VOCABULARY)]
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "split": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "},
                {"type": "Strip", "strip_left": True, "strip_right": True},
            ],
        },
        "pre_tokenizer": metaspace | {"prepend_scheme": "always"},
        "post_processor": None,
        "decoder": metaspace | {"prepend_scheme": "never"},
        "model": {
            "type": "WordLevel",
            "vocab": {_SPACE + word: token for token, word in enumerate(words)},
            "unk_token": _SPACE + words[0],
        },
    }


def tokenizer_config_json(max_positions: int) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }

"""Prompts: made again from their spec alone, and sent in the words of the API."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from reference_impl.tokens import VOCABULARY, encode
from workloads.prompts import Api, PromptFormat, prompt_tokens, request_body
from workloads.rows import PromptSpec


def test_a_prompt_is_its_specs_alone() -> None:
    tokens = prompt_tokens(PromptSpec(7, 3, 32_001))
    assert tokens.shape == (32_001,)
    assert tokens.min() >= 0
    assert tokens.max() < VOCABULARY
    assert len(np.unique(tokens)) > 4000
    assert (tokens == prompt_tokens(PromptSpec(7, 3, 32_001))).all()
    assert (tokens[:100] == prompt_tokens(PromptSpec(7, 3, 100))).all()
    assert (tokens != prompt_tokens(PromptSpec(7, 4, 32_001))).any()
    assert (tokens != prompt_tokens(PromptSpec(8, 3, 32_001))).any()


def test_the_tokens_never_change() -> None:
    """Old run folders are judged again by making their prompts again."""
    assert prompt_tokens(PromptSpec(1, 2, 6)).tolist() == [764, 700, 2066, 842, 325, 3257]
    assert prompt_tokens(PromptSpec(1, 2, 6, 0, 3)).tolist() == [3009, 818, 617, 764, 700, 2066]


def test_a_group_shares_its_prefix_and_nothing_more() -> None:
    one, other = (prompt_tokens(PromptSpec(0, index, 200, 5, 150)) for index in (1, 2))
    assert (one[:150] == other[:150]).all()
    assert (one[150:] != other[150:]).any()
    longer = prompt_tokens(PromptSpec(0, 3, 400, 5, 300))
    assert (longer[:150] == one[:150]).all()
    assert (prompt_tokens(PromptSpec(0, 1, 200, 6, 150))[:150] != one[:150]).any()


def test_a_prefix_longer_than_its_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="a prefix of 11 tokens does not fit in a prompt of 10"):
        prompt_tokens(PromptSpec(0, 0, 10, 1, 11))


def body(api: Api, form: PromptFormat, strict: bool = False) -> dict[str, Any]:
    sent = request_body(PromptSpec(0, 0, 9), model="m", max_tokens=5, api=api, prompt_format=form, strict_openai=strict)
    found: dict[str, Any] = msgspec.json.decode(sent)
    return found


def test_the_bodies_say_what_the_api_knows() -> None:
    ids = prompt_tokens(PromptSpec(0, 0, 9)).tolist()
    common = {
        "model": "m", "max_tokens": 5, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    own = {"ignore_eos": True, "return_token_ids": True}
    assert body(Api.COMPLETIONS, PromptFormat.IDS) == common | own | {"prompt": ids}
    assert body(Api.COMPLETIONS, PromptFormat.IDS, strict=True) == common | {"prompt": ids}
    assert encode(body(Api.COMPLETIONS, PromptFormat.TEXT)["prompt"]) == ids
    [message] = body(Api.CHAT, PromptFormat.TEXT)["messages"]
    assert message["role"] == "user"
    assert encode(message["content"]) == ids

"""Prompts: made again from their spec alone, and sent in the words of the API."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.tokens import VOCABULARY, encode
from workloads.prompts import Api, PromptFormat, prompt_tokens, request_body
from workloads.rows import PromptSpec

TURN = [1482, 1429, 4054, 3357, 3672]


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


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.lists(st.integers(0, 6), min_size=1, max_size=8),
       st.integers(1, 20), st.integers(1, 20))  # fmt: skip
def test_equal_blocks_are_equal_tokens(one: list[int], other: list[int], last: int, other_last: int) -> None:
    first, second = (
        prompt_tokens(PromptSpec(3, index, 20 * (len(blocks) - 1) + tail, block_ids=blocks, block_tokens=20))
        for index, (blocks, tail) in enumerate([(one, last), (other, other_last)])
    )
    assert len(first) == 20 * (len(one) - 1) + last
    for place, block in enumerate(one):
        mine = first[20 * place : 20 * place + 20]
        for their_place, their_block in enumerate(other):
            theirs = second[20 * their_place : 20 * their_place + 20]
            shorter = min(len(mine), len(theirs))
            if block == their_block:
                assert (mine[:shorter] == theirs[:shorter]).all()
            elif shorter >= 4:
                assert (mine[:shorter] != theirs[:shorter]).any()


def test_blocks_never_change() -> None:
    """Old run folders are judged again by making their prompts again."""
    spec = PromptSpec(1, 0, 6, block_ids=[5, 6], block_tokens=4)
    assert prompt_tokens(spec).tolist() == [2347, 3516, 1506, 1706, 1628, 452]
    assert (prompt_tokens(spec) != prompt_tokens(msgspec.structs.replace(spec, seed=2))).any()


@pytest.mark.parametrize("length", [0, 4, 9])
def test_blocks_that_do_not_fill_the_prompt_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"2 blocks of 4 tokens do not make a prompt of {length}"):
        prompt_tokens(PromptSpec(1, 0, length, block_ids=[5, 6], block_tokens=4))


def test_a_later_turn_repeats_what_was_before_and_adds_its_own() -> None:
    before = np.array([7, 8, 9])
    spec = PromptSpec(1, 4, 8, after="s-4-1", turn=2)
    assert prompt_tokens(spec, before).tolist() == [7, 8, 9, *TURN]
    for other in (PromptSpec(1, 4, 8, after="x", turn=3), PromptSpec(1, 5, 8, after="x", turn=2)):
        assert (prompt_tokens(other, before)[3:] != TURN).any()


@pytest.mark.parametrize("before", [0, 9])
def test_a_later_turn_that_cannot_follow_is_refused(before: int) -> None:
    with pytest.raises(ValueError, match=f"cannot follow s-4-1, which left {before} tokens"):
        prompt_tokens(PromptSpec(1, 4, 8, after="s-4-1", turn=2), np.zeros(before, np.int64))


def body(api: Api, form: PromptFormat, strict: bool = False) -> dict[str, Any]:
    ids = prompt_tokens(PromptSpec(0, 0, 9))
    sent = request_body(ids, model="m", max_tokens=5, api=api, prompt_format=form, strict_openai=strict)
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


def test_a_hand_off_travels_byte_for_byte() -> None:
    text = b'{ "remote_block_ids" : [[1, 2]],"remote_port":5600.0 }'
    ids = prompt_tokens(PromptSpec(0, 0, 9))
    common = {"model": "m", "max_tokens": 5, "api": Api.COMPLETIONS, "prompt_format": PromptFormat.IDS}
    assert b'"kv_transfer_params":' + text in request_body(ids, **common, hand_off=text)  # type: ignore[arg-type]
    assert b"kv_transfer_params" not in request_body(ids, **common)  # type: ignore[arg-type]

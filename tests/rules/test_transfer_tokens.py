"""Transfer tokens: good for one group, one epoch, one node, until a moment; whatever else is shown is told why not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.rules.handoff import parse
from reference_impl.rules.messages import ID_CHARS_MAX
from reference_impl.rules.transfer_tokens import NONCE_CHARS, is_token, issue, node_key, why_not

NOW_MS = 1_800_000_000_000
KEY = node_key(b"the deployment's secret", "p0")
NONCE = "0123456789abcdef"
TOKEN = issue(KEY, block_group_id="p0.abc", epoch=7, expires_ms=NOW_MS + 30_000, nonce=NONCE)

pytestmark = [pytest.mark.rule("KVC-IDEM-016")]


def test_a_token_is_good_for_its_group_and_epoch_until_it_expires() -> None:
    assert why_not(KEY, TOKEN, NOW_MS) == ""
    assert why_not(KEY, TOKEN, NOW_MS, block_group_id="p0.abc", epoch=7) == ""
    assert why_not(KEY, TOKEN, NOW_MS + 29_999) == ""
    assert why_not(KEY, TOKEN, NOW_MS + 30_000) == "the transfer token has expired"
    assert is_token(TOKEN)


@pytest.mark.parametrize(("block_group_id", "epoch"), [("p0.abc", 8), ("p0.abd", 7), ("7 p0.abc", 7), ("abc", 70)])
def test_a_token_for_another_group_or_epoch_says_so(block_group_id: str, epoch: int) -> None:
    reason = why_not(KEY, TOKEN, NOW_MS, block_group_id=block_group_id, epoch=epoch)
    assert reason == "the transfer token was made for another block group or epoch"


def test_another_nodes_or_another_deployments_token_is_none_of_ours() -> None:
    for key in (node_key(b"the deployment's secret", "d0"), node_key(b"another secret", "p0"), b"", b"p0"):
        other = issue(key, block_group_id="p0.abc", epoch=7, expires_ms=NOW_MS + 30_000, nonce=NONCE)
        assert why_not(KEY, other, NOW_MS) == "the transfer token is forged, or another node's"
        assert why_not(key, TOKEN, NOW_MS) == "the transfer token is forged, or another node's"


def test_a_token_altered_in_any_one_character_gives_nothing() -> None:
    for place in range(len(TOKEN)):
        for character in "0f-Z é\ud800\x00":
            altered = TOKEN[:place] + character + TOKEN[place + 1 :]
            if altered != TOKEN:
                assert why_not(KEY, altered, NOW_MS), altered
        assert why_not(KEY, TOKEN[:place] + TOKEN[place + 1 :], NOW_MS)
        assert why_not(KEY, TOKEN[:place] + "0" + TOKEN[place:], NOW_MS)
    assert why_not(KEY, TOKEN.upper(), NOW_MS)


@pytest.mark.parametrize(
    "token",
    ["", "-", "----", "xfer", "xfer-", "xfer----", "xfer-1-2-3", "xfer-1-2-3-4-5", "xfer-" * 1000, "é" * 50, "\ud800",
     "xfer-\ud800-\ud800-\ud800-\ud800", "xfer-zz-zz-zz-zz", "xfer--1-2-3-4", "0x1-0x1-0x1-0x1-0x1", "xfer-1_0-2-3-4"],
)  # fmt: skip
def test_what_is_no_token_is_told_so_and_breaks_nothing(token: str) -> None:
    assert why_not(KEY, token, NOW_MS)
    assert why_not(KEY, token, NOW_MS, block_group_id="\ud800", epoch=-1)


@settings(max_examples=300)
@given(st.text(max_size=120), st.integers(-(2**70), 2**70))
def test_no_text_breaks_it(text: str, now_ms: int) -> None:
    assert why_not(KEY, text, now_ms)
    assert why_not(KEY, "xfer-" + text, now_ms)
    assert isinstance(is_token(text), bool)


@given(
    st.integers(0, 2**53 - 1), st.integers(0, 2**44),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=128),
)  # fmt: skip
def test_every_token_travels_as_a_requests_id_and_is_understood(epoch: int, expires_ms: int, group: str) -> None:
    token = issue(KEY, block_group_id=group, epoch=epoch, expires_ms=expires_ms, nonce="f" * NONCE_CHARS)
    assert len(token) <= 90 <= ID_CHARS_MAX
    assert why_not(KEY, token, expires_ms - 1, block_group_id=group, epoch=epoch) == ""
    asked = parse(
        {
            "do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": token, "remote_block_ids": [[0]],
            "remote_host": "h", "remote_port": 1, "tp_size": 1, "remote_num_tokens": 16, "remote_block_group": "g",
        },
        block_tokens=16, hosts=("h",),
    )  # fmt: skip
    assert asked.load is not None
    assert asked.load.request_id == token

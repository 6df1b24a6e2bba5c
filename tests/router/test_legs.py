"""The bodies of the two legs: what is changed, and that nothing else is."""

from __future__ import annotations

import json

import msgspec
import pytest

from reference_impl.router import legs

NOTHING_REMOTE = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
HANDOFF = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p0-e1", "remote_port": 7}


def prefill(body: dict[str, object]) -> dict[str, object]:
    made: dict[str, object] = json.loads(legs.prefill_body(legs.fields_of(json.dumps(body).encode())))
    return made


def decode(body: dict[str, object], handoff: object = None) -> dict[str, object]:
    raw = msgspec.Raw(json.dumps(handoff).encode()) if handoff is not None else None
    made: dict[str, object] = json.loads(legs.decode_body(legs.fields_of(json.dumps(body).encode()), raw))
    return made


def test_the_first_leg_asks_for_one_token_whose_kv_is_kept() -> None:
    body = {"prompt": [1, 2], "max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}, "seed": 3}
    asked = {"do_remote_decode": True, "do_remote_prefill": False} | NOTHING_REMOTE
    assert prefill(body) == {
        "prompt": [1, 2], "max_tokens": 1, "stream": False, "seed": 3, "kv_transfer_params": asked
    }  # fmt: skip


@pytest.mark.parametrize("name", ["max_completion_tokens", "min_tokens"])
def test_other_counts_of_tokens_are_one_too_where_they_are_given(name: str) -> None:
    assert prefill({name: 9})[name] == 1
    assert name not in prefill({})
    assert prefill({name: None})[name] is None


def test_the_hand_off_of_the_last_turn_goes_along() -> None:
    asked = prefill({"kv_transfer_params": HANDOFF | {"session": 5}})["kv_transfer_params"]
    assert asked == NOTHING_REMOTE | HANDOFF | {"do_remote_decode": True, "session": 5}


@pytest.mark.parametrize(("given", "asked"), [(True, True), (False, False), (None, False), ("yes", "yes")])
def test_a_remote_prefill_is_asked_only_if_the_client_did(given: object, asked: object) -> None:
    """What is neither true nor false is for the engine to refuse, with the field's name."""
    params = prefill({"kv_transfer_params": {"do_remote_prefill": given}})["kv_transfer_params"]
    assert isinstance(params, dict)
    assert params["do_remote_prefill"] == asked
    assert params["do_remote_decode"] is True


def test_the_second_leg_is_the_clients_body_with_the_hand_off() -> None:
    body = {"prompt": "x", "max_tokens": 50, "stream": True, "kv_transfer_params": {"old": 1}}
    assert decode(body, HANDOFF) == body | {"kv_transfer_params": HANDOFF}


def test_without_a_hand_off_the_second_leg_has_none_of_an_earlier_turn_either() -> None:
    assert decode({"prompt": "x", "kv_transfer_params": {"old": 1}}) == {"prompt": "x"}


@pytest.mark.parametrize(
    "answer", [b'{"choices": []}', b'{"kv_transfer_params": null}', b'{"kv_transfer_params" : null }']
)
def test_an_answer_without_a_hand_off_gives_none(answer: bytes) -> None:
    assert legs.handoff_of(answer) is None


def test_what_is_not_changed_stays_as_the_client_wrote_it() -> None:
    """Numbers too large for a float, spaces, escapes: they are the engine's to read."""
    body = b'{"prompt": [ 1,2 ], "odd": 123456789012345678901234567890, "text": "\\u00e9"}'
    made = legs.decode_body(legs.fields_of(body), None)
    assert made == b'{"prompt":[ 1,2 ],"odd":123456789012345678901234567890,"text":"\\u00e9"}'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"not json", "not JSON"),
        (b'{"prompt": [1', "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"kv_transfer_params": 5}', "kv_transfer_params must be an object"),
        (b'{"kv_transfer_params": []}', "kv_transfer_params must be an object"),
    ],
)
def test_a_body_that_cannot_be_split_is_refused_with_a_reason(body: bytes, words: str) -> None:
    with pytest.raises(legs.BadBody, match=words):
        legs.prefill_body(legs.fields_of(body))


@pytest.mark.parametrize("params", ["null", "{}", '{"remote_engine_id": null}', '{"remote_engine_id": 5}'])
def test_a_renewal_must_name_its_holder(params: str) -> None:
    with pytest.raises(legs.BadBody, match="remote_engine_id must be a text"):
        legs.holder_of(f'{{"kv_transfer_params": {params}}}'.encode())

"""The bodies that the engine reads and writes."""

from __future__ import annotations

import json

import pytest

from reference_impl import tokens
from reference_impl.engine.openai import Parsed, RequestError, Writer, parse


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]], tokens.decode([1, 2, 3]), [tokens.decode([1, 2, 3])]])
def test_a_prompt_may_be_ids_or_text(prompt: object) -> None:
    parsed = parse(body(prompt=prompt, max_tokens=4), chat=False, model="m")
    assert parsed.prompt.tolist() == [1, 2, 3]
    assert parsed.max_tokens == 4


def test_a_chat_becomes_a_prompt() -> None:
    parsed = parse(body(messages=[{"role": "user", "content": "hello there"}]), chat=True, model="m")
    assert len(parsed.prompt) == 3


@pytest.mark.parametrize(
    ("raw", "param", "words"),
    [
        (b"not json", None, "not JSON"),
        (b"", None, "not JSON"),
        (b"\xff\xfe", None, "not JSON"),
        (b"[]", None, "object"),
        (b'{"x": ' + b"[" * 100_000, None, "nested"),
        (body(), "prompt", "not empty"),
        (body(prompt=[]), "prompt", "not empty"),
        (body(prompt=""), "prompt", "not empty"),
        (body(prompt=[1, 4096]), "prompt", "4096"),
        (body(prompt=[-1]), "prompt", "-1"),
        (body(prompt=[10**30]), "prompt", ""),
        (body(prompt=["a", "b"]), "prompt", "batches"),
        (body(prompt=[1, "a"]), "prompt", "batches"),
        (body(prompt=[1.5]), "prompt", ""),
        (body(prompt=[1], max_tokens=0), "max_tokens", "at least 1"),
        (body(prompt=[1], max_tokens="ten"), "max_tokens", "int"),
        (body(prompt=[1], n=2), "n", "must be 1"),
        (body(prompt=[1], stop=["x"]), "stop", "not supported"),
        (body(prompt=[1], model="other"), "model", "not served"),
        (body(prompt=[1], stream="yes"), "stream", "bool"),
    ],
)
def test_what_is_wrong_is_named(raw: bytes, param: str | None, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(raw, chat=False, model="m")
    assert caught.value.param == param
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_chat_message_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    whole = parse(body(messages=[{"role": "user", "content": "hello there"}]), chat=True, model="m")
    assert parse(body(messages=[{"role": "user", "content": parts}]), chat=True, model="m").prompt.tolist() == (
        whole.prompt.tolist()
    )
    with pytest.raises(RequestError, match="image_url"):
        parse(body(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), chat=True, model="m")


def test_a_chat_without_messages_is_refused() -> None:
    with pytest.raises(RequestError, match="messages"):
        parse(body(prompt=[1]), chat=True, model="m")


@pytest.mark.parametrize("chat", [False, True])
def test_events_and_whole_answers_say_the_same(chat: bool) -> None:
    fields = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": [1]}
    parsed: Parsed = parse(body(**fields, return_token_ids=True), chat=chat, model="m")
    writer = Writer("id", parsed, "m", 5)
    event = json.loads(writer.event([7, 8], finished=True).removeprefix(b"data: "))
    whole = json.loads(writer.whole([7, 8], 16))
    part = event["choices"][0]["delta"]["content"] if chat else event["choices"][0]["text"]
    full = whole["choices"][0]["message"]["content"] if chat else whole["choices"][0]["text"]
    assert part == full == tokens.decode([7, 8])
    assert event["choices"][0]["token_ids"] == [7, 8]
    assert event["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_tokens_and_text_turn_into_each_other() -> None:
    ids = list(range(0, tokens.VOCABULARY, 7))
    assert tokens.encode(tokens.decode(ids)) == ids

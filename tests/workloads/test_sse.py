"""Streams: the same events however the bytes were split, and a verdict that a cut stream cannot fool."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.answer import Answer
from workloads.rows import Chunk, Outcome
from workloads.sse import LINE_BYTES_MAX, BadStream, SseReader, decode_event

STREAM = (
    b": a proxy says hello\n\n"
    b'data: {"choices":[{"index":0,"text":" AB","token_ids":[1],"finish_reason":null}],"usage":null}\n\n'
    b'event: message\r\nid: 7\r\ndata:{"choices":[{"text":" AC CD","token_ids":[2,3]}]}\r\n\r\n'
    b'data: {"choices":[{"text":" AD",\ndata: "token_ids":[4],"finish_reason":"length"}]}\n\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}\n\n'
    b"data: [DONE]\n\n"
)


def answer_of(pieces: list[bytes]) -> Answer:
    answer = Answer()
    for t_ns, piece in enumerate(pieces, 1):
        answer.take(piece, t_ns)
    return answer


def cut_up(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cuts), len(stream)]
    return [stream[begin:end] for begin, end in itertools.pairwise(edges)]


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_splits_change_nothing_but_the_times(cuts: list[int]) -> None:
    pieces = cut_up(STREAM, cuts)
    answer = answer_of(pieces)
    assert answer.output_ids == [1, 2, 3, 4]
    assert [chunk.tokens for chunk in answer.chunks] == [1, 2, 1]
    assert answer.verdict() == (Outcome.OK, "")
    for chunk, end_of_data in zip(answer.chunks, (b"null}\n", b"[2,3]}]}\r\n", b'"length"}]}\n'), strict=True):
        last_byte = STREAM.index(end_of_data) + len(end_of_data)
        reached = 0
        for t_ns, piece in enumerate(pieces, 1):
            reached += len(piece)
            if reached >= last_byte:
                assert chunk.t_ns == t_ns
                break


@given(st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"")), max_size=5))
def test_the_short_way_reads_like_the_long_way(data: list[bytes]) -> None:
    events = [b"data: " + line + b"\n\n" for line in data]
    reader, bytewise = SseReader(), SseReader()
    at_once = [event for piece in events for event in reader.feed(piece, 1)]
    one_by_one = [event for n in b"".join(events) for event in bytewise.feed(bytes([n]), 1)]
    assert at_once == one_by_one == [(1, line) for line in data]


@given(st.integers(0, len(STREAM) - 2))
def test_a_stream_cut_anywhere_is_not_whole(length: int) -> None:
    outcome, error = answer_of([STREAM[:length]]).verdict()
    assert outcome is Outcome.FAIL
    assert "cut short" in error


def test_a_cut_stream_keeps_its_stamps() -> None:
    answer = answer_of(cut_up(STREAM, [130, 200])[:2])
    assert answer.chunks == [Chunk(1, 1), Chunk(2, 2)]
    assert answer.output_ids == [1, 2, 3]


def test_a_chat_answer_begins_with_its_first_word_not_with_its_role() -> None:
    answer = answer_of([
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
        b'data: {"choices":[{"delta":{"reasoning_content":"Hm"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"Yes"},"finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[],"usage":{"completion_tokens":5}}\n\ndata: [DONE]\n\n',
    ])  # fmt: skip
    assert answer.verdict() == (Outcome.OK, "")
    assert answer.chunks == [Chunk(2, 1), Chunk(3, 4)]  # what the usage counts beyond the chunks goes to the last


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (b'{"error":{"message":"no blocks","code":500}}', "the stream said: no blocks"),
        (b'{"error":"no blocks"}', "the stream said: no blocks"),
        (b'{"object":"error","message":"no blocks"}', "the stream said: no blocks"),
        (b'{"error":{"code":500}}', "the stream said: {'code': 500}"),
        (b'{"choices":[{"text":"","finish_reason":"abort"}]}', 'finish_reason "abort"'),
    ],
)
def test_an_error_in_the_stream_fails_the_request(event: bytes, words: str) -> None:
    outcome, error = answer_of([b"data: " + event + b"\n\ndata: [DONE]\n\n"]).verdict()
    assert outcome is Outcome.FAIL
    assert words in error


def test_the_last_hand_off_that_came_is_kept_as_it_came() -> None:
    answer = answer_of([
        b'data: {"choices":[{"text":"a"}],"kv_transfer_params": {"remote_port" : 1} }\n\n',
        b'data: {"choices":[],"usage":{"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":48}},'
        b'"kv_transfer_params":{"remote_port": 2.0, "x":[null]}}\n\n',
        b'data: {"choices":[{"text":"","finish_reason":"stop"}],"kv_transfer_params":null}\n\ndata: [DONE]\n\n',
    ])  # fmt: skip
    assert answer.hand_off == b'{"remote_port": 2.0, "x":[null]}'
    assert answer.cached_tokens == 48
    assert answer.verdict() == (Outcome.OK, "")


def test_an_answer_without_hand_off_has_none() -> None:
    answer = answer_of([STREAM])
    assert (answer.hand_off, answer.cached_tokens) == (b"", None)


def test_done_without_a_finish_reason_is_cut_short() -> None:
    outcome, error = answer_of([b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n']).verdict()
    assert outcome is Outcome.FAIL
    assert error == "the stream was cut short after 1 chunks (no finish_reason)"


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b'"text"', b'{"choices":3}', b"\xff"])
def test_what_is_no_chunk_is_refused(payload: bytes) -> None:
    with pytest.raises(BadStream, match="no OpenAI chunk"):
        decode_event(payload)


def test_a_line_without_end_is_refused() -> None:
    with pytest.raises(BadStream, match="longer than"):
        SseReader().feed(b"x" * (LINE_BYTES_MAX + 1), 1)

"""What Dynamo's front end says is read rightly, and a request is changed by one field alone."""

from __future__ import annotations

import json

import pytest

from harness.targets.dynamo.door import instance_of, naming
from harness.targets.dynamo.frontend import answered_by, is_whole, listed_at

BIG = 15094258624931643856
"""Dynamo's ids fill 64 bits."""


def health(*instances: tuple[int, str, str]) -> bytes:
    listed = [
        {"component": "backend", "endpoint": endpoint, "namespace": "dynamo", "instance_id": i,
         "transport": {"tcp": address}, "device_type": "cuda"}
        for i, endpoint, address in instances
    ]  # fmt: skip
    return json.dumps({"status": "healthy", "endpoints": [], "instances": listed}).encode()


def test_an_instance_is_known_by_its_port() -> None:
    said = health((7, "generate", "127.0.0.1:4001/a1/dynamo/backend/generate"), (BIG, "generate", "127.0.0.1:40/b2/x"))
    assert listed_at(said, 4001) == 7
    assert listed_at(said, 40) == BIG
    assert listed_at(said, 4002) is None


def test_other_endpoints_of_the_same_port_are_not_taken_for_it() -> None:
    assert listed_at(health((7, "worker_kv_query_source_1c", "127.0.0.1:4001/a1/x")), 4001) is None


def test_an_instance_reached_by_something_else_than_tcp_has_no_port() -> None:
    said = json.dumps({"instances": [{"instance_id": 1, "endpoint": "generate", "transport": {"nats": "subject"}}]})
    assert listed_at(said.encode(), 0) == 1  # no port is looked for under 0
    assert listed_at(said.encode(), 4001) is None


def test_what_is_no_health_lists_nobody() -> None:
    assert listed_at(b"<html>", 4001) is None
    assert listed_at(b"{}", 4001) is None


def test_an_answer_says_who_gave_it() -> None:
    named = {"choices": [], "nvext": {"worker_id": {"prefill_worker_id": 1, "decode_worker_id": BIG}}}
    assert answered_by(json.dumps(named).encode()) == BIG
    assert answered_by(b'{"choices":[],"nvext":null}') is None
    assert answered_by(b'{"choices":[]}') is None
    assert answered_by(b"[DONE]") is None


def test_an_answer_is_whole_when_it_ended_at_its_length() -> None:
    assert is_whole(b'{"choices":[{"text":" a","finish_reason":"length"}]}')
    assert not is_whole(b'{"choices":[{"text":" a"}]}')
    assert not is_whole(b'{"choices":[]}')
    assert not is_whole(b"oops")


def test_only_whole_events_are_read() -> None:
    event = b'data: {"choices":[],"nvext":{"worker_id":{"decode_worker_id":5}}}'
    assert instance_of(event) is None
    assert instance_of(event + b"\n\n") == 5
    assert instance_of(b": keep-alive\n\n" + event + b"\n") == 5
    assert instance_of(b'data: {"error":{"message":"no"}}\n\n') is None


def test_a_request_is_asked_one_thing_more() -> None:
    body = {"model": "canary", "prompt": [1, 2], "return_token_ids": True, "nvext": {"dp_rank": 3}}
    assert json.loads(naming(json.dumps(body).encode())) == body | {
        "nvext": {"dp_rank": 3, "extra_fields": ["worker_id"]}
    }


def test_a_request_that_asks_by_itself_is_left_as_it_is() -> None:
    body = {"prompt": "a", "nvext": {"extra_fields": ["timing", "worker_id"]}}
    assert json.loads(naming(json.dumps(body).encode())) == body


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"nvext":3}', b'{"nvext":{"extra_fields":"all"}}'])
def test_what_is_no_request_is_for_the_front_end_to_refuse(body: bytes) -> None:
    assert naming(body) == body

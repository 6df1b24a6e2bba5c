"""What holder and reader say to each other: whatever the bytes are, a message or BadMessage."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reference_impl.rules.messages import (
    HEARTBEAT_IDS_MAX,
    ID_CHARS_MAX,
    MAGIC,
    MESSAGE_BYTES_MAX,
    Answer,
    BadMessage,
    Claim,
    Heartbeat,
    How,
    Message,
    Report,
    decode,
    encode,
)
from reference_impl.rules.producer import Producer
from tests.rules.parties import TERMS, P, S, connected, holder, reading

ids = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=ID_CHARS_MAX)
known = st.one_of(
    st.builds(Heartbeat, st.lists(ids, min_size=1, max_size=5)),
    st.builds(Claim, ids, ids, st.integers(0, 3600 * S), st.text(max_size=64)),
    st.builds(Answer, ids, ids, st.booleans(), st.text(max_size=50)),
    st.builds(Report, ids, ids, st.sampled_from(How)),
)


@given(known)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.rule("KVC-REL-006")
@given(st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(MAGIC.__add__)))
@example(MAGIC + b"\xdd\xff\xff\xff\xff")
@example(MAGIC + b"\x92\xa2hb\xdd\xff\xff\xff\xff")
@example(MAGIC + b"\x91" * 5000)
@example(b"")
@example(b"x" * (MESSAGE_BYTES_MAX + 1))
def test_any_bytes_are_a_message_or_a_bad_one(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode(data)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.rule("KVC-REL-006")
@given(st.sampled_from(["hb", "claim", "answer", "report", "new"]), st.lists(json_values, max_size=6))
def test_any_fields_under_a_right_name_are_a_message_or_a_bad_one(tag: str, fields: list[object]) -> None:
    data = MAGIC + msgspec.msgpack.encode([tag, *fields])
    try:
        message = decode(data)
    except BadMessage:
        return
    assert isinstance(message, Heartbeat | Claim | Answer | Report)


@pytest.mark.rule("KVC-REL-006")
@given(st.lists(st.binary(max_size=60), max_size=10), known, st.data())
def test_damaged_notifications_are_dropped_and_counted_and_the_next_is_read(
    junk: list[bytes], message: Message, data: st.DataObject
) -> None:
    encoded = bytearray(encode(message))
    cut = bytes(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    producer = holder()
    producer.step([("x", b) for b in [*junk, cut, encode(Heartbeat(["p-req"]))]], 25 * S)
    assert producer.counts.malformed == len(junk) + 1
    lease = producer.leases.get("p-req")
    assert lease is not None
    assert lease.deadline_ns == 25 * S + TERMS.extension_ns


@pytest.mark.rule("KVC-REL-006")
@given(st.lists(st.tuples(st.sampled_from([P, "d-1", "x"]), known), max_size=20))
def test_no_sequence_of_well_formed_messages_ends_a_side(inbox: list[tuple[str, Message]]) -> None:
    producer, consumer = Producer(TERMS), connected()
    reading(consumer)
    for now, (engine, message) in enumerate(inbox):
        for sender, answer in producer.step([(engine, encode(message))], now):
            consumer.answered(sender, answer, now)
        consumer.tick(now)
    assert len(producer.leases) == 0, "no message makes a lease"


def test_the_largest_heartbeat_fits_a_notification() -> None:
    largest = Heartbeat([f"{n:0{ID_CHARS_MAX}d}" for n in range(HEARTBEAT_IDS_MAX)])
    assert len(encode(largest)) <= MESSAGE_BYTES_MAX
    assert decode(encode(largest)) == largest


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat([]),
        Heartbeat(["a"] * (HEARTBEAT_IDS_MAX + 1)),
        Heartbeat([""]),
        Heartbeat(["x" * (ID_CHARS_MAX + 1)]),
        Claim("a", "r", -1, ""),
        Claim("a", "r", 10**15, ""),
        Report("a", "r", "lost"),  # type: ignore[arg-type]
    ],
)
def test_values_out_of_range_are_refused(message: Message) -> None:
    with pytest.raises(BadMessage):
        decode(encode(message))

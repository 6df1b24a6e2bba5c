"""A reader and a holder for tests of the rules, and short ways to make what travels between them."""

from __future__ import annotations

from typing import TypeVar

from reference_impl.rules.clock import NS_PER_S
from reference_impl.rules.clocksync import Sample
from reference_impl.rules.consumer import Consumer
from reference_impl.rules.handoff import HandOff
from reference_impl.rules.messages import Answer, How, Message, Report, encode
from reference_impl.rules.producer import Producer, Send
from reference_impl.rules.terms import KvTerms

S = NS_PER_S
TERMS = KvTerms()
TWO_TURNS = KvTerms(bidirectional_kv_xfer=True)
P, D = "p-1", "d-1"
A = TypeVar("A")


def handoff(request: str = "p-req", engine: str = P, *, expiry_ns: int = 0, blocks: int = 3) -> HandOff:
    return HandOff(
        engine_id=engine, request_id=request, host="127.0.0.1", port=7000, blocks=list(range(10, 10 + blocks)),
        tokens=blocks * 16, ranks=1, expiry_ns=expiry_ns,
    )  # fmt: skip


def holder(terms: KvTerms = TERMS, *, readers: int = 1, request: str = "p-req") -> Producer:
    """A holder with one lease, granted at 0."""
    producer = Producer(terms)
    producer.grant(request, [10, 11, 12], readers=readers, content="text", now_ns=0)
    return producer


def tell(producer: Producer, now_ns: int, *messages: Message, engine: str = D) -> list[tuple[str, Answer]]:
    return producer.step([(engine, encode(m)) for m in messages], now_ns)


def only(kind: type[A], actions: list[object]) -> list[A]:
    return [a for a in actions if isinstance(a, kind)]


def messages(kind: type[A], actions: list[object]) -> list[A]:
    """The messages of one kind among what is to be sent."""
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def report(reader: str, how: How = How.READ, request: str = "p-req") -> Report:
    return Report(request, reader, how)


def connected(
    terms: KvTerms = TERMS, *, samples: tuple[Sample, ...] = (), now_ns: int = 0, engine: str = P
) -> Consumer:
    """A reader connected to a holder, with nothing to read: its one request was spared."""
    consumer = Consumer(terms)
    consumer.arrive("first", handoff("first", engine), "text", now_ns)
    consumer.connected(engine, TERMS.interval_ns, samples, now_ns)
    consumer.spare("first")
    consumer.take()
    return consumer


def claimed(consumer: Consumer, request: str = "r", now_ns: int = 0) -> None:
    """Bring a load to where its claim has left, if its holder is connected."""
    consumer.arrive(request, handoff(), "text", now_ns)
    consumer.admit(request, [10, 11, 12], [1, 2, 3], now_ns)


def reading(consumer: Consumer, request: str = "r", now_ns: int = 0) -> int:
    """Bring a load to where it reads; return the read's id."""
    from reference_impl.rules.consumer import Read

    claimed(consumer, request, now_ns)
    consumer.answered(P, Answer("p-req", request, True), now_ns)
    return only(Read, consumer.take())[0].read_id  # type: ignore[arg-type]

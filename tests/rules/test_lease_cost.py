"""What a step pays for leases, as ratios within one run; the times themselves are in `benchmarks/leases.py`."""

from __future__ import annotations

import pytest

from reference_impl.realclock import now_ns
from reference_impl.rules.producer import Producer
from reference_impl.rules.terms import KvTerms

FEW, MANY = 1_000, 200_000
LOOKS = 500


def held(leases: int) -> Producer:
    producer, blocks = Producer(KvTerms(kv_lease_duration=3600.0)), [1]
    for number in range(leases):
        producer.grant(f"request-{number}", blocks, readers=1, content="", now_ns=number)
    return producer


def look_ns(producer: Producer) -> int:
    """Return what a few hundred steps take in which nothing has come and no lease has expired."""
    start_ns = now_ns()
    for _ in range(LOOKS):
        producer.step([], 0)
    return now_ns() - start_ns


@pytest.mark.rule("KVC-LEASE-006")
def test_a_look_for_expired_leases_costs_the_same_however_many_there_are() -> None:
    few, many = held(FEW), held(MANY)
    pairs = [(look_ns(few), look_ns(many)) for _ in range(20)]  # in turn, as others use the machine as well
    assert min(m for _, m in pairs) <= 5 * min(f for f, _ in pairs)


@pytest.mark.rule("KVC-LEASE-006")
def test_one_expiry_among_many_costs_little_more_than_among_few() -> None:
    few, many = held(FEW), held(MANY)
    first_ns = few.terms.first_ns

    def expiry_ns(producer: Producer, number: int) -> int:
        start_ns = now_ns()
        producer.step([], first_ns + number)
        took_ns = now_ns() - start_ns
        assert len(producer.take()) == 1
        return took_ns

    pairs = [(expiry_ns(few, n), expiry_ns(many, n)) for n in range(200)]
    assert min(m for _, m in pairs) <= 20 * min(f for f, _ in pairs)  # linear would be 200

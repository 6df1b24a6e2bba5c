"""The terms of the lease protocol, checked at the door."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from reference_impl.rules.clock import NS_PER_S
from reference_impl.rules.terms import KvTerms, LeaseDesign

S = NS_PER_S


@pytest.mark.rule("KVC-LEASE-001")
@pytest.mark.rule("KVC-CLK-001")
def test_the_defaults_are_vllms() -> None:
    terms = KvTerms()
    assert (terms.first_ns, terms.extension_ns, terms.interval_ns) == (30 * S, 20 * S, 5 * S)
    assert terms.ttl_ns == 480 * S
    assert terms.renews


@pytest.mark.rule("KVC-LEASE-013")
def test_the_old_design_has_one_timeout_and_no_heartbeats() -> None:
    terms = KvTerms(design=LeaseDesign.SINGLE_TIMEOUT)
    assert terms.first_ns == 480 * S
    assert not terms.renews


@pytest.mark.parametrize(
    "name", ["kv_lease_duration", "single_timeout", "decoder_kv_blocks_ttl", "read_limit", "load_limit"]
)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, -math.inf, 86_401])
def test_a_duration_that_makes_no_sense_is_refused_by_its_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0 and at most 86400 seconds, got"):
        KvTerms(**{name: value})


@pytest.mark.parametrize(
    "name", ["kv_lease_duration", "single_timeout", "decoder_kv_blocks_ttl", "read_limit", "load_limit"]
)
def test_a_duration_too_short_to_do_anything_in_is_refused_by_its_name(name: str) -> None:
    for value in (1e-9, 0.0499):
        with pytest.raises(ValueError, match=f"{name} must be at least 0.05 seconds, got {value}"):
            KvTerms(**{name: value})
    assert getattr(KvTerms(**{"read_limit": 0.05, name: 0.05}), name) == 0.05


def test_a_load_has_time_for_its_read() -> None:
    with pytest.raises(ValueError, match="load_limit must be at least read_limit"):
        KvTerms(read_limit=5, load_limit=4)


@pytest.mark.parametrize(
    "given", [{"kv_lease_duration": "30"}, {"design": "eternal"}, {"lease": 3}, {"kv_load_failure_policy": None}]
)
def test_wrong_types_and_unknown_terms_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(given, KvTerms)

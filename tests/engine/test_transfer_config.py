"""`--kv-transfer-config`: vLLM's JSON becomes our terms, and what it cannot mean is refused by the field's name."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from reference_impl.engine.transfer_config import BadTransferConfig, terms_of
from reference_impl.rules.routing import Role
from reference_impl.rules.terms import KvTerms, LeaseDesign, LoadPolicy


def test_nothing_given_is_the_defaults() -> None:
    assert terms_of("{}", Role.BOTH) == KvTerms()


def test_vllms_own_configuration_is_understood() -> None:
    text = json.dumps({
        "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "kv_lease_duration": 6, "bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 20,
        },
    })  # fmt: skip
    assert terms_of(text, Role.PREFILL) == KvTerms(
        kv_lease_duration=6.0, bidirectional_kv_xfer=True, decoder_kv_blocks_ttl=20.0,
        kv_load_failure_policy=LoadPolicy.FAIL,
    )  # fmt: skip


def test_every_term_may_stand_at_the_top_or_in_the_extra_part() -> None:
    terms = KvTerms(design=LeaseDesign.SINGLE_TIMEOUT, single_timeout=5, kv_lease_duration=6, clock_correction=False)
    fields = msgspec.to_builtins(terms)
    assert terms_of(json.dumps(fields), Role.BOTH) == terms
    assert terms_of(json.dumps({"kv_connector_extra_config": fields}), Role.BOTH) == terms


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a JSON object"),
        ("not json", "a JSON object"),
        ("[]", "a JSON object"),
        ("[" * 100_000, "a JSON object"),
        ('{"kv_lease_durations": 6}', "kv_lease_durations is not known; there are design, kv_lease_duration"),
        ('{"kv_connector_extra_config": {"lease": 6}}', "lease is not known"),
        ('{"kv_connector_extra_config": 6}', "kv_connector_extra_config must be an object"),
        ('{"kv_lease_duration": 6, "kv_connector_extra_config": {"kv_lease_duration": 6}}', "stands twice"),
        ('{"kv_lease_duration": 0}', "kv_lease_duration must be above 0"),
        ('{"kv_lease_duration": -1}', "kv_lease_duration must be above 0"),
        ('{"kv_lease_duration": 0.01}', "kv_lease_duration must be at least 0.05 seconds"),
        ('{"read_limit": 1e-9}', "read_limit must be at least 0.05 seconds"),
        ('{"kv_lease_duration": 1e300}', "kv_lease_duration must be above 0"),
        ('{"kv_lease_duration": 1e999}', "a JSON object"),
        ('{"kv_lease_duration": "6"}', "kv_lease_duration: Expected `float`"),
        ('{"kv_lease_duration": null}', "kv_lease_duration: Expected `float`"),
        ('{"bidirectional_kv_xfer": 1}', "bidirectional_kv_xfer: Expected `bool`"),
        ('{"decoder_kv_blocks_ttl": true}', "decoder_kv_blocks_ttl: Expected `float`"),
        ('{"kv_load_failure_policy": "shrug"}', "kv_load_failure_policy: Invalid enum value 'shrug'"),
        ('{"design": "hope"}', "design: Invalid enum value 'hope'"),
        ('{"kv_connector": "MooncakeConnector"}', "kv_connector must be NixlConnector"),
        ('{"kv_buffer_device": "cuda"}', "kv_buffer_device must be cpu"),
        ('{"kv_role": "kv_all"}', "kv_role must be one of"),
        ('{"kv_role": {}}', "kv_role must be one of"),
        ('{"kv_role": "kv_consumer"}', "kv_role kv_consumer does not go with --role prefill"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_in_one_line_by_its_name(text: str, words: str) -> None:
    with pytest.raises(BadTransferConfig, match=re.escape(words)) as caught:
        terms_of(text, Role.PREFILL)
    assert "\n" not in str(caught.value)

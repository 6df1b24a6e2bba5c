"""The hand-off at the door: every field that is wrong is refused by its name, and no value ends an engine."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.rules.handoff import Asked, BadHandOff, HandOff, parse
from reference_impl.rules.messages import ID_CHARS_MAX, Heartbeat, encode
from tests.rules.parties import handoff

HOSTS = ("127.0.0.1", "::1")
GOOD = handoff().params()
FIELDS = sorted(GOOD)
NEEDED = [f for f in FIELDS if f.startswith(("remote_", "tp_")) and f != "remote_blocks_expiry_time"]


def door(params: object) -> Asked:
    return parse(params, block_tokens=16, hosts=HOSTS)


def refused(**changes: Any) -> str:
    """The field that a hand-off with these changes is refused for; `...` takes a field out."""
    params = {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}
    with pytest.raises(BadHandOff) as caught:
        door(params)
    assert caught.value.param in str(caught.value) or "`$." in str(caught.value) or "unknown field" in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value.param.removeprefix("kv_transfer_params").removeprefix(".")


@pytest.mark.rule("KVC-LEASE-001")
@given(
    request=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=ID_CHARS_MAX),
    blocks=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20, unique=True),
    short=st.integers(0, 15), ranks=st.sampled_from([1, 2, 4, 8]), expiry_ns=st.just(0) | st.integers(1, 10**17),
)  # fmt: skip
def test_what_a_holder_says_a_reader_understands(
    request: str, blocks: list[int], short: int, ranks: int, expiry_ns: int
) -> None:
    made = HandOff(
        engine_id="p", request_id=request, host="::1", port=65_535, blocks=blocks, tokens=16 * len(blocks) - short,
        ranks=ranks, expiry_ns=expiry_ns,
    )  # fmt: skip
    assert set(made.params()) == set(FIELDS)
    load = door(json.loads(json.dumps(made.params()))).load
    assert load is not None
    assert abs(load.expiry_ns - expiry_ns) < 1000, "seconds in a float hold a microsecond"
    assert msgspec.structs.replace(load, expiry_ns=expiry_ns) == made
    assert load.turn == made.turn or expiry_ns < 1000


def test_the_first_leg_asks_to_keep_and_names_nothing() -> None:
    nulls = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    assert door({"do_remote_decode": True, "do_remote_prefill": False, **nulls}) == Asked(keep=True)
    assert door({"do_remote_decode": True, "remote_readers": 3}) == Asked(keep=True, readers=3)
    assert door({}) == Asked()


@pytest.mark.rule("KVC-XFER-005")
@pytest.mark.parametrize(
    "name", [f for f in FIELDS if f.startswith(("remote_", "tp_")) and f != "remote_blocks_expiry_time"]
)
def test_a_missing_field_is_named(name: str) -> None:
    assert refused(**{name: ...}) == name
    assert refused(**{name: None}) == name


@pytest.mark.rule("KVC-XFER-005")
@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [[], {}, [[]], {"a": 1}, [["x"]], [[-1]], [[1.5]], [[2**31]], [[None]], b"x"])
def test_a_field_of_a_wrong_type_is_named(name: str, value: object) -> None:
    assert refused(**{name: value}) == name


@pytest.mark.rule("KVC-XFER-005")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("remote_port", 0), ("remote_port", -1), ("remote_port", 65_536), ("remote_port", "7000"), ("remote_port", 1.5),
        ("remote_port", 2**70), ("tp_size", 0), ("tp_size", -4), ("tp_size", 3), ("tp_size", 65),
        ("remote_num_tokens", 0), ("remote_num_tokens", -16), ("remote_num_tokens", 2**31), ("remote_port", True),
        ("remote_blocks_expiry_time", -1), ("remote_blocks_expiry_time", 1e12), ("remote_blocks_expiry_time", math.nan),
        ("remote_blocks_expiry_time", math.inf), ("remote_blocks_expiry_time", "soon"),
        ("remote_engine_id", ""), ("remote_engine_id", "x" * 121), ("remote_engine_id", "a b"), ("remote_engine_id", 7),
        ("remote_request_id", ""), ("remote_request_id", "ü"), ("remote_request_id", "\ud800"),
        ("remote_request_id", "a\n"), ("remote_host", ""), ("remote_host", "10.0.0.1"), ("remote_host", "evil.example"),
        ("remote_host", 127), ("transfer_mode", "write"), ("transfer_mode", 1), ("do_remote_prefill", "yes"),
        ("do_remote_decode", 1), ("remote_readers", 0), ("remote_readers", 1025),
        ("remote_block_ids", [[10, 11]]), ("remote_block_ids", [[9, 10, 11, 12]]), ("remote_block_ids", [[9, 9, 9]]),
        ("remote_block_ids", [[10, 11, 12], [10, 11, 12]]), ("remote_block_ids", [10, 11, 12]),
        ("remote_block_ids", "10"), ("remote_block_ids", [[-1, 11, 12]]),
    ],
)  # fmt: skip
def test_a_value_out_of_range_or_foreign_is_named(name: str, value: object) -> None:
    assert refused(**{name: value}) == name


@pytest.mark.rule("KVC-XFER-005")
@pytest.mark.parametrize("name", ["remote_rank", "do_remote_", "REMOTE_PORT", "x" * 50, "`", "$.remote_port"])
def test_an_extra_field_is_named(name: str) -> None:
    assert refused(**{name: 1}) == name.split("`", maxsplit=1)[0]


@pytest.mark.rule("KVC-XFER-005")
@pytest.mark.parametrize(
    ("params", "message", "param"),
    [
        ({"remote_port": "7000"},
         "Expected `int | null`, got `str` - at `$.kv_transfer_params.remote_port`", "remote_port"),
        ({"remote_block_ids": [["x"]]},
         "Expected `int`, got `str` - at `$.kv_transfer_params.remote_block_ids[0][0]`", "remote_block_ids"),
        ({"x": 1}, "kv_transfer_params: Object contains unknown field `x`", "x"),
        ({" - at `$.y": 1}, "kv_transfer_params: Object contains unknown field ` - at `$.y`", " - at "),
        ([], "kv_transfer_params: Expected `object`, got `array`", ""),
    ],
)  # fmt: skip
def test_a_message_names_the_path_from_the_requests_root(params: Any, message: str, param: str) -> None:
    with pytest.raises(BadHandOff) as caught:
        door(params)
    assert str(caught.value) == message
    assert caught.value.param == ".".join(filter(None, ("kv_transfer_params", param)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.rule("KVC-XFER-005")
@given(json_values | st.dictionaries(st.sampled_from([*FIELDS, "remote_readers"]), json_values))
def test_any_json_is_understood_or_refused(params: object) -> None:
    with contextlib.suppress(BadHandOff):
        door(params)


@pytest.mark.rule("KVC-XFER-005")
@given(st.dictionaries(st.sampled_from([*FIELDS, "remote_readers"]), json_values, max_size=2))
def test_any_change_of_a_good_hand_off_is_understood_or_refused(changes: dict[str, object]) -> None:
    try:
        load = door({**GOOD, **changes}).load
    except BadHandOff:
        return
    if load is not None:
        encode(Heartbeat([load.request_id]))
        assert load.host in HOSTS
        assert len(load.blocks) == -(-load.tokens // 16)


def test_deep_nesting_is_refused() -> None:
    nested: object = 1
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(BadHandOff):
        door({**GOOD, "remote_block_ids": nested})

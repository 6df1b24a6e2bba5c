"""The summary: from raw rows, with every request that never answered counted."""

from __future__ import annotations

import math

import msgspec

from workloads.rows import Chunk, Outcome, PromptSpec, RequestRecord
from workloads.summary import figures, quantile, summary

MS = 1_000_000
GOOD = RequestRecord(
    request_id="a", prompt=PromptSpec(0, 0, 10), max_tokens=3, intended_ns=0, send_began_ns=1 * MS, sent_ns=2 * MS,
    end_ns=50 * MS, chunks=[Chunk(12 * MS, 1), Chunk(32 * MS, 2)], outcome=Outcome.OK,
)  # fmt: skip
LOST = msgspec.structs.replace(GOOD, chunks=[], outcome=Outcome.FAIL, spoilt="loop lag 12 ms")
STOPPED = msgspec.structs.replace(GOOD, outcome=Outcome.UNKNOWN)


def test_a_quantile_is_a_value_that_was_measured() -> None:
    assert quantile([3, 1, 2, 4], 0.5) == 2
    assert quantile([3, 1, 2, 4], 0.99) == 4
    assert math.isnan(quantile([], 0.5))


def test_requests_without_a_first_token_are_endless_not_absent() -> None:
    text = summary([figures(GOOD, False), figures(GOOD, False), figures(LOST, False), figures(STOPPED, True)])
    assert "4 requests: 2 ok, 1 fail, 1 unknown" in text
    assert "TTFT           p50 10.00 ms p90 never ms p99 never ms   (1 of 4 censored)" in text
    assert "decode rate    p50 100.00 tokens/s   (2 of 4 censored)" in text
    assert "schedule lag   p50 1.00 ms p99 1.00 ms" in text
    assert "lateness: 1" in text


def test_hand_offs_are_told_where_there_are_some() -> None:
    handed = msgspec.structs.replace(GOOD, kv_handed=True, renewals=3, renewals_failed=1)
    assert "hand-offs sent 2, renewed 6 times, renewals failed 2" in summary([figures(handed, False)] * 2)
    assert "hand-offs" not in summary([figures(GOOD, False)])


def test_what_the_end_of_the_load_broke_off_is_no_failure() -> None:
    assert not figures(STOPPED, True).counts_as_failure
    assert figures(STOPPED, False).counts_as_failure
    assert not figures(GOOD, False).counts_as_failure


def test_no_request_is_said_plainly() -> None:
    assert summary([]) == "pdproof: no request was sent\n"

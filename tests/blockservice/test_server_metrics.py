"""The metrics and log fields of the RPC document are there, under its names, and say what happened."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice.buckets import Bucket, How, Limit, Rate
from reference_impl.blockservice.credentials import credential
from reference_impl.blockservice.metrics import CALLS_KEPT, RpcMetrics, quantile
from reference_impl.blockservice.rpc_log import Line, RpcLog
from reference_impl.rules.blockgroups import (
    Answer,
    CancelMigrate,
    Evict,
    Outcome,
    Pin,
    PrepareGet,
    Refusal,
    Reserve,
    StartMigrate,
    Unpin,
)
from reference_impl.rules.clock import NS_PER_S
from tests.blockservice.server_kit import NODE, SECRET, TENANT, Failed, serving
from tests.waiting import until_async

AT = {"block_group_id": "bg_1", "epoch": 7}
DOCUMENT = {
    # The RPC document's list, without what only a client has (pool and breaker).
    "rpc_qps", "rpc_error_rate", "rpc_timeout_count", "rpc_retry_count", "rpc_latency_p50", "rpc_latency_p99",
    "rpc_inflight_requests", "rpc_queue_length", "rate_limited_count",
    "get_metadata_latency", "get_block_group_latency", "migrate_start_latency", "migrate_status_latency",
    "evict_latency", "pin_latency", "unpin_latency", "remote_read_timeout_count",
}  # fmt: skip
FIELDS = [
    "request_id", "operation_id", "block_group_id", "src_node", "dst_node", "epoch", "rpc_method", "timeout_ms",
    "retry_count", "error_code", "latency_ms",
]  # fmt: skip


def values(metrics: RpcMetrics) -> dict[tuple[str, ...], float]:
    """Return every sample by its name and the values of its labels, as a scraper reads them."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.text().decode()) for sample in family.samples
    }  # fmt: skip


@pytest.mark.rule("KVC-IDEM-018")
def test_every_metric_of_the_document_is_there_under_its_name_before_the_first_call() -> None:
    names = {family.name for family in text_string_to_metric_families(RpcMetrics().text().decode())}
    assert names >= DOCUMENT
    assert names - DOCUMENT == {
        "operations_applied", "operations_replayed", "operations_refused", "rpc_broken_handlers",
    }  # fmt: skip


@pytest.mark.rule("KVC-IDEM-018")
async def test_each_call_is_counted_under_its_method(tmp_path: Path) -> None:
    async with serving(tmp_path) as here:
        caller = here.caller()
        await caller.write("p-1", Pin(request_id="r", **AT))
        await caller.write("p-1", Pin(request_id="r", **AT), attempt=2)
        await caller.write("p-1", Pin(request_id="r", **AT), attempt=3)
        await caller.write("u-1", Unpin(request_id="r", **AT))
        await caller.write("e-1", Evict(block_group_id="bg_1", epoch=1))
        await caller.write("g-1", PrepareGet(request_id="r", **AT))
        await caller.call("GetMetadata", pb.GetMetadataRequest(block_group_id="bg_1"))
        with pytest.raises(Failed):
            await caller.call("GetMetadata", pb.GetMetadataRequest(block_group_id="bg_2"))
        found = values(here.metrics)
    assert found["rpc_retry_count", "Pin"] == 2
    assert found["rpc_retry_count", "Unpin"] == 0
    assert found["rpc_error_rate", "GetMetadata"] == 0.5
    assert found["rpc_error_rate", "Pin"] == 0
    assert found["operations_applied",] == 3
    assert found["operations_replayed",] == 2
    assert found["operations_refused",] == 1
    assert found["rpc_inflight_requests",] == 0
    for name, method, count in (
        ("pin_latency", "Pin", 3), ("unpin_latency", "Unpin", 1), ("evict_latency", "Evict", 1),
        ("get_block_group_latency", "PrepareGet", 1), ("get_metadata_latency", "GetMetadata", 2),
    ):  # fmt: skip
        assert found[f"{name}_count",] == count
        assert 0 < found["rpc_latency_p50", method] <= found["rpc_latency_p99", method]
        assert found[name, "0.5"] == found["rpc_latency_p50", method]
        assert found[name, "0.99"] == found["rpc_latency_p99", method]


@pytest.mark.rule("KVC-IDEM-018")
async def test_a_call_that_ran_out_of_time_is_counted_and_a_read_of_another_node_twice(tmp_path: Path) -> None:
    limits = {Bucket.REMOTE_READ_QPS: Limit(tenant=Rate(per_s=0.01, burst=1))}
    async with serving(tmp_path, limits=limits) as here:
        caller = here.caller()
        here.node.writer.run = lambda _: asyncio.sleep(60)  # type: ignore[method-assign,assignment]
        for request in (Reserve(slots=1, **AT), PrepareGet(request_id="r", **AT)):
            with pytest.raises(Failed, match="DEADLINE_EXCEEDED"):
                await caller.write("op", request, timeout_s=0.2)
        with pytest.raises(Failed, match="RATE_LIMITED"):
            await caller.write("op", PrepareGet(request_id="r", **AT), timeout_s=0.5)
        await until_async(lambda: not here.metrics.inflight, 20, "all have ended")
        found = values(here.metrics)
    assert found["rpc_timeout_count", "Reserve"] == 1
    assert found["rpc_timeout_count", "PrepareGet"] == 1
    assert found["remote_read_timeout_count",] == 1
    assert found["rate_limited_count", "remote_read_qps_token", "delayed"] == 1
    assert found["rate_limited_count", "remote_read_qps_token", "refused"] == 1


def test_quantiles_are_those_of_the_last_calls_by_the_nearest_rank() -> None:
    metrics = RpcMetrics()
    for _ in range(500):
        call(metrics, latency_ns=10**9)  # long ago
    for n in range(1, CALLS_KEPT + 1):
        call(metrics, latency_ns=n * 10**6, code="OK" if n % 4 else "UNAVAILABLE")
    found = values(metrics)
    assert found["rpc_latency_p50", "Pin"] == 512
    assert found["rpc_latency_p99", "Pin"] == 1014
    assert found["rpc_error_rate", "Pin"] == 0.25
    assert found["pin_latency_count",] == 500 + CALLS_KEPT
    assert ("rpc_latency_p50", "Evict") not in found, "a method that was not called has no quantile"


def call(metrics: RpcMetrics, method: str = "Pin", *, latency_ns: int = 0, code: str = "OK") -> None:
    metrics.began(method, 1)
    metrics.ended(method, code, latency_ns)


def test_the_nearest_rank_is_a_value_that_was_measured() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.25, 0.5, 0.51, 0.99, 1.0)] == [1, 1, 2, 3, 4, 4]
    assert quantile([7.0], 0.5) == 7
    with pytest.raises(IndexError):
        quantile([], 0.5)


def test_the_rate_is_that_of_the_last_ten_whole_seconds() -> None:
    now_ns = [5 * NS_PER_S]
    metrics = RpcMetrics(clock_ns=lambda: now_ns[0])
    for second in range(5, 25):
        now_ns[0] = second * NS_PER_S + 1
        for _ in range(second):
            call(metrics)
    now_ns[0] = 25 * NS_PER_S
    assert values(metrics)["rpc_qps", "Pin"] == sum(range(15, 25)) / 10
    now_ns[0] = 100 * NS_PER_S
    assert values(metrics)["rpc_qps", "Pin"] == 0


def test_gauges_tell_of_this_moment() -> None:
    waiting = [3]
    metrics = RpcMetrics(queue_length=lambda: waiting[0])
    metrics.began("Pin", 1)
    assert (values(metrics)["rpc_inflight_requests",], values(metrics)["rpc_queue_length",]) == (1, 3)
    metrics.ended("Pin", "OK", 1)
    waiting[0] = 0
    assert (values(metrics)["rpc_inflight_requests",], values(metrics)["rpc_queue_length",]) == (0, 0)


def test_every_kind_of_answer_and_of_limit_is_counted() -> None:
    metrics = RpcMetrics()
    applied = Answer(outcome=Outcome.APPLIED)
    refused = Answer(outcome=Outcome.REFUSED, refusal=Refusal.PINNED)
    for answer, replayed in ((applied, False), (refused, False), (refused, True)):
        metrics.answered(answer, replayed=replayed)
    metrics.rate_limited(Bucket.MIGRATION_BYTES, How.REFUSED)
    metrics.broke()
    found = values(metrics)
    assert [found[f"operations_{what}",] for what in ("applied", "replayed", "refused")] == [1, 1, 1]
    assert found["rate_limited_count", "migration_bytes_token", "refused"] == 1
    assert found["rpc_broken_handlers",] == 1


# The log.


def lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


@pytest.mark.rule("KVC-IDEM-018")
async def test_every_call_has_a_line_with_the_documents_fields(tmp_path: Path) -> None:
    async with serving(tmp_path) as here:
        caller = here.caller()
        await caller.write("p-1", Pin(request_id="r-1", **AT), more=[("x-pdproof-request-id", "user-7")], attempt=3)
        await caller.write("m-1", StartMigrate(src=NODE, dst="node-2", block_group_id="bg_1", epoch=6))
        await caller.write("c-1", CancelMigrate(migration_id="m-9", **AT))
        await caller.call("GetMetadata", pb.GetMetadataRequest(block_group_id="bg_1"))
        with pytest.raises(Failed):
            await caller.call("GetMetadata", pb.GetMetadataRequest(block_group_id="bg_2"), timeout_s=None)
    found = lines(here.log_path)
    assert all(list(line) == FIELDS for line in found)
    assert all(line["latency_ms"] > 0 for line in found)
    pin, move, cancel, read, bad = [
        {k: v for k, v in line.items() if k not in ("latency_ms", "timeout_ms")} for line in found
    ]
    assert pin == {
        "request_id": "user-7", "operation_id": "p-1", "block_group_id": "bg_1", "src_node": "", "dst_node": NODE,
        "epoch": 7, "rpc_method": "Pin", "retry_count": 2, "error_code": "",
    }  # fmt: skip
    assert (move["src_node"], move["dst_node"], move["epoch"]) == (NODE, "node-2", 6)
    assert (move["rpc_method"], move["error_code"]) == ("StartMigrate", "STALE_EPOCH")
    assert (cancel["operation_id"], cancel["error_code"]) == ("c-1", "UNKNOWN_OPERATION")
    assert (read["rpc_method"], read["operation_id"], read["epoch"]) == ("GetMetadata", "", "")
    assert (bad["error_code"], found[-1]["timeout_ms"]) == ("INVALID_ARGUMENT", "")
    assert 15_000 < found[0]["timeout_ms"] <= 21_000


async def test_no_secret_gets_into_the_log(tmp_path: Path) -> None:
    async with serving(tmp_path) as here:
        caller = here.caller()
        await caller.write("g-1", PrepareGet(request_id="r", **AT))
        with pytest.raises(Failed):
            await here.caller(key="wrong-key-of-somebody").write("g-2", PrepareGet(request_id="r", **AT))
    text = here.log_path.read_text()
    assert "g-1" in text
    for secret in ("token-g-1", credential(SECRET, TENANT), SECRET.decode(), "wrong-key", "Bearer"):
        assert secret not in text


def test_the_log_is_private_and_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch(mode=0o644)
    for n in range(2):
        log = RpcLog(path, NODE)
        log.say(Line(request_id=str(n)))
        log.close()
        log.close()
        log.say(Line(request_id="too late"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [line["request_id"] for line in lines(path)] == ["0", "1"]


def test_a_line_has_an_end_whatever_is_in_it(tmp_path: Path) -> None:
    nasty = ['"' * 10_000, "\n" * 300, "\u2028日本\x1b[2J", "\ud800", "x" * 1_000_000]
    log = RpcLog(tmp_path / "log")
    for text in nasty:
        log.say(Line(request_id=text, operation_id=text, block_group_id=text, src_node=text, dst_node=text))
    log.close()
    raw = (tmp_path / "log").read_bytes().splitlines()
    assert len(raw) == len(nasty)
    assert max(len(line) for line in raw) < 2048
    assert all(set(msgspec.json.decode(line)) == set(FIELDS) for line in raw)
    assert log.dropped == 0


def test_a_log_that_cannot_keep_up_drops_lines_and_never_waits(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # and reads nothing: its writer will stand still
    log = RpcLog(path, lines_max=10)
    for n in range(2000):
        log.say(Line(request_id=f"{n:0>100}"))
    assert log.dropped > 1000
    os.set_blocking(reader, True)
    while os.read(reader, 1 << 16) and log._lines.qsize():
        pass
    log.say(Line(request_id="the last"))
    log._lines.put(None)
    rest = b""
    while chunk := os.read(reader, 1 << 16):
        rest += chunk
    os.close(reader)
    assert b"the last" in rest


def test_without_a_path_lines_go_nowhere() -> None:
    log = RpcLog(None)
    log.say(Line())
    log.close()
    assert log.dropped == 0

"""The scenario of lost replies, small, through the real command line."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

import msgspec
import pytest

from harness.run_folder import RunFolder
from harness.verdicts import Verdict
from reference_impl.rules.events import EventKind
from tests.harness.test_commands import PDPROOF
from tests.harness.test_pd_scenarios import PROFILE
from workloads.operation_rows import OF_CLIENT

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

LIMIT_S: Final = 110.0
SCENARIO: Final = """
name = "small"
title = "reply loss, small"
requests_min = 5
[kv]
prefill = 2
decode = 1
kv_lease_duration = 3
[control]
clients = 4
rate_per_s = 40
applied_min = 60
retried_min = 3
replayed_min = 2
crashes_min = 2
storm_s = 1.5
[load]
rate_per_s = 2
arrivals = "constant"
input_tokens = 1000
output_tokens = 30
request_timeout_s = 40
[[phases]]
name = "baseline"
seconds = 4
[[phases]]
name = "killed"
seconds = 3
fault = { kind = "blocks_kill", worker = "p0" }
[[phases]]
name = "ends before the reply"
seconds = 3
fault = { kind = "fail_point", worker = "p1", point = "after_commit_before_reply", action = "exit" }
[[phases]]
name = "loses replies"
seconds = 3
fault = { kind = "fail_point", worker = "p1", point = "after_commit_before_reply", action = "drop", requests = 2 }
[[phases]]
name = "drain"
seconds = 40
"""


@pytest.mark.rule("KVC-IDEM-001", "KVC-IDEM-003", "KVC-IDEM-011", "KVC-IDEM-019")
def test_operations_have_one_effect_under_crashes_and_lost_replies(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SCENARIO)
    (tmp_path / "profile.toml").write_text(PROFILE)
    done = subprocess.run(
        [PDPROOF, "run", "small.toml", "--profile", "profile.toml", "--out", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    run = RunFolder(tmp_path / "run")
    assert run.incomplete is None, done.stderr[-2000:]
    results = {result.check: result for result in run.verdicts}
    failed = [result for result in results.values() if result.verdict is Verdict.FAIL]
    assert failed == []
    assert results["operations"].verdict is Verdict.PASS, results["operations"].found
    assert results["one-owner"].verdict is Verdict.PASS, results["one-owner"].found
    assert results["content"].verdict is Verdict.PASS
    proved = {str(e.subject) for e in run.events_of(EventKind.FAULT_PROVED)}
    assert len(proved) == 3, [e.detail for e in run.events_of(EventKind.FAULT_UNPROVED)]
    assert any(e.cause == OF_CLIENT for e in run.control.effects)
    assert any(i.replayed for i in run.control.invocations)
    assert {"operation", "metadata"} <= {look.kind for look in run.control.looks if look.said}
    assert [result.budget for result in run.storm] == [True, False]
    names = set(run.metrics["name"])
    assert {"rpc_qps Pin", "rpc_inflight_requests", "connection_pool_in_use", "circuit_breaker_state"} <= names
    logged = (run.path / "logs" / "p0-rpc.jsonl").read_bytes().splitlines()
    assert {"request_id", "operation_id", "block_group_id", "src_node", "dst_node", "epoch", "rpc_method", "timeout_ms",
            "retry_count", "error_code", "latency_ms"} == msgspec.json.decode(logged[0]).keys()  # fmt: skip

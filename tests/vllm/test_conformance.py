"""vLLM's own connectors in process: which of them are run, what is known of them, and that the verdicts are theirs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from harness.conformance.known import decided, known_for
from harness.conformance.naming import SubjectName
from harness.conformance.registry import CASES
from harness.conformance.run import Plan, run
from harness.conformance.stream import ConformanceRun
from harness.targets.vllm.config import PYTHON_VARIABLE
from harness.verdicts import Verdict

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
QUIET = {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
CHILDREN = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("NixlConnector", "ExampleConnector")]


def python() -> str:
    """Return the interpreter that has vLLM."""
    found = os.environ.get(PYTHON_VARIABLE, "")
    if not found:
        pytest.skip(f"{PYTHON_VARIABLE} names no interpreter with vLLM")
    return found


def conformed(folder: Path, config: dict[str, object], cases: list[str] | None = None) -> ConformanceRun:
    """Run cases on a connector of vLLM's."""
    plan = Plan(
        subject=SubjectName(kv_transfer_config=config), python=python(), seed=2, out=folder, twins=False,
        command=["test"], environment=QUIET,
    )  # fmt: skip
    return run([CASES[name] for name in cases or CASES], plan, lambda _: None)


def test_what_is_known_of_the_nixl_connector_is_what_is_seen(tmp_path: Path) -> None:
    ran = conformed(tmp_path / "run", {"kv_connector": "NixlConnector"})
    decision = decided(ran, known_for(ran.header), allow_known=True)
    assert decision.expected
    assert decision.exit == 0, [(s.result.case, s.result.found) for s in decision.stood if s.standing != "as expected"]
    failed = [r for r in ran.results if r.verdict is Verdict.FAIL]
    assert len(failed) >= 3
    assert all(r.timeline and r.found for r in failed)


@pytest.mark.parametrize(
    "config",
    [
        {"kv_connector": "ExampleConnector"},
        {"kv_connector": "NixlPushConnector"},
        {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": CHILDREN}},
    ],
    ids=lambda config: config["kv_connector"],
)
def test_other_connectors_move_kv_as_well(tmp_path: Path, config: dict[str, object]) -> None:
    ran = conformed(
        tmp_path / "run", config, ["KVC-XFER-001.content", "KVC-XFER-001.again", "KVC-LEASE-002.other-ends"]
    )
    assert [r.verdict for r in ran.results] == [Verdict.PASS] * 3, [r.found for r in ran.results]


def test_every_connector_that_vllm_registers_is_run_or_left_out_for_a_reason() -> None:
    code = (
        "import json; from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as F;"
        "from harness.conformance.subjects.vllm.connectors import LEFT_OUT, SHIPPED;"
        "print(json.dumps([sorted(F._registry), sorted(SHIPPED), LEFT_OUT]))"
    )
    ran = subprocess.run(
        [python(), "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd="/",
        env=os.environ | QUIET,
    )  # fmt: skip
    registered, shipped, left_out = msgspec.json.decode(ran.stdout.splitlines()[-1])
    assert not set(shipped) & left_out.keys()
    assert set(registered) == set(shipped) | left_out.keys()
    assert all(len(reason) > 10 for reason in left_out.values())

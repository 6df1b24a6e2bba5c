"""Each fixed case as a test of the connector that `--connector` or `--kv-transfer-config` names."""

from __future__ import annotations

import pytest

from harness.conformance.case import Case
from harness.conformance.pytest_plugin import Trials
from harness.conformance.registry import CASES
from harness.conformance.timeline import lines
from harness.verdicts import Verdict

SHOWN = 60
"""Lines of a failed case's timeline."""


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_connector_keeps(case: Case, conformance: Trials) -> None:
    """Fail with what was found and the end of its timeline, also for no verdict; skip what does not apply."""
    result = conformance.result(case)
    if result.verdict is None:
        pytest.skip(result.found)
    story = "\n".join([f"{result.verdict}: {case.name}: {case.title}", result.found, *lines(result.timeline)[-SHOWN:]])
    assert result.verdict is Verdict.PASS, story

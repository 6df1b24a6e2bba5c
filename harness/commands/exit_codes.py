"""The exit code of a verdict."""

from __future__ import annotations

from harness.verdicts import Verdict

_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 3, Verdict.ERROR: 4}


def exit_code(verdict: Verdict) -> int:
    """Return 0 for pass, 1 for fail, 3 for inconclusive, 4 for the harness's own error."""
    return _CODES[verdict]

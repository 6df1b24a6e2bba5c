"""Check: every token of every answer is the right one (KVC-XFER-001)."""

from __future__ import annotations

from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict
from harness.words import counted


def answers_are_right(run: RunFolder) -> CheckResult:
    """Fail for one wrong answer; inconclusive if no answer could be checked, or a whole one was not."""
    rows = run.requests
    checked = int(rows.content_ok.notna().sum())
    wrong = rows[rows.content_ok == False]  # noqa: E712 # three-valued: NA is not False
    unchecked = int(((rows.outcome == "ok") & rows.content_ok.isna()).sum())
    tokens = int(rows.output_tokens[rows.content_ok.notna()].sum())
    found = (
        f"{counted(checked, 'answer')} with {counted(tokens, 'token')} checked against the oracle, {len(wrong)} wrong"
    )
    verdict = Verdict.PASS
    if not checked or unchecked:
        verdict = Verdict.INCONCLUSIVE
        found += f"; {counted(unchecked, 'whole answer')} could not be checked"
    if len(wrong):
        verdict = Verdict.FAIL
        found += f"; the first: {wrong.request_id.iloc[0]} from {wrong.node_d.iloc[0]}"
    return CheckResult(
        check="content", title="Every answer is right, token by token", rules=["KVC-XFER-001", "KVC-ROUT-002", "S2"],
        verdict=verdict, found=found, evidence={"checked": checked, "wrong": len(wrong), "unchecked": unchecked},
    )  # fmt: skip

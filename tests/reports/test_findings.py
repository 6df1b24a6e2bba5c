"""Findings: what cases say of rules, how that stands to what was expected, and the page and document of it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from harness.errors import BadInput
from harness.expectations import (
    Expectations,
    Kind,
    Known,
    Standing,
    expectations_for,
    load_expectations,
    standing,
    unmatched,
)
from harness.verdicts import CheckResult, Verdict
from reports.commands.findings import command
from reports.findings.markdown import markdown
from reports.findings.model import Findings, gather
from reports.findings.page import write_findings
from reports.findings.words import lead, reasons
from tests.harness.case_histories import CaseHistory
from tests.reports import chromium
from tests.reports.fits import assert_fits

FREED = "KVC-LEASE-005"


def check(name: str, verdict: Verdict, *rules: str, found: str = "as it should") -> CheckResult:
    return CheckResult(check=name, title=f"About {name}", rules=list(rules), verdict=verdict, found=found)


def case(folder: Path, name: str, *results: CheckResult) -> Path:
    history = CaseHistory(name)
    for second in range(5):
        history.sampled("p0", second, 0.3 if second < 3 else 0.0)
        history.sampled("d0", second, 0.1)
    history.mark("held", 1)
    history.finale(6)
    history.write(folder / name).write_verdicts(list(results))
    return folder


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    folder = tmp_path / "cases"
    case(folder, "abandoned", check("freed", Verdict.PASS, FREED, "L1"), check("machine", Verdict.PASS))
    case(folder, "stale_handoff", check("stale", Verdict.FAIL, "KVC-REL-007", "S2", found="a <wrong> answer | one"))
    return case(folder, "surge", check("leases-kept", Verdict.INCONCLUSIVE, "KVC-LEASE-010"))


def known(*entries: Known) -> Expectations:
    return Expectations(system="made-up", versions=["1"], known=list(entries))


STALE_HANDOFF = Known(case="stale_handoff", check="stale", reason="it is not fenced", link="https://example.org/1")


def gathered(folder: Path, *entries: Known, reference: Path | None = None) -> Findings:
    return gather(folder, known=known(*entries), reference=reference)


def test_each_rule_has_the_verdict_of_its_checks_and_failures_come_first(cases: Path) -> None:
    found = gathered(cases)
    assert [(rule.rule_id, rule.verdict) for rule in found.rules] == [
        ("KVC-REL-007", Verdict.FAIL), ("S2", Verdict.FAIL), ("KVC-LEASE-010", Verdict.INCONCLUSIVE),
        (FREED, Verdict.PASS), ("L1", Verdict.PASS),
    ]  # fmt: skip
    assert lead(found) == "Of 5 rules that were tried, made-up keeps 2 and breaks 2; 1 has no verdict."
    assert "pdproof conform --target made-up --case stale_handoff" in found.rules[0].seen[0].command
    assert all(rule.text for rule in found.rules)


def test_one_failure_outweighs_a_pass_and_a_pass_an_undecided_one(tmp_path: Path) -> None:
    case(tmp_path, "abandoned", check("a", Verdict.PASS, FREED, "L1"), check("b", Verdict.INCONCLUSIVE, "L1"))
    case(tmp_path, "surge", check("c", Verdict.FAIL, FREED))
    assert {r.rule_id: r.verdict for r in gathered(tmp_path).rules} == {FREED: Verdict.FAIL, "L1": Verdict.PASS}


def test_a_failure_that_nobody_expected_fails_and_a_known_one_does_not(cases: Path) -> None:
    unexpected = gathered(cases)
    assert unexpected.verdict is Verdict.FAIL
    assert "stale_handoff/stale" in reasons(unexpected)[0]
    expected = gathered(cases, STALE_HANDOFF)
    assert expected.verdict is Verdict.INCONCLUSIVE  # for the one rule without a verdict
    assert [s.standing for s in expected.standing(Standing.KNOWN)] == [Standing.KNOWN]


def test_an_expectation_that_no_longer_holds_fails(cases: Path) -> None:
    found = gathered(cases, STALE_HANDOFF, Known(case="abandoned", check="freed", reason="it used to leak"))
    assert found.verdict is Verdict.FAIL
    assert any("stale: abandoned/freed" in reason for reason in reasons(found))


def test_an_expectation_that_no_check_answers_to_fails_unless_its_case_did_not_run(cases: Path) -> None:
    nobody = Known(case="surge", check="no-such", reason="renamed")
    elsewhere = Known(case="p_restart", check="old", reason="not run here")
    found = gathered(cases, STALE_HANDOFF, nobody, elsewhere)
    assert found.verdict is Verdict.FAIL
    assert found.unmatched == [nobody]
    assert unmatched(None, [], []) == []


@pytest.mark.parametrize(
    ("verdict", "kind", "stands"),
    [
        (Verdict.FAIL, None, Standing.NEW), (Verdict.PASS, None, Standing.AS_EXPECTED),
        (Verdict.FAIL, Kind.FAILING, Standing.KNOWN), (Verdict.PASS, Kind.FAILING, Standing.STALE),
        (Verdict.FAIL, Kind.FLAKY, Standing.FLAKY), (Verdict.PASS, Kind.FLAKY, Standing.FLAKY),
        (Verdict.INCONCLUSIVE, None, Standing.OPEN), (Verdict.INCONCLUSIVE, Kind.FAILING, Standing.OPEN),
    ],
)  # fmt: skip
def test_how_a_verdict_stands(verdict: Verdict, kind: Kind | None, stands: Standing) -> None:
    entries = [] if kind is None else [Known(case="two_*", check="*", kind=kind, reason="because")]
    assert standing("two_turn", "late", verdict, known(*entries))[0] is stands


def test_what_the_reference_does_is_set_beside_a_failure(cases: Path, tmp_path: Path) -> None:
    reference = case(tmp_path / "reference", "stale_handoff", check("stale", Verdict.PASS, "KVC-REL-007"))
    text = markdown(gathered(cases, STALE_HANDOFF, reference=reference))
    assert "The reference implementation passes" in text
    assert "Known: it is not fenced (https://example.org/1)" in text
    assert "a &lt;wrong> answer \\| one" in text
    assert "The reference implementation was not asked" in markdown(gathered(cases))


def test_a_run_that_is_cut_short_is_no_pass(cases: Path) -> None:
    path = cases / "abandoned" / "events.jsonl"
    path.write_bytes(b"\n".join(path.read_bytes().splitlines()[:-1]) + b"\n")
    found = gathered(cases, STALE_HANDOFF)
    assert FREED not in {rule.rule_id for rule in found.rules}
    assert next(c for c in found.cases if c.name == "abandoned").verdict is Verdict.INCONCLUSIVE


def test_folders_that_hold_no_cases_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no run folder of a case"):
        gather(tmp_path)


def test_expectations_come_with_the_versions_that_they_hold_for() -> None:
    found = expectations_for("vllm", ["3.11", "0.32.0"])
    assert found is not None
    assert all(entry.reason for entry in found.known)
    assert expectations_for("vllm", ["0.33.0"]) is None
    assert expectations_for("other", ["0.32.0"]) is None
    with pytest.raises(BadInput, match="unknown"):
        load_expectations("nothing")


def test_no_expectation_hides_wrong_content_of_every_case() -> None:
    found = load_expectations("vllm-0.32")
    assert not [k for k in found.known if k.fits("undisturbed", "content") or k.fits("a_new_case", "content")]


def test_the_command_writes_page_summary_and_document(cases: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = CliRunner().invoke(
        command, [str(cases), "--out", str(out), "--markdown", str(out / "it.md")], standalone_mode=False
    )
    assert ran.return_value == 1
    page = (out / "index.html").read_text()
    assert "a &lt;wrong&gt; answer" in page
    assert "<wrong>" not in page
    assert not re.search(r"(?:src|href)=\"https?://", page)
    assert msgspec.json.decode((out / "findings.json").read_bytes())["verdict"] == "fail"
    assert (out / "it.md").read_text().startswith("# Findings: made-up")


@pytest.mark.browser
@pytest.mark.skipif(chromium.find() is None, reason="Chromium is not installed (apt-get install chromium)")
def test_the_page_fits_its_window(tmp_path: Path) -> None:
    for name in ("abandoned", "surge", "two_turn_ahead_fail"):
        case(tmp_path / "cases", name, check("freed", Verdict.PASS, FREED, "S2", found="a long sentence " * 30))
    write_findings(gathered(tmp_path / "cases"), tmp_path)
    binary = chromium.find()
    assert binary is not None
    with chromium.Browser(binary) as browser:
        for width in (1280, 900, 390):
            assert_fits(browser, tmp_path / "index.html", width, dark=width == 900, charts=3)
        assert browser.problems == []

"""JUnit XML: any server can read it, and it is green exactly where the exit code is 0."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree as ET

import pytest

from harness.conformance.junit import junit
from harness.conformance.known import Decision, KnownCase, KnownCases, decided
from harness.conformance.stream import ConformanceRun
from harness.expectations import Kind
from harness.verdicts import Verdict
from tests.conformance.made_up import BACK, GRANT, TOGETHER, breach, result, run, timeline


def decision(made: ConformanceRun, *entries: KnownCase, allow_known: bool = False) -> Decision:
    known = KnownCases(subject="*", versions=["*"], known=list(entries))
    return decided(made, known, allow_known=allow_known, every=(GRANT, BACK, TOGETHER))


def entry(case: str, kind: Kind = Kind.FAILING) -> KnownCase:
    return KnownCase(case=case, kind=kind, reason="it is known", link="https://example.org/1")


def suite(*decisions: Decision) -> ET.Element:
    return ET.fromstring(junit(decisions))[0]


def outcomes(found: ET.Element) -> list[str]:
    return [case[0].tag if len(case) else "" for case in found.iter("testcase")]


def test_a_suite_a_run_and_a_case_a_result() -> None:
    made = run(
        result(GRANT), result(BACK, Verdict.FAIL, found="it went back"), result(TOGETHER, None, found="no leases")
    )
    root = ET.fromstring(junit([decision(made), decision(run(result(GRANT)))]))
    assert root.tag == "testsuites"
    assert [s.get("name") for s in root] == ["NixlConnector (vllm 0.32.0)"] * 2
    found = root[0]
    assert [(c.get("classname"), c.get("name"), c.get("time")) for c in found.iter("testcase")] == [
        ("KVC-LEASE-001", GRANT, "0.250"), ("KVC-LEASE-003", BACK, "0.250"), ("KVC-HB-002", TOGETHER, "0.250"),
    ]  # fmt: skip
    assert outcomes(found) == ["", "failure", "skipped"]
    counts = [found.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["3", "1", "0", "1"]
    assert found.get("timestamp") == "2025-11-30T10:53:20"


def test_properties_say_what_was_tested() -> None:
    found = suite(decision(run(result(GRANT))))
    told = {p.get("name"): p.get("value") for p in found.iter("property")}
    assert told["version.vllm"] == "0.32.0"
    assert told["capabilities"] == "leases two-turn"
    assert told["not exercised"] == "two-turn"
    assert told["seed"] == "2"


def test_a_failure_holds_what_was_found_and_the_end_of_its_history() -> None:
    failed = result(BACK, Verdict.FAIL, found="it went back", breaches=[breach()], timeline=timeline(500))
    failure = suite(decision(run(failed))).find("testcase/failure")
    assert failure is not None
    assert failure.get("message") == "it went back"
    text = failure.text or ""
    assert "breach of L2" in text
    assert "again: pdproof conform" in text
    assert "(440 earlier lines" in text
    assert "r499" in text
    assert "r439" not in text
    assert text.count("heartbeat") == 60


@pytest.mark.parametrize(
    ("verdict", "entries", "allow", "tag", "words"),
    [
        (Verdict.FAIL, [entry(GRANT)], False, "failure", "known: it is known (https://example.org/1)"),
        (Verdict.FAIL, [entry(GRANT)], True, "skipped", "known: it is known"),
        (Verdict.FAIL, [entry(GRANT, Kind.FLAKY)], False, "skipped", "flaky: it is known"),
        (Verdict.PASS, [entry(GRANT)], True, "failure", "remove the expectation"),
        (Verdict.INCONCLUSIVE, [], False, "error", "inconclusive: "),
        (Verdict.ERROR, [entry(GRANT, Kind.FLAKY)], False, "error", "what was to be seen"),
    ],
)
def test_how_each_standing_is_told(
    verdict: Verdict, entries: list[KnownCase], allow: bool, tag: str, words: str
) -> None:
    found = suite(decision(run(result(GRANT, verdict), result(BACK)), *entries, allow_known=allow))
    outcome = next(found.iter("testcase"))[0]
    assert outcome.tag == tag
    assert words in (outcome.get("message") or "")


def test_it_is_green_exactly_where_the_exit_code_is_0() -> None:
    kinds = [[], [entry(GRANT)], [entry(GRANT, Kind.FLAKY)], [entry("KVC-LEASE-003.renamed")]]
    cases_of = [[GRANT, BACK], [GRANT, BACK, TOGETHER]]
    seen = set()
    for verdict, other, entries, complete, allow, cases in itertools.product(
        (*Verdict, None), (Verdict.PASS, None), kinds, (True, False), (True, False), cases_of
    ):  # fmt: skip
        made = run(result(GRANT, verdict), result(BACK, other), complete=complete, cases=cases)
        came = decision(made, *entries, allow_known=allow)
        green = not {"failure", "error"} & set(outcomes(suite(came)))
        assert green is (came.exit == 0), (verdict, other, entries, complete, allow, cases)
        seen.add(came.exit)
    assert not [o for o in outcomes(suite(decision(run()))) if o == ""]
    assert seen == {0, 1, 2, 3, 70}


def test_what_xml_cannot_hold_is_spelt_out() -> None:
    odd = result(GRANT, Verdict.FAIL, found="a <b> & \x00\x1b[31m \ud800 \ufffe ]]> \U0001f600", title="t\x08")
    text = junit([decision(run(odd, subject="x\x07<y>"))])
    failure = ET.fromstring(text.encode()).find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.get("message") == "a <b> & \\u0000\\u001b[31m \\ud800 \\ufffe ]]> \U0001f600"
    assert ET.fromstring(text.encode())[0].get("name") == "x\\u0007<y> (vllm 0.32.0)"

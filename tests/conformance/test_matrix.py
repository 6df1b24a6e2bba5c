"""Rules by subjects: what a cell says, where its evidence is, and how the command ends."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from harness.cli import pdproof
from harness.conformance.known import Decision, KnownCase, KnownCases, decided
from harness.conformance.stream import ConformanceRun
from harness.expectations import Kind
from harness.rules import catalogue
from harness.verdicts import Verdict
from reports.conformance.markdown import markdown
from reports.conformance.model import Matrix, State, merged
from reports.conformance.page import LINES_MAX, timeline, write_matrix
from reports.conformance.words import MARKS, READING
from tests.conformance.made_up import BACK, GRANT, TOGETHER, breach, result, run, written
from tests.conformance.made_up import timeline as entries
from tests.reports import chromium

OTHER = "KVC-LEASE-001.other"
EVERY = (GRANT, OTHER, BACK, TOGETHER, "KVC-REL-001.read")
EVIL = "<script>alert(1)</script> & \"quoted\" 'too' | `tick`"


def decision(made: ConformanceRun, *known: KnownCase, allow_known: bool = False) -> Decision:
    expectations = KnownCases(subject="*", versions=["*"], known=list(known)) if known else None
    return decided(made, expectations, allow_known=allow_known, every=EVERY)


def entry(case: str, kind: Kind = Kind.FAILING, link: str = "https://example.org/1") -> KnownCase:
    return KnownCase(case=case, kind=kind, reason="it is known", link=link)


def matrix(*decisions: Decision) -> Matrix:
    return merged(decisions, EVERY)


def cell(made: ConformanceRun, *known: KnownCase) -> State:
    return matrix(decision(made, *known)).families[0].rows[0].cells[0].state


class Page(HTMLParser):
    """The ids of a page, its links, and what it would run or fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Iterable[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [str(given["id"])] if "id" in given else []
        self.links += [str(given["href"])] if tag == "a" else []
        self.fetched += [str(v) for k, v in given.items() if k in ("src", "srcset", "data") or k.startswith("on")]


def page(tmp_path: Path, *decisions: Decision) -> str:
    write_matrix(matrix(*decisions), tmp_path / "m.html")
    return (tmp_path / "m.html").read_text()


@pytest.mark.parametrize(
    ("made", "known", "state"),
    [
        (run(result(GRANT)), [], State.PASS),
        (run(result(GRANT, Verdict.FAIL)), [], State.FAIL),
        (run(result(GRANT, Verdict.FAIL)), [entry(GRANT)], State.KNOWN),
        (run(result(GRANT)), [entry(GRANT)], State.STALE),
        (run(result(GRANT, Verdict.FAIL)), [entry(GRANT, Kind.FLAKY)], State.FLAKY),
        (run(result(GRANT, Verdict.INCONCLUSIVE)), [], State.INCONCLUSIVE),
        (run(result(GRANT, Verdict.ERROR)), [entry(GRANT, Kind.FLAKY)], State.ERROR),
        (run(result(GRANT, None)), [], State.NOT_APPLICABLE),
        (run(cases=[GRANT]), [], State.NOT_RUN),
        # Several cases of one rule.
        (run(result(GRANT), result(OTHER, Verdict.FAIL)), [], State.FAIL),
        (run(result(GRANT, Verdict.FAIL), result(OTHER, Verdict.FAIL)), [entry(OTHER)], State.FAIL),
        (run(result(GRANT, Verdict.INCONCLUSIVE), result(OTHER, Verdict.FAIL)), [entry(OTHER)], State.KNOWN),
        (run(result(GRANT), result(OTHER, Verdict.INCONCLUSIVE)), [], State.INCONCLUSIVE),
        (run(result(GRANT), cases=[GRANT, OTHER]), [], State.NOT_RUN),
        (run(result(GRANT), result(OTHER, None)), [], State.PASS),
    ],
)  # fmt: skip
def test_what_a_cell_says(made: ConformanceRun, known: list[KnownCase], state: State) -> None:
    assert cell(made, *known) is state


def test_rules_stand_in_the_catalogues_order_by_family_and_a_rule_nobody_ran_is_not_run() -> None:
    one = decision(run(result(TOGETHER), result(BACK), result("KVC-NEW-001.x"), result("X1.y")))
    other = decision(run(result(GRANT), subject="other"))
    made = matrix(one, other)
    shown = {f.title: [row.rule_id for row in f.rows] for f in made.families}
    assert shown == {
        "Leases": ["KVC-LEASE-001", "KVC-LEASE-003"], "Heartbeats": ["KVC-HB-002"], "NEW": ["KVC-NEW-001"],
        "Other rules": ["X1"],
    }  # fmt: skip
    states = [[c.state for c in row.cells] for row in made.families[0].rows]
    assert states == [[State.NOT_RUN, State.PASS], [State.PASS, State.NOT_RUN]]
    assert made.families[0].rows[0].text.startswith("a prefill that finishes")


def test_runs_of_the_same_subject_and_versions_are_counted_through() -> None:
    same = decision(run(result(GRANT)))
    newer = decision(run(result(GRANT), versions={"vllm": "0.33.0"}))
    twins = decision(run(result(GRANT, twin="early"), twins=True))
    assert [(c.name, c.versions) for c in matrix(same, newer, same, twins).columns] == [
        ("NixlConnector #1", "vllm 0.32.0"), ("NixlConnector", "vllm 0.33.0"), ("NixlConnector #2", "vllm 0.32.0"),
        ("NixlConnector, twins", "vllm 0.32.0"),
    ]  # fmt: skip


def test_every_rule_of_the_catalogue_is_in_the_matrix_or_has_a_reason_why_not() -> None:
    made = matrix(decision(run(result(GRANT))))
    why = {rule.rule_id: rule.why for _, rules in made.uncovered for rule in rules}
    assert {*why, "KVC-LEASE-001"} == {rule.id for rule in catalogue()}
    assert all(why.values())
    assert why["KVC-REL-001"] == "it has cases, and none of them is in these results"
    assert why["KVC-LEASE-004"] == "no in-process case speaks of it yet"
    assert "real servers" in why["KVC-LEASE-011"]
    assert "control plane" in why["KVC-IDEM-001"]
    assert "its tests hold it" in why["KVC-MEM-001"]
    assert why["KVC-SHDW-006"].startswith("not built")
    assert (made.covered, made.rules) == (1, len(catalogue()))


def test_every_state_has_a_mark_and_an_explanation() -> None:
    assert set(MARKS) == set(READING) == set(State)


def test_each_cell_leads_to_its_evidence(tmp_path: Path) -> None:
    failed = result(BACK, Verdict.FAIL, found="it went back", breaches=[breach()], note="odd")
    text = page(
        tmp_path, decision(run(result(GRANT), failed, cases=[GRANT, BACK, TOGETHER]), entry(BACK)),
        decision(run(result(GRANT, None, found="no leases"), subject="other")),
    )  # fmt: skip
    found = Page(text)
    inner = [link[1:] for link in found.links if link.startswith("#")]
    assert {"e0-KVC-LEASE-001", "e0-KVC-LEASE-003", "e0-KVC-HB-002", "e1-KVC-LEASE-001"} <= set(inner)
    assert set(inner) <= set(found.ids)
    assert len(found.ids) == len(set(found.ids))
    for words in (
        "it went back", "p.1 gave r1 up", "never loses its lease", "heartbeat: r2", "no leases",
        f"--case {BACK} --seed 2", "It was to run, and there is no result", "Known: it is known",
    ):  # fmt: skip
        assert words in text, words
    assert found.links.count("https://example.org/1") == 1


def test_the_page_needs_nothing_and_runs_nothing(tmp_path: Path) -> None:
    made = run(
        result(GRANT, Verdict.FAIL, found=EVIL, title=EVIL, note=EVIL, timeline=entries(2)), subject=EVIL,
        versions={EVIL: EVIL}, capabilities=[EVIL], machine={EVIL: EVIL}, command=[EVIL], configuration={EVIL: EVIL},
    )  # fmt: skip
    text = page(tmp_path, decision(made, KnownCase(case="*", reason=EVIL, link="javascript:alert(1)")))
    found = Page(text)
    assert "script" not in found.tags
    assert found.fetched == []
    assert not [link for link in found.links if not link.startswith("#")]
    assert "<script" not in text
    assert not re.search(r"(?:src|href)=\"https?://", text)


def test_the_head_says_the_verdict_of_each_subject(tmp_path: Path) -> None:
    well, ill = decision(run(result(GRANT))), decision(run(result(GRANT, Verdict.FAIL), subject="other"))
    one = page(tmp_path, well)
    assert "<title>Conformant: NixlConnector</title>" in one
    assert '<h1 class="verdict pass" id="verdict">Conformant</h1>' in one
    assert "of 1 case, 1 passed and 0 failed." in one
    both = page(tmp_path, well, ill)
    assert "<title>Conformance: NixlConnector, other</title>" in both
    assert both.index("Not conformant</span>") > both.index("Conformant</span>")
    assert "1 failure (there are no expectations for this version): KVC-LEASE-001.grant." in both


def test_claims_that_no_case_exercised_are_named(tmp_path: Path) -> None:
    made = decision(run(result(GRANT), result(BACK, None, needs=["two-turn"]), capabilities=["leases", "two-turn"]))
    assert "No case exercised: two-turn." in page(tmp_path, made)
    assert "Exercised: leases (1 case)." in page(tmp_path, made)
    assert "- NixlConnector: two-turn" in markdown(matrix(made))


def test_a_run_of_nothing_can_be_shown(tmp_path: Path) -> None:
    nothing = decision(run())
    assert "Inconclusive" in page(tmp_path, nothing)
    assert "No case was run." in page(tmp_path, nothing)
    assert markdown(matrix(nothing)).startswith("# Conformance")


@pytest.mark.parametrize(
    ("count", "at", "first", "last"),
    [(10, None, 0, 9), (LINES_MAX, None, 0, LINES_MAX - 1), (1_000, None, 600, 999), (1_000, 500, 300, 699),
     (1_000, 5, 0, 399), (1_000, 990, 600, 999)],
)  # fmt: skip
def test_of_a_long_timeline_the_part_around_the_first_breach_is_shown(
    count: int, at: int | None, first: int, last: int
) -> None:
    breaches = [] if at is None else [breach(at * 50_000_000), breach(count * 50_000_000)]
    text, heading = timeline(result(GRANT, timeline=entries(count), breaches=breaches), LINES_MAX)
    lines = text.splitlines()
    assert [re.findall(r"r\d+", line) for line in (lines[0], lines[-1])] == [[f"r{first}"], [f"r{last}"]]
    assert ("the rest is in the results" in heading) is (count > LINES_MAX)


def test_the_document_shows_the_same() -> None:
    made = run(result(GRANT), result(OTHER, Verdict.FAIL, found="a <wrong>\nanswer | one"), result(BACK, Verdict.FAIL))
    text = markdown(matrix(decision(made, entry(BACK)), decision(run(result(GRANT), subject="other"))))
    lines = text.splitlines()
    assert "| rule | NixlConnector | other |" in lines
    row = next(line for line in lines if line.startswith("| KVC-LEASE-001"))
    assert row.endswith("| × fail (1 of 2 cases) | ✓ pass |")
    assert (
        "**Not conformant**: NixlConnector (vllm 0.32.0): of 3 cases, 1 passed and 2 failed (1 of them known)." in lines
    )
    assert "a &lt;wrong> answer \\| one. Again: `pdproof conform" in text
    assert "Known: it is known (https://example.org/1)" in text
    assert all(line.count("|") - line.count("\\|") == 4 for line in lines if line.startswith("|"))


# The command.


def invoke(*args: object) -> tuple[int, str]:
    ran = CliRunner().invoke(pdproof, ["matrix", *map(str, args)], standalone_mode=False)
    if ran.exception is not None:
        return int(getattr(ran.exception, "exit_code", -1)), str(ran.exception)
    return int(ran.return_value), ran.output


@pytest.fixture
def passed(tmp_path: Path) -> Path:
    return written(tmp_path / "passed.jsonl", run(result(GRANT), subject="made-up"))


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    made = run(result(GRANT), result(BACK, Verdict.FAIL), subject="made-up", versions={"it": "2"})
    return written(tmp_path / "failed.jsonl", made)


def test_the_command_writes_page_document_and_junit(passed: Path, failed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "m.html"
    code, said = invoke(
        passed, failed, "--out", out, "--markdown", tmp_path / "m.md", "--junit", tmp_path / "m.xml"
    )  # fmt: skip
    assert code == 1
    assert "made-up (it 2): not conformant" in said
    assert out.read_text().startswith("<!doctype html>")
    assert (tmp_path / "m.md").read_text().startswith("# Conformance: made-up, made-up\n")
    assert len(ET.fromstring((tmp_path / "m.xml").read_bytes())) == 2
    assert invoke(passed, "--out", out)[0] == 0


def test_expectations_can_be_given(passed: Path, failed: Path, tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    known.write_text(f'subject = "made-up"\nversions = ["2"]\n[[known]]\ncase = "{BACK}"\nreason = "it is"\n')
    out = tmp_path / "m.html"
    assert invoke(failed, "--out", out, "--known", known)[0] == 1
    assert invoke(failed, "--out", out, "--known", known, "--allow-known")[0] == 0
    assert invoke(failed, "--out", out, "--allow-known")[0] == 1
    code, said = invoke(passed, "--out", out, "--known", known)
    assert (code, "no result is" in said) == (78, True)
    known.write_text(f'subject = "made-up"\nversions = ["2"]\n[[known]]\ncase = "{GRANT}"\nreason = "it was"\n')
    assert invoke(failed, "--out", out, "--known", known)[0] == 3
    known.write_text("subject = 1")
    assert invoke(failed, "--out", out, "--known", known)[0] == 78


def test_a_run_that_was_cut_short_is_shown_and_is_not_conformant(tmp_path: Path) -> None:
    path = written(tmp_path / "cut.jsonl", run(result(GRANT), complete=False))
    code, said = invoke(path, "--out", tmp_path / "m.html")
    assert (code, "no footer" in said) == (2, True)
    assert "Inconclusive" in (tmp_path / "m.html").read_text()
    assert invoke(written(tmp_path / "none.jsonl", run()), "--out", tmp_path / "m.html")[0] == 2


def test_results_that_cannot_be_read_are_65_and_nothing_is_written(passed: Path, tmp_path: Path) -> None:
    passed.write_bytes(passed.read_bytes()[:-5])
    out = tmp_path / "m.html"
    code, said = invoke(passed, "--out", out)
    assert (code, "cut off in the middle" in said, out.exists()) == (65, True, False)
    assert invoke(tmp_path / "nowhere", "--out", out)[0] == 65
    assert invoke(tmp_path, "--out", out)[0] == 65


def test_wrong_usage_is_64(passed: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.html"
    assert invoke("--out", out)[0] == 64
    assert invoke(passed)[0] == 64
    assert invoke(passed, "--out", out, "--nonsense")[0] == 64
    code, said = invoke(passed, passed, "--out", out)
    assert (code, "given twice" in said) == (64, True)
    assert not out.exists()


def test_a_mistake_of_ours_is_70(passed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reports.commands.matrix.merged", lambda _: 1 / 0)
    code, said = invoke(passed, "--out", tmp_path / "m.html")
    assert (code, "ZeroDivisionError" in said) == (70, True)


def test_the_shell_sees_the_same(passed: Path, tmp_path: Path) -> None:
    def ran(*args: object) -> tuple[int, str]:
        command = [str(Path(sys.executable).with_name("pdproof")), "matrix", *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stderr

    assert ran(passed, "--out", tmp_path / "m.html")[0] == 0
    assert ran("--help")[0] == 0
    assert ran("--nonsense")[0] == 64
    code, said = ran(tmp_path / "nowhere", "--out", tmp_path / "m.html")
    assert (code, said.count("\n")) == (65, 1)


@pytest.mark.browser
@pytest.mark.skipif(chromium.find() is None, reason="Chromium is not installed (apt-get install chromium)")
def test_the_page_fits_its_window_and_a_cell_opens_its_evidence(tmp_path: Path) -> None:
    found = "a long sentence " * 30 + "x" * 300
    made = [
        decision(run(result(GRANT, found=found, timeline=entries(500)), result(BACK, Verdict.FAIL, found=found,
                                                                            breaches=[breach()]), subject=subject))
        for subject in ("reference", "ANameThatIsQuiteLongForAConnectorOfSomebodyElse")
    ]  # fmt: skip
    page(tmp_path, *made)
    binary = chromium.find()
    assert binary is not None
    with chromium.Browser(binary) as browser:
        for width, dark in ((1280, False), (700, True), (390, False)):
            browser.show(tmp_path / "m.html", width, dark=dark)
            wide = browser.value("[document.documentElement.scrollWidth, innerWidth]")
            assert wide == [width, width]
        opened = "document.querySelector('#e1-KVC-LEASE-001').parentElement.open"
        assert browser.value(opened) is False
        browser.value("document.querySelector('a[href=\"#e1-KVC-LEASE-001\"]').click()")
        assert browser.value(f"new Promise(r => setTimeout(() => r({opened}), 300))") is True
        assert browser.problems == []

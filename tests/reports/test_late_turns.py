"""Turns that came too late: one row a case, from its run folder, also where there is little or nothing to tell."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cases import clocks
from harness.cases.judging import judge
from harness.cases.metrics import EXPIRED, LATE
from harness.cases.observations import Came
from harness.cases.steps import Call, Look
from harness.verdicts import Verdict
from reports.findings.late_turns import NOT_RUN, LateTurn, LateTurnRow
from reports.findings.markdown import markdown
from reports.findings.model import Findings, gather
from reports.findings.page import findings_view, write_findings
from reports.findings.words import ASKED, late_turn_case, late_turn_cells
from tests.harness.case_histories import CaseHistory, at
from tests.harness.test_cases_faults import two_turn
from tests.reports import chromium
from tests.reports.fits import assert_fits

NAMES = [case.name for case in clocks.CASES]
FAIL, RECOMPUTE = "two_turn_ahead_fail", "two_turn_behind_recompute"
HUNG = 90.0
KEPT = 0.0297
HINDERED = "late-1: the prefill gave no hand-off"


def goes_no_further(h: CaseHistory) -> None:
    """The turn never comes to the decode side."""
    h.drop(lambda s: isinstance(s, Call) and (s.label, s.leg) == ("late-2", "decode"))


def refused(h: CaseHistory) -> None:
    """The prefill side declines the turn, and answers with an error."""
    goes_no_further(h)
    h.fails("late-2", "prefill")


def hangs(h: CaseHistory) -> None:
    """The prefill side declines the turn, and waits for it for ever, with blocks in its hands."""
    refused(h)
    h.change_calls("late-2", outcome="unknown", status=0, error="no end within 90 s", end_ns=at(21.5 + HUNG))
    h.change_looks("end", "p0", usage=KEPT)
    for second, share in ((3, 0.5), (22, 2 * KEPT), (40, KEPT)):  # the first is of the turn that came in time
        h.sampled("p0", second, share)


def hindered(h: CaseHistory) -> None:
    h.hindered = HINDERED


def untouched(_: object) -> None:
    """A history, or a folder, that is left as it is."""


def write(folder: Path, name: str, mutate: Callable[[CaseHistory], None] = untouched) -> Path:
    h = two_turn(name)
    mutate(h)
    run = h.write(folder / name)
    run.write_verdicts(judge(run))
    return run.path


def rows(folder: Path, reference: Path | None = None) -> dict[str, LateTurnRow]:
    return {row.case: row for row in gather(folder, reference=reference).late_turns}


def row(folder: Path, name: str = FAIL) -> LateTurn:
    return rows(folder)[name].system


def test_a_turn_that_is_computed_anew_is_the_right_answer_and_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path, FAIL)
    found = rows(tmp_path)[FAIL]
    assert (found.policy, found.skew_s, found.reference) == ("fail", 5_000.0, None)
    turn = found.system
    assert (turn.verdict, turn.came, turn.status) == (Verdict.PASS, Came.RIGHT, 200)
    assert turn.seconds == pytest.approx(0.6)  # both legs
    assert (turn.usage_before, turn.usage_most, turn.usage_end) == (0.0, 0.0, 0.0)
    assert (turn.declined, turn.late, turn.reads) == (1.0, 0.0, 0.0)


def test_a_turn_that_is_refused_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, FAIL, refused)
    turn = row(tmp_path)
    assert (turn.verdict, turn.came, turn.status) == (Verdict.FAIL, Came.ERROR, 500)
    assert late_turn_cells(turn)[0] == ("an error", "HTTP 500 after 100 ms")


def test_a_turn_that_hangs_is_no_answer_and_its_blocks_are_counted_from_when_it_came(tmp_path: Path) -> None:
    write(tmp_path, RECOMPUTE, hangs)
    found = rows(tmp_path)[RECOMPUTE]
    assert (found.policy, found.skew_s) == ("recompute", -5_000.0)
    assert late_turn_case(found) == "D's clock 5,000 s behind, policy recompute"
    client, blocks, counts = late_turn_cells(found.system)
    assert client == ("no answer", "no status after 90.0 s")
    assert blocks == ("2.97% in the end", "0.00% before, 5.94% at most")
    assert counts == ("1 declined", "0 late reads, 0 reads")


def test_a_wrong_answer_is_one_whatever_its_status(tmp_path: Path) -> None:
    write(tmp_path, FAIL, lambda h: h.answers_wrongly("late-2"))
    turn = row(tmp_path)
    assert (turn.verdict, turn.came, turn.status) == (Verdict.FAIL, Came.WRONG, 200)


def test_a_prefill_that_hands_nothing_over_leaves_the_client_without_an_answer(tmp_path: Path) -> None:
    write(tmp_path, FAIL, goes_no_further)
    turn = row(tmp_path)
    assert (turn.verdict, turn.came) == (Verdict.FAIL, Came.NONE)


def test_counters_that_a_server_lacks_are_not_nought(tmp_path: Path) -> None:
    def uncounted(h: CaseHistory) -> None:
        h.drop_metric(EXPIRED)
        h.drop_metric(LATE[0])

    write(tmp_path, FAIL, uncounted)
    _, _, counts = late_turn_cells(row(tmp_path))
    assert counts == ("no count of turns declined", "no count of late reads, 0 reads")


def test_late_reads_are_the_holders_count(tmp_path: Path) -> None:
    write(tmp_path, FAIL, lambda h: h.change_looks("after-late", "d0", **{LATE[0]: 1.0}))
    assert "1 late read," in late_turn_cells(row(tmp_path))[2][1]


def test_cases_that_were_not_run_have_a_row_that_says_so(tmp_path: Path) -> None:
    write(tmp_path / "ours", FAIL)
    write(tmp_path / "theirs", RECOMPUTE)
    found = rows(tmp_path / "ours", tmp_path / "theirs")
    assert list(found) == NAMES
    assert {name for name, r in found.items() if r.system.why == NOT_RUN} == {*NAMES} - {FAIL}
    assert late_turn_case(found[RECOMPUTE]) == "D's clock 5,000 s behind, policy recompute"
    assert late_turn_cells(found[RECOMPUTE].system) == [("not run", ""), ("–", ""), ("–", "")]
    theirs = found[RECOMPUTE].reference
    assert theirs is not None
    assert theirs.verdict is Verdict.PASS


def cut(path: Path) -> None:
    events = path / "events.jsonl"
    events.write_bytes(b"\n".join(events.read_bytes().splitlines()[:-1]) + b"\n")


def without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def unsent(h: CaseHistory) -> None:
    h.drop(lambda s: isinstance(s, Call) and s.label == "late-2")


def unseen(h: CaseHistory) -> None:
    h.drop(lambda s: isinstance(s, Look) and s.name == "before-late")


BLIND: dict[str, tuple[Callable[[CaseHistory], None], Callable[[Path], None], str]] = {
    "hindered": (hindered, untouched, HINDERED), "cut short": (untouched, cut, "no footer"),
    "not judged": (untouched, without("verdicts.json"), "'recomputed' was not made"),
    "without steps": (untouched, without("steps.jsonl"), "steps.jsonl"),
    "never sent": (unsent, untouched, "was never sent"), "not looked at": (unseen, untouched, "no look 'before-late'"),
}  # fmt: skip


@pytest.mark.parametrize("how", BLIND)
def test_a_case_that_shows_nothing_has_no_verdict_and_says_why(how: str, tmp_path: Path) -> None:
    mutate, spoil, why = BLIND[how]
    spoil(write(tmp_path, FAIL, mutate))
    turn = row(tmp_path)
    assert turn.verdict is None
    assert why in turn.why
    assert late_turn_cells(turn)[0] == ("could not be judged", turn.why)


def test_cases_of_any_name_are_told_by_their_check(tmp_path: Path) -> None:
    manifest = write(tmp_path, FAIL) / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"name":"{FAIL}"', '"name":"elsewhere"').replace(
        f'"name": "{FAIL}"', '"name": "elsewhere"'))  # fmt: skip
    found = rows(tmp_path)
    assert found["elsewhere"].system.verdict is Verdict.PASS
    assert found[FAIL].system.why == NOT_RUN


def test_findings_without_such_cases_say_nothing_of_late_turns(tmp_path: Path) -> None:
    h = CaseHistory("surge")
    h.finale(3)
    h.write(tmp_path / "surge").write_verdicts([])
    found = gather(tmp_path)
    assert found.late_turns == []
    assert "too late" not in markdown(found)
    write_findings(found, tmp_path)
    assert 'id="late-turns"' not in (tmp_path / "index.html").read_text()


@pytest.fixture
def findings(tmp_path: Path) -> Findings:
    write(tmp_path / "cases", FAIL, refused)
    write(tmp_path / "cases", RECOMPUTE, hangs)
    write(tmp_path / "cases", "two_turn_ahead_recompute", hindered)
    for name in NAMES:
        write(tmp_path / "reference", name)
    return gather(tmp_path / "cases", reference=tmp_path / "reference")


def test_the_document_sets_both_systems_beside_what_was_asked_for(findings: Findings) -> None:
    lines = markdown(findings).split("## Turns that came too late")[1].split("##")[0].splitlines()
    table = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in lines if line.startswith("|")]
    assert {len(cells) for cells in (table[0], *table[2:])} == {8}
    assert len(table) == 2 + len(NAMES)
    by_case = {cells[0].split("**")[1]: cells[1:] for cells in table[2:]}
    assert {cells[0] for cells in by_case.values()} == {ASKED}
    assert by_case[FAIL][1] == "an error (HTTP 500 after 100 ms)"
    assert by_case[FAIL][4] == "the right answer (HTTP 200 after 600 ms)"
    assert by_case["two_turn_behind_fail"][1] == "not run"
    assert by_case["two_turn_ahead_recompute"][1] == f"could not be judged ({HINDERED})"


def test_the_page_marks_what_each_client_got(findings: Findings) -> None:
    table = findings_view(findings).late_turns
    assert table is not None
    assert table.systems == ["made-up", "reference implementation"]
    kinds = {r.case: [cell.kind for cell in r.cells if cell.kind] for r in table.rows}
    assert kinds[FAIL] == ["word fail", "word pass"]
    assert kinds["two_turn_ahead_recompute"] == ["word inconclusive", "word pass"]
    assert {r.case for r in table.rows if not r.ran} == {"two_turn_behind_fail"}


@pytest.mark.browser
@pytest.mark.skipif(chromium.find() is None, reason="Chromium is not installed (apt-get install chromium)")
def test_the_table_fits_its_window(tmp_path: Path) -> None:
    for name in NAMES:
        write(tmp_path / "cases", name)
    write_findings(gather(tmp_path / "cases", reference=tmp_path / "cases"), tmp_path)
    binary = chromium.find()
    assert binary is not None
    with chromium.Browser(binary) as browser:
        for width in (1280, 900, 700, 390):
            assert_fits(browser, tmp_path / "index.html", width, dark=width == 900, charts=0)
        assert browser.problems == []

"""The pages, read as a browser reads them: what stands where, and that nothing reaches outside."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import click.testing
import pytest

from harness.errors import BadInput
from harness.run_folder import RunFolder
from harness.verdicts import Verdict
from reports import words
from reports.commands.report import command
from reports.comparison import write_comparison
from reports.page import breakable, coded, run_page
from tests.reports.runs import comparison, cut_short, edit_events, pair
from tests.reports.sample_runs import sample, write

SECTIONS = ["recovery", "ttft", "decode", "limits", "memory", "tables", "checks", "faults", "reading", "about"]
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Gathers what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = ""
        self.ids: list[str] = []
        self.classes: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.figures: list[tuple[str, Any, str]] = []
        self.open: list[str] = []
        self.first_words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append((tag, values))
        self.ids += [values["id"]] if "id" in values else []
        self.classes += values.get("class", "").split()
        if "data-key" in values:
            self.figures.append((values["data-key"], json.loads(values["data-value"]), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self.open or "title" in self.open:
            return
        self.text += data
        if data.strip() and not self.first_words:
            self.first_words = data.strip()
        if self.figures and self.figures[-1][2] == "" and self.open[-1:] == ["span"]:
            key, value, _ = self.figures[-1]
            self.figures[-1] = (key, value, data)


def compared(profile: str = "default") -> tuple[Page, str, dict[str, Any]]:
    out = comparison(profile)
    text = (out / "index.html").read_text()
    return Page(text), text, json.loads((out / "summary.json").read_bytes())


def at(summary: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        summary = summary[name]
    return summary


@pytest.mark.parametrize("profile", ["default", "glm-5.2-b200"])
def test_the_comparison_is_one_sound_file_that_says_what_its_summary_says(profile: str) -> None:
    page, text, summary = compared(profile)
    assert page.open == []
    assert page.first_words == "Pass"  # the verdict comes first
    assert [i for i in page.ids if i in ["published", *SECTIONS]] == ["published", *SECTIONS]
    assert len(page.figures) > 60
    for key, value, _ in page.figures:
        assert value == at(summary, key), key
    shown = {key: said for key, _, said in page.figures}
    assert shown["ratio_recovery"] == words.ratio(summary["ratio_recovery"])
    assert shown["cold.recovery_s.median"] == words.duration(summary["cold"]["recovery_s"]["median"])
    assert shown["shadow.requests_failed"] == f"{summary['shadow']['requests_failed']:,}"
    assert shown["shadow.ttft_over_limit.over"].startswith(f"{summary['shadow']['ttft_over_limit']['over']:,} of ")
    assert len(text) < 3_000_000
    nothing_reaches_outside(page, text)


def nothing_reaches_outside(page: Page, text: str) -> None:
    assert not [tag for tag, _ in page.tags if tag in ("script", "iframe", "object", "embed", "img", "base")]
    for tag, values in page.tags:
        for name in ("href", "src", "xlink:href", "action", "srcset"):
            assert values.get(name, "#").startswith(("#", "data:")), f"<{tag} {name}={values[name]}>"
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text


def test_ids_are_unique_though_many_drawings_share_the_page() -> None:
    page, text, _ = compared()
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)


def test_charts_are_there_in_both_widths_with_a_mark_for_each_request() -> None:
    page, _, _ = compared()
    run = RunFolder(comparison().parent / "cold")
    labels = [values["aria-label"] for tag, values in page.tags if tag == "svg"]
    assert len(labels) == 2 * 4 * 2  # two widths, four charts, two arms
    answered = int((run.requests.ttft_ms.notna() & (run.requests.spoilt == "")).sum())
    assert any(label.startswith(f"TTFT over time, Cold start: {answered} requests answered") for label in labels)


def test_what_is_emulated_stands_near_the_top_and_marks_its_figures() -> None:
    page, text, summary = compared("glm-5.2-b200")
    for line in summary["emulated"]:
        assert line in page.text
    assert text.index('id="emulated"') < text.index("<main>")
    assert "hatch" in page.classes
    assert "full scale" in page.text


def test_real_runs_say_that_nothing_is_emulated(tmp_path: Path) -> None:
    plan = sample("shadow")
    plan.emulated.clear()
    text = run_page(write(tmp_path / "run", plan))
    assert "Nothing is emulated." in text
    assert 'class="emu"' not in text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script><img src=http://evil.example/>\" onload=\"x"
    run = write(tmp_path / "run", sample("shadow"), error=hostile)
    page = Page(text := run_page(run))
    assert page.open == []
    assert hostile in page.text
    assert "<script" not in text
    assert not [v for _, v in page.tags if "onload" in v]


def test_an_incomplete_run_says_so_and_never_passes(tmp_path: Path) -> None:
    _, shadow = pair(tmp_path)
    page = Page(run_page(cut_short(shadow)))
    assert page.first_words == "Inconclusive"
    assert "incomplete: events.jsonl has no footer" in page.text


def test_a_run_that_was_broken_off_still_has_a_page(tmp_path: Path) -> None:
    _, shadow = pair(tmp_path)
    for name in ("events.jsonl", "requests.parquet", "chunks.parquet", "metrics.parquet", "verdicts.json"):
        (shadow.path / name).unlink()
    (shadow.path / "parts").mkdir()
    line = '{"t_ns":1,"wall_ns":1,"actor":"harness","kind":"phase.started","subject":"r","detail":{}}\n'
    (shadow.path / "parts/events-harness.jsonl").write_text(line)
    page = Page(run_page(RunFolder(shadow.path)))
    assert page.first_words == "Inconclusive"
    assert "the run was broken off" in page.text
    assert "empty" in page.classes


def test_runs_without_recoveries_compare_as_inconclusive(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    edit_events(shadow, without="fault.proved")
    write_comparison(cold.path, shadow.path, tmp_path / "out")
    page = Page((tmp_path / "out/index.html").read_text())
    assert page.first_words == "Inconclusive"
    assert "no proof was recorded" in page.text
    assert "There is no ratio" in page.text


def test_a_failed_check_stands_at_the_head_with_what_it_found(tmp_path: Path) -> None:
    run = write(tmp_path / "run", sample("shadow"), verdict=Verdict.FAIL)
    text = run_page(run)
    assert Page(text).first_words == "Fail"
    assert "The worker serves again: fail. 3 of 3 kills recovered" in text[: text.index("<main>")]


def test_the_command_writes_beside_the_run_or_where_it_is_told(tmp_path: Path) -> None:
    pair(tmp_path)
    invoke = click.testing.CliRunner().invoke
    one = invoke(command, [str(tmp_path / "cold")])
    assert (one.exit_code, one.output.strip()) == (0, str(tmp_path / "cold/report.html"))
    both = invoke(command, [str(tmp_path / "shadow"), str(tmp_path / "cold"), "--out", str(tmp_path / "out")])
    assert both.output.strip() == str(tmp_path / "out/index.html")
    assert "Beside the published figures" in (tmp_path / "out/index.html").read_text()
    assert (tmp_path / "out/summary.json").is_file()
    assert invoke(command, []).exit_code == 2


def test_two_runs_of_one_name_do_not_share_a_page(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        pair(tmp_path / parent)
    same = [str(tmp_path / parent / "cold") for parent in ("a", "b")]
    done = click.testing.CliRunner().invoke(command, [*same, "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, BadInput)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0, "0 s"), (0.00431, "4.31 ms"), (0.9999, "1.00 s"), (2.0, "2.00 s"), (9.434, "9.43 s"),
     (9.996, "10.0 s"), (99.97, "100 s"), (283.2, "283 s"), (12345.0, "12,345 s"),
     (0.0713, "71.3 ms"), (0.0004, "0.4 ms")],
)  # fmt: skip
def test_durations_have_three_significant_digits(seconds: float | None, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "short"), [("7.30 s", "7.3 s"), ("5.00 s", "5 s"), ("283 s", "283 s"), ("201 of 399", "201 of 399"),
                        ("39.0 ×", "39 ×"), ("20.0 tokens/s", "20 tokens/s"), ("100 s", "100 s"), ("–", "–")],
)  # fmt: skip
def test_given_figures_lose_their_trailing_zeros(text: str, short: str) -> None:
    assert words.given(text) == short


def test_answers_without_a_decode_rate_are_neither_slow_nor_a_stumbling_block(tmp_path: Path) -> None:
    """An answer of one token has no gap, and one that came in a single read has a gap of nothing."""
    cold, shadow = pair(tmp_path)
    for run in (cold, shadow):
        rows = run.requests
        whole = rows.index[(rows.outcome == "ok") & (rows.spoilt == "")]
        rows.loc[whole[:5], "mean_decode_gap_ms"] = 0.0
        rows.loc[whole[5:9], "mean_decode_gap_ms"] = float("nan")
        rows.to_parquet(run.path / "requests.parquet")
    summary = write_comparison(cold.path, shadow.path, tmp_path / "out")
    rates = (summary.cold.decode_rate_tokens_s.baseline, summary.cold.decode_rate_tokens_s.after_fault)
    assert sum(r.n for r in rates) == len(cold.requests) - 9 - summary.cold.spoilt_rows
    assert sum(r.censored for r in rates) == summary.cold.requests_failed + summary.cold.requests_unknown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("of `kv_lease_duration` (30 s)", "of <code>kv_lease_duration</code> (30 s)"),
        ("a `lone backtick", "a `lone backtick"),
        ("`<b>` and <i>", "<code>&lt;b&gt;</code> and &lt;i&gt;"),
    ],
)
def test_what_stands_between_backticks_is_code(text: str, shown: str) -> None:
    assert coded(text) == shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("NixlPushConnector", "Nixl<wbr>Push<wbr>Connector"),
        ("a.b_c", "a.<wbr>b_<wbr>c"),
        ("<x>", "&lt;x&gt;"),
        ("", ""),
    ],
)
def test_names_are_broken_where_they_may_be(name: str, shown: str) -> None:
    assert breakable(name) == shown

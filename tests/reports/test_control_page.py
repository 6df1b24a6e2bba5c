"""The page of a run with a control plane, read as a browser reads it, and in headless Chromium."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import msgspec
import pytest

from harness.errors import BadInput
from reference_impl.rules.events import EventKind
from reports.commands.report import command
from reports.control.gauges import NAMES
from reports.control.page import write_control_page
from reports.control.rpc_lines import FIELDS
from reports.control.setup import has_control
from tests.reports import chromium
from tests.reports.control_runs import ControlRun, broken, idle, reply_loss
from tests.reports.fits import assert_fits
from tests.reports.kv_runs import quiet
from tests.reports.test_page import Page, at, nothing_reaches_outside

SECTIONS = [
    "time", "lost", "latency", "moves", "storm", "questions", "logs", "metrics", "checks", "faults", "reading", "about",
]  # fmt: skip
CHARTS = 2 + 2
"""Two nodes, two storms."""


def drawn(home: Path, run: ControlRun) -> Path:
    """Write a run and its page below `home`; return the page's folder."""
    write_control_page(run.write(home / "run"), home / "out" / "index.html")
    return home / "out"


def read(out: Path) -> tuple[Page, str, dict[str, Any]]:
    text = (out / "index.html").read_text()
    return Page(text), text, json.loads((out / "summary.json").read_bytes())


@functools.cache
def whole_page() -> tuple[Page, str, dict[str, Any]]:
    """The page of a run under all faults, drawn once a session."""
    home = Path(tempfile.mkdtemp(prefix="pdproof-control-page-"))
    try:
        return read(drawn(home, reply_loss()))
    finally:
        shutil.rmtree(home)


def section(text: str, name: str) -> str:
    """Return one section of a page, read."""
    begin = text.index(f'<section id="{name}">')
    return Page(text[begin : text.index("</section>", begin) + len("</section>")]).text


def test_the_page_is_one_sound_file_that_says_what_its_summary_says() -> None:
    page, text, summary = whole_page()
    assert page.open == []
    assert page.first_words == "Pass"
    assert [i for i in page.ids if i in SECTIONS] == SECTIONS
    assert len(page.ids) == len(set(page.ids))
    assert len(page.figures) > 200
    for key, value, _ in page.figures:
        assert value == at(summary, key), key
    shown = {key: said for key, _, said in page.figures}
    assert shown["faults.drop@after_commit_before_reply.struck"] == "4"
    assert shown["methods.all.invocations"] == f"{summary['counts']['invocations']:,}"
    assert shown["outages.applied_s.n"] == "8"
    assert shown["moves.started"] == f"{summary['moves']['started']:,}"
    assert shown["storms.with_budget.outage_amplification"] == "1.15"
    assert shown["metrics.connection_pool_in_use.of.clients"] == "6"
    nothing_reaches_outside(page, text)


def test_each_node_has_a_chart_with_every_fault_that_struck_it() -> None:
    page, text, summary = whole_page()
    charts = [values["aria-label"] for tag, values in page.tags if tag == "svg"]
    assert len(charts) == 2 * 4 + 2 * 2  # nodes in four widths, storms in two
    assert charts[0].startswith("Operations a second at p0 over time: ")
    wide = re.findall(r'<div class="sized xl">(.*?)</svg>', text, re.S)
    for number, node in enumerate(("p0", "d0")):
        titles = re.findall(r"<title>([^<]*)</title>", wide[number])
        assert len(titles) == int(re.findall(r"(\d+) moments of faults", charts[4 * number])[0])
        assert all("not proved" not in title for title in titles)
        assert any("Block service killed, at " in title for title in titles), node
    assert sum(int(re.findall(r"(\d+) moments", charts[n])[0]) for n in (0, 4)) == sum(
        fate["struck"] for fate in summary["faults"].values()
    )


def test_the_chart_counts_what_the_services_said() -> None:
    page, _, summary = whole_page()
    said = [re.findall(r"([\d,]+) (?:applied|replayed|attempts)", v["aria-label"]) for t, v in page.tags if t == "svg"]
    replayed = sum(int(of[1].replace(",", "")) for of in (said[0], said[4]))
    assert replayed >= summary["counts"]["replayed"]  # some replays were lost again on their way


def test_all_fourteen_questions_stand_there_with_answer_rules_and_cases() -> None:
    _, text, summary = whole_page()
    told = section(text, "questions")
    for number in range(1, 15):
        question = summary["questions"][f"q{number}"]
        assert f"{number}. {question['question']}" in told
        assert question["answer"] in told
        assert ", ".join(question["rules"]) in told
        assert question["tests"]
    assert "14 shown." in told


def test_the_log_is_shown_by_real_lines_of_one_operation() -> None:
    _, text, _ = whole_page()
    told = section(text, "logs")
    for field in FIELDS:
        assert field in told
    for words in (
        "calls ",
        "applied, and its answer kept with it",
        "has ended with status",
        "the kept answer is given",
    ):
        assert words in told, words
    assert re.search(r"(p0|d0)-rpc\.jsonl, line \d+", told)


def test_every_metric_of_the_document_is_named_also_one_that_nobody_scraped() -> None:
    _, text, _ = whole_page()
    told = section(text, "metrics")
    assert all(name in told for name in NAMES)
    assert "never scraped" in told


def test_a_broken_run_says_so_at_its_head_and_in_its_tables(tmp_path: Path) -> None:
    page, text, summary = read(drawn(tmp_path, broken()))
    assert page.first_words == "Fail"
    head = Page(text[: text.index("<main>")]).text
    assert "came a second time." in head
    assert "KVC-IDEM-001: " in head
    assert "2 of its faults left no proof that they happened." in head
    assert "1 answer of the engines had wrong tokens." in head
    assert "Not shown: no storm was run behind this run." in section(text, "storm")
    for key, value, _ in page.figures:
        assert value == at(summary, key), key
    assert 'class="word fail">broken<' in text
    assert 'class="word inconclusive">not shown<' in text
    assert "not proved" in " ".join(re.findall(r"<title>([^<]*)</title>", text))


def test_a_control_plane_that_nobody_asked_anything_has_a_page(tmp_path: Path) -> None:
    page, text, _ = read(drawn(tmp_path, idle()))
    assert page.first_words == "Inconclusive"
    assert page.open == []
    for words in ("Nothing was asked of the control plane.", "It holds no operation.", "Nothing was asked of any node.",
                  "No block service crashed.", "No fault was injected", "No operation was retried.",
                  "None was scraped.", "14 not shown."):  # fmt: skip
        assert words in page.text, words
    assert 'class="word pass">shown<' not in text


def test_a_run_of_one_storm_only_shows_that_one(tmp_path: Path) -> None:
    run = idle()
    run.storms = [storm for storm in reply_loss(seconds=2).storms if storm.budget]
    _, text, summary = read(drawn(tmp_path, run))
    assert list(summary["storms"]) == ["with_budget"]
    assert "No such storm was run." in section(text, "storm")


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script><img src=http://evil.example/>\" onload=\"x"
    run = reply_loss(seconds=12)
    run.events = [
        msgspec.structs.replace(e, detail=e.detail | {"fault": hostile, "action": hostile, "point": hostile})
        if e.kind is EventKind.FAULT_INJECTED else e for e in run.events
    ]  # fmt: skip
    run.events.append(msgspec.structs.replace(run.events[0], kind=EventKind.MIGRATION_MOVED, subject="op1",
                                              detail={"step": hostile}))  # fmt: skip
    again = max(run.control.invocations, key=lambda i: i.attempts)
    run.control.invocations.append(msgspec.structs.replace(again, client=hostile, block_group_id=hostile))
    run.lines["p0"] = [msgspec.structs.replace(line, request_id=hostile) for line in run.lines["p0"]]
    run.configuration["scenario"]["name"] = hostile
    page, text, _ = read(drawn(tmp_path, run))
    assert page.open == []
    assert "<script" not in text
    assert not [v for _, v in page.tags if "onload" in v]
    assert not [v for tag, v in page.tags if tag == "img"]


def test_the_command_writes_the_page_of_a_control_plane_into_its_folder(tmp_path: Path) -> None:
    folder = reply_loss(seconds=4, faults=[]).write(tmp_path / "one")
    other = idle().write(tmp_path / "two")
    assert has_control(folder)
    invoke = click.testing.CliRunner().invoke
    done = invoke(command, [str(folder.path)])
    assert (done.exit_code, done.output.strip()) == (0, str(folder.path / "report.html"))
    assert json.loads((folder.path / "summary.json").read_bytes())["format"] == "pdproof-control-summary/1"
    done = invoke(command, [str(folder.path), str(other.path), "--out", str(tmp_path / "out")])
    assert done.output.split() == [str(tmp_path / "out" / name / "index.html") for name in ("one", "two")]
    done = invoke(command, [str(folder.path), "--out", str(tmp_path / "alone")])
    assert done.output.split() == [str(tmp_path / "alone" / "index.html")]


def test_runs_of_other_kinds_are_not_drawn_beside_it(tmp_path: Path) -> None:
    mixed = [str(idle().write(tmp_path / "control").path), str(quiet().write(tmp_path / "kv").path)]
    done = click.testing.CliRunner().invoke(command, mixed)
    assert isinstance(done.exception, BadInput)
    assert str(tmp_path / "kv") in str(done.exception)
    assert not (tmp_path / "control" / "report.html").exists()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = {"whole": reply_loss(), "calm": reply_loss(seconds=4, faults=[])}
    return [drawn(tmp_path_factory.mktemp(name), run) / "index.html" for name, run in made.items()]


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    binary = chromium.find()
    assert binary is not None
    with chromium.Browser(binary) as opened:
        yield opened


@pytest.mark.browser
@pytest.mark.skipif(chromium.find() is None, reason="Chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 900, 600, 390])
def test_a_page_fits_its_window_and_shows_its_charts(
    pages: list[Path], browser: chromium.Browser, width: int, dark: bool
) -> None:
    for page in pages:
        assert_fits(browser, page, width, dark=dark, charts=CHARTS)
        lines = browser.value(
            "[...document.querySelectorAll('.sized svg path[stroke^=var]')].map(e => getComputedStyle(e).stroke)"
        )
        assert lines
        assert "rgb(0, 0, 0)" not in lines  # the page's variables reach into the drawings
        browser.value("[...document.querySelectorAll('details')].forEach(d => d.open = true)")
        wide = browser.value("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], wide
    assert browser.problems == []

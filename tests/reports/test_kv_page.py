"""The page of prefill/decode runs, read as a browser reads it."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click.testing
import pytest

from harness.errors import BadInput
from harness.run_folder import RunFolder
from reference_impl.rules.events import EventKind
from reports import words
from reports.commands.report import command
from reports.kv.page import write_kv_page
from tests.reports.kv_runs import ARMS, KvRun, d_crash, quiet, surge, two_turn
from tests.reports.runs import cut_short
from tests.reports.sample_runs import sample, write
from tests.reports.test_page import Page, at, nothing_reaches_outside

SECTIONS = ["held", "designs", "checks", "faults", "reading", "about"]


def drawn(home: Path, *runs: KvRun) -> Path:
    """Write the runs and their page below `home`; return the page's folder."""
    write_kv_page([run.write(home / f"{number}-{run.arm}") for number, run in enumerate(runs)], home / "out")
    return home / "out"


def read(out: Path) -> tuple[Page, str, dict[str, Any]]:
    text = (out / "index.html").read_text()
    return Page(text), text, json.loads((out / "summary.json").read_bytes())


@functools.cache
def crash_page() -> tuple[Page, str, dict[str, Any]]:
    """The page of a crash in all three designs, drawn once a session."""
    home = Path(tempfile.mkdtemp(prefix="pdproof-kv-page-"))
    try:
        return read(drawn(home, *(d_crash(arm) for arm in ARMS)))
    finally:
        shutil.rmtree(home)


def test_the_page_is_one_sound_file_that_says_what_its_summary_says() -> None:
    page, text, summary = crash_page()
    assert page.open == []
    assert page.first_words == "Pass"
    assert [i for i in page.ids if i in ["turns", *SECTIONS]] == SECTIONS
    assert len(page.ids) == len(set(page.ids))
    assert len(page.figures) > 80
    for key, value, _ in page.figures:
        assert value == at(summary, key), key
    shown = {key: said for key, _, said in page.figures}
    assert shown["runs.lease.crash.blocks"] == "24,000"
    assert shown["runs.lease.crash.reclaim_s"] == "1.70 s"
    assert shown["runs.lease.at_full_scale.reclaim_s"] == "17.0 s"
    assert shown["runs.single-timeout-480.at_full_scale.reclaim_s"] == "478 s"
    assert shown["runs.single-timeout-5.leases.freed_early"] == "8"
    assert shown["runs.single-timeout-5.recomputed_tokens"] == "320,000"
    assert shown["runs.lease.content_wrong"] == "0"
    assert shown["runs.lease.timeout_s"] == "30 s"
    nothing_reaches_outside(page, text)


def test_the_head_has_the_sentence_the_bars_and_the_scale() -> None:
    page, text, summary = crash_page()
    head = Page(text[: text.index("<main>")])
    assert (
        "freed its 24,000 blocks in 17.0 s; one timeout of 480 s held its 24,000 blocks for 478 s (28 times longer)"
        in head.text
    )
    bars = next(values["aria-label"] for tag, values in page.tags if values.get("role") == "img" and tag == "div")
    assert bars.endswith("Leases 17.0 s. Timeout 480 s 478 s. Timeout 5 s 3.00 s.")
    assert "measured ones times 10" in head.text
    assert summary["emulated"][0] in head.text
    assert "1 prefill, 2 decode, 3 requests at once each" in head.text


def test_all_designs_share_one_chart_of_blocks_held_with_the_moment_of_each_reclaim() -> None:
    page, text, _ = crash_page()
    charts = [values["aria-label"] for tag, values in page.tags if tag == "svg"]
    assert len(charts) == 3 * 4  # blocks held, of them left behind, requests waiting; four widths each
    assert "Leases: at most 26,000; Timeout 480 s: at most 26,000; Timeout 5 s: at most 14,000" in charts[0]
    assert charts[4].startswith("Of them, blocks held for readers that died: Leases: at most 24,000;")
    assert charts[8] == "Requests waiting at the decode engines over time, at most 6"
    first = text[text.index('<div class="sized xl">') : text.index('<div class="sized l">')]
    for label in ("D killed", "free after 17.0 s", "free after 478 s", "free after 3.00 s", "30,000", "40%"):
        assert f">{label}<" in first, label
    assert "seconds since the first fault, at full scale (ran 10 × faster)" in first


def test_charts_below_one_another_have_one_time_axis() -> None:
    _, text, _ = crash_page()
    sizes = re.findall(r'viewBox="0 0 (\d+) ', text)
    assert sizes[0:4] == sizes[4:8] == sizes[8:12]
    assert int(sizes[0]) > int(sizes[1]) > int(sizes[2]) > int(sizes[3])


def test_what_baselines_fail_is_told_and_does_not_count() -> None:
    page, text, _ = crash_page()
    told = Page(text[text.index('id="baselines"') - 9 : text.index('<section id="checks">')])
    assert "Timeout 480 s: fail" in told.text
    assert "A dead reader's blocks are free in time: 12 leases stood longer" in told.text
    assert page.first_words == "Pass"


def test_a_surge_has_no_reclaim_and_its_axis_begins_with_the_load(tmp_path: Path) -> None:
    page, text, _ = read(drawn(tmp_path, *(surge(arm) for arm in ARMS)))
    assert "seconds since the load began" in text
    assert "What the crash left behind" not in page.text
    assert "freed 38 of 40 leases while their readers still lived" in page.text
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 2 * 4


def test_two_turns_have_a_section_of_their_own_with_a_mark_for_each_turn(tmp_path: Path) -> None:
    page, text, summary = read(
        drawn(tmp_path, two_turn(), two_turn("lease-uncorrected"), two_turn("lease-uncorrected", -5_000.0))
    )
    assert [i for i in page.ids if i in ["turns", *SECTIONS]] == ["turns", *SECTIONS]
    for key, value, _ in page.figures:
        assert value == at(summary, key), key
    assert {key: said for key, _, said in page.figures}["runs.lease.turns.loaded"] == "20"
    section = text[text.index('<section id="turns">') : text.index('<section id="held">')]
    wide = re.findall(r'<div class="wide">(.*?)</svg>', section, re.S)
    marks = [{fate: drawing.count(f": {fate} after") for fate in ("loaded", "declined", "too late", "too early")}
             for drawing in wide]  # fmt: skip
    assert marks == [
        {"loaded": 20, "declined": 10, "too late": 0, "too early": 0},
        {"loaded": 21, "declined": 0, "too late": 9, "too early": 0},
        {"loaded": 0, "declined": 10, "too late": 0, "too early": 20},
    ]
    assert "time to live 20 s" in section
    said = Page(section).text
    for words_ in ("d0 as seen by p0", "+5,000.000 s", "−5,000.000 s", "below the time to live", "within 10 % of it"):
        assert words_ in said, words_


def test_a_clock_estimate_beyond_its_bound_stands_out(tmp_path: Path) -> None:
    run = two_turn()
    run.configuration["clock_offsets_s"] = {"d0": 4_999.0}
    _, text, _ = read(drawn(tmp_path, run))
    section = text[text.index("Clocks, estimated and set") : text.index("By think time")]
    assert '<span class="word fail">no</span>' in section


def test_one_run_without_faults_makes_a_page_at_true_scale(tmp_path: Path) -> None:
    page, text, _ = read(drawn(tmp_path, quiet()))
    assert page.first_words == "Pass"
    assert "times faster" not in page.text
    assert "full scale (ran" not in text
    assert "Durations in the head" not in page.text
    assert "No fault was injected." in page.text
    assert "The decode engines' queue was not sampled." in page.text.replace("’", "'")
    assert 'id="baselines"' not in text


def test_a_holders_restart_is_no_readers_crash(tmp_path: Path) -> None:
    run = quiet()
    run.scenario = "p_restart"
    run.grant(24, "lost")
    run.kill(25, "p0")
    page, text, summary = read(drawn(tmp_path, run))
    assert ">P killed<" in text
    assert "seconds since the first fault" in text
    assert "What the crash left behind" not in page.text
    assert (summary["runs"]["lease"]["crash"], summary["runs"]["lease"]["leases"]["died"]) == (None, 1)


def test_hand_offs_that_the_router_held_are_marked_and_not_called_early(tmp_path: Path) -> None:
    run = quiet()
    run.scenario = "router_hold"
    run.say(10, "harness", EventKind.FAULT_INJECTED, "router_hold-1", fault="router_hold", target="router")
    run.say(11, "harness", EventKind.FAULT_PROVED, "router_hold-1", evidence="held 1 hand-off")
    run.say(24, "harness", EventKind.FAULT_HEALED, "router_hold-1")
    run.grant(10.5, "held")
    run.expire(24, "held")
    run.too_late(25, "held")
    page, text, summary = read(drawn(tmp_path, run))
    assert ">hand-offs held<" in text
    counts = summary["runs"]["lease"]["leases"]
    assert (counts["expired"], counts["freed_early"], counts["claims_late"]) == (1, 0, 1)
    assert "router_hold of router" in page.text


def test_a_wrong_answer_stands_at_the_head_of_a_failing_page(tmp_path: Path) -> None:
    bad = d_crash("single-timeout-5")
    bad.request(70, 71, content_ok=False)
    page, text, summary = read(drawn(tmp_path, d_crash("lease"), bad))
    assert page.first_words == "Fail"
    assert "Timeout 5 s: 1 answer had wrong tokens." in text[: text.index("<main>")]
    assert {key: said for key, _, said in page.figures}["runs.single-timeout-5.content_wrong"] == "1"
    assert summary["verdict"] == "fail"


def test_an_incomplete_run_says_so_and_never_passes(tmp_path: Path) -> None:
    lease = cut_short(d_crash("lease").write(tmp_path / "lease"))
    write_kv_page([lease], tmp_path / "out")
    page, _, _ = read(tmp_path / "out")
    assert page.first_words == "Inconclusive"
    assert "The run is incomplete: events.jsonl has no footer" in page.text


def test_a_run_that_was_broken_off_still_has_a_page(tmp_path: Path) -> None:
    run = d_crash("lease").write(tmp_path / "run")
    for name in ("events.jsonl", "requests.parquet", "chunks.parquet", "metrics.parquet", "verdicts.json"):
        (run.path / name).unlink()
    (run.path / "parts").mkdir()
    line = '{"t_ns":1,"wall_ns":1,"actor":"harness","kind":"phase.started","subject":"r","detail":{}}\n'
    (run.path / "parts/events-harness.jsonl").write_text(line)
    write_kv_page([RunFolder(run.path)], tmp_path / "out")
    page, _, _ = read(tmp_path / "out")
    assert page.first_words == "Inconclusive"
    assert "the run was broken off" in page.text
    assert "No block was ever held." in page.text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script><img src=http://evil.example/>\" onload=\"x"
    run = d_crash("lease")
    run.say(1, "p0-e1", EventKind.PEER_CONNECTED, hostile, handshake_ms=1.0, offset_ms=0.0, offset_error_ms=1.0)
    run.arm = f"lease{hostile}"
    page, text, _ = read(drawn(tmp_path, run))
    assert page.open == []
    assert "<script" not in text
    assert not [v for _, v in page.tags if "onload" in v]


def test_the_command_writes_one_page_for_all_or_one_into_each(tmp_path: Path) -> None:
    folders = [str(d_crash(arm).write(tmp_path / arm).path) for arm in ARMS]
    invoke = click.testing.CliRunner().invoke
    done = invoke(command, [*folders, "--out", str(tmp_path / "out")])
    assert (done.exit_code, done.output.strip()) == (0, str(tmp_path / "out/index.html"))
    done = invoke(command, folders)
    assert done.output.split() == [f"{folder}/report.html" for folder in folders]
    pages = {(Path(folder) / "report.html").read_text() for folder in folders}
    assert len(pages) == 1
    assert all((Path(folder) / "summary.json").is_file() for folder in folders)


def test_runs_of_other_kinds_are_not_drawn_on_this_page(tmp_path: Path) -> None:
    mixed = [str(quiet().write(tmp_path / "kv").path), str(write(tmp_path / "other", sample("shadow")).path)]
    done = click.testing.CliRunner().invoke(command, [*mixed, "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, BadInput)
    assert "other" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arm", "title"),
    [("lease", "Leases"), ("single-timeout-480", "Timeout 480 s"), ("lease-uncorrected", "Leases, uncorrected"),
     ("cold", "Cold start"), ("", "This run")],
)  # fmt: skip
def test_designs_have_names_for_people(arm: str, title: str) -> None:
    assert words.arm_title(arm) == title

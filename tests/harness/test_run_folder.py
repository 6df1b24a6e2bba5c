"""A run folder is read back as it was written, and a damaged one is known for what it is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.errors import BadRunFolder
from harness.run_folder import CHUNK_COLUMNS, REQUEST_COLUMNS, RunFolder, RunWriter
from reference_impl.rules.events import EventKind
from tests.harness.histories import ORIGIN, History, clean


def test_what_was_written_is_read(tmp_path: Path) -> None:
    history = History()
    run = history.write(tmp_path / "run")
    assert run.incomplete is None
    assert list(run.requests.columns) == list(REQUEST_COLUMNS)
    assert len(run.requests) == 60
    assert list(run.chunks.columns) == list(CHUNK_COLUMNS)
    assert len(run.chunks) == 180
    assert len(run.events) == len(history.events)
    assert [e.t_ns for e in run.events] == sorted(e.t_ns for e in run.events)
    assert run.origin_ns == ORIGIN
    assert not (run.path / "parts").exists()


def test_derived_columns_follow_the_words_for_time(tmp_path: Path) -> None:
    row = clean(tmp_path / "run").requests.iloc[0]
    assert row.schedule_lag_ms == pytest.approx(1)
    assert row.ttft_ms == pytest.approx(98)  # 100 ms after the start, sent 2 ms after it
    assert row.ttft_from_intended_ms == pytest.approx(100)
    assert row.mean_decode_gap_ms == pytest.approx(100)
    assert row.e2e_ms == pytest.approx(498)


def test_a_failed_request_is_censored(tmp_path: Path) -> None:
    rows = clean(tmp_path / "run").requests
    failed = rows[rows.outcome == "fail"].iloc[0]
    assert failed.isna().e2e_ms
    assert failed.isna().mean_decode_gap_ms


def test_a_run_without_requests_reads_as_one(tmp_path: Path) -> None:
    history = History()
    history.requests = []
    run = history.write(tmp_path / "run")
    assert run.incomplete is None
    assert list(run.requests.columns) == list(REQUEST_COLUMNS)
    assert run.requests.empty


def test_a_folder_in_the_way_is_refused(tmp_path: Path) -> None:
    run = clean(tmp_path / "run")
    with pytest.raises(BadRunFolder, match="exists already"):
        RunWriter(run.path, run.manifest)


@pytest.mark.parametrize("lines", [0, 1, 2, 30, -1])
def test_events_cut_short_anywhere_make_the_run_incomplete(tmp_path: Path, lines: int) -> None:
    run = clean(tmp_path / "run")
    path = run.path / "events.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))
    assert RunFolder(run.path).incomplete


@pytest.mark.parametrize("size", [10, 500, -1, -40])
def test_events_cut_inside_a_line_make_the_run_incomplete(tmp_path: Path, size: int) -> None:
    run = clean(tmp_path / "run")
    path = run.path / "events.jsonl"
    path.write_bytes(path.read_bytes()[:size])
    again = RunFolder(run.path)
    if size == -1:  # only the last newline is gone: everything is there
        assert again.incomplete is None
    else:
        assert again.incomplete


def test_a_lost_row_makes_the_run_incomplete(tmp_path: Path) -> None:
    run = clean(tmp_path / "run")
    run.requests.iloc[:-1].to_parquet(run.path / "requests.parquet")
    assert "footer promises" in str(RunFolder(run.path).incomplete)


def test_another_runs_events_make_the_run_incomplete(tmp_path: Path) -> None:
    one, other = clean(tmp_path / "one"), clean(tmp_path / "other")
    (one.path / "events.jsonl").write_bytes((other.path / "events.jsonl").read_bytes())
    assert "header" in str(RunFolder(one.path).incomplete)


def test_a_run_broken_off_can_still_be_read(tmp_path: Path) -> None:
    finished = clean(tmp_path / "finished")
    writer = RunWriter(tmp_path / "run", finished.manifest)
    writer.events.say(EventKind.PHASE_STARTED, "x", phase="baseline")
    with writer.events_part("engine").open("wb") as part:
        part.write(msgspec.json.encode(finished.events[0]) + b'\n{"t_ns": 1, "cut sho')
    run = RunFolder(tmp_path / "run")
    assert "broken off" in str(run.incomplete)
    assert len(run.events) == 2
    assert run.requests.empty


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("manifest.json", b"{}", "manifest.json"),
        ("manifest.json", b"not json", "manifest.json"),
        ("requests.parquet", b"not parquet", "requests.parquet"),
        ("events.jsonl", b'{"line":"header","format":"x","run_id":"run"}\nnonsense\n{}\n', "line 2"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, file: str, content: bytes, words: str) -> None:
    run = clean(tmp_path / "run")
    (run.path / file).write_bytes(content)
    with pytest.raises(BadRunFolder, match=words) as caught:
        _ = RunFolder(run.path).incomplete
    assert "\n" not in str(caught.value)


def test_what_is_no_run_folder_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(BadRunFolder, match="no such folder"):
        RunFolder(tmp_path / "nothing")
    with pytest.raises(BadRunFolder, match=r"no manifest\.json"):
        RunFolder(tmp_path)


def test_a_column_of_another_type_is_named(tmp_path: Path) -> None:
    run = clean(tmp_path / "run")
    rows = run.requests.astype({"intended_ns": "string"})
    rows.loc[0, "intended_ns"] = "soon"
    rows.to_parquet(run.path / "requests.parquet")
    with pytest.raises(BadRunFolder, match=r"requests\.parquet holds values of another type"):
        _ = RunFolder(run.path).requests


@pytest.mark.parametrize("scale", ["0", "-1", "null"])
def test_a_manifest_that_nobody_could_divide_by_is_refused(tmp_path: Path, scale: str) -> None:
    run = clean(tmp_path / "run")
    path = run.path / "manifest.json"
    path.write_text(path.read_text().replace('"time_scale": 1.0', f'"time_scale": {scale}'))
    with pytest.raises(BadRunFolder, match=r"manifest\.json"):
        _ = RunFolder(run.path).manifest

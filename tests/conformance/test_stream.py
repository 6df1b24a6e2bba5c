"""Results on disk: what is written is read back, and whatever was cut, repeated or made up is refused in one line."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness.conformance import stream
from harness.conformance.exits import Exit
from harness.conformance.stream import BadResults, ResultWriter, read_results
from harness.errors import MachineLimit
from harness.verdicts import Verdict
from tests.conformance.made_up import BACK, GRANT, TOGETHER, breach, header, result, run, timeline, written

Change = Callable[[list[bytes]], list[bytes]]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    made = run(result(GRANT), result(BACK, Verdict.FAIL, breaches=[breach()]), result(TOGETHER, None))
    return written(tmp_path / "whole.jsonl", made)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    made = run(result(GRANT), result(BACK, Verdict.FAIL, breaches=[breach()], note="odd"), result(TOGETHER, None))
    read = read_results(written(tmp_path / "results.jsonl", made))
    assert (read.header, read.results, read.complete) == (made.header, made.results, True)
    assert read.source.endswith("results.jsonl")


def test_the_file_is_its_owners_alone(whole: Path) -> None:
    assert stat.S_IMODE(whole.stat().st_mode) == 0o600


def test_a_file_that_is_there_is_left_alone(whole: Path) -> None:
    before = whole.read_bytes()
    with pytest.raises(BadResults, match="exists already"):
        ResultWriter(whole, header())
    assert whole.read_bytes() == before


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineLimit, match="cannot be written"):
        ResultWriter(tmp_path / "file" / "results.jsonl", header())


def test_each_result_is_on_disk_as_soon_as_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    with ResultWriter(path, header(GRANT, BACK)) as writer:
        assert read_results(path).results == []
        writer.add(result(GRANT))
        assert [r.case for r in read_results(path).results] == [GRANT]
        assert not read_results(path).complete


def test_a_run_that_was_broken_off_has_no_footer_and_can_be_shown(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultWriter(path, header(GRANT, BACK)) as writer:
        writer.add(result(GRANT))
    assert not read_results(path).complete


def test_what_a_reader_would_refuse_is_not_written(tmp_path: Path) -> None:
    with ResultWriter(tmp_path / "results.jsonl", header(GRANT)) as writer:
        writer.add(result(GRANT))
        with pytest.raises(ValueError, match="already"):
            writer.add(result(GRANT))
        with pytest.raises(ValueError, match="not announced"):
            writer.add(result(BACK))


def test_a_history_too_long_for_a_line_loses_its_beginning_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "LINE_MAX", 20_000)
    path = written(tmp_path / "results.jsonl", run(result(GRANT, timeline=timeline(1_000))))
    kept = read_results(path).results[0].timeline
    assert path.stat().st_size < 25_000
    assert kept[0].what == "cut"
    assert kept[-1] == timeline(1_000)[-1]


def test_many_long_histories_stay_within_what_a_reader_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FILE_MAX", 60_000)
    cases = [f"KVC-LEASE-00{n}.x" for n in range(8)]
    made = run(*(result(case, timeline=timeline(2_000)) for case in cases))
    read = read_results(written(tmp_path / "results.jsonl", made))
    assert read.complete
    assert all(len(r.timeline) > 1 for r in read.results)


def test_a_subjects_odd_words_do_not_end_a_run(tmp_path: Path) -> None:
    odd = result(GRANT, found="not text: \udcff\x00", timeline=[
        msgspec.structs.replace(timeline(1)[0], detail={"large": 2**70, "text": "\ud800", "yes": True}),
    ])  # fmt: skip
    read = read_results(written(tmp_path / "results.jsonl", run(odd)))
    assert read.results[0].found == "not text: \\udcff\x00"
    assert read.results[0].timeline[0].detail == {"large": str(2**70), "text": "\\ud800", "yes": True}


def doubled(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], *lines[1:]]


def with_header(**changes: object) -> Change:
    def changed(lines: list[bytes]) -> list[bytes]:
        return [msgspec.json.encode(msgspec.json.decode(lines[0]) | changes) + b"\n", *lines[1:]]

    return changed


def with_result(**changes: object) -> Change:
    def changed(lines: list[bytes]) -> list[bytes]:
        return [lines[0], msgspec.json.encode(msgspec.json.decode(lines[1]) | changes) + b"\n", *lines[2:]]

    return changed


@pytest.mark.parametrize(
    ("change", "line", "problem"),
    [
        (lambda _: [], 0, "is empty"),
        (lambda lines: lines[1:], 1, "the header is missing"),
        (lambda lines: [b"\n", *lines], 1, "is no header of results"),
        (lambda _: [b"[1, 2]\n"], 1, "is no header of results"),
        (lambda _: [b"\x00\xff\xfe\n"], 1, "is no header of results"),
        (lambda lines: [b"\xef\xbb\xbf" + lines[0], *lines[1:]], 1, "is no header of results"),
        (lambda _: [b'{"type":' * 100_000 + b"\n"], 1, "is no header of results"),
        (with_header(format="pdproof-conformance-2"), 1, "format 'pdproof-conformance-2' is unknown"),
        (with_header(format="pdproof-conformance-2", seed="new"), 1, "use the pdproof that wrote it"),
        (with_header(format=""), 1, "format '' is unknown"),
        (with_header(seed="two"), 1, "Expected `int`, got `str`"),
        (with_header(cases=[GRANT, GRANT]), 1, "announces a case twice"),
        (with_header(cases=[BACK, TOGETHER]), 2, "the header does not announce it"),
        (lambda lines: [*lines[:2], lines[0], *lines[2:]], 3, "a second header"),
        (lambda lines: [*lines, *lines], 6, "something follows the footer"),
        (lambda lines: [*lines, lines[1]], 6, "something follows the footer"),
        (lambda lines: [*lines, lines[-1]], 6, "something follows the footer"),
        (doubled, 3, f"a second result of '{GRANT}'"),
        (with_result(twin="late"), 2, "twin 'late' of"),
        (with_result(verdict="well"), 2, "Invalid enum value 'well'"),
        (with_result(verdict=True), 2, "cannot be read"),
        (with_result(seconds="long"), 2, "Expected `float`"),
        (with_result(type="page"), 2, "cannot be read"),
        (with_result(timeline=[1]), 2, "Expected `object`, got `int`"),
        (lambda lines: [lines[0], b'{"type":"case"}\n', *lines[2:]], 2, "missing required field"),
        (lambda lines: [lines[0], b"\n", *lines[1:]], 2, "cannot be read"),
        (lambda lines: [lines[0], b"[" * 100_000 + b"\n", *lines[1:]], 2, "cannot be read"),
        (lambda lines: [lines[0], lines[1][:40] + b"\n", *lines[2:]], 2, "cannot be read"),
        (lambda lines: [*lines[:2], lines[2][:-20]], 3, "cut off in the middle"),
        (lambda lines: [*lines[:-1], lines[-1].rstrip()], 5, "cut off in the middle"),
        (lambda lines: [*lines[:2], *lines[3:]], 4, "promises 3 results, 2 stand above it"),
    ],
)  # fmt: skip
def test_what_is_not_as_it_was_written_is_refused_in_one_line(
    whole: Path, change: Change, line: int, problem: str
) -> None:
    whole.write_bytes(b"".join(change(whole.read_bytes().splitlines(keepends=True))))
    with pytest.raises(BadResults, match=re.escape(problem)) as refused:
        read_results(whole)
    said = str(refused.value)
    assert said.startswith(f"{whole}:{line}: " if line else f"{whole}: ")
    assert "\n" not in said
    assert refused.value.exit_code == Exit.BAD_DATA == 65


def test_every_cut_is_refused_or_reads_as_incomplete(whole: Path) -> None:
    """A copy can end anywhere."""
    content = whole.read_bytes()
    for end in range(0, len(content), 7):
        whole.write_bytes(content[:end])
        try:
            assert not read_results(whole).complete
        except BadResults:
            assert end == 0 or content[end - 1 : end] != b"\n"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadResults, match="no such file"):
        read_results(tmp_path / "nowhere")
    with pytest.raises(BadResults, match="is no file"):
        read_results(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadResults, match="is no file"):
        read_results(tmp_path / "pipe")


def test_what_is_too_large_is_refused(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = whole.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(stream, "LINE_MAX", max(map(len, lines)))
    assert read_results(whole).complete
    monkeypatch.setattr(stream, "LINE_MAX", max(map(len, lines)) - 1)
    with pytest.raises(BadResults, match="the line is longer than"):
        read_results(whole)
    monkeypatch.undo()
    monkeypatch.setattr(stream, "FILE_MAX", whole.stat().st_size - 1)
    with pytest.raises(BadResults, match="the file is larger than"):
        read_results(whole)


def test_twins_are_told_apart(tmp_path: Path) -> None:
    made = run(result(GRANT, twin="early"), result(GRANT, twin="never"), twins=True)
    path = written(tmp_path / "twins.jsonl", made)
    assert [r.twin for r in read_results(path).results] == ["early", "never"]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], *lines[1:]]))
    with pytest.raises(BadResults, match=r"a second result of .*, twin 'early', in one run"):
        read_results(path)


def test_a_claim_is_exercised_by_a_case_that_used_it_and_came_to_a_verdict() -> None:
    made = run(
        result(GRANT, needs=["leases"]), result(BACK, Verdict.INCONCLUSIVE, needs=["two-turn"]),
        result(TOGETHER, None, needs=["ranks"]), capabilities=["leases", "two-turn", "ranks", "fence"],
    )  # fmt: skip
    assert made.unexercised == ["two-turn", "ranks", "fence"]

"""`summary.json`: right figures of a clean pair, and never a pass for a broken one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.errors import BadInput, BadRunFolder, MachineLimit
from harness.recovery import recoveries
from harness.run_folder import RunFolder
from harness.verdicts import Verdict
from reports.comparison import write_comparison
from reports.split import by_end, by_first_token, timed
from reports.summary import Summary, summarise
from tests.reports.runs import comparison, cut_short, edit_events, pair
from tests.reports.sample_runs import Sample, sample, write


def test_a_clean_pair_passes_and_its_ratio_is_that_of_the_medians(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    summary = summarise(cold, shadow)
    assert summary.verdict is Verdict.PASS
    assert summary.reasons == []
    medians = [sorted(r.recovery_s or 0 for r in recoveries(run))[1] for run in (cold, shadow)]
    assert summary.ratio_recovery == pytest.approx(medians[0] / medians[1])
    assert summary.cold.recovery_s.n == summary.shadow.recovery_s.n == 3
    assert summary.shadow.redundancy_s.n == 3
    assert summary.cold.redundancy_s.n == 0  # a cold arm has no shadow to restore


def test_spans_are_gapless_and_sum_to_the_recovery(tmp_path: Path) -> None:
    for run in pair(tmp_path, "glm-5.2-b200"):
        for recovery in recoveries(run):
            ends = [recovery.fault_ns, *(s.end_ns for s in recovery.spans)]
            assert [s.start_ns for s in recovery.spans] == ends[:-1]
            assert ends[-1] == recovery.registered_ns
            assert all(s.seconds > 0 for s in recovery.spans)
    names = [s.name for s in recoveries(RunFolder(tmp_path / "shadow"))[0].spans]
    assert names[:3] == ["process death to lock", "notice the death", "take the lock"]
    assert recoveries(RunFolder(tmp_path / "cold"))[0].spans[0].name == "detect death and spawn"


def test_every_trusted_request_is_on_exactly_one_side_of_the_first_fault(tmp_path: Path) -> None:
    for run in pair(tmp_path):
        for halves in (by_first_token(run), by_end(run)):
            both = [*halves.baseline.request_id, *halves.after.request_id]
            assert sorted(both) == sorted(timed(run).request_id)
        assert summarise_counts(run) == len(run.requests)


def summarise_counts(run: RunFolder) -> int:
    from reports.arms import summarise_arm

    arm = summarise_arm(run)
    assert arm.spoilt_rows == 1
    return arm.requests_ok + arm.requests_failed + arm.requests_unknown


def test_failed_requests_are_censored_and_break_their_limit(tmp_path: Path) -> None:
    shadow = summarise(*pair(tmp_path)).shadow
    rates = shadow.decode_rate_tokens_s.after_fault
    assert rates.censored == shadow.requests_failed + shadow.requests_unknown
    assert shadow.requests_failed > 0
    assert shadow.decode_under_limit.undetermined == shadow.requests_failed + shadow.requests_unknown
    assert rates.p99 is None  # the slowest hundredth never came to its end


def test_full_scale_undoes_the_time_scale(tmp_path: Path) -> None:
    cold = summarise(*pair(tmp_path, "glm-5.2-b200")).cold
    scaled = cold.at_full_scale
    assert scaled.recovery_s.median == pytest.approx(20 * (cold.recovery_s.median or 0))
    assert scaled.recovery_s.n == cold.recovery_s.n
    rates, full = cold.decode_rate_tokens_s.after_fault, scaled.decode_rate_tokens_s.after_fault
    assert full.p50 == pytest.approx((rates.p50 or 0) / 20)
    assert full.censored == rates.censored
    assert (cold.ttft_over_limit.limit, cold.decode_under_limit.limit) == (0.25, 400.0)


def test_weights_are_held_once_and_shared_pages_counted_once(tmp_path: Path) -> None:
    memory = summarise(*pair(tmp_path)).shadow.memory
    assert memory.weights_bytes_max == 2**30
    assert memory.worker_pss_bytes_max is not None
    assert memory.worker_pss_bytes_max < 1.5 * 2**30


# Broken twins: each takes one thing away from a passing pair.


def test_a_failed_check_fails_the_comparison(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    first, *rest = shadow.verdicts
    shadow.write_verdicts([msgspec.structs.replace(first, verdict=Verdict.FAIL), *rest])
    assert summarise(cold, shadow).verdict is Verdict.FAIL


def test_a_run_without_its_footer_never_passes(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    summary = summarise(cold, cut_short(shadow))
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert summary.shadow.incomplete
    assert any("incomplete" in reason for reason in summary.reasons)


@pytest.mark.parametrize("kind", ["fault.proved", "router.registered", "fault.injected"])
def test_a_run_that_lost_its_recoveries_is_inconclusive_and_has_no_ratio(tmp_path: Path, kind: str) -> None:
    cold, shadow = pair(tmp_path)
    summary = summarise(cold, edit_events(shadow, without=kind))
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert summary.ratio_recovery is None
    assert summary.shadow.incomplete is None  # the folder is whole: what is missing is the recovery


def test_one_kill_without_a_successor_is_inconclusive_though_the_others_give_a_ratio(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    path = shadow.path / "events.jsonl"
    lines = path.read_text().splitlines()
    last = max(i for i, line in enumerate(lines) if '"router.registered"' in line)
    lines[last] = lines[last].replace('"router.registered"', '"router.refused"')
    path.write_text("\n".join(lines) + "\n")
    summary = summarise(cold, RunFolder(shadow.path))
    assert summary.ratio_recovery is not None
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert any("After 1 of 3 kills no successor registered" in reason for reason in summary.reasons)


def test_a_run_that_no_check_has_judged_is_inconclusive(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    (cold.path / "verdicts.json").unlink()
    assert summarise(cold, shadow).verdict is Verdict.INCONCLUSIVE


def test_runs_of_another_seed_or_profile_are_not_compared(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    path = shadow.path / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 8'))
    summary = summarise(cold, RunFolder(shadow.path))
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert any("differ in seed (7 and 8)" in reason for reason in summary.reasons)


def test_the_wrong_arm_is_refused(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    with pytest.raises(BadInput, match="expected a run of the arm 'cold', found 'shadow'"):
        summarise(shadow, cold)


def test_a_run_without_faults_or_requests_is_summarised_all_the_same(tmp_path: Path) -> None:
    quiet = Sample("cold", [], [], 0.0, 0.0, kills_s=(), end_s=1.0)
    summary = summarise(write(tmp_path / "cold", quiet), write(tmp_path / "shadow", sample("shadow")))
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert summary.cold.kills == 0


def test_the_files_are_written_and_read_back() -> None:
    out = comparison()
    summary = summarise(RunFolder(out.parent / "cold"), RunFolder(out.parent / "shadow"))
    assert msgspec.json.decode((out / "summary.json").read_bytes(), type=Summary) == summary
    assert sorted(p.name for p in out.iterdir()) == ["index.html", "summary.json"]


def test_a_place_that_cannot_be_written_and_a_folder_that_is_none_are_said_in_one_line(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    with pytest.raises(BadRunFolder, match="no such folder"):
        write_comparison(cold.path, tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "out").write_text("a file is in the way")
    with pytest.raises(MachineLimit, match="--out"):
        write_comparison(cold.path, shadow.path, tmp_path / "out")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"scenario": "kill-active"', '"scenario": "another"', "scenario"),
        ('"rate": 0.74', '"rate": 5.0', "configuration (rate)"),
        ('"commit": "0000000000000000"', '"commit": "1111111111111111"', "commit"),
        ('"cores": 2', '"cores": 64', "machine (cores)"),
        ('"python": "3.11.2"', '"python": "3.13.0"', "versions (python)"),
    ],
)
def test_two_different_experiments_are_not_compared(tmp_path: Path, before: str, after: str, words: str) -> None:
    cold, shadow = pair(tmp_path)
    path = shadow.path / "manifest.json"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    summary = summarise(cold, RunFolder(shadow.path))
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert any(words in reason for reason in summary.reasons)


def test_the_summary_says_which_check_was_not_passed(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    first, *rest = shadow.verdicts
    shadow.write_verdicts([msgspec.structs.replace(first, verdict=Verdict.FAIL, found="broken on purpose"), *rest])
    summary = summarise(cold, RunFolder(shadow.path))
    assert summary.verdict is Verdict.FAIL
    assert any("broken on purpose" in reason for reason in summary.reasons)
    assert any("broken on purpose" in reason for reason in summary.shadow.reasons)


def test_the_ratio_has_its_range(tmp_path: Path) -> None:
    summary = summarise(*pair(tmp_path))
    assert summary.ratio_recovery_min is not None
    assert summary.ratio_recovery is not None
    assert summary.ratio_recovery_max is not None
    assert summary.ratio_recovery_min < summary.ratio_recovery < summary.ratio_recovery_max

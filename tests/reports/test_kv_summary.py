"""The summary of prefill/decode runs: exact figures of made-up runs, and never a pass for a broken one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.errors import BadInput, BadRunFolder
from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict
from reference_impl.rules.events import EventKind
from reports.kv.arms import KvArm
from reports.kv.lead import lead
from reports.kv.summary import KvSummary, summarise
from reports.kv.turns import Turns
from tests.reports.kv_runs import AHEAD_S, ARMS, KvRun, d_crash, quiet, surge, two_turn
from tests.reports.runs import cut_short, edit_events
from workloads.rows import Outcome


def written(tmp_path: Path, *runs: KvRun) -> list[RunFolder]:
    return [run.write(tmp_path / f"{number}-{run.arm}") for number, run in enumerate(runs)]


def summary_of(tmp_path: Path, *runs: KvRun) -> KvSummary:
    return summarise(written(tmp_path, *runs))


def test_a_crash_by_design_in_exact_figures(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, *(d_crash(arm) for arm in reversed(ARMS)))
    assert list(summary.runs) == list(ARMS)  # the lease first, then the longest timeout, in whatever order they came
    assert (summary.verdict, summary.reasons) == (Verdict.PASS, [])
    lease, long, short = summary.runs.values()
    for arm, blocks, reclaim_s, block_seconds in (
        (lease, 24_000, 17, 24_000 * 17), (long, 24_000, 478, 11_364_000),
        (short, 8_000, 3, 2_000 * sum(49 + n * 9 / 11 - 55 for n in range(8, 12))),
    ):  # fmt: skip
        assert arm.crash is not None
        assert (arm.crash.crashes, arm.crash.blocks, arm.crash.standing) == (1, blocks, 0)
        assert arm.at_full_scale.reclaim_s == pytest.approx(reclaim_s)
        assert arm.crash.reclaim_s == pytest.approx(reclaim_s / 10)
        assert arm.at_full_scale.block_seconds == pytest.approx(block_seconds, rel=1e-6)
    assert [arm.at_full_scale.promised_s for arm in summary.runs.values()] == pytest.approx([28, 478, 3])
    assert [arm.crash.late for arm in summary.runs.values() if arm.crash] == [0, 12, 0]
    assert summary.ratio_reclaim == pytest.approx(478 / 17)
    assert summary.ratio_of == "single-timeout-480"
    assert lead(summary) == (
        "After D's crash the lease design freed its 24,000 blocks in 17.0 s; one timeout of 480 s held its 24,000 "
        "blocks for 478 s (28 times longer); one timeout of 5 s freed 8 of 46 leases while their readers still lived; "
        "no answer was wrong anywhere."
    )


def test_leases_and_loads_are_counted_from_events(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, *(d_crash(arm) for arm in ARMS))
    lease, long, short = summary.runs.values()
    for arm, extended, early in ((lease, 18, 0), (long, 0, 0), (short, 0, 8)):
        counts = arm.leases
        assert (counts.granted, counts.released, counts.expired, counts.died, counts.standing) == (46, 34, 12, 0, 0)
        assert (counts.extended, counts.freed_early, counts.freed_early_blocks) == (extended, early, early * 2_000)
        assert (counts.claims_late, counts.claims_refused) == (early, early)
        assert (arm.loads.done, arm.loads.failed) == (34, early)
        assert arm.loads.bytes_read == 34 * 2_000 * 4096
        assert (arm.requests, arm.requests_ok, arm.requests_failed) == (46, 34, 12)
    assert [arm.recomputed_tokens for arm in summary.runs.values()] == [0, 0, 320_000]
    assert [arm.waiting_max for arm in summary.runs.values()] == [6, 6, 6]  # the prefill side's 99 are no reader's
    assert lease.leases.blocks_max == 26_000
    assert lease.pool_blocks == 65_536
    assert (lease.timeout_s, lease.extension_s, long.timeout_s, long.extension_s) == (30, 20, 480, None)
    assert (lease.loads.handshake_ms.n, lease.loads.handshake_ms.p50) == (1, 21.0)


def test_the_time_of_a_load_splits_into_waiting_and_reading(tmp_path: Path) -> None:
    run = quiet()
    run.load(25, "slow", waited_ms=100.0, read_ms=50.0)
    run.load(25, "nothing-left-to-read", blocks=0, read_ms=0.0)
    loads = summary_of(tmp_path, run).runs["lease"].loads
    assert (loads.done, loads.waited_ms.p50, loads.waited_ms.p99, loads.read_ms.p50) == (22, 12.0, 100.0, 8.0)
    assert (loads.bytes_per_s.n, loads.bytes_per_s.p50) == (21, pytest.approx(2_000 * 4096 / 0.008))


def test_ttft_of_all_requests_with_the_failed_ones_censored(tmp_path: Path) -> None:
    lease = summary_of(tmp_path, d_crash("lease")).runs["lease"]
    assert (lease.ttft_ms.n, lease.ttft_ms.censored, lease.ttft_ms.p99) == (46, 12, None)
    assert lease.ttft_ms.p50 == pytest.approx(300)
    assert lease.at_full_scale.ttft_ms.p50 == pytest.approx(3_000)


def test_a_surge_tells_what_a_short_timeout_takes_from_living_readers(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, *(surge(arm) for arm in ARMS))
    lease, long, short = summary.runs.values()
    assert [arm.crash for arm in summary.runs.values()] == [None, None, None]
    assert [arm.leases.freed_early for arm in (lease, long, short)] == [0, 0, 38]
    assert [arm.recomputed_tokens for arm in (lease, long, short)] == [0, 0, 38 * 32_000]
    assert summary.verdict is Verdict.PASS
    assert lead(summary).startswith(
        "With up to 27 requests waiting on D, the lease design freed none of 40 leases too "
    )
    assert "one timeout of 5 s freed 38 of 40 leases while their readers still lived, and 1,216,000 tokens" in lead(
        summary
    )


def turns_of(arm: KvArm) -> Turns:
    assert arm.turns is not None
    return arm.turns


@pytest.mark.parametrize(
    ("arm", "ahead_s", "loaded", "declined", "late", "early"),
    [
        ("lease", AHEAD_S, 20, 10, 0, 0), ("lease", -AHEAD_S, 20, 10, 0, 0),
        ("lease-uncorrected", AHEAD_S, 21, 0, 9, 0), ("lease-uncorrected", -AHEAD_S, 0, 10, 0, 20),
    ],
)  # fmt: skip
def test_turns_are_told_by_the_holders_own_truth(
    tmp_path: Path, arm: str, ahead_s: float, loaded: int, declined: int, late: int, early: int
) -> None:
    found = turns_of(summary_of(tmp_path, two_turn(arm, ahead_s)).runs[arm])
    assert (found.judged, found.loaded, found.declined, found.too_late, found.too_early) == (
        30, loaded, declined, late, early
    )  # fmt: skip
    assert (found.kept, found.kept_expired, found.other, found.unmeasured) == (30, 9, 0, 0)
    assert found.tokens_loaded == loaded * 500 * 16


def test_a_load_that_gave_up_before_it_could_judge_is_unmeasured(tmp_path: Path) -> None:
    run = two_turn()
    reason = "the turn's blocks have expired"
    run.say(3, "p0-e1", EventKind.LOAD_FAILED, "early-bird", reason=reason, policy="recompute", expired=True)
    arm = summary_of(tmp_path, run).runs["lease"]
    assert turns_of(arm).unmeasured == 1
    assert arm.loads.failed == 0  # too late is no failure


def test_clocks_are_set_beside_their_estimates(tmp_path: Path) -> None:
    (clock,) = summary_of(tmp_path, two_turn()).runs["lease"].clocks
    assert (clock.reader, clock.holder, clock.set_s, clock.measured) == ("p0", "d0", 5_000.0, 1)
    assert clock.estimate_s == pytest.approx(5_000.0002)
    assert clock.off_ms_max == pytest.approx(0.2, abs=1e-6)
    assert (clock.error_ms_max, clock.within) == (0.6, True)
    wrong = two_turn(ahead_s=AHEAD_S)
    wrong.configuration["clock_offsets_s"] = {"d0": AHEAD_S - 0.001}
    assert not summary_of(tmp_path / "wrong", wrong).runs["lease"].clocks[0].within


def test_the_clock_that_the_scenario_sets_is_known_without_more(tmp_path: Path) -> None:
    run = two_turn()
    del run.configuration["clock_offsets_s"]
    run.configuration["scenario"]["kv"]["decode_clock_offset_s"] = AHEAD_S
    assert summary_of(tmp_path, run).runs["lease"].clocks[0].set_s == AHEAD_S


def test_turns_by_think_time_as_engines_and_as_the_client_saw_them(tmp_path: Path) -> None:
    below, near, above = summary_of(tmp_path, two_turn()).runs["lease"].think
    assert (below.judged, below.loaded, below.rows) == (18, 18, 18)
    assert (near.judged, near.loaded, near.rows) == (5, 2, 5)
    assert (above.judged, above.loaded, above.rows) == (7, 0, 7)
    assert (below.tokens_loaded.p50, above.tokens_loaded.p50, below.cached_tokens.p50) == (8_000, 0, 8_000)
    assert (below.ttft_ms.p50, above.ttft_ms.p50) == (pytest.approx(50), pytest.approx(400))


def test_two_turns_in_one_sentence(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, two_turn("lease-uncorrected"), two_turn())
    assert summary.verdict is Verdict.PASS  # the twin is there to be compared with
    assert lead(summary) == (
        "Of 30 later turns, with clocks 5,000 s apart, 20 read their KV from D and 10 were declined in time, none too "
        "late and none too early; without correction 9 came too late and 0 were declined too early; no answer was "
        "wrong anywhere."
    )


def test_a_run_without_faults_says_what_it_did(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, quiet())
    assert (summary.verdict, summary.ratio_reclaim, summary.runs["lease"].crash) == (Verdict.PASS, None, None)
    assert lead(summary) == "20 of 20 requests answered, 20 loads of KV done and 0 failed; no answer was wrong."


@pytest.mark.parametrize("arm", ARMS)
def test_one_wrong_answer_anywhere_fails_the_whole_page(tmp_path: Path, arm: str) -> None:
    runs = [d_crash(each) for each in ARMS]
    next(run for run in runs if run.arm == arm).request(70, 71, content_ok=False)
    summary = summary_of(tmp_path, *runs)
    assert summary.verdict is Verdict.FAIL
    assert summary.runs[arm].content_wrong == 1
    assert any(reason.endswith("1 answer had wrong tokens.") for reason in summary.reasons)
    assert lead(summary).endswith("1 answer was wrong.")


def test_unchecked_answers_are_told(tmp_path: Path) -> None:
    run = quiet()
    run.request(22, 23, content_ok=None)
    run.request(22, 23, outcome=Outcome.FAIL)
    summary = summary_of(tmp_path, run)
    assert summary.runs["lease"].content_unchecked == 1
    assert lead(summary).endswith("no answer was wrong, 1 could not be checked.")


def test_the_lease_design_must_pass_and_a_baseline_need_not(tmp_path: Path) -> None:
    runs = [d_crash(arm) for arm in ARMS]
    assert {run.arm: run.verdicts[-1].verdict for run in runs} == {
        "lease": Verdict.PASS, "single-timeout-480": Verdict.FAIL, "single-timeout-5": Verdict.FAIL
    }  # fmt: skip
    runs[0].verdicts.append(failed("leases-kept"))
    summary = summary_of(tmp_path, *runs)
    assert summary.verdict is Verdict.FAIL
    assert summary.reasons == ["Leases: The check leases-kept: fail. It found something"]


def failed(name: str) -> CheckResult:
    return CheckResult(
        check=name, title=f"The check {name}", rules=[], verdict=Verdict.FAIL, found="It found something"
    )


def test_a_baseline_alone_is_judged_like_any_run(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, d_crash("single-timeout-480"))
    assert summary.verdict is Verdict.FAIL
    assert summary.ratio_reclaim is None
    assert lead(summary).startswith("After D's crash one timeout of 480 s freed its 24,000 blocks in 478 s")


@pytest.mark.parametrize("arm", ["lease", "single-timeout-480"])
def test_an_incomplete_run_passes_nothing_even_as_a_baseline(tmp_path: Path, arm: str) -> None:
    folders = written(tmp_path, *(d_crash(each) for each in ARMS))
    folders = [cut_short(f) if f.manifest.arm == arm else f for f in folders]
    summary = summarise(folders)
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert any("incomplete: events.jsonl has no footer" in reason for reason in summary.reasons)
    assert lead(summary).startswith("Seen, but not proved: after D's crash")


@pytest.mark.parametrize("arm", ["lease", "single-timeout-480"])
def test_a_fault_without_proof_proves_nothing_even_in_a_baseline(tmp_path: Path, arm: str) -> None:
    folders = written(tmp_path, *(d_crash(each) for each in ARMS))
    folders = [edit_events(f, without="fault.proved") if f.manifest.arm == arm else f for f in folders]
    summary = summarise(folders)
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert any("1 of its faults left no proof" in reason for reason in summary.reasons)


def test_what_was_still_held_at_the_end_was_held_for_longer_than_it_was_watched(tmp_path: Path) -> None:
    cut = d_crash("single-timeout-480")
    cut.events = [e for e in cut.events if e.subject != "left-11" or e.kind is not EventKind.LEASE_EXPIRED]
    summary = summary_of(tmp_path, d_crash("lease"), cut)
    long = summary.runs["single-timeout-480"]
    assert long.crash is not None
    assert (long.crash.standing, long.crash.reclaim_s) == (1, None)
    assert long.at_full_scale.watched_s == pytest.approx(540)
    assert summary.ratio_reclaim == pytest.approx(540 / 17)
    assert "one timeout of 480 s still held its 24,000 blocks after 540 s (more than 32 times longer)" in lead(summary)


def test_runs_that_differ_in_more_than_their_design_cannot_be_compared(tmp_path: Path) -> None:
    other = d_crash("single-timeout-480", scale=5.0)
    other.configuration["profile"] = {"kv_blocks": 1}
    summary = summary_of(tmp_path, d_crash("lease"), other)
    assert summary.verdict is Verdict.INCONCLUSIVE
    text = " ".join(summary.reasons)
    assert "The runs differ in time_scale (10.0, 5.0)" in text
    assert "The runs differ in configuration (profile, terms)" in text


def test_a_shorter_timeout_in_the_scenario_is_the_design_and_no_difference(tmp_path: Path) -> None:
    short = d_crash("single-timeout-5")
    short.configuration["scenario"]["kv"]["single_timeout"] = 5.0
    assert summary_of(tmp_path, d_crash("lease"), short).verdict is Verdict.PASS


def test_runs_of_one_design_are_told_apart(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, d_crash("lease"), d_crash("lease"))
    assert [(key, arm.title) for key, arm in summary.runs.items()] == [
        ("lease", "Leases"), ("lease-2", "Leases, run 2")
    ]  # fmt: skip


def test_runs_of_several_scenarios_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="d_crash, surge; draw them apart"):
        summary_of(tmp_path, d_crash("lease"), surge("lease"))


def test_an_unjudged_run_and_one_without_requests_do_not_pass(tmp_path: Path) -> None:
    run = quiet()
    run.requests.clear()
    summary = summarise([run.write(tmp_path / "run", judged=False)])
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert [reason.partition(": ")[2][:20] for reason in summary.reasons] == [
        "No check has judged ",
        "It holds no request.",
    ]
    assert "no answer could be checked" in lead(summary)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [("terms", {"single_timeout": 0}, "single_timeout"), ("terms", {"nonsense": 1}, "nonsense"),
     ("roles", None, "roles"), ("roles", {"p0": 3}, "roles"), ("profile", {"kv_blocks": "many"}, "kv_blocks"),
     ("clock_offsets_s", {"d0": "late"}, "clock_offsets_s")],
)  # fmt: skip
def test_a_manifest_that_makes_no_sense_is_a_bad_run_folder(
    tmp_path: Path, name: str, value: object, problem: str
) -> None:
    run = quiet()
    run.configuration[name] = value
    with pytest.raises(BadRunFolder, match=problem):
        summary_of(tmp_path, run)


def test_an_event_without_its_number_is_a_bad_run_folder(tmp_path: Path) -> None:
    run = quiet()
    run.say(2, "d0-e1", EventKind.LOAD_DONE, "half", blocks=3)
    with pytest.raises(BadRunFolder, match=r"load\.done of half: read_ms is None"):
        summary_of(tmp_path, run)


def test_the_summary_can_be_read_back(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, *(d_crash(arm) for arm in ARMS))
    assert msgspec.json.decode(msgspec.json.encode(summary), type=KvSummary) == summary

"""Every check on moving KV accepts a clean history and catches its broken twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness.checks import CHECKS, OF_MOVING_KV, judge, overall
from harness.errors import BadRunFolder
from harness.verdicts import Verdict
from reference_impl.rules.events import EventKind
from tests.harness.histories import at, clean
from tests.harness.kv_histories import KILL_S, KvHistory

Mutation = Callable[[KvHistory], None]


def test_a_clean_history_passes_every_check(tmp_path: Path) -> None:
    results = judge(KvHistory().write(tmp_path / "run"))
    assert {r.check for r in results} >= OF_MOVING_KV
    assert [(r.check, r.found) for r in results if r.verdict is not Verdict.PASS] == []
    assert overall(results) is Verdict.PASS


def test_a_run_in_which_no_kv_moves_is_not_asked_about_it(tmp_path: Path) -> None:
    assert not {r.check for r in judge(clean(tmp_path / "run"))} & OF_MOVING_KV


def lease_ends_early(h: KvHistory) -> None:
    h.drop(lambda e: e.kind is EventKind.LEASE_RELEASED and e.subject == "p45")
    h.expire(45.2, "p45")


def reader_comes_too_late(h: KvHistory) -> None:
    h.of_p(50, EventKind.CLAIM_REFUSED, "p49", reader="r", reason="no lease")


def dead_blocks_are_held(h: KvHistory) -> None:
    h.drop(lambda e: e.kind is EventKind.LEASE_EXPIRED and e.subject == "p17")
    h.expire(KILL_S + 6.0, "p17")


def dead_blocks_are_never_freed(h: KvHistory) -> None:
    h.drop(lambda e: e.kind is EventKind.LEASE_EXPIRED and e.subject == "p18")


def nothing_was_left_behind(h: KvHistory) -> None:
    h.drop(lambda e: e.subject in ("p17", "p18"))


def a_living_readers_lease_runs_out_in_the_faults_window(h: KvHistory) -> None:
    h.drop(lambda e: e.kind is EventKind.LEASE_RELEASED and e.subject == "p21")
    h.expire(26, "p21", heard_from="d1-e1.x")


def no_load_is_done(h: KvHistory) -> None:
    h.drop(lambda e: e.kind is EventKind.LOAD_DONE)


def a_load_fails_for_no_reason(h: KvHistory) -> None:
    h.load_failed(50, "p49")


def no_leases(h: KvHistory) -> None:
    h.drop(lambda e: e.kind.startswith("lease."))


def declined_early(h: KvHistory) -> None:
    h.drop(lambda e: e.kind is EventKind.TURN_JUDGED and e.subject == "again4")
    h.judge(9 + 5, "t4", live=False, reader="again4")


def taken_late(h: KvHistory) -> None:
    h.drop(lambda e: e.kind is EventKind.TURN_JUDGED and e.subject == "again5")
    h.judge(11 + 12, "t5", live=True, reader="again5")


def refused_by_the_holder(h: KvHistory) -> None:
    h.of_d(14, EventKind.CLAIM_REFUSED, "t4", reader="again4", reason="no lease")


def only_live_turns(h: KvHistory) -> None:
    h.drop(lambda e: e.kind is EventKind.TURN_JUDGED and not e.detail["live"])


def blocks_are_held_at_the_end(h: KvHistory) -> None:
    h.metrics.append((at(67.5), "p0/p0-e1", "pdproof:lease_blocks_held", 125.0))


def request_waits_at_the_end(h: KvHistory) -> None:
    h.metrics.append((at(67.5), "d1/d1-e1", "vllm:num_requests_waiting", 1.0))


def nobody_looked(h: KvHistory) -> None:
    h.metrics = []


TWINS = [
    ("leases-kept", lease_ends_early, Verdict.FAIL),
    ("leases-kept", reader_comes_too_late, Verdict.FAIL),
    ("leases-kept", a_living_readers_lease_runs_out_in_the_faults_window, Verdict.FAIL),
    ("leases-kept", no_leases, Verdict.INCONCLUSIVE),
    ("kv-loaded", no_load_is_done, Verdict.INCONCLUSIVE),
    ("kv-loaded", a_load_fails_for_no_reason, Verdict.FAIL),
    ("reclaim", dead_blocks_are_held, Verdict.FAIL),
    ("reclaim", dead_blocks_are_never_freed, Verdict.FAIL),
    ("reclaim", nothing_was_left_behind, Verdict.INCONCLUSIVE),
    ("turns", declined_early, Verdict.FAIL),
    ("turns", taken_late, Verdict.FAIL),
    ("turns", refused_by_the_holder, Verdict.FAIL),
    ("turns", only_live_turns, Verdict.INCONCLUSIVE),
    ("all-free", blocks_are_held_at_the_end, Verdict.FAIL),
    ("all-free", request_waits_at_the_end, Verdict.FAIL),
    ("all-free", dead_blocks_are_never_freed, Verdict.FAIL),
    ("all-free", nobody_looked, Verdict.INCONCLUSIVE),
]


@pytest.mark.parametrize(("check", "break_it", "verdict"), TWINS, ids=[f"{c}-{m.__name__}" for c, m, _ in TWINS])
def test_a_broken_history_is_caught(tmp_path: Path, check: str, break_it: Mutation, verdict: Verdict) -> None:
    history = KvHistory()
    break_it(history)
    result = CHECKS[check](history.write(tmp_path / "run"))
    assert result.verdict is verdict, result.found


def test_every_check_has_a_twin_that_it_must_catch() -> None:
    assert {check for check, _, _ in TWINS} == OF_MOVING_KV


def test_a_turn_that_its_client_renewed_is_judged_by_the_renewal(tmp_path: Path) -> None:
    history = KvHistory()
    history.of_d(8, EventKind.TURN_RENEWED, "t3", duration_s=10.0)  # granted at 7, judged dead at 19
    result = CHECKS["turns"](history.write(tmp_path / "run"))
    assert result.verdict is Verdict.PASS, result.found
    history.of_d(12, EventKind.TURN_RENEWED, "t3", duration_s=10.0)  # and so it lived until 22
    result = CHECKS["turns"](history.write(tmp_path / "again"))
    assert result.verdict is Verdict.FAIL, result.found


def test_a_load_that_fails_in_a_faults_window_or_comes_too_late_for_a_turn_is_explained(tmp_path: Path) -> None:
    history = KvHistory()
    history.load_failed(KILL_S + 1, "p19")
    history.load_failed(50, "t3", expired=True)
    result = CHECKS["kv-loaded"](history.write(tmp_path / "run"))
    assert result.verdict is Verdict.PASS, result.found


def test_a_living_readers_lease_is_not_counted_as_the_dead_ones(tmp_path: Path) -> None:
    history = KvHistory()
    a_living_readers_lease_runs_out_in_the_faults_window(history)
    history.grant(19.5, "other")
    history.expire(29.9, "other", heard_from="d1-e1.x")
    result = CHECKS["reclaim"](history.write(tmp_path / "run"))
    assert result.verdict is Verdict.PASS, result.found
    assert msgspec.to_builtins(result.evidence)["leases"] == 2


def test_a_folder_whose_terms_are_missing_is_not_judged_without_them(tmp_path: Path) -> None:
    history = KvHistory()
    del history.configuration["terms"]
    with pytest.raises(BadRunFolder, match=r"configuration\.terms is missing"):
        judge(history.write(tmp_path / "run"))


def test_the_old_design_fails_what_leases_promise(tmp_path: Path) -> None:
    history = KvHistory()
    history.arm = "single-timeout-48"
    history.configuration["terms"] = history.configuration["terms"] | {"design": "single-timeout"}  # type: ignore[operator]
    history.drop(lambda e: e.kind is EventKind.LEASE_EXPIRED and e.subject in ("p17", "p18"))
    for name, granted_s in (("p17", 17.1), ("p18", 18.1)):
        history.expire(granted_s + 48, name)
    result = CHECKS["reclaim"](history.write(tmp_path / "run"))
    assert result.verdict is Verdict.FAIL
    assert msgspec.to_builtins(result.evidence)["seconds_max"] == pytest.approx(46.1)

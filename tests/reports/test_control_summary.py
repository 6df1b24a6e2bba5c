"""The summary of a run with a control plane: figures are those of the rows, and a broken run is never a pass."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest

from harness.errors import BadRunFolder
from harness.latency import percentiles
from harness.operation_history import counts_of
from harness.rules import catalogue, checkout_tests
from harness.run_folder import RunFolder
from harness.verdicts import CheckResult, Verdict
from reference_impl.rules.blockgroups import Refusal
from reference_impl.rules.events import Event, EventKind
from reports.control.caught import caught_by, tag_of
from reports.control.lead import effects, lead
from reports.control.questions import QUESTIONS, Status
from reports.control.story import story
from reports.control.strikes import Sort, strikes
from reports.control.summary import ControlSummary, Read, read
from tests.harness.operation_histories import Flaw
from tests.reports.control_runs import BEGAN_NS, FAULTS, ControlRun, S, broken, idle, reply_loss, storm_of
from tests.reports.runs import cut_short


@functools.cache
def whole() -> Read:
    """A run under all faults, read once a session; its folder is gone, its rows are there."""
    home = Path(tempfile.mkdtemp(prefix="pdproof-control-"))
    try:
        found = read(reply_loss().write(home / "run"))
        assert found.run.storm
        return found
    finally:
        shutil.rmtree(home)


def summary_of(tmp_path: Path, run: ControlRun, **how: Any) -> ControlSummary:
    return read(run.write(tmp_path / "run", **how)).summary


def test_a_run_under_faults_in_the_figures_of_its_rows() -> None:
    summary, rows = whole().summary, whole().run.control
    assert (summary.verdict, summary.reasons, summary.breaches) == (Verdict.PASS, [], {})
    assert summary.counts == counts_of(rows)
    assert summary.counts.invocations == len(rows.invocations)
    assert summary.counts.replayed == sum(i.replayed for i in rows.invocations) > 0
    assert summary.counts.double_effects == summary.counts.unresolved == 0
    assert (
        summary.seconds == (max(i.end_ns for i in rows.invocations) - min(i.start_ns for i in rows.invocations)) / 1e9
    )
    told = lead(summary)
    assert told.startswith(f"{summary.counts.operations:,} operations in ")
    assert ", through 8 crashes and 7 lost or late replies: " in told
    assert f" {summary.counts.retried:,} retried, {summary.counts.replayed:,} answers replayed, " in told
    assert told.endswith("no operation had its effect twice, and no user's answer was wrong.")


def test_faults_are_counted_by_kind_as_they_were_injected_proved_and_struck() -> None:
    proved = whole().summary.proved
    assert (proved.crashes, proved.replies, proved.repeats, proved.full, proved.unproved) == (8, 7, 3, 3, 0)
    kinds = {key: (f.injected, f.proved, f.struck) for key, f in whole().summary.faults.items()}
    wanted: Counter[str] = Counter()
    for _, _, point, action, times in FAULTS:
        wanted[f"{action}@{point}" if point else "blocks_kill"] += times
    assert {key: struck for key, (_, _, struck) in kinds.items()} == wanted
    assert kinds["drop@after_commit_before_reply"] == (1, 1, 4)
    assert kinds["exit@after_commit_before_reply"] == (3, 3, 3)


def test_every_operation_that_a_fault_caught_stands_in_one_column() -> None:
    for key, fate in whole().summary.faults.items():
        assert fate.caught == fate.applied_once + fate.refused + fate.nothing + fate.wrong, key
        assert fate.wrong == fate.double_effects == 0
        if fate.sort is Sort.LOST:
            assert fate.caught >= fate.struck - 1  # two of them may be of one operation
            assert fate.retried >= fate.caught


def test_a_crash_catches_what_is_under_way_at_its_node_and_nothing_else() -> None:
    strike = next(s for s in strikes(whole().run) if s.key == "exit@after_commit_before_reply")
    here = [i for i in whole().run.control.invocations if i.node == strike.node]
    caught = caught_by(strike, here)
    assert caught
    assert all(i.start_ns <= strike.moments[0] <= i.end_ns for i in caught)
    assert len(caught) == sum(i.start_ns <= strike.moments[0] <= i.end_ns for i in here)


def test_a_dropped_reply_catches_only_calls_of_its_method_that_went_without_an_answer() -> None:
    strike = next(s for s in strikes(whole().run) if s.sort is Sort.LOST)
    caught = caught_by(strike, [i for i in whole().run.control.invocations if i.node == strike.node])
    assert {i.method for i in caught} <= {tag_of(method) for method in strike.methods}
    assert all(i.attempts > 1 or i.outcome == "unknown" for i in caught)


@pytest.mark.parametrize(("method", "tag"), [("StartMigrate", "start_migrate"), ("Pin", "pin"), ("", "")])
def test_methods_are_told_by_their_requests_tags(method: str, tag: str) -> None:
    assert tag_of(method) == tag


def test_crashes_take_as_long_as_their_node_applies_nothing() -> None:
    found = whole()
    assert found.summary.outages.crashes == found.summary.outages.back == len(found.outages) == 8
    assert found.summary.outages.unexplained == 0
    for outage in found.outages:
        applied = [e.t_ns for e in found.run.events_of(EventKind.OPERATION_APPLIED)
                   if e.actor == f"{outage.node}-blocks" and e.t_ns > outage.exited_ns]  # fmt: skip
        assert outage.applied_s == pytest.approx((min(applied) - outage.exited_ns) / 1e9)
        assert outage.started_s == pytest.approx(0.0295)
    assert found.summary.outages.applied_s.max == max(o.applied_s or 0 for o in found.outages)


def test_a_crash_that_no_fault_explains_is_told_and_no_pass(tmp_path: Path) -> None:
    run = reply_loss(seconds=12, faults=[])
    at = BEGAN_NS + 5 * S
    run.events.append(Event(at, 0, "p0-supervisor", EventKind.PROCESS_EXITED, "p0-blocks",
                            {"pid": 4000, "status": -11, "worker_id": "p0"}))  # fmt: skip
    late = run.control.invocations[-1].end_ns + S
    run.events.append(Event(late, 0, "d0-supervisor", EventKind.PROCESS_EXITED, "d0-blocks",
                            {"pid": 4000, "status": -9, "worker_id": "d0"}))  # fmt: skip
    summary = summary_of(tmp_path, run)
    assert (summary.outages.crashes, summary.outages.unexplained) == (1, 1)  # the other one ended with the run
    assert summary.reasons == ["The block service of p0 ended 1 time without a fault that explains it."]
    assert summary.verdict is Verdict.INCONCLUSIVE


def test_latencies_are_of_calls_that_were_applied_and_the_unknown_stand_beside() -> None:
    rows = whole().run.control.invocations
    for name, method in whole().summary.methods.items():
        of = [i for i in rows if name in (i.method, "all")]
        assert method.invocations == len(of) == method.ok + method.refused + method.failed + method.unknown
        assert method.ms == percentiles(pd.Series([i.latency_ms for i in of if i.outcome == "ok"], dtype=float))
        assert method.attempts_max == max(i.attempts for i in of)
        assert method.attempts_mean == pytest.approx(sum(i.attempts for i in of) / sum(i.attempts > 0 for i in of))


def test_users_requests_are_told_apart_by_whether_a_service_was_away() -> None:
    u, requests = whole().summary.users, whole().run.requests
    away = [(o.exited_ns, o.exited_ns + round((o.applied_s or 0) * 1e9)) for o in whole().outages]
    during = [r for r in requests.itertuples() if any(r.intended_ns < end and r.end_ns > start for start, end in away)]
    assert (u.requests, u.ok, u.failed, u.wrong) == (len(requests), len(requests), 0, 0)
    assert (u.during, u.during_failed) == (len(during), 0)
    assert u.ttft_before_ms.n + u.ttft_after_ms.n == len(requests)


def test_migrations_are_those_of_the_sources_databases() -> None:
    moves, rows = whole().summary.moves, whole().run.control
    started = {(e.node, e.tenant, e.key) for e in rows.effects if e.kind == "migration"}
    assert moves.started == len(started) == len(whole().moves) == sum(moves.by_status.values())
    assert moves.bytes_moved == moves.by_status["SUCCEEDED"] * (48 << 20)
    assert sum(moves.owned.values()) + moves.evicted + moves.ownerless == moves.groups
    assert (moves.ownerless, moves.owner_breaches) == (0, 0)
    for move in whole().moves:
        key = (move.src, move.tenant, move.operation_id)
        of = [e.at_ns for e in rows.effects if e.kind == "migration" and (e.node, e.tenant, e.key) == key]
        assert move.started_ns == min(of)


def test_a_counter_gains_over_the_restarts_of_its_process(tmp_path: Path) -> None:
    run = idle()
    for n, value in enumerate([2, 5, 1, 4]):
        run.metrics.append((BEGAN_NS + n, "p0/blocks", "rate_limited_count remote_read_qps_token refused", value))
    run.metrics.append((BEGAN_NS, "p0/blocks", "rate_limited_count migration_bytes_token delayed", 10))
    run.metrics.append((BEGAN_NS, "p0/blocks", "rpc_queue_length_of_something_else", 10))
    gauge = summary_of(tmp_path, run).metrics["rate_limited_count"]
    assert (gauge.of, gauge.samples) == ({"p0": 5 + 4 + 10}, 5)


def test_a_storm_is_what_its_rows_come_to() -> None:
    storms = whole().summary.storms
    assert list(storms) == ["with_budget", "without_budget"]
    for key, budget in (("with_budget", True), ("without_budget", False)):
        result, storm = storm_of(budget=budget), storms[key]
        assert storm.calls == sum(r.calls_started for r in result.rows)
        assert storm.attempts == sum(r.attempts_arrived for r in result.rows)
        assert storm.amplification == pytest.approx(storm.attempts / storm.calls)
        assert storm.outage_amplification == result.storm_amplification
    assert storms["with_budget"].recovered_s == 0


def test_a_run_folder_without_a_storm_has_none_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    run = idle().write(tmp_path / "run")
    assert run.storm == []
    (run.path / "storm.json").write_text('[{"budget": 3}]')
    with pytest.raises(BadRunFolder, match=r"storm\.json"):
        _ = RunFolder(run.path).storm


def test_a_doubled_effect_fails_the_run_whatever_the_checks_say(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, broken())
    assert all(c.verdict is Verdict.PASS for c in broken().verdicts)
    assert summary.verdict is Verdict.FAIL
    assert summary.counts.double_effects > 0
    plural = "" if summary.counts.double_effects == 1 else "s"
    assert summary.reasons[0] == f"{summary.counts.double_effects} effect{plural} came a second time."
    assert any(reason.startswith("KVC-IDEM-001: ") for reason in summary.reasons)
    assert "2 of its faults left no proof that they happened." in summary.reasons
    assert summary.questions["q6"].status is Status.BROKEN
    assert (summary.users.wrong, summary.users.failed) == (1, 1)
    assert "1 user's answer was wrong" in lead(summary)
    assert summary.storms == {}
    assert (summary.faults["exit@migration_copied"].injected, summary.faults["exit@migration_copied"].struck) == (0, 0)


def test_an_operation_doubled_in_a_crash_is_no_operation_applied_once(tmp_path: Path) -> None:
    """By hand: one reserve, its node killed under it, and a second effect."""
    run = idle()
    at = BEGAN_NS + S
    asked = next(i for i in reply_loss(seconds=6).control.invocations if i.method == "reserve" and i.outcome == "ok")
    call = msgspec.structs.replace(asked, start_ns=at - 5, end_ns=at + 5, attempts=2, node="p0")
    effect = next(e for e in reply_loss(seconds=6).control.effects if e.operation_id == asked.operation_id)
    for seq, (when, kind) in enumerate([(at - 3, "group"), (at + 3, "group")], 1):
        run.control.effects.append(msgspec.structs.replace(effect, at_ns=when, kind=kind, seq=seq, node="p0"))
    run.control.invocations.append(call)
    run.events.append(Event(at, 0, "harness", EventKind.FAULT_INJECTED, "blocks_kill-1",
                            {"fault": "blocks_kill", "worker_id": "p0", "target": "p0-blocks"}))  # fmt: skip
    fate = summary_of(tmp_path, run).faults["blocks_kill"]
    assert (fate.caught, fate.applied_once, fate.wrong, fate.double_effects, fate.retried) == (1, 0, 1, 1, 1)
    assert (fate.injected, fate.proved) == (1, 0)


@pytest.mark.parametrize("flaw", [Flaw.RESULT_NOT_STORED, Flaw.ANSWERS_ANEW, Flaw.EPOCH_NOT_CHECKED])
def test_no_flawed_service_passes(tmp_path: Path, flaw: Flaw) -> None:
    summary = summary_of(tmp_path, reply_loss(flaw=flaw, seconds=16))
    assert summary.verdict is Verdict.FAIL
    assert summary.breaches
    assert Status.BROKEN in {q.status for q in summary.questions.values()}


def test_effects_without_their_log_show_under_the_crash_that_parted_them(tmp_path: Path) -> None:
    faults = [(2 + n * 1.2, node, "before_commit", "kill", 1) for n in range(12) for node in ("p0", "d0")]
    summary = summary_of(tmp_path, reply_loss(flaw=Flaw.TWO_TRANSACTIONS, seconds=18, faults=faults))
    fate = summary.faults["kill@before_commit"]
    assert summary.verdict is Verdict.FAIL
    assert fate.double_effects == summary.counts.double_effects > 0
    assert fate.caught == fate.applied_once + fate.refused + fate.nothing + fate.wrong


def test_a_run_without_checks_or_cut_short_or_idle_is_inconclusive(tmp_path: Path) -> None:
    unjudged = read(reply_loss(seconds=8, faults=[]).write(tmp_path / "unjudged", judged=False)).summary
    assert (unjudged.verdict, unjudged.reasons) == (
        Verdict.INCONCLUSIVE, ["No check has judged this run; `pdproof check` does."])  # fmt: skip
    assert lead(unjudged).startswith("Seen, but not proved: ")
    assert ", with no proved fault: " in lead(unjudged)
    short = read(cut_short(reply_loss(seconds=8, faults=[]).write(tmp_path / "short"))).summary
    assert short.verdict is Verdict.INCONCLUSIVE
    assert short.reasons[0].startswith("The run is incomplete: ")
    nothing = summary_of(tmp_path, idle())
    assert (nothing.verdict, nothing.reasons) == (Verdict.INCONCLUSIVE, ["It holds no operation."])
    assert {q.status for q in nothing.questions.values()} == {Status.NOT_SHOWN}


def test_a_failed_check_is_a_reason(tmp_path: Path) -> None:
    run = reply_loss(seconds=8, faults=[])
    run.verdicts.append(CheckResult(check="x", title="All is well", rules=[], verdict=Verdict.FAIL, found="It is not"))
    summary = summary_of(tmp_path, run)
    assert (summary.verdict, summary.reasons) == (Verdict.FAIL, ["All is well: fail. It is not"])


def test_the_questions_are_fourteen_and_a_whole_run_shows_all_of_them() -> None:
    questions = whole().summary.questions
    assert list(questions) == [f"q{n}" for n in range(1, 15)]
    assert {key: q.status for key, q in questions.items()} == dict.fromkeys(questions, Status.SHOWN)
    rows = whole().run.control.invocations
    stale = sum(i.refusal == Refusal.STALE_EPOCH for i in rows)
    assert f"{stale:,} were refused as stale" in questions["q7"].answer
    assert f"{max(i.attempts for i in rows)} attempts a call, of 6 allowed" in questions["q5"].answer
    again = sum(i.attempts > 1 for i in rows)
    assert questions["q4"].answer.startswith(f"Yes. {again:,} of {len(rows):,} calls took more than one attempt")
    assert "Every group has one owner, and none is lost on its way: pass" in questions["q8"].checks


def test_the_cases_named_beside_the_questions_exist() -> None:
    rules, tests = {rule.id for rule in catalogue()}, checkout_tests()
    assert tests is not None
    for question in QUESTIONS:
        assert question.rules
        assert set(question.rules) <= rules
        for case in question.tests:
            file, _, name = case.partition("::")
            text = (tests / file).read_text()
            assert f"def {name}(" in text, case


@pytest.mark.parametrize(
    ("key", "spoil"),
    [
        ("q1", lambda run: run.requests.clear()), ("q2", lambda run: run.lines.clear()),
        ("q3", lambda run: (run.lines.pop("clients"), run.configuration.pop("client_policy"))),
        ("q5", lambda run: (run.storms.clear(), run.configuration.pop("client_policy"))),
        ("q11", lambda run: run.metrics.clear()), ("q12", lambda run: run.metrics.clear()),
        ("q13", lambda run: run.metrics.clear()), ("q14", lambda run: run.lines.clear()),
    ],
)  # fmt: skip
def test_what_was_not_measured_is_never_shown(tmp_path: Path, key: str, spoil: Any) -> None:
    run = reply_loss(seconds=12)
    spoil(run)
    assert summary_of(tmp_path, run).questions[key].status is Status.NOT_SHOWN


def test_a_calm_run_shows_no_more_than_it_came_across(tmp_path: Path) -> None:
    run = reply_loss(seconds=10, faults=[])
    questions = summary_of(tmp_path, run).questions
    assert questions["q1"].status is questions["q4"].status is Status.NOT_SHOWN
    assert questions["q1"].answer == "No user's request was under way while a block service was away."


def _lines(change: Any) -> Any:
    def spoil(run: ControlRun) -> None:
        run.lines["p0"] = [change(line) for line in run.lines["p0"]]

    return spoil


@pytest.mark.parametrize(
    ("key", "spoil"),
    [
        ("q2", _lines(lambda line: msgspec.structs.replace(line, timeout_ms=None))),
        ("q3", _lines(lambda line: msgspec.structs.replace(line, timeout_ms=5000))),
        ("q5", lambda run: run.configuration["client_policy"].update(attempts_max=2)),
        ("q5", lambda run: run.configuration["client_policy"].update(initial_s=1.0, max_s=9.0)),
        ("q14", _lines(lambda line: msgspec.structs.replace(line, request_id=""))),
    ],
)  # fmt: skip
def test_what_the_rows_contradict_is_broken(tmp_path: Path, key: str, spoil: Any) -> None:
    run = reply_loss(seconds=12)
    spoil(run)
    assert summary_of(tmp_path, run).questions[key].status is Status.BROKEN


def test_a_wrong_answer_during_an_outage_breaks_the_first_question(tmp_path: Path) -> None:
    run = reply_loss(seconds=12)
    run.request_at(6.2, 0.3, content_ok=False)
    assert summary_of(tmp_path, run).questions["q1"].status is Status.BROKEN


def test_the_story_is_of_one_operation_through_a_crash_with_its_own_lines() -> None:
    found = story(whole().run, whole().lines)
    assert found is not None
    assert [s.t_ns for s in found.steps] == sorted(s.t_ns for s in found.steps)
    said = [s.what for s in found.steps]
    applied, ended, replayed = (
        next(n for n, what in enumerate(said) if words in what)
        for words in ("applied, and its answer kept", "has ended with status", "the kept answer is given again")
    )
    assert applied < ended < replayed
    assert found.lines
    assert {line.of("operation_id") for line in found.lines} == {found.operation_id}
    assert {line.of("block_group_id") for line in found.lines} == {
        i.block_group_id for i in whole().run.control.invocations
        if (i.node, i.tenant, i.operation_id) == (found.node, found.tenant, found.operation_id)
    }  # fmt: skip
    retry = next(line for line in found.lines if line.owner == found.node)
    assert int(retry.of("retry_count")) > 0


def test_a_log_line_that_cannot_be_read_is_counted(tmp_path: Path) -> None:
    run = reply_loss(seconds=8, faults=[]).write(tmp_path / "run")
    before = read(run).summary.log
    with (run.path / "logs" / "p0-rpc.jsonl").open("ab") as log:
        log.write(b'{"request_id": [1]}\n{"cut sh')
    after = read(RunFolder(run.path)).summary.log
    assert (after.unreadable, after.lines) == (2, before.lines)


@pytest.mark.parametrize(
    ("double", "said"),
    [(0, "no operation had its effect twice"), (1, "1 effect came twice"), (1200, "1,200 effects came twice")],
)
def test_effects_in_words(double: int, said: str) -> None:
    assert effects(double) == said


def test_without_a_callers_log_only_writes_are_held_against_a_calls_time(tmp_path: Path) -> None:
    run = reply_loss(seconds=8, faults=[])
    run.lines.pop("clients")
    run.lines["p0"].append(msgspec.structs.replace(run.lines["p0"][0], rpc_method="Accept", timeout_ms=5000))
    question = summary_of(tmp_path, run).questions["q3"]
    assert (question.status, question.answer) == (
        Status.SHOWN, "The write with most time left had 999 ms, of calls with 4,000 ms in all.")  # fmt: skip


def test_calls_that_never_left_are_no_attempts(tmp_path: Path) -> None:
    run = reply_loss(seconds=8, faults=[])
    last = run.control.invocations[-1]
    run.control.invocations.append(msgspec.structs.replace(
        last, operation_id="never-left", outcome="fail", attempts=0, answer="", refusal="", replayed=False,
        error_code="CIRCUIT_OPEN"))  # fmt: skip
    method = summary_of(tmp_path, run).methods["all"]
    assert (method.attempts_mean, method.failed) == (1.0, 1)

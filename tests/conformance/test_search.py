"""Generated histories: the search finds what is broken, makes it short, and accuses nobody else."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from faults.nixl.orders import Kind
from harness.commands.conform import command as conform
from harness.commands.replay import command as replay
from harness.conformance.defects import SEEDED, broken
from harness.conformance.exits import Exit
from harness.conformance.naming import SubjectName
from harness.conformance.process import SubjectProcess
from harness.conformance.registry import CASES
from harness.conformance.search import verdicts
from harness.conformance.search.actions import (
    Abort,
    Action,
    Again,
    Arrive,
    Crash,
    Decode,
    Freeze,
    Inject,
    LinkFault,
    Local,
    Messages,
    NextTurn,
    Pass,
    Questions,
    Reads,
    Renew,
    Restart,
    Thaw,
)
from harness.conformance.search.asked import searched
from harness.conformance.search.found import Figures, Found, History
from harness.conformance.search.history import Parameters, Side, perform, signature
from harness.conformance.search.replay import BadReplay, FixedCase, Recorded, load, save
from harness.conformance.search.search import Searched, search
from harness.conformance.stream import read_results
from harness.conformance.subject import Capability
from harness.conformance.subjects.reference import ReferenceSubject
from harness.conformance.trial import tried
from harness.conformance.watch import Breach
from harness.verdicts import Verdict
from reference_impl.realclock import now_ns

BUDGET_S = 120.0
SOAK = "PDPROOF_HISTORIES" in os.environ
"""As in `make soak`."""
TWO = [Arrive(readers=2), Decode(), Abort()]
"""One of two readers goes."""


def hunted(defect: str, seed: int, seconds: float = BUDGET_S) -> Found:
    with broken(defect):
        done = search(ReferenceSubject(), seed, seconds, first_only=True)
    assert done.found, f"{defect} was not found from seed {seed} in {done.figures.histories} histories"
    return done.found[0]


# -- what it finds --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("defect", SEEDED)
def test_each_seeded_fault_is_found_and_found_again_in_its_history(defect: str) -> None:
    found = hunted(defect, 1)
    history = found.history
    with broken(defect):
        again = perform(history.parameters, history.actions, ReferenceSubject())
    assert signature(found.breach) in map(signature, again.breaches)
    assert perform(history.parameters, history.actions, ReferenceSubject()).breaches == []


@pytest.mark.slow
@pytest.mark.skipif(not SOAK, reason="ten faults from five seeds take a quarter of an hour: make soak")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("defect", SEEDED)
def test_each_seeded_fault_is_found_within_two_minutes_from_any_seed(defect: str, seed: int) -> None:
    assert hunted(defect, seed).found_s < BUDGET_S


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["shared_freed", "abort_ends_for_all", "claim_again_reopens"])
def test_some_of_the_seeded_faults_no_fixed_case_names(defect: str) -> None:
    with broken(defect):
        caught = [name for name, case in CASES.items() if tried(case, ReferenceSubject(), 2).verdict is Verdict.FAIL]
    assert caught == []


def test_a_failure_is_made_short() -> None:
    assert hunted("expiry_twice", 1).history.actions == [Arrive()]
    assert len(hunted("wrong_id", 1).history.actions) <= 2


def test_after_a_breach_the_search_goes_on_for_others() -> None:
    with broken("expiry_twice"), broken("wrong_id"):
        done = search(ReferenceSubject(), 1, 60.0, most=150)
    rules = [found.breach.rule for found in done.found]
    assert {"O1", "C1"} <= set(rules)
    assert len({signature(found.breach) for found in done.found}) == len(rules)


def test_the_same_seed_draws_the_same_histories() -> None:
    drawn: list[list[bytes]] = [[], []]
    for kept in drawn:
        search(ReferenceSubject(), 5, 60.0, most=30, before=lambda history, to=kept: to.append(encoded(history)))
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 20


def encoded(history: History) -> bytes:
    return msgspec.json.encode(history)


def test_a_mistake_of_the_suite_is_no_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("harness.conformance.search.search.perform", mistaken)
    with pytest.raises(ZeroDivisionError):
        search(ReferenceSubject(), 1, 60.0)


# -- whom it does not accuse ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clean() -> Searched:
    return search(ReferenceSubject(), 11, 110.0, most=400)


def test_the_reference_breaks_nothing(clean: Searched) -> None:
    assert [found.breach for found in clean.found] == []
    assert clean.figures.histories == 400


def test_a_history_takes_few_milliseconds(clean: Searched) -> None:
    """The aim is 5 ms; a machine that does other things as well is given more."""
    assert 0 < clean.figures.median_ms < 25
    assert clean.figures.p99_ms >= clean.figures.median_ms


def test_everything_that_can_happen_happens(clean: Searched) -> None:
    wanted = {"arrive", "decode", "turn", "local", "abort", "pass", "crash", "freeze", "messages", "reads", "questions",
              "again", "inject", "answered", "loaded", "released", "expired", "kept turns", "samples"}  # fmt: skip
    assert wanted <= {name for name, count in clean.figures.happened.items() if count}


ALONE: list[Action] = [
    Decode(), NextTurn(), Abort(), Restart(), Thaw(), Again(), Renew(), Messages(count=0), Reads(count=0),
    Questions(count=0),
]  # fmt: skip


@pytest.mark.parametrize("action", ALONE, ids=lambda action: type(action).__name__)
def test_what_cannot_be_done_does_nothing(action: Action) -> None:
    outcome = perform(Parameters(), [action], ReferenceSubject())
    assert outcome.breaches == []
    assert outcome.happened[type(action).__struct_config__.tag] == 0


@pytest.mark.parametrize(
    "actions",
    [
        [Arrive(), Crash(), Decode(), Restart(), Arrive(), Decode(which=1)],
        [Arrive(), Freeze(which=1), Pass(ms=3_000), Thaw(), Decode()],
        [Arrive(readers=3), Decode(samples=3), Messages(fault=LinkFault.LOSE, count=9), Pass(ms=2_000)],
        [Arrive(name="a b"), Decode(), Arrive(name="a,b"), Decode(), Arrive(name="a,b"), Decode(samples=2)],
        [Inject(data=b"\x00\xff"), Arrive(), Decode(), Inject(engine=1, data=b"HB:r1"), Local(answer=20)],
        [Arrive(), Decode(), Pass(ms=500), Again(kind=Kind.CLAIM), Again(kind=Kind.COMPLETION)],
    ],
)
def test_faults_alone_are_no_breach(actions: list[Action]) -> None:
    assert perform(Parameters(two_turn=True), actions, ReferenceSubject()).breaches == []


# -- what it says ---------------------------------------------------------------------------------------------------


def test_a_search_that_did_nothing_is_inconclusive() -> None:
    results = verdicts.results("reference", [*Capability], Figures(), [])
    assert {result.verdict for result in results} == {Verdict.INCONCLUSIVE}
    idle = verdicts.results("reference", [*Capability], Figures(histories=10_000, happened={"pass": 10_000}), [])
    assert {result.verdict for result in idle} == {Verdict.INCONCLUSIVE}
    assert "hardly ever happened: loaded" in next(r.found for r in idle if r.rule == "S1")


def test_what_a_subject_does_not_claim_does_not_apply() -> None:
    results = {r.rule: r for r in verdicts.results("toy", ["leases"], Figures(), [])}
    assert results["C2"].verdict is None
    assert results["C2"].found == "toy does not claim: two-turn"


def test_a_breach_is_a_failure_whatever_else_did_not_happen() -> None:
    found = Found(history=History(actions=[Arrive()]), breach=Breach(rule="S2", what="wrong", t_ns=0))
    results = {r.rule: r for r in verdicts.results("toy", [], Figures(), [found])}
    assert results["S2"].verdict is Verdict.FAIL
    assert results["S2"].found == "wrong; the shortest history has 1 actions"
    assert results["K1"].verdict is Verdict.INCONCLUSIVE


# -- files ----------------------------------------------------------------------------------------------------------


def recorded(**changes: object) -> Recorded:
    given = {
        "subject": SubjectName(), "twin": "abort_ends_for_all", "rule": "S3", "where": "lease", "found": "too early",
        "run": History(
            parameters=Parameters(prefill=Side(lease_ms=1_750), decode=Side(lease_ms=1_750)), actions=list(TWO)
        ),
    }  # fmt: skip
    return Recorded(**(given | changes))  # type: ignore[arg-type]


def test_a_file_says_all_that_is_needed_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "replay.json"
    save(recorded(), path)
    assert load(path) == recorded()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_action_goes_through_a_file(tmp_path: Path) -> None:
    actions = [*ALONE, *TWO, Local(), Crash(), Freeze(), Pass(ms=9), Inject(data=b"\xff\x00"), Arrive(name='",\\é')]
    save(recorded(run=History(actions=actions)), tmp_path / "replay.json")
    run = load(tmp_path / "replay.json").run
    assert isinstance(run, History)
    assert run.actions == actions


BAD = {
    "no JSON": b"nonsense", "no object": b"[]", "another format": b'{"format": "pdproof-replay-0"}',
    "nothing in it": b'{"format": "pdproof-replay-1"}',
    "a field too many": b'{"format": "pdproof-replay-1", "subject": {}, "run": {"type": "history"}, "more": 1}',
    "an action too many": b'{"format": "pdproof-replay-1", "subject": {}, "run": {"type": "history", "actions": '
    b'[{"type": "fly"}]}}',
    "a wrong value": b'{"format": "pdproof-replay-1", "subject": {}, "run": {"type": "history", "actions": '
    b'[{"type": "pass", "ms": -1}]}}',
    "no such case": b'{"format": "pdproof-replay-1", "subject": {}, "run": {"type": "case", "name": "x", "seed": 1}}',
    "no such twin": b'{"format": "pdproof-replay-1", "subject": {}, "run": {"type": "history"}, "twin": "x"}',
    "too long": b" " * ((1 << 20) + 1), "deep": b"[" * 100_000, "empty": b"",
}  # fmt: skip


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_a_file_that_no_run_wrote_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "replay.json"
    path.write_bytes(data)
    with pytest.raises(BadReplay) as refused:
        load(path)
    assert refused.value.exit_code == Exit.BAD_DATA
    assert str(path) in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "pipe"):
        with pytest.raises(BadReplay):
            load(path)


# -- commands -------------------------------------------------------------------------------------------------------


def run_again(path: Path) -> tuple[int, str]:
    result = CliRunner().invoke(replay, [str(path)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value), result.output


def test_a_generated_history_is_run_again(tmp_path: Path) -> None:
    save(recorded(), tmp_path / "broken.json")
    code, said = run_again(tmp_path / "broken.json")
    assert code == Exit.NOT_CONFORMANT
    assert "request" in said
    assert "It is there again." in said
    save(recorded(twin=""), tmp_path / "whole.json")
    code, said = run_again(tmp_path / "whole.json")
    assert code == Exit.CONFORMANT
    assert "It is not there any more." in said


def test_a_twin_that_is_caught_now_is_not_there_any_more(tmp_path: Path) -> None:
    case = FixedCase(name="KVC-LEASE-004.unknown", seed=2, twin="heartbeat_creates")
    save(recorded(run=case, rule="", where="", twin=""), tmp_path / "case.json")
    assert run_again(tmp_path / "case.json")[0] == Exit.CONFORMANT


@pytest.mark.slow
def test_a_search_from_the_command_line(tmp_path: Path) -> None:
    """A third party's connector that is broken: results, and a file for each failure."""
    out = tmp_path / "out"
    result = CliRunner().invoke(
        conform,
        ["--connector", "tests.conformance.broken_subjects:wrong_id", "--case", "KVC-LEASE-010.queued", "--search", "8",
         "--out", str(out)],
        standalone_mode=False,
    )  # fmt: skip
    assert result.exception is None
    assert result.return_value == Exit.NOT_CONFORMANT
    results = {r.case: r for r in read_results(out / "results.jsonl").results}
    assert list(results) == ["KVC-LEASE-010.queued", *verdicts.names()]
    assert results["search.C1"].verdict is Verdict.FAIL
    assert results["search.C1"].timeline
    files = {path.name for path in (out / "replays").iterdir()}
    assert "KVC-LEASE-010.queued.json" in files
    (found,) = [name for name in files if name.startswith("search.C1.")]
    code, said = run_again(out / "replays" / found)
    assert code == Exit.NOT_CONFORMANT
    assert "breach" in said
    assert run_again(out / "replays" / "KVC-LEASE-010.queued.json")[0] == Exit.NOT_CONFORMANT


def test_without_a_search_nothing_is_announced(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        conform, ["--connector", "reference", "--case", "KVC-LEASE-001.grant", "--out", str(tmp_path / "out")],
        standalone_mode=False,
    )  # fmt: skip
    assert result.return_value == Exit.CONFORMANT
    assert read_results(tmp_path / "out" / "results.jsonl").header.cases == ["KVC-LEASE-001.grant"]


@pytest.mark.slow
def test_a_subject_that_is_lost_in_a_history_has_broken_r1(tmp_path: Path) -> None:
    name = SubjectName(connector="tests.conformance.broken_subjects:leaves")
    process = SubjectProcess(name, sys.executable, tmp_path / "subject.log")
    said: list[str] = []
    begun_ns = now_ns()
    try:
        process.start()
        figures, found = searched(process, 3, 60.0, tmp_path, said.append)
    finally:
        process.close()
    assert now_ns() - begun_ns < 110 * 10**9
    (lost,) = found
    assert lost.breach.rule == "R1"
    assert "exit code 3" in lost.breach.what
    assert any(isinstance(action, Abort) for action in lost.history.actions)
    assert figures.histories >= 0
    assert not (tmp_path / "current-history.json").exists()

"""Every check accepts a clean history and catches its broken twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness.checks import CHECKS, OF_CONTROL, OF_MOVING_KV, judge, overall
from harness.verdicts import CheckResult, Verdict, worst
from reference_impl.rules.events import EventKind
from tests.harness.histories import MIB, History, S, at, clean
from workloads.rows import Outcome

Mutation = Callable[[History], None]
OF_FAILOVER = [name for name in CHECKS if name not in OF_MOVING_KV | OF_CONTROL]


@pytest.mark.parametrize("arm", ["cold", "shadow"])
@pytest.mark.parametrize("check", OF_FAILOVER)
def test_a_clean_history_passes(tmp_path: Path, check: str, arm: str) -> None:
    result = CHECKS[check](clean(tmp_path / "run", arm))
    assert result.verdict is Verdict.PASS, result.found
    assert result.check == check


def unprove(h: History) -> None:
    h.drop(lambda e: e.kind is EventKind.FAULT_PROVED and e.subject == "kill-2")


def never_inject(h: History) -> None:
    h.drop(lambda e: e.kind in (EventKind.FAULT_INJECTED, EventKind.FAULT_PROVED))


def disprove(h: History) -> None:
    unprove(h)
    h.say(41, "harness", EventKind.FAULT_UNPROVED, "kill-2", worker_id="w0", reason="still runs")


def few_requests(h: History) -> None:
    h.requests = h.requests[:19]


def no_requests(h: History) -> None:
    h.requests = []


def none_before_the_fault(h: History) -> None:
    h.requests = h.requests[20:]


def spoil_many(h: History) -> None:
    for number in range(10):
        h.change_request(number, spoilt="loop lag 50 ms")


def one_late_request(h: History) -> None:
    record = h.requests[3][0]
    h.change_request(3, send_began_ns=record.intended_ns + S, spoilt="schedule lag 1000 ms")


def fall_behind(h: History) -> None:
    for number in range(5):
        record = h.requests[number][0]
        h.change_request(number, send_began_ns=record.intended_ns + S)


def never_registered(h: History) -> None:
    h.drop(lambda e: e.kind is EventKind.ROUTER_REGISTERED and e.subject == "w0-e3")


def no_canary(h: History) -> None:
    h.drop(lambda e: e.kind is EventKind.CANARY_ANSWERED and e.subject == "w0-e2")


def wrong_canary(h: History) -> None:
    no_canary(h)
    h.say(20.02, "w0-e2", EventKind.CANARY_ANSWERED, "w0-e2", worker_id="w0", ok=False)


def slow_recovery(h: History) -> None:
    h.drop(lambda e: e.kind is EventKind.ROUTER_REGISTERED and e.subject == "w0-e2")
    h.say(23, "router", EventKind.ROUTER_REGISTERED, "w0-e2", worker_id="w0", epoch=2)


def fail_in_peace(h: History) -> None:
    h.change_request(5, outcome=Outcome.FAIL, error="the stream ended without [DONE]")


def fail_on_the_other_worker(h: History) -> None:
    h.change_request(19, outcome=Outcome.FAIL, error="reset", end_ns=at(20.01), node_d="w1/w1-e1")


def fail_long_after(h: History) -> None:
    h.change_request(18, outcome=Outcome.FAIL, error="reset", end_ns=at(30), node_d="w0/w0-e1")


def unavailable_in_peace(h: History) -> None:
    h.change_request(10, outcome=Outcome.FAIL, error="503", http_status=503, node_d="")


def hang(h: History) -> None:
    h.change_request(18, outcome=Outcome.UNKNOWN, error="no end within 120 s", node_d="w0/w0-e1")


def wrong_answer(h: History) -> None:
    h.change_request(7, content_ok=False)


def unchecked_answer(h: History) -> None:
    h.change_request(7, content_ok=None)


def check_nothing(h: History) -> None:
    for number in range(len(h.requests)):
        h.change_request(number, content_ok=None)


def same_epoch(h: History) -> None:
    for number, event in enumerate(h.events):
        if event.kind is EventKind.ENGINE_AWAKE and event.subject == "w0-e2":
            h.events[number] = msgspec.structs.replace(event, detail=event.detail | {"epoch": 1})


def two_awake(h: History) -> None:
    """The second engine wakes while the first lives."""
    h.say(10, "w0-e9", EventKind.ENGINE_AWAKE, "w0-e9", worker_id="w0", epoch=7)


def speak_from_the_grave(h: History) -> None:
    h.say(25, "w0-e1", EventKind.INIT_PHASE, "w0-e1", worker_id="w0", name="x", start_ns=0, end_ns=0, emulated=False)


def never_promoted(h: History) -> None:
    h.drop(lambda e: e.kind is EventKind.ENGINE_AWAKE and e.subject != "w0-e1")


def no_new_shadow(h: History) -> None:
    h.drop(lambda e: e.kind is EventKind.ENGINE_ASLEEP and e.subject == "w0-e4")


def next_kill_too_soon(h: History) -> None:
    h.drop(lambda e: e.kind is EventKind.ENGINE_ASLEEP and e.subject == "w0-e3")


def old_shadow_only(h: History) -> None:
    """Something parked, but it was there before the kill: no new redundancy."""
    h.drop(lambda e: e.kind is EventKind.PROCESS_STARTED and e.subject == "w0-e4")


def second_copy(h: History) -> None:
    h.metrics = [(t, n, m, v * 2 if m == "memory_weights_bytes" and t > at(65) else v) for t, n, m, v in h.metrics]


def kv_of_the_dead(h: History) -> None:
    h.metrics.append((at(66.5), "w0", "memory_kv_bytes", 17 * MIB))


def leak_descriptors(h: History) -> None:
    h.metrics = [(t, n, m, v + (t - at(0)) // S if n == "w0/w0-gms" else v) for t, n, m, v in h.metrics]


def no_gauges(h: History) -> None:
    h.metrics = []


def leave_a_process(h: History) -> None:
    h.say(70, "harness", EventKind.PROCESS_LEFT, "123", pid=123)


def look_for_nothing(h: History) -> None:
    h.drop(lambda e: e.kind is EventKind.AUDITED)


FAIL, UNSURE = Verdict.FAIL, Verdict.INCONCLUSIVE
TWINS: list[tuple[str, Mutation, Verdict]] = [
    ("faults-proved", unprove, UNSURE),
    ("faults-proved", never_inject, UNSURE),
    ("faults-proved", disprove, UNSURE),
    ("load-sufficient", few_requests, UNSURE),
    ("load-sufficient", no_requests, UNSURE),
    ("load-sufficient", none_before_the_fault, UNSURE),
    ("load-sufficient", spoil_many, UNSURE),
    ("load-sufficient", fall_behind, UNSURE),
    ("recovery", never_registered, FAIL),
    ("recovery", no_canary, FAIL),
    ("recovery", wrong_canary, FAIL),
    ("recovery", slow_recovery, FAIL),
    ("recovery", never_inject, UNSURE),
    ("errors-in-window", fail_in_peace, FAIL),
    ("errors-in-window", fail_on_the_other_worker, FAIL),
    ("errors-in-window", fail_long_after, FAIL),
    ("errors-in-window", unavailable_in_peace, FAIL),
    ("errors-in-window", never_inject, FAIL),
    ("errors-in-window", hang, UNSURE),
    ("errors-in-window", no_requests, UNSURE),
    ("content", wrong_answer, FAIL),
    ("content", unchecked_answer, UNSURE),
    ("content", check_nothing, UNSURE),
    ("content", no_requests, UNSURE),
    ("one-awake", same_epoch, FAIL),
    ("one-awake", two_awake, FAIL),
    ("one-awake", speak_from_the_grave, FAIL),
    ("one-awake", never_promoted, UNSURE),
    ("redundancy", no_new_shadow, FAIL),
    ("redundancy", next_kill_too_soon, UNSURE),
    ("redundancy", old_shadow_only, FAIL),
    ("redundancy", never_inject, UNSURE),
    ("resources", second_copy, FAIL),
    ("resources", kv_of_the_dead, FAIL),
    ("resources", leak_descriptors, FAIL),
    ("resources", no_gauges, UNSURE),
    ("nothing-left", leave_a_process, FAIL),
    ("nothing-left", look_for_nothing, UNSURE),
]


@pytest.mark.parametrize(("check", "mutation", "verdict"), TWINS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_broken_twin_is_caught(tmp_path: Path, check: str, mutation: Mutation, verdict: Verdict) -> None:
    history = History("shadow")
    mutation(history)
    run = history.write(tmp_path / "run")
    assert run.incomplete is None
    result = CHECKS[check](run)
    assert result.verdict is verdict, result.found
    assert result.found


def test_every_check_has_a_twin_that_it_must_catch() -> None:
    assert {check for check, _, _ in TWINS} == set(OF_FAILOVER)


def test_an_incomplete_run_is_judged_by_nothing_else(tmp_path: Path) -> None:
    run = clean(tmp_path / "run")
    path = run.path / "events.jsonl"
    path.write_bytes(b"\n".join(path.read_bytes().splitlines()[:-1]) + b"\n")
    results = judge(type(run)(run.path))
    assert [r.check for r in results] == ["complete"]
    assert overall(results) is Verdict.INCONCLUSIVE


def test_verdicts_combine_to_the_worst() -> None:
    assert worst([]) is Verdict.INCONCLUSIVE
    assert worst([Verdict.PASS, Verdict.PASS]) is Verdict.PASS
    assert worst([Verdict.PASS, Verdict.INCONCLUSIVE]) is Verdict.INCONCLUSIVE
    assert worst([Verdict.INCONCLUSIVE, Verdict.FAIL]) is Verdict.FAIL
    assert worst([Verdict.FAIL, Verdict.ERROR]) is Verdict.ERROR
    assert overall([]) is Verdict.INCONCLUSIVE


def test_verdicts_are_kept_in_the_folder(tmp_path: Path) -> None:
    run = clean(tmp_path / "run")
    assert run.verdicts == []
    run.write_verdicts(judge(run))
    kept: list[CheckResult] = type(run)(run.path).verdicts
    assert [r.check for r in kept] == OF_FAILOVER
    assert overall(kept) is Verdict.PASS


def test_a_check_that_stumbles_is_an_error_and_the_rest_go_on(tmp_path: Path) -> None:
    history = History()
    history.events = [
        msgspec.structs.replace(e, detail={}) if e.kind is EventKind.ENGINE_AWAKE else e for e in history.events
    ]
    results = {r.check: r for r in judge(history.write(tmp_path / "run"))}
    assert results["one-awake"].verdict is Verdict.ERROR
    assert "KeyError" in results["one-awake"].found
    assert results["content"].verdict is Verdict.PASS
    assert overall(list(results.values())) is Verdict.ERROR


def test_one_late_request_of_many_does_not_void_a_run(tmp_path: Path) -> None:
    history = History()
    one_late_request(history)
    assert CHECKS["load-sufficient"](history.write(tmp_path / "run")).verdict is Verdict.PASS

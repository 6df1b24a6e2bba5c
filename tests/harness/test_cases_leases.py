"""Every judge of the chapter on leases accepts a clean history and catches its broken twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cases import leases
from harness.cases.metrics import EXPIRED
from harness.cases.observations import Came, CaseRun
from harness.cases.steps import Look, Mark
from harness.verdicts import Verdict
from tests.harness.case_histories import HELD, CaseHistory, at

LATE = "vllm:nixl_num_notifications_after_expiry_total"
ONCE = {EXPIRED: 1.0}
RELEASE = (
    "Releasing expired KV blocks for request cmpl-1 which were retrieved by 0 remote worker(s) before lease expired."
)


def abandoned() -> CaseHistory:
    h = CaseHistory("abandoned")
    h.call("abandoned", "prefill", 1, 0.1)
    h.look("held", "p0", 1.2, HELD)
    h.look("still-held", "p0", 4.7, HELD)
    h.mark("idle", 4.8)
    h.line("p0", 7.2, RELEASE)
    h.mark("poke", 10.2)
    h.look("freed", "p0", 10.3, 0.0)
    h.finale(11, p=ONCE)
    return h


def queue(h: CaseHistory, count: int, until: float) -> None:
    """Requests that wait at the decode side from second 2 on."""
    h.mark("slots-taken", 1)
    for number in range(count):
        h.call(f"queued-{number}", "prefill", 1.5, 0.1)
        h.call(f"queued-{number}", "decode", 1.7, until + 0.5 - 1.7, first=until + 0.1 - 1.7)
    h.look("held", "p0", 2, HELD)
    h.mark("slots-freed", until)


def waiting(h: CaseHistory, until: float) -> None:
    for step in range(3, int(until), 2):
        h.look("waiting", "p0", step, HELD)


def surge(name: str = "surge") -> CaseHistory:
    h = CaseHistory(name)
    queue(h, 4, 20)
    waiting(h, 20)
    h.finale(22)
    return h


def some_lost() -> CaseHistory:
    return surge("lost_heartbeats_some")


def one_silent() -> CaseHistory:
    h = CaseHistory("lost_heartbeats_one")
    h.call("silent", "prefill", 1.2, 0.1)
    h.call("silent", "decode", 1.4, 13, first=12.8)
    queue(h, 1, 14)
    h.look("later", "p0", 13.9, HELD, **ONCE)
    h.finale(16, p=ONCE)
    return h


def all_lost() -> CaseHistory:
    h = CaseHistory("lost_heartbeats_all")
    queue(h, 2, 9)
    h.look("freed", "p0", 5, HELD)
    h.look("freed", "p0", 7.8, 0.0)
    h.finale(16, p={EXPIRED: 2.0})
    return h


def held_back(name: str = "router_hold_kept") -> CaseHistory:
    h = CaseHistory(name)
    h.call("held-back", "prefill", 1, 0.1)
    h.look("held", "p0", 1.2, HELD)
    h.look("freed", "p0", 8.7, 0.0)
    h.call("held-back", "decode", 9)
    h.finale(11, p=ONCE | {LATE: 1.0})
    return h


def held_back_reused() -> CaseHistory:
    return held_back("router_hold_reused")


def long_prefill() -> CaseHistory:
    h = CaseHistory("long_prefill")
    queue(h, 1, 14)
    waiting(h, 14)
    for number in range(4):
        h.call(f"long-{number}", "plain", 2 + 2.5 * number, 2.4, tokens=1, worker="p0")
    h.finale(16)
    return h


def d_stalled() -> CaseHistory:
    h = CaseHistory("d_stalled")
    queue(h, 1, 22)
    h.mark("stop", 2.5, worker="d0")
    h.look("freed", "p0", 20.5, 0.0)
    h.finale(24, p=ONCE)
    return h


def d_crash() -> CaseHistory:
    h = CaseHistory("d_crash")
    queue(h, 4, 14)
    h.fails("queued", "decode", status=0, error="the connection broke")
    h.change_calls("queued", "decode", end_ns=at(8.6))
    h.look("waiting", "p0", 8.4, HELD)
    h.mark("kill", 8.5, worker="d0")
    for step in range(9, 13):
        h.look("reclaimed", "p0", step, HELD)
    h.look("reclaimed", "p0", 12.6, 0.0)
    h.finale(16)
    return h


CLEAN: dict[str, Callable[[], CaseHistory]] = {
    "abandoned": abandoned, "surge": surge, "lost_heartbeats_some": some_lost, "lost_heartbeats_one": one_silent,
    "lost_heartbeats_all": all_lost, "router_hold_kept": held_back, "router_hold_reused": held_back_reused,
    "long_prefill": long_prefill, "d_stalled": d_stalled, "d_crash": d_crash,
}  # fmt: skip


@pytest.mark.parametrize("name", [case.name for case in leases.CASES])
def test_a_clean_history_of_every_case_passes_all_its_checks(name: str, tmp_path: Path) -> None:
    results = CLEAN[name]().judged(tmp_path / name)
    assert [(r.check, r.found) for r in results.values() if r.verdict is not Verdict.PASS] == []
    assert len(results) == len(CLEAN[name]().case.checks) + 4


def is_look(name: str, worker: str = "p0") -> Callable[[object], bool]:
    return lambda s: isinstance(s, Look) and (s.name, s.worker) == (name, worker)


BROKEN: list[tuple[str, str, Callable[[CaseHistory], None]]] = [
    ("abandoned", "kept", lambda h: h.change_looks("still-held", "p0", usage=0.0)),
    ("abandoned", "freed", lambda h: h.change_looks("freed", "p0", usage=HELD)),
    ("abandoned", "idle", lambda h: h.move(lambda s: getattr(s, "text", "") == RELEASE, 3.5)),
    ("abandoned", "counted", lambda h: h.change_looks("final", "p0", **{EXPIRED: 2.0})),
    ("abandoned", "conserved", lambda h: h.change_looks("end", "p0", usage=HELD)),
    ("abandoned", "serves-after", lambda h: h.fails("after", "decode")),
    ("surge", "leases-kept", lambda h: h.change_looks("final", "p0", **{EXPIRED: 1.0})),
    ("surge", "leases-kept", lambda h: h.change_looks("waiting", "p0", usage=HELD / 2)),
    ("surge", "answered", lambda h: h.fails("queued-2", "decode")),
    ("surge", "content", lambda h: h.answers_wrongly("queued-1")),
    ("lost_heartbeats_some", "leases-kept", lambda h: h.change_looks("final", "p0", **{EXPIRED: 1.0})),
    ("lost_heartbeats_one", "one-expires", lambda h: h.change_looks("later", "p0", **{EXPIRED: 0.0})),
    ("lost_heartbeats_one", "one-expires", lambda h: h.change_looks("later", "p0", **{EXPIRED: 2.0})),
    ("lost_heartbeats_one", "one-expires", lambda h: h.fails("queued-0", "decode")),
    ("lost_heartbeats_one", "late-reader", lambda h: h.fails("silent", "decode")),
    ("lost_heartbeats_all", "freed", lambda h: h.change_looks("freed", "p0", usage=HELD)),
    ("lost_heartbeats_all", "freed", lambda h: h.move(lambda s: is_look("freed")(s) and s.t_ns > at(7), 3)),
    ("lost_heartbeats_all", "late-reader", lambda h: h.answers_wrongly("queued-0")),
    ("router_hold_kept", "outcome", lambda h: h.answers_wrongly("held-back")),
    ("router_hold_kept", "outcome", lambda h: h.fails("held-back", "decode", status=0)),
    ("router_hold_kept", "visible", lambda h: h.change_looks("final", "p0", **{LATE: 0.0})),
    ("router_hold_reused", "content", lambda h: h.answers_wrongly("held-back")),
    ("long_prefill", "leases-kept", lambda h: h.change_looks("final", "p0", **{EXPIRED: 1.0})),
    ("long_prefill", "answered", lambda h: h.answers_wrongly("queued-0")),
    ("d_stalled", "freed", lambda h: h.change_looks("freed", "p0", usage=HELD)),
    ("d_stalled", "late-reader", lambda h: h.answers_wrongly("queued-0")),
    ("d_crash", "reclaimed", lambda h: h.change_looks("reclaimed", "p0", usage=HELD)),
    ("d_crash", "reclaimed", lambda h: h.move(lambda s: is_look("reclaimed")(s) and s.t_ns > at(12.5), 2.5)),
    ("d_crash", "told", lambda h: h.change_calls("queued-3", "decode", end_ns=at(40))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "check", "mutate"), BROKEN, ids=[f"{n}-{c}-{i}" for i, (n, c, _) in enumerate(BROKEN)]
)
def test_a_broken_history_fails(name: str, check: str, mutate: Callable[[CaseHistory], None], tmp_path: Path) -> None:
    h = CLEAN[name]()
    mutate(h)
    assert h.judged(tmp_path / name)[check].verdict is Verdict.FAIL


def test_a_reader_that_was_served_too_early_proves_nothing(tmp_path: Path) -> None:
    h = surge()
    h.change_calls("queued-0", "decode", first_ns=at(5))
    assert h.judged(tmp_path / "run")["leases-kept"].verdict is Verdict.INCONCLUSIVE


def test_nothing_held_at_the_crash_proves_nothing(tmp_path: Path) -> None:
    h = d_crash()
    h.change_looks("waiting", "p0", usage=0.0)
    assert h.judged(tmp_path / "run")["reclaimed"].verdict is Verdict.INCONCLUSIVE


def test_an_idle_engine_that_neither_says_nor_shows_anything_proves_nothing(tmp_path: Path) -> None:
    h = abandoned()
    h.drop(lambda s: getattr(s, "text", "") == RELEASE)
    assert h.judged(tmp_path / "run")["idle"].verdict is Verdict.INCONCLUSIVE


def test_a_gauge_that_falls_by_itself_shows_that_an_idle_engine_let_go(tmp_path: Path) -> None:
    h = abandoned()
    h.drop(lambda s: getattr(s, "text", "") == RELEASE)
    h.sampled("p0", 6, HELD)
    h.sampled("p0", 8, 0.0)
    assert h.judged(tmp_path / "run")["idle"].verdict is Verdict.PASS


def test_an_error_is_what_the_policy_fail_asks_for_and_what_recompute_forbids(tmp_path: Path) -> None:
    h = one_silent()
    h.fails("silent", "decode")
    assert h.judged(tmp_path / "recompute")["late-reader"].verdict is Verdict.FAIL
    h = held_back()
    h.fails("held-back", "decode")
    assert h.judged(tmp_path / "either")["outcome"].verdict is Verdict.PASS


def test_a_machine_that_starves_its_servers_makes_a_failure_inconclusive(tmp_path: Path) -> None:
    h = surge()
    h.change_looks("final", "p0", **{EXPIRED: 1.0})
    h.drop(lambda s: isinstance(s, Mark) and s.name == "machine")
    h.mark("machine", 30, late_ms=5.0, rate_per_s=4.5)
    results = h.judged(tmp_path / "run")
    assert results["leases-kept"].verdict is Verdict.INCONCLUSIVE
    assert results["machine"].verdict is Verdict.INCONCLUSIVE


def test_what_holds_on_an_unfit_machine_holds(tmp_path: Path) -> None:
    h = surge()
    h.drop(lambda s: isinstance(s, Mark) and s.name == "machine")
    h.mark("machine", 30, late_ms=9_000.0, rate_per_s=140.0)
    assert {r.verdict for r in h.judged(tmp_path / "run").values()} == {Verdict.PASS}


def test_a_machine_that_starves_its_servers_excuses_no_wrong_answer(tmp_path: Path) -> None:
    h = surge()
    h.answers_wrongly("queued-0")
    h.drop(lambda s: isinstance(s, Mark) and s.name == "machine")
    h.mark("machine", 30, late_ms=9_000.0, rate_per_s=140.0)
    assert h.judged(tmp_path / "run")["content"].verdict is Verdict.FAIL


def test_a_drive_that_was_hindered_is_judged_by_what_holds_for_every_case_alone(tmp_path: Path) -> None:
    h = surge()
    h.hindered = "the decode server does not run 2 requests at once"
    results = h.judged(tmp_path / "run")
    assert results["setup"].verdict is Verdict.INCONCLUSIVE
    assert set(results) == {"setup", "content", "serves-after", "conserved", "machine"}


NO_END = {"outcome": "unknown", "error": "no end within 90 s", "output_tokens": 0, "first_ns": 0}


def untouched(_: CaseHistory) -> None:
    """A history that is left as it is."""


def wrong_from_the_start(h: CaseHistory) -> None:
    h.answers_wrongly("held-back")
    h.change_calls("held-back", "decode", outcome="fail", error="it was cut", output_tokens=9)


ENDINGS: dict[Came, tuple[Callable[[CaseHistory], None], str]] = {
    Came.RIGHT: (untouched, "held-back: 64 tokens after 0.50 s"),
    Came.WRONG: (lambda h: h.answers_wrongly("held-back"), "held-back: a wrong answer, 64 tokens after 0.50 s"),
    Came.ERROR: (lambda h: h.fails("held-back", "decode"), "held-back: an error (HTTP 500: no) after 0.50 s"),
    Came.NONE: (
        lambda h: h.change_calls("held-back", "decode", **NO_END, status=0),
        "held-back: no answer (no end within 90 s) after 0.50 s",
    ),
    Came.BEGUN_WRONG: (
        wrong_from_the_start, "held-back: the beginning of a wrong answer (it was cut) after 0.50 s",
    ),
}  # fmt: skip


@pytest.mark.parametrize("came", ENDINGS)
def test_a_verdict_says_what_the_client_got(came: Came, tmp_path: Path) -> None:
    """A wrong answer, an error and no answer are three things: each has words of its own, and is said once."""
    mutate, words = ENDINGS[came]
    h = held_back()
    mutate(h)
    result = h.judged(tmp_path / "run")["outcome"]
    assert result.verdict is (Verdict.PASS if came in (Came.RIGHT, Came.ERROR) else Verdict.FAIL)
    assert result.found == words


def test_a_stream_that_never_ends_is_no_error_that_a_policy_asks_for(tmp_path: Path) -> None:
    """Its status came with its headers; nobody told the client of an error."""
    h = held_back()
    h.change_calls("held-back", "decode", **NO_END, status=200)
    run = h.write(tmp_path / "run")
    seen = CaseRun(run)
    assert seen.came(seen.call("held-back")) is Came.NONE
    assert h.judged(tmp_path / "judged")["outcome"].verdict is Verdict.FAIL


def test_an_answer_that_nobody_can_judge_is_not_called_the_right_one(tmp_path: Path) -> None:
    run = held_back().write(tmp_path / "run")
    rows = run.requests
    rows["content_ok"] = rows.content_ok.astype("boolean").where(rows.content_ok.isna())
    rows.to_parquet(run.path / "requests.parquet")
    seen = CaseRun(run)
    call = seen.call("held-back")
    assert seen.came(call) is Came.UNCHECKED
    assert seen.right(call)


@pytest.mark.parametrize(("grown", "words"), [(1.0, "1 lease ran out"), (2.0, "2 leases ran out")])
def test_one_is_not_spoken_of_as_several(grown: float, words: str, tmp_path: Path) -> None:
    h = surge()
    h.change_looks("final", "p0", **{EXPIRED: grown})
    assert h.judged(tmp_path / "run")["leases-kept"].found.startswith(f"{words}; 4 requests waited")

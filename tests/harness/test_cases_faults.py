"""Every judge of the chapters on transfers, crashes and clocks accepts a clean history and catches its broken twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cases import clocks, crashes, transfer
from harness.cases.metrics import EXPIRED, FAILED_TRANSFERS
from harness.cases.steps import Mark
from harness.verdicts import Verdict
from tests.harness.case_histories import HAND_OFF, HELD, CaseHistory, at

READS = "vllm:nixl_bytes_transferred_count"
LOST = "vllm:nixl_num_failed_notifications_total"
NEW_LIFE = HAND_OFF | {"remote_engine_id": "p-life-2"}
TURN = HAND_OFF | {"remote_engine_id": "d-life-1", "remote_blocks_expiry_time": 5012.5, "do_remote_prefill": False}


def failed(policy: str) -> CaseHistory:
    h = CaseHistory(f"failed_transfer_{policy}")
    h.request("failed", 1)
    if policy == "fail":
        h.fails("failed", "decode")
    h.request("again", 3)
    h.finale(5, d={FAILED_TRANSFERS: 1.0})
    return h


def stalled() -> CaseHistory:
    h = CaseHistory("stalled_transfer")
    h.call("stalled", "prefill", 1, 0.1)
    h.call("stalled", "decode", 1.1, 4.9, first=4.5)
    h.request("beside", 2)
    h.finale(7)
    return h


def abort() -> CaseHistory:
    h = CaseHistory("abort_in_transfer")
    h.call("cut", "prefill", 1, 0.1)
    h.call("cut", "decode", 1.2, 0.5, outcome="unknown", output_tokens=0)
    for number in range(3):
        h.request(f"next-{number}", 2)
    h.look("released", "p0", 8, 0.0)
    h.look("emptied", "d0", 8.2, 0.0)
    h.finale(10)
    return h


def malformed(kind: str) -> CaseHistory:
    h = CaseHistory(f"malformed_handoff_{kind}")
    names = [*transfer.FIELDS, *(["everything"] if kind == "missing" else [])]
    for number, name in enumerate(names):
        error = f"HTTP 400: kv_transfer_params.{'remote_host' if name == 'everything' else name} is wrong"
        h.call(f"bad-{name}", "decode", 1 + number)
        h.fails(f"bad-{name}", status=400, error=error)
        h.request(f"then-{name}", 1.5 + number)
    h.finale(20)
    return h


def p_restart() -> CaseHistory:
    h = CaseHistory("p_restart")
    h.call("queued-0", "prefill", 1, 0.1)
    h.call("queued-0", "decode", 1.2, 12)
    h.call("old-life", "prefill", 1.5, 0.1)
    h.look("orphaned", "d0", 8.2, HELD, **{LOST: 3.0})
    h.call("old-life", "decode", 14)
    for number in range(2):
        h.call(f"new-life-{number}", "prefill", 15 + number, 0.1, returned=NEW_LIFE)
        h.call(f"new-life-{number}", "decode", 15.2 + number)
    h.finale(18)
    return h


def d_restart() -> CaseHistory:
    h = CaseHistory("d_restart")
    for number in range(2):
        h.request(f"cut-{number}", 1, took=2.1)
        h.request(f"behind-{number}", 12 + number)
    h.fails("cut", "decode", status=200, error="the connection broke after 30 chunks")
    h.mark("kill", 3)
    h.request("waits", 10)
    h.mark("writer", 15, before="p0-e1", after="p0-e1")
    h.finale(18)
    return h


def handshake() -> CaseHistory:
    h = CaseHistory("failed_handshake")
    h.request("first", 10)
    h.request("second", 12)
    h.look("released", "p0", 13.2, 0.0)
    h.finale(18)
    return h


def two_turn(name: str) -> CaseHistory:
    h = CaseHistory(name)
    h.call("live-1", "prefill", 1, 0.1)
    h.call("live-1", "decode", 1.2, 3, returned=TURN)
    h.look("before-live", "p0", 4.3, 0.0, **{READS: 0.0})
    h.request("live-2", 4.5)
    h.look("after-live", "p0", 5.2, 0.0, **{READS: 1.0})
    h.call("late-1", "prefill", 6, 0.1)
    h.call("late-1", "decode", 6.2, 3, returned=TURN)
    h.mark("turn-ended", 9.3)
    h.look("kept", "d0", 9.4, HELD)
    h.look("ttl-over", "d0", 21, 0.0)
    h.look("before-late", "p0", 21.2, 0.0, **{READS: 1.0})
    h.look("before-late", "d0", 21.3, 0.0)
    h.request("late-2", 21.5)
    h.look("after-late", "p0", 22.5, 0.0, **{READS: 1.0, EXPIRED: 1.0})
    h.look("after-late", "d0", 22.6, 0.0)
    h.finale(25)
    return h


CLEAN: dict[str, Callable[[], CaseHistory]] = {
    "failed_transfer_recompute": lambda: failed("recompute"), "failed_transfer_fail": lambda: failed("fail"),
    "stalled_transfer": stalled, "abort_in_transfer": abort,
    **{f"malformed_handoff_{kind}": (lambda kind=kind: malformed(kind)) for kind in ("missing", "type", "range")},
    "p_restart": p_restart, "d_restart": d_restart, "failed_handshake": handshake,
    **{case.name: (lambda name=case.name: two_turn(name)) for case in clocks.CASES},
}  # fmt: skip
NAMES = [case.name for chapter in (transfer, crashes, clocks) for case in chapter.CASES]


@pytest.mark.parametrize("name", NAMES)
def test_a_clean_history_of_every_case_passes_all_its_checks(name: str, tmp_path: Path) -> None:
    results = CLEAN[name]().judged(tmp_path / name)
    assert [(r.check, r.found) for r in results.values() if r.verdict is not Verdict.PASS] == []
    assert len(results) == len(CLEAN[name]().case.checks) + 4


def changed_looks(name: str, worker: str, **values: float) -> Callable[[CaseHistory], None]:
    return lambda h: h.change_looks(name, worker, **values)


def changed_calls(label: str, leg: str, **fields: Any) -> Callable[[CaseHistory], None]:
    return lambda h: h.change_calls(label, leg, **fields)


TWO = "two_turn_ahead_fail"
BROKEN: list[tuple[str, str, Callable[[CaseHistory], None]]] = [
    ("failed_transfer_recompute", "policy", lambda h: h.fails("failed", "decode")),
    ("failed_transfer_fail", "policy", changed_calls("failed", "decode", outcome="ok", output_tokens=64)),
    ("failed_transfer_fail", "policy", changed_calls("failed", "decode", status=0)),
    ("failed_transfer_recompute", "cache", lambda h: h.answers_wrongly("again")),
    ("failed_transfer_recompute", "counted", changed_looks("final", "d0", **{FAILED_TRANSFERS: 0.0})),
    ("failed_transfer_recompute", "counted", changed_looks("final", "d0", **{FAILED_TRANSFERS: 4.0})),
    ("stalled_transfer", "stalled", changed_calls("beside", "decode", first_ns=at(5.7), end_ns=at(6))),
    ("stalled_transfer", "stalled", lambda h: h.fails("stalled", "decode")),
    ("stalled_transfer", "stalled", lambda h: h.fails("beside", "decode")),
    ("stalled_transfer", "stalled", lambda h: h.answers_wrongly("stalled")),
    ("abort_in_transfer", "clean", changed_looks("released", "p0", usage=HELD)),
    ("abort_in_transfer", "clean", changed_looks("emptied", "d0", usage=HELD)),
    ("abort_in_transfer", "clean", lambda h: h.answers_wrongly("next-1")),
    ("malformed_handoff_missing", "refused", changed_calls("bad-tp_size", "decode", status=500)),
    ("malformed_handoff_type", "refused", changed_calls("bad-tp_size", "decode", error="HTTP 400: no")),
    ("malformed_handoff_range", "refused", changed_calls("bad-remote_port", "decode", outcome="ok", status=200)),
    ("malformed_handoff_missing", "goes-on", lambda h: h.mark("died", 5, worker="d0", field="everything")),
    ("malformed_handoff_type", "goes-on", lambda h: h.fails("then-tp_size", "decode")),
    ("p_restart", "old", lambda h: h.answers_wrongly("old-life")),
    ("p_restart", "old", lambda h: h.fails("old-life", "decode")),
    ("p_restart", "new", changed_calls("new-life", "prefill", returned=HAND_OFF)),
    ("p_restart", "new", lambda h: h.fails("new-life-1", "decode")),
    ("p_restart", "counted", changed_looks("orphaned", "d0", **{LOST: 0.0})),
    ("p_restart", "late-reader", lambda h: h.fails("queued-0", "decode")),
    ("d_restart", "again", lambda h: h.fails("behind-0", "decode")),
    ("d_restart", "again", lambda h: h.answers_wrongly("waits")),
    ("d_restart", "told", changed_calls("cut-0", "decode", end_ns=at(33))),
    ("failed_handshake", "again", lambda h: h.fails("second", "decode")),
    ("failed_handshake", "again", changed_looks("released", "p0", usage=HELD)),
    ("failed_handshake", "again", changed_looks("final", "p0", **{EXPIRED: 2.0})),
    (TWO, "kept", changed_looks("kept", "d0", usage=0.0)),
    (TWO, "kept", changed_looks("ttl-over", "d0", usage=HELD)),
    (TWO, "kept", changed_calls("late-1", "decode", returned=TURN | {"remote_blocks_expiry_time": None})),
    (TWO, "in-time", changed_looks("after-live", "p0", **{EXPIRED: 1.0})),
    (TWO, "in-time", changed_looks("after-live", "p0", **{READS: 0.0})),
    (TWO, "in-time", lambda h: h.fails("live-2", "prefill")),
    (TWO, "recomputed", lambda h: h.fails("late-2", "prefill")),
    (TWO, "declined", changed_looks("after-late", "p0", **{EXPIRED: 0.0})),
    (TWO, "declined", changed_looks("after-late", "d0", **{"vllm:nixl_num_notifications_after_expiry_total": 1.0})),
    (TWO, "content", lambda h: h.answers_wrongly("late-2")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "check", "mutate"), BROKEN, ids=[f"{n}-{c}-{i}" for i, (n, c, _) in enumerate(BROKEN)]
)
def test_a_broken_history_fails(name: str, check: str, mutate: Callable[[CaseHistory], None], tmp_path: Path) -> None:
    h = CLEAN[name]()
    mutate(h)
    assert h.judged(tmp_path / name)[check].verdict is Verdict.FAIL


def test_the_writer_must_be_left_alone_when_the_reader_restarts(tmp_path: Path) -> None:
    h = d_restart()
    h.drop(lambda s: isinstance(s, Mark) and s.name == "writer")
    h.mark("writer", 15, before="p0-e1", after="p0-e2")
    assert h.judged(tmp_path / "run")["again"].verdict is Verdict.FAIL


def test_a_stall_that_did_not_happen_proves_nothing(tmp_path: Path) -> None:
    h = stalled()
    h.change_calls("stalled", "decode", first_ns=at(2.5))
    assert h.judged(tmp_path / "run")["stalled"].verdict is Verdict.INCONCLUSIVE


def test_a_request_that_came_behind_the_stall_proves_nothing(tmp_path: Path) -> None:
    h = stalled()
    h.change_calls("beside", "decode", sent_ns=at(5.7), first_ns=at(5.8), end_ns=at(6))
    assert h.judged(tmp_path / "run")["stalled"].verdict is Verdict.INCONCLUSIVE

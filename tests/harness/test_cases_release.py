"""Every judge of the chapter on release accepts a clean history and catches its broken twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cases import release
from harness.cases.metrics import EXPIRED
from harness.verdicts import Verdict
from tests.harness.case_histories import HAND_OFF, HELD, CaseHistory, at

HALF = HAND_OFF | {"remote_host": None}


def undisturbed() -> CaseHistory:
    h = CaseHistory("undisturbed")
    h.request("alone-0", 1)
    h.call("watched", "prefill", 2, 0.1)
    h.look("held", "p0", 2.2, HELD)
    h.call("watched", "decode", 2.3, 0.3, tokens=16)
    h.mark("read", 2.6)
    h.look("released", "p0", 2.7, 0.0)
    h.finale(4)
    return h


def freed(name: str, label: str, mark: str) -> Callable[[], CaseHistory]:
    """A case in which something happens to a request at the decode side, and its blocks are free at once."""

    def made() -> CaseHistory:
        h = CaseHistory(name)
        h.call(label, "prefill", 1, 0.1)
        h.look("held", "p0", 1.2, HELD)
        h.call(label, "decode", 1.3, 0.2)
        h.mark(mark, 1.5)
        h.look("released", "p0", 1.7, 0.0)
        h.finale(4)
        return h

    return made


def rejected() -> CaseHistory:
    h = freed("rejected_at_door", "rejected", "refused")()
    h.fails("rejected", "decode", status=400, error="HTTP 400: max_tokens is too large")
    return h


def abort_in_queue() -> CaseHistory:
    h = freed("abort_in_queue", "queued-0", "leaves")()
    h.change_calls("queued", "decode", outcome="unknown", output_tokens=0, first_ns=0)
    h.mark("slots-freed", 3)
    return h


def client_gone() -> CaseHistory:
    h = CaseHistory("client_gone")
    h.call("gone-early", "prefill", 1, 0.2, outcome="unknown", output_tokens=0, returned={})
    h.mark("leaves-prefill", 1.2)
    h.look("freed-p", "p0", 1.9, 0.0)
    h.call("gone-late", "prefill", 3, 0.1)
    h.call("gone-late", "decode", 3.2, 1.0, outcome="unknown", output_tokens=20)
    h.mark("leaves-decode", 4.2)
    h.look("freed-d", "d0", 4.5, 0.0)
    h.finale(6)
    return h


def for_nobody() -> CaseHistory:
    h = CaseHistory("no_remote_decode")
    h.call("for-nobody", "plain", 1, 0.1, tokens=1, worker="p0")
    h.mark("answered", 1.1)
    h.look("freed", "p0", 1.2, 0.0)
    h.finale(3)
    return h


def local_hit() -> CaseHistory:
    h = freed("local_hit", "again", "answered")()
    h.request("first", 0.2)
    return h


def lost_completion() -> CaseHistory:
    h = CaseHistory("lost_completion")
    h.call("unheard", "prefill", 1, 0.1)
    h.look("held", "p0", 1.2, HELD)
    h.call("unheard", "decode", 1.3)
    h.mark("idle", 2)
    h.line("p0", 7.2, "Releasing expired KV blocks for request cmpl-1")
    h.mark("poke", 11)
    h.look("released", "p0", 11.1, 0.0)
    h.finale(12, p={EXPIRED: 1.0})
    return h


def repeated_completion() -> CaseHistory:
    h = CaseHistory("repeated_completion")
    h.request("twice", 1)
    h.call("beside", "prefill", 2, 0.1)
    h.request("twice-again", 2.3)
    h.look("beside", "p0", 3, HELD)
    h.call("beside", "decode", 3.2)
    h.finale(5)
    return h


def damaged() -> CaseHistory:
    h = CaseHistory("damaged_notification")
    h.request("damaged", 1)
    h.request("behind", 2)
    h.look("released", "p0", 9, 0.0)
    h.finale(10)
    return h


def stale() -> CaseHistory:
    h = CaseHistory("stale_handoff")
    h.request("fresh", 1)
    h.call("stale", "decode", 4)
    h.finale(6)
    return h


def foreign() -> CaseHistory:
    h = CaseHistory("foreign_handoff")
    for label in ("crossed", "nobody", "owner-again"):
        h.request(label, 2)
    h.finale(6)
    return h


CLEAN: dict[str, Callable[[], CaseHistory]] = {
    "undisturbed": undisturbed, "rejected_at_door": rejected, "abort_in_queue": abort_in_queue,
    "client_gone": client_gone, "no_remote_decode": for_nobody, "local_hit": local_hit,
    "lost_completion": lost_completion, "repeated_completion": repeated_completion, "damaged_notification": damaged,
    "stale_handoff": stale, "foreign_handoff": foreign,
}  # fmt: skip


@pytest.mark.parametrize("name", [case.name for case in release.CASES])
def test_a_clean_history_of_every_case_passes_all_its_checks(name: str, tmp_path: Path) -> None:
    results = CLEAN[name]().judged(tmp_path / name)
    assert [(r.check, r.found) for r in results.values() if r.verdict is not Verdict.PASS] == []
    assert len(results) == len(CLEAN[name]().case.checks) + 4


def held_on(h: CaseHistory) -> None:
    h.change_looks("released", "p0", **{"vllm:kv_cache_usage_perc": HELD})


BROKEN: list[tuple[str, str, Callable[[CaseHistory], None]]] = [
    ("undisturbed", "answered", lambda h: h.fails("alone-0", "decode")),
    ("undisturbed", "hand-off", lambda h: h.change_calls("watched", "prefill", returned=HALF)),
    ("undisturbed", "hand-off", lambda h: h.change_looks("held", "p0", usage=0.0)),
    ("undisturbed", "released", held_on),
    ("undisturbed", "released", lambda h: h.move(lambda s: getattr(s, "name", "") == "released", 3.0)),
    ("undisturbed", "calm", lambda h: h.change_looks("final", "p0", **{EXPIRED: 1.0})),
    ("undisturbed", "metrics", lambda h: h.drop_metric("pdproof:leases_live")),
    ("undisturbed", "content", lambda h: h.answers_wrongly("watched")),
    ("rejected_at_door", "released", held_on),
    ("abort_in_queue", "released", held_on),
    ("client_gone", "freed", lambda h: h.change_looks("freed-d", "d0", usage=HELD)),
    ("client_gone", "freed", lambda h: h.change_looks("freed-p", "p0", usage=HELD)),
    ("client_gone", "freed", lambda h: h.change_looks("final", "p0", **{EXPIRED: 1.0})),
    ("no_remote_decode", "freed", lambda h: h.change_looks("freed", "p0", usage=HELD)),
    ("no_remote_decode", "freed", lambda h: h.change_calls("for-nobody", returned=HAND_OFF)),
    ("local_hit", "released", held_on),
    ("local_hit", "answered", lambda h: h.answers_wrongly("again")),
    ("lost_completion", "released", held_on),
    ("lost_completion", "idle", lambda h: h.move(lambda s: hasattr(s, "text"), 5.0)),
    ("repeated_completion", "harmless", lambda h: h.change_looks("beside", "p0", usage=0.0)),
    ("repeated_completion", "harmless", lambda h: h.change_looks("final", "p0", **{EXPIRED: 1.0})),
    ("repeated_completion", "harmless", lambda h: h.answers_wrongly("beside")),
    ("damaged_notification", "contained", lambda h: h.fails("behind", "decode")),
    ("damaged_notification", "contained", held_on),
    ("stale_handoff", "stale", lambda h: h.answers_wrongly("stale")),
    ("foreign_handoff", "foreign", lambda h: h.answers_wrongly("crossed")),
    ("foreign_handoff", "foreign", lambda h: h.fails("nobody", "decode", status=0)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "check", "mutate"), BROKEN, ids=[f"{n}-{c}-{i}" for i, (n, c, _) in enumerate(BROKEN)]
)
def test_a_broken_history_fails(name: str, check: str, mutate: Callable[[CaseHistory], None], tmp_path: Path) -> None:
    h = CLEAN[name]()
    mutate(h)
    assert h.judged(tmp_path / name)[check].verdict is Verdict.FAIL


def test_blocks_that_were_never_held_prove_no_release(tmp_path: Path) -> None:
    h = rejected()
    h.change_looks("held", "p0", usage=0.0)
    assert h.judged(tmp_path / "run")["released"].verdict is Verdict.INCONCLUSIVE


def test_a_request_that_was_not_refused_proves_nothing_of_refusals(tmp_path: Path) -> None:
    h = freed("rejected_at_door", "rejected", "refused")()
    assert h.judged(tmp_path / "run")["released"].verdict is Verdict.INCONCLUSIVE


def test_a_client_that_left_too_late_proves_nothing(tmp_path: Path) -> None:
    h = client_gone()
    h.change_calls("gone-late", "decode", outcome="ok", end_ns=at(4.1))
    assert h.judged(tmp_path / "run")["freed"].verdict is Verdict.INCONCLUSIVE

"""What was held for whom, read from events: exact figures of made-up histories."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import BadRunFolder
from harness.holding import blocks_over_time, came_late, freed_early, held, reclaims, terms_of
from harness.run_folder import RunFolder
from reference_impl.rules.events import EventKind
from tests.reports.kv_runs import BASE_NS, KvRun, S, d_crash, quiet


def test_each_lease_ends_once_and_says_how(tmp_path: Path) -> None:
    run = KvRun("made-up", "lease")
    for second, name in enumerate(("read", "gone", "lost", "open"), 1):
        run.grant(second, name, blocks=10)
    run.release(5, "read")
    run.release(6, "read", how="abort")  # a repeat changes nothing
    run.expire(7, "gone")
    run.release(8, "unheard-of")
    found = {lease.request_id: lease for lease in held(run.write(tmp_path / "run"))}
    assert {name: (lease.how, lease.ended_ns) for name, lease in found.items()} == {
        "read": ("read", BASE_NS + 5 * S), "gone": ("expired", BASE_NS + 7 * S), "lost": ("", None), "open": ("", None)
    }  # fmt: skip
    assert blocks_over_time(found.values()) == [
        (BASE_NS + t * S, blocks) for t, blocks in ((1, 10), (2, 20), (3, 30), (4, 40), (5, 30), (7, 20))
    ]
    assert found["open"].live_at(BASE_NS + 100 * S)
    assert not found["read"].live_at(BASE_NS + 5 * S)


def test_a_holder_that_dies_takes_its_leases_along(tmp_path: Path) -> None:
    run = KvRun("made-up", "lease")
    run.grant(1, "lost")
    run.kill(2, "p0")
    folder = run.write(tmp_path / "run")
    assert [(lease.how, lease.ended_ns) for lease in held(folder)] == [("died", BASE_NS + 2 * S + S // 500)]
    assert reclaims(folder) == []  # it reads nobody's blocks, so its death leaves none behind


def test_what_a_dead_reader_left_is_what_nobody_came_for(tmp_path: Path) -> None:
    folder = d_crash("lease").write(tmp_path / "run")
    (reclaim,) = reclaims(folder)
    assert (reclaim.worker_id, reclaim.leases, reclaim.blocks, reclaim.standing) == ("d0", 12, 24_000, 0)
    assert reclaim.seconds == pytest.approx(1.7)
    assert reclaim.promised_s == pytest.approx(2.8)  # the youngest began 0.2 s before, with a first term of 3 s
    assert reclaim.block_seconds == pytest.approx(24_000 * 1.7)
    assert reclaim.late == []
    assert sorted(lease.request_id for lease in reclaim.left) == sorted(f"left-{n}" for n in range(12))
    assert freed_early(folder) == []
    assert came_late(folder) == set()


def test_a_reader_that_came_late_was_alive(tmp_path: Path) -> None:
    folder = d_crash("single-timeout-5").write(tmp_path / "run")
    (reclaim,) = reclaims(folder)
    assert sorted(lease.request_id for lease in reclaim.left) == ["left-10", "left-11", "left-8", "left-9"]
    early = {f"left-{n}" for n in range(8)}
    assert {lease.request_id for lease in freed_early(folder)} == early
    assert {request for _, request in came_late(folder)} == early


def test_what_still_stands_at_the_end_has_no_reclaim_and_is_late(tmp_path: Path) -> None:
    run = d_crash("single-timeout-480")
    run.events = [e for e in run.events if e.subject != "left-11" or e.kind is not EventKind.LEASE_EXPIRED]
    (reclaim,) = reclaims(run.write(tmp_path / "run"))
    assert (reclaim.standing, reclaim.seconds) == (1, None)
    assert "left-11" in reclaim.late


def test_an_unproved_kill_leaves_nothing_behind_and_explains_nothing(tmp_path: Path) -> None:
    run = d_crash("lease")
    run.events = [e for e in run.events if e.kind is not EventKind.FAULT_PROVED]
    folder = run.write(tmp_path / "run")
    assert reclaims(folder) == []
    assert len(freed_early(folder)) == 12


@pytest.mark.parametrize(
    ("proved", "early"), [(True, ["before", "long-after"]), (False, ["before", "held", "long-after"])]
)
def test_what_the_router_held_back_was_not_freed_early(tmp_path: Path, proved: bool, early: list[str]) -> None:
    run = KvRun("router_hold", "lease")
    run.say(10, "harness", EventKind.FAULT_INJECTED, "router_hold-1", fault="router_hold", target="router")
    if proved:
        run.say(40, "harness", EventKind.FAULT_PROVED, "router_hold-1", evidence="held 3")
    run.say(45, "harness", EventKind.FAULT_HEALED, "router_hold-1")
    for name, second in (("before", 9), ("held", 42), ("long-after", 45 + 30 + 2)):
        run.grant(1, name)
        run.expire(second, name)
    found = freed_early(run.write(tmp_path / "run"))
    assert sorted(lease.request_id for lease in found) == early


def test_terms_and_events_that_make_no_sense_are_a_bad_run_folder(tmp_path: Path) -> None:
    run = quiet()
    run.configuration["terms"] = {"kv_lease_duration": -1}
    with pytest.raises(BadRunFolder, match=r"configuration\.terms: kv_lease_duration"):
        terms_of(run.write(tmp_path / "terms"))
    run = quiet()
    run.say(1, "p0-e1", EventKind.LEASE_GRANTED, "half", blocks=3)
    with pytest.raises(BadRunFolder, match=r"lease\.granted of half: .*duration_s"):
        held(run.write(tmp_path / "event"))


def test_a_run_in_which_no_kv_moves_has_no_terms(tmp_path: Path) -> None:
    run = quiet()
    del run.configuration["terms"]
    del run.configuration["scenario"]["kv"]
    folder = run.write(tmp_path / "run")
    assert terms_of(RunFolder(folder.path)) is None
    assert reclaims(folder) == []

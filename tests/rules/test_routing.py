"""Which worker a request goes to (KVC-ROUT-001, KVC-LOCK-004)."""

from __future__ import annotations

import pytest

from reference_impl.rules.routing import Role, Route, RouteTable


def route(worker: str, epoch: int, engine: str = "", role: Role = Role.BOTH) -> Route:
    return Route(worker, engine or f"{worker}-e{epoch}", f"http://{worker}/{epoch}", epoch, role)


def split(prefill: int, decode: int) -> RouteTable:
    """Return a table with workers p0, p1 ... and d0, d1 ..."""
    table = RouteTable()
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for number in range(count):
            table.register(route(f"{role[0]}{number}", 1, role=role))
    return table


def turns(table: RouteTable, part: Role, count: int) -> list[str]:
    return [chosen.worker_id for chosen in (table.choose(part) for _ in range(count)) if chosen]


def test_workers_are_chosen_in_turn() -> None:
    table = RouteTable()
    for worker in ("w0", "w1", "w2"):
        table.register(route(worker, 1))
    chosen = [r.worker_id for r in (table.choose() for _ in range(6)) if r]
    assert sorted(chosen[:3]) == ["w0", "w1", "w2"]
    assert chosen[:3] == chosen[3:]


def test_with_no_worker_nothing_is_chosen() -> None:
    assert RouteTable().choose() is None


@pytest.mark.rule("KVC-ROUT-001")
def test_a_removed_worker_is_not_chosen_again() -> None:
    table = RouteTable()
    table.register(route("w0", 1))
    table.register(route("w1", 1))
    assert table.remove(route("w0", 1))
    assert {r.worker_id for r in (table.choose() for _ in range(4)) if r} == {"w1"}


@pytest.mark.rule("KVC-LOCK-004")
def test_a_late_predecessor_is_refused_even_after_its_successor_has_gone() -> None:
    table = RouteTable()
    table.register(route("w0", 2))
    table.remove(route("w0", 2))
    replaced, refusal = table.register(route("w0", 1))
    assert replaced is None
    assert "fenced" in refusal
    assert table.choose() is None


def test_a_successor_replaces_and_the_removal_of_its_predecessor_leaves_it_alone() -> None:
    table = RouteTable()
    table.register(route("w0", 1))
    replaced, refusal = table.register(route("w0", 2))
    assert replaced == route("w0", 1)
    assert not refusal
    assert not table.remove(route("w0", 1))
    assert table.choose() == route("w0", 2)


def test_one_epoch_has_one_holder() -> None:
    table = RouteTable()
    table.register(route("w0", 1, "a"))
    assert table.register(route("w0", 1, "a")) == (None, "")
    assert "belongs to a" in table.register(route("w0", 1, "b"))[1]


def test_each_part_has_its_own_turn() -> None:
    """However the two parts' choices mix, each goes round its own workers evenly."""
    table = split(2, 3)
    chosen = [turns(table, part, 1)[0] for _ in range(6) for part in (Role.PREFILL, Role.DECODE)]
    assert sorted(chosen[::2]) == ["p0"] * 3 + ["p1"] * 3
    assert sorted(chosen[1::2]) == ["d0"] * 2 + ["d1"] * 2 + ["d2"] * 2


def test_nobody_is_chosen_for_a_part_it_does_not_do() -> None:
    table = split(1, 0)
    assert table.disaggregated
    assert table.choose(Role.DECODE) is None
    assert table.choose(Role.BOTH) is None
    assert (table.has(Role.PREFILL), table.has(Role.DECODE)) == (True, False)


def test_one_that_does_both_parts_does_either() -> None:
    table = split(1, 0)
    table.register(route("w0", 1))
    assert set(turns(table, Role.PREFILL, 4)) == {"p0", "w0"}
    assert turns(table, Role.DECODE, 2) == turns(table, Role.BOTH, 2) == ["w0", "w0"]


def test_it_is_no_split_deployment_until_somebody_does_one_part_only() -> None:
    table = RouteTable()
    table.register(route("w0", 1))
    assert not table.disaggregated


def test_an_engine_is_found_by_its_name_among_its_peers_and_by_no_other() -> None:
    table = RouteTable()
    named = Route("d0", "d0-e1", "http://d0", 1, Role.DECODE, "d0-e1.5eed")
    table.register(named)
    assert table.find("d0-e1.5eed") == named
    assert table.find("d0-e1") is None
    assert table.find("d0-e1.0ld0") is None


def test_an_engine_is_found_while_it_is_registered() -> None:
    table = split(1, 1)
    found = table.find("d0-e1")
    assert found is not None
    assert found.name == "d0/d0-e1"
    table.remove(found)
    assert table.find("d0-e1") is None

"""Which worker a request goes to (KVC-ROUT-001, KVC-LOCK-004)."""

from __future__ import annotations

from reference_impl.rules.routing import Route, RouteTable


def route(worker: str, epoch: int, engine: str = "") -> Route:
    return Route(worker, engine or f"{worker}-e{epoch}", f"http://{worker}/{epoch}", epoch)


def test_workers_are_chosen_in_turn() -> None:
    table = RouteTable()
    for worker in ("w0", "w1", "w2"):
        table.register(route(worker, 1))
    chosen = [r.worker_id for r in (table.choose() for _ in range(6)) if r]
    assert sorted(chosen[:3]) == ["w0", "w1", "w2"]
    assert chosen[:3] == chosen[3:]


def test_with_no_worker_nothing_is_chosen() -> None:
    assert RouteTable().choose() is None


def test_a_removed_worker_is_not_chosen_again() -> None:
    table = RouteTable()
    table.register(route("w0", 1))
    table.register(route("w1", 1))
    assert table.remove(route("w0", 1))
    assert {r.worker_id for r in (table.choose() for _ in range(4)) if r} == {"w1"}


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

"""Every place at which a process can be made to fail, and that one effect comes of it, as without the fault."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice import failpoints
from reference_impl.blockservice.credentials import DEPLOYMENT
from reference_impl.blockservice.failpoints import EXIT_CODE, ORDERS_MAX, POSSIBLE, Action, FailPoints, Order, Point
from reference_impl.blockservice.store import StoreError, wall_ms
from reference_impl.rules.blockgroups import Evict, Pin, Request, Reserve, StartMigrate, Unpin
from tests.blockservice.server_kit import (
    CALL_S,
    NODE,
    TENANT,
    Caller,
    Child,
    Failed,
    Held,
    called,
    child,
    held_at,
    serving,
)
from tests.waiting import until_async

AT = {"block_group_id": "bg_1", "epoch": 7}
LATE_S = 0.4
"""Of calls whose reply does not come."""
Asked = Callable[..., Awaitable[tuple[Any, bool]]]
ENDS = {Action.EXIT: EXIT_CODE, Action.KILL: -signal.SIGKILL}


# The orders.


def armed(*orders: Order) -> tuple[FailPoints, list[tuple[str, ...]]]:
    said: list[tuple[str, ...]] = []
    points = FailPoints(lambda *words: said.append(words), sleep=lambda seconds: said.append(("slept", str(seconds))))
    for order in orders:
        points.arm(order)
    return points, said


async def test_nothing_happens_unless_it_is_armed() -> None:
    points, said = armed()
    for point in Point:
        assert await points.reach(point, "Pin") is None
        assert points.reach_now(point, "Pin") is None
    assert (said, points.acted, points.armed) == ([], {}, 0)


async def test_an_order_lets_by_what_it_is_to_skip_and_acts_as_often_as_it_says() -> None:
    points, said = armed(Order(point=Point.RECEIVED, action=Action.REPEAT, skip=2, times=3))
    acts = [await points.reach(Point.RECEIVED, f"m{n}") for n in range(8)]
    assert [act is Action.REPEAT for act in acts] == [False, False, True, True, True, False, False, False]
    assert said == [("received", "repeat", f"m{n}") for n in (2, 3, 4)]
    assert (points.acted, points.armed) == ({"received:repeat": 3}, 0)


async def test_an_order_for_one_method_counts_no_other() -> None:
    points, said = armed(Order(point=Point.RECEIVED, action=Action.REPEAT, skip=1, method="Pin"))
    for method in ("Pin", "Evict", "Evict", "Pin"):
        await points.reach(Point.RECEIVED, method)
    assert said == [("received", "repeat", "Pin")]


async def test_an_order_takes_the_place_of_the_one_before_and_can_be_taken_back() -> None:
    points, said = armed(
        Order(point=Point.RECEIVED, action=Action.REPEAT), Order(point=Point.RECEIVED, action=Action.DROP)
    )
    points.arm(Order(point=Point.AFTER_REPLY, action=Action.REPEAT))
    assert points.armed == 2
    points.disarm(Point.RECEIVED)
    assert points.armed == 1
    assert await points.reach(Point.RECEIVED) is None
    points.disarm()
    assert points.armed == 0
    assert said == []


@pytest.mark.parametrize(
    "order",
    [
        Order(point=point, action=action, seconds=float(action is Action.DELAY))
        for point in Point for action in Action if action not in POSSIBLE[point]
    ],
    ids=lambda o: f"{o.point}-{o.action}",
)  # fmt: skip
def test_what_cannot_be_done_at_a_point_is_refused(order: Order) -> None:
    with pytest.raises(ValueError, match=r"^action: "):
        armed(order)


def test_orders_that_make_no_sense_are_refused_by_their_field() -> None:
    for order, field in (
        (Order(point=Point.BEFORE_COMMIT, action=Action.KILL, method="Pin"), "method"),
        (Order(point=Point.RECEIVED, action=Action.DELAY), "seconds"),
        (Order(point=Point.RECEIVED, action=Action.EXIT, seconds=1.0), "seconds"),
    ):
        with pytest.raises(ValueError, match=f"^{field}: "):
            armed(order)
    many = [Order(point=Point.RECEIVED, action=Action.EXIT, method=f"m{n}") for n in range(ORDERS_MAX + 1)]
    with pytest.raises(ValueError, match=r"^point: 64 orders"):
        armed(*many)


def test_a_full_disk_and_a_delay_happen_in_the_threads_of_the_store() -> None:
    points, said = armed(
        Order(point=Point.BEFORE_COMMIT, action=Action.FULL),
        Order(point=Point.AFTER_COMMIT, action=Action.DELAY, seconds=2),
    )
    with pytest.raises(StoreError) as caught:
        points.in_store("before_commit")
    assert (caught.value.code, caught.value.retry) == ("full", True)
    points.in_store("before_commit")
    points.in_store("after_commit")
    assert said == [("before_commit", "full", ""), ("after_commit", "delay", ""), ("slept", "2")]


async def test_a_dropped_reply_is_never_sent_not_even_as_an_error(tmp_path: Path) -> None:
    points = FailPoints(lambda *_: None)
    async with serving(tmp_path, points=points) as here:
        points.arm(Order(point=Point.AFTER_COMMIT_BEFORE_REPLY, action=Action.DROP))
        with pytest.raises(Failed) as caught:
            await here.caller().write("op-1", Reserve(slots=1, **AT), timeout_s=LATE_S)
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.rule == "", "its own clock said so, not the server"
        await until_async(lambda: not here.metrics.inflight, CALL_S, "the call has ended here as well")


@pytest.mark.parametrize("action", ENDS)
def test_what_is_about_to_happen_is_said_first(monkeypatch: pytest.MonkeyPatch, action: Action) -> None:
    points, said = armed(Order(point=Point.AFTER_COMMIT, action=action))
    monkeypatch.setattr(failpoints, "_end", lambda a: said.append(("ended", a)))
    points.in_store("after_commit")
    assert said == [("after_commit", action, ""), ("ended", action)]


# A process without fail points.


async def test_a_process_without_fail_points_never_calls_into_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("reach", "reach_now", "in_store", "_take", "__init__"):
        monkeypatch.setattr(FailPoints, name, lambda *_: pytest.fail("called"))
    async with serving(tmp_path) as here:
        assert (await here.caller().write("op-1", Reserve(slots=1, **AT)))[0].applied
        await here.caller().call("GetMetadata", pb.GetMetadataRequest(block_group_id="bg_1"))


async def test_nothing_can_be_armed_in_a_process_without_fail_points(tmp_path: Path) -> None:
    with child(tmp_path, "--no-points") as running:
        async with called(running, DEPLOYMENT) as ours:
            for arm in (ours.arm("received", "exit"), ours.call("Report", pb.ReportRequest())):
                with pytest.raises(Failed) as caught:
                    await arm
                assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
        running.stop()


# Real processes.


async def write(running: Child, operation_id: str, request: Request, **more: Any) -> tuple[Any, bool]:
    async with called(running) as caller:
        return await caller.write(operation_id, request, **more)


async def arm(running: Child, point: str, action: str, **more: Any) -> None:
    async with called(running, DEPLOYMENT) as ours:
        report = await ours.arm(point, action, **more)
        assert (report.armed, report.pid) == (1, running.process.pid)


async def without_faults(folder: Path, requests: list[tuple[str, Request]]) -> Held:
    """Return what a store holds after requests to which nothing happens."""
    folder.mkdir()
    async with serving(folder) as here:
        caller = here.caller()
        for operation_id, request in requests:
            await caller.write(operation_id, request)
        return await here.held()


POINTS = [point for point in Point if not point.startswith("migration")]
CRASHES = [(point, action) for point in POINTS for action in ENDS]


async def crash(running: Child, point: Point, action: Action, asked: Asked) -> Any:
    """Have a process end at a point; return its answer, if one got out before."""
    await arm(running, point, action)
    first = None
    if point is Point.AFTER_REPLY:
        with contextlib.suppress(Failed):  # what was sent may or may not have got out of the dead process
            first = (await asked(running))[0]
    else:
        with pytest.raises(Failed) as caught:
            await asked(running)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE, "the client knows nothing of what happened"
    assert running.ended() == ENDS[action]
    assert running.said()[-1] == [
        point, action, "" if "commit" in point and "reply" not in point else "Reserve"
    ]  # fmt: skip
    return first


@pytest.mark.rule("KVC-IDEM-002", "KVC-IDEM-003")
@pytest.mark.parametrize("action", ENDS)
async def test_a_crash_anywhere_and_a_retry_at_the_successor_have_one_effect(tmp_path: Path, action: Action) -> None:
    """Before the commit nothing is there, after it everything; the successor's answer is the same either way.

    A successor answers the retry, and then crashes itself, at the next point.
    """
    request, asked, first, committed = Reserve(slots=3, **AT), None, None, False
    for number, point in enumerate([*POINTS, None]):
        with child(tmp_path) as running:
            if asked is not None:
                answer, replayed = await asked(running, attempt=2)
                assert (answer.applied, answer.reserved, replayed) == (True, 3 * number, committed), point
                assert first in (None, answer)
            if point is None:
                running.stop()
                break
            asked = partial(write, operation_id=f"op-{number}", request=request, issued_ms=wall_ms())
            first = await crash(running, point, action, asked)
        committed = point not in (Point.RECEIVED, Point.BEFORE_COMMIT)
        held = held_at(tmp_path / "store")
        assert len(held.records) == len(held.of_clients()) == number + committed, point
    assert len(running.said()) == len(POINTS)
    clean = await without_faults(tmp_path / "clean", [(f"op-{n}", request) for n in range(len(POINTS))])
    assert held_at(tmp_path / "store").state() == clean.state()


STORIES: list[tuple[str, Request]] = [
    ("reserve", Reserve(slots=3, **AT)),
    ("pin", Pin(request_id="r", **AT)),
    ("unpin", Unpin(request_id="r", **AT)),
    ("pin-late", Pin(request_id="r", **AT)),
    ("stale", Evict(block_group_id="bg_1", epoch=6)),
    ("migrate", StartMigrate(src=NODE, dst="node-2", **AT)),
]


async def lost(caller: Caller, operation_id: str, request: Request) -> grpc.StatusCode:
    """Return the error of a call whose reply does not come in time."""
    with pytest.raises(Failed) as caught:
        await caller.write(operation_id, request, timeout_s=LATE_S)
    return caught.value.code


async def answered(caller: Caller, operation_id: str, request: Request) -> None:
    await caller.write(operation_id, request)


async def refused_full(caller: Caller, operation_id: str, request: Request) -> None:
    with pytest.raises(Failed) as caught:
        await caller.write(operation_id, request)
    assert (caught.value.code, caught.value.rule) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL")


async def too_late(caller: Caller, operation_id: str, request: Request) -> None:
    assert await lost(caller, operation_id, request) is grpc.StatusCode.DEADLINE_EXCEEDED


SURVIVED: list[tuple[Point, Action, Callable[..., Any], bool | None]] = [
    # Where, what, how its caller sees it, and whether a retry finds that it had run (None: he had his answer).
    (Point.RECEIVED, Action.DROP, too_late, False),
    (Point.RECEIVED, Action.DELAY, too_late, False),
    (Point.RECEIVED, Action.REPEAT, answered, None),
    (Point.BEFORE_COMMIT, Action.DELAY, too_late, True),
    (Point.BEFORE_COMMIT, Action.FULL, refused_full, False),
    (Point.AFTER_COMMIT, Action.DELAY, too_late, True),
    (Point.AFTER_COMMIT_BEFORE_REPLY, Action.DROP, too_late, True),
    (Point.AFTER_COMMIT_BEFORE_REPLY, Action.DELAY, too_late, True),
    (Point.AFTER_COMMIT_BEFORE_REPLY, Action.REPEAT, answered, None),
    (Point.AFTER_REPLY, Action.REPEAT, answered, None),
]


def test_every_point_is_tried_with_everything_that_can_be_done_there() -> None:
    tried = {*CRASHES, *[(point, action) for point, action, *_ in SURVIVED]}
    assert tried == {(p, a) for p, actions in POSSIBLE.items() for a in actions if not p.startswith("migration")}


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """One process for everything that a process survives: each fault has a tenant and a group of its own."""
    tenants = [_tenant(point, action) for point, action, *_ in SURVIVED]
    with child(tmp_path_factory.mktemp("survivor"), "--tenants", *tenants) as running:
        yield running
        running.stop()


def _tenant(point: Point, action: Action) -> str:
    return f"{point}.{action}"


@pytest.mark.rule("KVC-IDEM-001")
@pytest.mark.parametrize(("point", "action", "seen", "had_run"), SURVIVED, ids=lambda x: str(getattr(x, "__name__", x)))
async def test_a_fault_that_the_process_survives_and_a_retry_have_one_effect(
    survivor: Child, tmp_path: Path, point: Point, action: Action, seen: Callable[..., Any], had_run: bool | None
) -> None:
    stories = [STORIES[0], STORIES[-1]] if seen is too_late else STORIES  # waiting takes its time
    tenant = _tenant(point, action)
    async with called(survivor, tenant) as caller, called(survivor, DEPLOYMENT) as ours:
        for number, (operation_id, request) in enumerate(stories):
            await ours.arm(point, action, seconds=2 * LATE_S if action is Action.DELAY else 0.0)
            await seen(caller, operation_id, request)
            answer, replayed = await caller.write(operation_id, request, attempt=2)
            assert replayed is (True if had_run is None else had_run)
            assert await caller.write(operation_id, request, attempt=3) == (answer, True)
            report = await ours.call("Report", pb.ReportRequest())
            assert (report.acted[f"{point}:{action}"], report.armed) == (number + 1, 0)
    assert [said[:2] for said in survivor.said()].count([point, action]) == len(stories)
    clean = await without_faults(tmp_path / "clean", stories)
    assert survivor.held().seen_by(tenant).state() == clean.seen_by(TENANT).state()


async def test_an_order_can_be_taken_back_from_outside(tmp_path: Path) -> None:
    with child(tmp_path) as running:
        async with called(running, DEPLOYMENT) as ours:
            await ours.arm("received", "exit", method="Reserve")
            await write(running, "op-1", Pin(request_id="r", **AT))
            report = await ours.call("Arm", pb.ArmRequest(point="received"))
            assert (report.armed, dict(report.acted)) == (0, {})
            for bad, field in (
                (pb.ArmRequest(point="nowhere"), "point"),
                (pb.ArmRequest(point="received", action="full", times=1), "action"),
            ):
                with pytest.raises(Failed) as caught:
                    await ours.call("Arm", bad)
                assert (caught.value.code, caught.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert (await write(running, "op-2", Reserve(slots=1, **AT)))[0].applied
        running.stop()
    assert running.said() == []

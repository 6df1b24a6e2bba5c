"""Handshakes in the background: whoever does not answer delays nobody who does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest
import pytest_asyncio

from reference_impl.engine import handshakes
from reference_impl.engine.connector import Shaken
from reference_impl.engine.handshakes import AT_ONE_PLACE_MAX, RUNNING_MAX, BackgroundShaker
from reference_impl.realclock import now_ns
from reference_impl.rules.agreement import Hello, RankAddress
from reference_impl.rules.terms import KvTerms
from reference_impl.transport.hello import HandshakeServer
from tests.waiting import until_async

HOST = "127.0.0.1"
SECRET = b"secret of a test"


def hello(engine_id: str) -> Hello:
    return Hello(
        engine_id=engine_id, role="prefill", model="oracle", block_tokens=16, block_bytes=4096, blocks=100, ranks=1,
        terms=KvTerms(), addresses=[RankAddress(b"metadata", 4096, 8192, 100)],
    )  # fmt: skip


@pytest_asyncio.fixture
async def shaker() -> AsyncIterator[BackgroundShaker]:
    found = BackgroundShaker(lambda: hello("D"), SECRET)
    yield found
    await found.close()


@pytest_asyncio.fixture
async def healthy() -> AsyncIterator[HandshakeServer]:
    """An engine `P` that answers."""
    server = HandshakeServer(lambda: hello("P"), lambda _theirs: None, now_ns, SECRET)
    await server.start(HOST)
    yield server
    await server.close()


@pytest.fixture
def silent() -> Iterator[list[int]]:
    """Ports that accept and never say a word."""
    with ExitStack() as stack:
        ports = []
        for _ in range(40):
            listener = stack.enter_context(socket.create_server((HOST, 0), backlog=512))
            ports.append(listener.getsockname()[1])
        yield ports


async def the_result(shaker: BackgroundShaker, limit_s: float = 10.0) -> Shaken:
    return (await until_async(shaker.results, limit_s, "a handshake has come out"))[0]


@pytest.mark.rule("KVC-HSK-002")
async def test_a_healthy_peer_is_met_while_400_handshakes_to_a_silent_port_wait(
    shaker: BackgroundShaker, healthy: HandshakeServer, silent: list[int]
) -> None:
    for number in range(400):
        shaker.connect(f"ghost {number}", HOST, silent[0])
    await asyncio.sleep(0)
    assert shaker.running == AT_ONE_PLACE_MAX
    began_ns = now_ns()
    shaker.connect("P", HOST, healthy.port)
    met = await the_result(shaker)
    assert (met.engine_id, met.problem) == ("P", "")
    shaker.measure("P", HOST, healthy.port)
    measured = await the_result(shaker)
    assert (measured.engine_id, measured.problem, measured.measured) == ("P", "", True)
    assert now_ns() - began_ns < 0.5e9


async def test_so_many_run_at_once_and_the_places_take_turns(
    shaker: BackgroundShaker, healthy: HandshakeServer, silent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "LIMIT_S", 0.3)
    for number in range(10):
        for port in silent:
            shaker.connect(f"ghost {number}", HOST, port)
    await until_async(lambda: shaker.running == RUNNING_MAX, 5, "as many run as may")
    shaker.connect("P", HOST, healthy.port)
    results: list[Shaken] = []

    def met() -> bool:
        results.extend(shaker.results())
        return any(r.engine_id == "P" for r in results)

    await until_async(met, 10, "the healthy peer has had its turn")
    assert [r.problem for r in results if r.engine_id == "P"] == [""]
    assert len(results) <= 2 * RUNNING_MAX + 1, "it waited for two rounds at most"


async def test_the_time_limit_counts_from_the_start_of_a_handshake(
    shaker: BackgroundShaker, silent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "LIMIT_S", 0.2)
    began_ns = now_ns()
    for number in range(6):
        shaker.connect(f"ghost {number}", HOST, silent[0])
    results: list[Shaken] = []

    def all_told() -> bool:
        results.extend(shaker.results())
        return len(results) == 6

    await until_async(all_told, 10, "all have been given up")
    assert now_ns() - began_ns >= 0.6e9, "three turns of two"
    assert all("did not answer within 0.2 s" in r.problem for r in results)
    assert [r.engine_id for r in results] == [f"ghost {number}" for number in range(6)]
    await until_async(lambda: not shaker.running, 5, "the last is over")


@pytest.mark.rule("KVC-HSK-002")
async def test_the_queue_is_bounded_and_the_longest_line_pays(
    shaker: BackgroundShaker, healthy: HandshakeServer, silent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "WAITING_MAX", 50)
    for number in range(60):
        shaker.connect(f"ghost {number}", HOST, silent[0])
    told = shaker.results()
    assert [r.engine_id for r in told] == [f"ghost {number}" for number in range(52, 60)]
    assert all("50 handshakes wait already" in r.problem for r in told)
    for number in range(AT_ONE_PLACE_MAX + 1):  # one more than can start at once
        shaker.measure(f"P {number}", HOST, healthy.port)
    assert [r.engine_id for r in shaker.results()] == ["ghost 51"], "not one of the healthy peer's"
    monkeypatch.setattr(handshakes, "RUNNING_MAX", 0)
    for port in silent[1:]:
        shaker.connect("alone", HOST, port)
    assert len(shaker._places) <= 2 + 50, "a place that nobody waits for any more is forgotten"


async def test_nothing_is_started_after_its_end(shaker: BackgroundShaker, silent: list[int]) -> None:
    for number in range(10):
        shaker.connect(f"ghost {number}", HOST, silent[0])
    await until_async(lambda: shaker.running, 5, "some run")
    await shaker.close()
    shaker.connect("late", HOST, silent[0])
    await asyncio.sleep(0)  # a task that was made would begin now
    assert shaker.running == 0

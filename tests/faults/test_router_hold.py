"""The fault `router_hold`: it is proved by the router's own count, and aimed wrongly it is not proved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web

from faults import router_hold
from faults.fault import FaultMissed
from faults.router_hold import RouterHold
from reference_impl.event_log import EventLog
from reference_impl.router.hold import HandoffHold
from reference_impl.router.server import Router

TOKEN = "the deployment's secret"


class Held:
    """A router that listens, and its hold."""

    def __init__(self, url: str, hold: HandoffHold) -> None:
        self.url, self.hold = url, hold


@pytest_asyncio.fixture
async def router() -> AsyncIterator[Held]:
    made = Router(TOKEN, EventLog(None, "router"))
    runner = web.AppRunner(made.app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield Held(f"http://127.0.0.1:{runner.addresses[0][1]}", made.hold)
    await runner.cleanup()


async def test_hand_offs_that_were_held_prove_it(router: Held) -> None:
    fault = RouterHold(router.url, TOKEN, seconds=0.2, requests=2)
    assert fault.available() is None
    await fault.inject()
    passing = [asyncio.create_task(router.hold.pass_through()) for _ in range(3)]
    proof = await fault.prove()
    await asyncio.gather(*passing)
    assert proof.holds, proof.shown_by
    assert "2 hand-offs held" in proof.shown_by
    await fault.heal()
    assert (await fault.prove_healed()).holds


async def test_without_a_request_nothing_is_proved(router: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_hold, "PROOF_SPARE_S", 0.3)
    fault = RouterHold(router.url, TOKEN, seconds=0.1, requests=1)
    await fault.inject()
    proof = await fault.prove()
    assert not proof.holds
    assert "0 of 1" in proof.shown_by
    assert not (await fault.prove_healed()).holds  # the order still stands
    await fault.heal()
    assert (await fault.prove_healed()).holds


async def test_hand_offs_that_left_too_soon_do_not_prove_it(router: Held) -> None:
    fault = RouterHold(router.url, TOKEN, seconds=0.2, requests=1)
    await fault.inject()
    leaving = asyncio.create_task(router.hold.pass_through())
    await asyncio.sleep(0)
    leaving.cancel()  # its client went away
    proof = await fault.prove()
    assert not proof.holds, proof.shown_by


@pytest.mark.parametrize("wrong", ["token", "port"])
async def test_a_router_that_does_not_take_the_order_is_a_miss(router: Held, wrong: str) -> None:
    url = router.url if wrong == "token" else "http://127.0.0.1:9"
    fault = RouterHold(url, "not the secret", seconds=1, requests=1)
    with pytest.raises(FaultMissed, match="does not take the order"):
        await fault.inject()

"""The fault `router_hold`: the router keeps hand-offs to itself, as a long queue before the decode side would."""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
import msgspec

from faults.fault import Evidence, FaultMissed
from reference_impl.realclock import now_ns
from reference_impl.router.hold import Hold, HoldReport
from reference_impl.router.protocol import HOLD_PATH, TOKEN_HEADER

CALL_LIMIT_S: Final = 5.0
PROOF_SPARE_S: Final = 30.0
"""For as many requests to arrive as are to be held."""
LOOK_INTERVAL_S: Final = 0.1


class RouterHold:
    """Holds the next `requests` hand-offs for `seconds` each.

    Proof: the router's own count of hand-offs that it held, and the shortest time that it held one.
    """

    name = "router_hold"

    def __init__(self, router_url: str, token: str, *, seconds: float, requests: int) -> None:
        self._url = router_url + HOLD_PATH
        self._headers = {TOKEN_HEADER: token}
        self._seconds = seconds
        self._requests = requests
        self._before = 0

    def available(self) -> str | None:
        """Every router of ours can do it; whether it answers is seen when it is told."""
        return None

    async def inject(self) -> int:
        """Give the order, and return the moment. Raises FaultMissed if the router does not take it."""
        try:
            self._before = (await self._report()).held
            moment = now_ns()
            await self._order(self._requests)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            raise FaultMissed(f"the router does not take the order to hold hand-offs: {error!r}") from error
        return moment

    async def prove(self) -> Evidence:
        """Wait until as many have been held, each for as long, as ordered."""
        report = None
        try:
            async with asyncio.timeout(self._seconds + PROOF_SPARE_S):
                while report is None or report.held - self._before < self._requests:
                    await asyncio.sleep(LOOK_INTERVAL_S)
                    report = await self._report()
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            held = 0 if report is None else report.held - self._before
            return Evidence(False, f"the router has held {held} of {self._requests} hand-offs")
        long_enough = report.held_s_min >= self._seconds
        return Evidence(
            long_enough,
            f"the router counts {report.held - self._before} hand-offs held, for {report.held_s_min:.2f} s at least",
        )

    async def heal(self) -> None:
        """Order to hold no more."""
        try:
            await self._order(0)
        except (aiohttp.ClientError, TimeoutError):
            return  # `prove_healed` will tell

    async def prove_healed(self) -> Evidence:
        """Ask whether none is held any more."""
        try:
            report = await self._report()
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            return Evidence(False, f"the router does not answer: {error!r}")
        left = report.holding + report.requests_left
        return Evidence(left == 0, f"the router holds {report.holding} hand-offs, {report.requests_left} are to come")

    async def _order(self, requests: int) -> None:
        body = msgspec.json.encode(Hold(self._seconds, requests))
        async with self._session() as session, session.post(self._url, data=body) as response:
            response.raise_for_status()

    async def _report(self) -> HoldReport:
        async with self._session() as session, session.get(self._url) as response:
            response.raise_for_status()
            return msgspec.json.decode(await response.read(), type=HoldReport)

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=CALL_LIMIT_S))

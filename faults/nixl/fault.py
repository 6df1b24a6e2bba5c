"""The fault `nixl`: an order to the NIXL agents inside engines, proved by their own reports of what they struck.

An order is in force when every live agent that it may mean has reported that it has read it, and gone when every live
one has reported other orders since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from faults.fault import Evidence, FaultMissed
from faults.nixl.channel import Desk
from faults.nixl.orders import Order, Report, Said
from reference_impl.failover.pidfd import read_stat
from reference_impl.realclock import now_ns

READ_LIMIT_S: Final = 5.0
"""For agents to have read what has changed; they look every few hundredths of a second, unless they stand still."""
LOOK_INTERVAL_S: Final = 0.02


class NixlFault:
    """`order`, given at `desk`. `within_s`: when as many as it names (one at least) must have been struck."""

    name = "nixl"

    def __init__(self, desk: Desk, order: Order, *, within_s: float) -> None:
        self.order = order
        self._desk = desk
        self._within_s = within_s

    def available(self) -> str | None:
        """An order needs a live agent to obey it."""
        if self._agents():
            return None
        unfit = [report.detail for report in self._desk.reports() if report.said is Said.UNFIT]
        whose = f" of an engine named {self.order.engine!r}" if self.order.engine else ""
        return f"no NIXL agent{whose} has reported in {self._desk.folder}" + "".join(f"; {each}" for each in unfit[:1])

    async def inject(self) -> int:
        """Give the order, wait until it is in force, and return the moment before. Raises FaultMissed."""
        reason = self.available()
        if reason is not None:
            raise FaultMissed(reason)
        moment = now_ns()
        self._desk.place(self.order)
        late = await self._until_read(lambda report: self.order.id in report.orders)
        if late or not self._agents():
            self._desk.remove(self.order.id)
            raise FaultMissed(f"{_names(late)} did not read the order {self.order.id!r} within {READ_LIMIT_S:g} s")
        return moment

    def struck(self) -> list[Report]:
        """Return what agents have reported so far of what they struck."""
        return self._reports(Said.STRUCK)

    async def prove(self) -> Evidence:
        """Wait until as many have been struck as ordered."""
        order, wanted = self.order, max(1, self.order.count)
        try:
            async with asyncio.timeout(self._within_s):
                while len(self.struck()) < wanted:
                    await asyncio.sleep(LOOK_INTERVAL_S)
        except TimeoutError:
            missed = "".join(f"; missed: {report.detail}" for report in self._reports(Said.MISSED)[:1])
            struck = f"struck {len(self.struck())} of {wanted} within {self._within_s:g} s"
            return Evidence(False, f"the order {order.id!r} {struck}{missed}")
        struck_ones = self.struck()
        first = struck_ones[0].text or struck_ones[0].detail or f"a {order.what}"
        count = f"{order.what} x {len(struck_ones)}"
        return Evidence(True, f"{_names(struck_ones)} reports {order.action} of {count}, the first: {first}")

    async def heal(self) -> None:
        """Take the order back. What it had kept back goes on."""
        self._desk.remove(self.order.id)

    async def prove_healed(self) -> Evidence:
        """Wait until every live agent has reported orders without it."""
        late = await self._until_read(lambda report: self.order.id not in report.orders)
        if late:
            return Evidence(False, f"{_names(late)} has not read within {READ_LIMIT_S:g} s that the order has gone")
        return Evidence(True, f"{_names(self._agents())} has read that the order {self.order.id!r} has gone")

    def _reports(self, said: Said) -> list[Report]:
        return [report for report in self._desk.reports() if report.order == self.order.id and report.said is said]

    def _agents(self) -> list[Report]:
        """Return the last word on orders of every live agent that the order may mean."""
        last: dict[tuple[int, str], Report] = {}
        started: dict[tuple[int, str], int] = {}
        for report in self._desk.reports():
            if self.order.engine not in report.engine:
                continue
            key = (report.pid, report.agent)
            if report.said is Said.HELLO:
                started[key] = report.start_ticks
            if report.said in {Said.HELLO, Said.READ}:
                last[key] = report
        return [report for key, report in last.items() if key in started and _lives(report.pid, started[key])]

    async def _until_read(self, holds: Callable[[Report], bool]) -> list[Report]:
        """Wait until it holds for every live agent's last word; return those for which it does not in time."""
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                while any(not holds(report) for report in self._agents()):
                    await asyncio.sleep(LOOK_INTERVAL_S)
        except TimeoutError:
            return [report for report in self._agents() if not holds(report)]
        return []


def _lives(pid: int, start_ticks: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.start_ticks == start_ticks and not stat.is_dead


def _names(reports: list[Report]) -> str:
    return ", ".join(sorted({report.engine for report in reports})) or "nobody"

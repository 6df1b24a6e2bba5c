"""The fault `fail_point`: at a named place, a block service ends, keeps its reply back, delays it, or works twice.

The service is told by RPC, with the deployment's credential. Proof: of an ending, the kernel's word that the process is
gone, and that process's own last word (an event, written before it acts) that it was the fail point; of all else, the
service's own count of how often it acted.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import grpc
import msgspec

from faults.fault import Evidence, FaultMissed, ProcessRef
from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice import blocks_pb2_grpc as rpc
from reference_impl.blockservice.credentials import DEPLOYMENT, credential, metadata
from reference_impl.blockservice.failpoints import Action
from reference_impl.failover.pidfd import ProcessWatch
from reference_impl.realclock import now_ns
from reference_impl.rules.events import Event, EventKind

CALL_LIMIT_S: Final = 3.0
HEAL_LIMIT_S: Final = 30.0
LOOK_INTERVAL_S: Final = 0.05
ENDINGS: Final = frozenset({Action.EXIT, Action.KILL})


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to happen, and how often; `seconds` of a delay."""

    point: str
    action: Action
    times: int = 1
    seconds: float = 0.0
    method: str = ""


class FailPoint:
    """An order to the block service `target`, which listens at `address` and writes its events to `events`.

    `within_s`: when it must have acted.
    """

    name = "fail_point"

    def __init__(
        self, target: ProcessRef, address: str, secret: bytes, order: Order, *, events: Path, within_s: float
    ) -> None:  # fmt: skip
        self.target = target
        self.order = order
        self._address = address
        self._events = events
        self._metadata = metadata(DEPLOYMENT, credential(secret, DEPLOYMENT))
        self._within_s = within_s
        self._watch: ProcessWatch | None = None
        self._before = 0

    @property
    def _key(self) -> str:
        return f"{self.order.point}:{self.order.action}"

    def available(self) -> str | None:
        """Whether the service has fail points is seen when it is told."""
        return None

    async def inject(self) -> int:
        """Arm the point, and return the moment. Raises FaultMissed if the service does not take the order."""
        order = self.order
        try:
            self._watch = ProcessWatch(self.target.pid, self.target.start_ticks)
        except ProcessLookupError as error:
            raise FaultMissed(f"{self.target.name} had gone before it could be told: {error}") from error
        request = pb.ArmRequest(
            point=order.point, action=order.action, times=order.times, seconds=order.seconds, method=order.method
        )
        moment = now_ns()
        try:
            report = await self._call("Arm", request, wait=True)  # it may be starting
        except grpc.aio.AioRpcError as error:
            told = f"{error.code().name} {error.details()}"
            raise FaultMissed(f"{self.target.name} does not take the order: {told}") from error
        self._before = report.acted.get(self._key, 0)
        return moment

    async def prove(self) -> Evidence:
        """Wait until it has acted as often as ordered."""
        if self._watch is None:
            return Evidence(False, "no order was ever given")
        try:
            async with asyncio.timeout(self._within_s):
                if self.order.action not in ENDINGS:
                    return await self._counted()
                await self._watch.exited()
                return self._last_word()
        except TimeoutError:
            return Evidence(False, f"nothing passed {self.order.point} within {self._within_s:g} s")
        finally:
            self._watch.close()

    def _last_word(self) -> Evidence:
        """Say whether the process that has ended said before that the fail point would end it."""
        exited = f"pidfd of pid {self.target.pid} reports its exit"
        for line in reversed(self._events.read_bytes().splitlines()):
            event = msgspec.json.decode(line, type=Event)
            if event.kind is EventKind.FAIL_POINT_REACHED and event.detail.get("pid") == self.target.pid:
                found = f"{event.subject}:{event.detail.get('action')}"
                return Evidence(found == self._key, f"{exited}; its last word was {found}")
        return Evidence(False, f"{exited}, but it never said that a fail point ends it")

    async def _counted(self) -> Evidence:
        acted = 0
        while acted < self.order.times:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                report = await self._call("Report", pb.ReportRequest())
            except grpc.aio.AioRpcError as error:
                return Evidence(False, f"{self.target.name} does not answer: {error.code().name}")
            if report.pid != self.target.pid:
                return Evidence(False, f"pid {self.target.pid} has ended, and with it its count")
            acted = report.acted.get(self._key, 0) - self._before
        return Evidence(True, f"{self.target.name} counts {acted} times {self.order.action} at {self.order.point}")

    async def heal(self) -> None:
        """Disarm, if the same process still lives."""
        try:
            await self._call("Arm", pb.ArmRequest(point=self.order.point, action=""))
        except grpc.aio.AioRpcError:
            return  # `prove_healed` will tell

    async def prove_healed(self) -> Evidence:
        """Wait until a service answers that has nothing armed."""
        try:
            async with asyncio.timeout(HEAL_LIMIT_S):
                while True:
                    try:
                        report = await self._call("Report", pb.ReportRequest())
                        break
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(LOOK_INTERVAL_S)
        except TimeoutError:
            return Evidence(False, f"no block service answers at {self._address} within {HEAL_LIMIT_S:g} s")
        return Evidence(report.armed == 0, f"pid {report.pid} answers, {report.armed} orders stand")

    async def _call(
        self, method: str, request: pb.ArmRequest | pb.ReportRequest, *, wait: bool = False
    ) -> pb.FailPointReport:  # fmt: skip
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = rpc.FailPointsStub(channel)
            report: pb.FailPointReport = await getattr(stub, method)(
                request, timeout=CALL_LIMIT_S, metadata=self._metadata, wait_for_ready=wait
            )  # fmt: skip
            return report

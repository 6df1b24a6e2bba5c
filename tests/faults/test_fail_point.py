"""The fault `fail_point`: proved by the kernel and the victim's last word, or by a count; aimed wrongly it is not."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from faults.fail_point import FailPoint, Order
from faults.fault import FaultMissed, ProcessRef
from reference_impl.blockservice.client import BlockClient, CallOutcome, Credentials, Result
from reference_impl.blockservice.config import BlockServiceConfig
from reference_impl.blockservice.credentials import credential
from reference_impl.blockservice.failpoints import Action, Point
from reference_impl.blockservice.peers import read_address
from reference_impl.failover.pidfd import start_ticks
from reference_impl.realclock import wall_ns
from reference_impl.rules.clock import NS_PER_MS
from reference_impl.rules.retries import RetryPolicy
from reference_impl.secret import TOKEN_VARIABLE

SECRET = b"the secret of a deployment"
READY_LIMIT_S = 20.0


class Service:
    """A block service without an engine; a supervisor of its own brings it back."""

    def __init__(self, folder: Path, *, fail_points: bool = True) -> None:
        self.events = folder / "events.jsonl"
        self._folder = folder
        self._issued_ms = 0
        self._config = BlockServiceConfig(
            node="p0", nodes=["p0"], run_dir=str(folder), engine_socket=str(folder / "p0.blocks"),
            store=str(folder / "p0.sqlite"), events_file=str(self.events), fail_points=fail_points,
        )  # fmt: skip
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "reference_impl.blockservice.process",
            msgspec.json.encode(self._config).decode(), stdout=asyncio.subprocess.PIPE,
            env=os.environ | {TOKEN_VARIABLE: SECRET.decode()},
        )  # fmt: skip
        assert self.process.stdout is not None
        async with asyncio.timeout(READY_LIMIT_S):
            assert (await self.process.stdout.readline()).strip() == b"ready"
        self._issued_ms = self._issued_ms or wall_ns() // NS_PER_MS  # a retry repeats the moment of its operation

    async def end(self) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    @property
    def ref(self) -> ProcessRef:
        assert self.process is not None
        ticks = start_ticks(self.process.pid)
        assert ticks is not None
        return ProcessRef(
            name="p0-blocks", role="block-service", worker_id="p0", pid=self.process.pid, start_ticks=ticks
        )

    @property
    def address(self) -> str:
        found = read_address(self._folder, "p0")
        assert found is not None
        return found.target

    def fault(self, point: Point, action: Action, *, times: int = 1, within_s: float = 10.0) -> FailPoint:
        seconds = 0.1 if action is Action.DELAY else 0.0
        order = Order(point=point, action=action, times=times, seconds=seconds)
        return FailPoint(self.ref, self.address, SECRET, order, events=self.events, within_s=within_s)

    async def ask(self, operation_id: str) -> Result:
        """One write, of a group that is unknown: it is decided and kept like any other."""
        policy = RetryPolicy(attempts_max=1, attempt_timeout_s=0.5)
        client = BlockClient(self.address, Credentials("t", credential(SECRET, "t")), policy=policy)
        try:
            return await client.reserve(
                "g", 1, 1, operation_id=operation_id, issued_ms=self._issued_ms, timeout_s=2.0
            )  # fmt: skip
        finally:
            await client.close()


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    made = Service(tmp_path)
    await made.start()
    yield made
    await made.end()


@pytest.mark.parametrize("action", [Action.EXIT, Action.KILL])
async def test_an_ending_is_proved_by_the_kernel_and_the_victims_last_word(service: Service, action: Action) -> None:
    fault = service.fault(Point.AFTER_COMMIT_BEFORE_REPLY, action)
    assert fault.available() is None
    await fault.inject()
    result = await service.ask("op-1")
    assert result.outcome is CallOutcome.UNKNOWN
    proof = await fault.prove()
    assert proof.holds, proof.shown_by
    assert f"after_commit_before_reply:{action}" in proof.shown_by
    assert service.process is not None
    await service.process.wait()
    await service.start()
    assert (await fault.prove_healed()).holds
    again = await service.ask("op-1")
    assert again.error_code == "UNKNOWN_GROUP"


@pytest.mark.parametrize("action", [Action.DROP, Action.DELAY, Action.REPEAT])
async def test_what_leaves_the_process_alive_is_proved_by_its_count(service: Service, action: Action) -> None:
    fault = service.fault(Point.RECEIVED, action, times=2)
    await fault.inject()
    await asyncio.gather(service.ask("op-1"), service.ask("op-2"))
    proof = await fault.prove()
    assert proof.holds, proof.shown_by
    assert "counts 2 times" in proof.shown_by
    await fault.heal()
    assert (await fault.prove_healed()).holds


async def test_where_nothing_passes_nothing_is_proved(service: Service) -> None:
    fault = service.fault(Point.MIGRATION_DECIDED, Action.EXIT, within_s=0.5)
    await fault.inject()
    await service.ask("op-1")
    proof = await fault.prove()
    assert not proof.holds
    assert "nothing passed migration_decided" in proof.shown_by
    assert not (await fault.prove_healed()).holds  # the order still stands
    await fault.heal()
    assert (await fault.prove_healed()).holds


async def test_an_end_of_another_kind_is_not_taken_for_it(service: Service) -> None:
    fault = service.fault(Point.BEFORE_COMMIT, Action.EXIT)
    await fault.inject()
    os.kill(service.ref.pid, signal.SIGKILL)
    proof = await fault.prove()
    assert not proof.holds
    assert "never said" in proof.shown_by


async def test_a_service_without_fail_points_takes_no_order(tmp_path: Path) -> None:
    made = Service(tmp_path, fail_points=False)
    await made.start()
    try:
        with pytest.raises(FaultMissed, match="UNIMPLEMENTED"):
            await made.fault(Point.RECEIVED, Action.DROP).inject()
    finally:
        await made.end()


async def test_a_target_that_has_gone_is_missed(service: Service) -> None:
    fault = service.fault(Point.RECEIVED, Action.DROP)
    await service.end()
    with pytest.raises(FaultMissed):
        await fault.inject()

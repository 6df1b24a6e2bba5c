"""The control plane's clients, as a child process beside the load, and what the run folder keeps of it all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec

from harness.errors import PdproofError
from harness.run_folder import RunWriter
from harness.scenario import ControlSpec
from reference_impl.blockservice import blocks_pb2 as pb
from reference_impl.blockservice.client import BlockClient, Credentials
from reference_impl.blockservice.credentials import credential
from reference_impl.blockservice.node import TENANT
from reference_impl.blockservice.store import Store
from reference_impl.processes import end_child, last_line
from reference_impl.rules.blockgroups import GroupState
from reference_impl.secret import TOKEN_VARIABLE
from workloads.operation_rows import ControlRows, Invocation, Look, joined, read_rows, rows_of_store
from workloads.operations import CALL_S, POLICY, OperationsPlan, Sample

SPARE_S: Final = 120.0
"""For what is asked again, and for taking the pins back."""
STOP_LIMIT_S: Final = 10.0
MOVING_LOOK_S: Final = 0.2
MOVING_LIMIT_S: Final = 2.0
CLIENTS: Final = "clients"
"""The node of the clients' own metrics."""


def client_policy() -> dict[str, float]:
    """Return how the clients retry, for the manifest: the policy's fields, and what a whole call may take."""
    return msgspec.structs.asdict(POLICY) | {"call_timeout_s": CALL_S}


class OperationsFailed(PdproofError):
    """The operations could not be driven; the message holds their last word."""


class ControlLoad:
    """An open loop of operations of `seconds`, whose rows land in the run's parts."""

    def __init__(self, spec: ControlSpec, targets: dict[str, str], secret: str, *, seconds: float, seed: int) -> None:
        self._spec, self._targets, self._secret, self._seconds, self._seed = spec, targets, secret, seconds, seed
        self._child: asyncio.subprocess.Process | None = None

    async def start(self, start_ns: int, writer: RunWriter) -> None:
        """Start the child; the first operation is due at `start_ns` (monotonic)."""
        spec = self._spec
        plan = OperationsPlan(
            targets=self._targets, owner=TENANT, strangers=[f"tenant-{n}" for n in range(1, spec.tenants)],
            clients=spec.clients, rate_per_s=spec.rate_per_s, start_ns=start_ns, seconds=self._seconds,
            seed=self._seed, rows=str(_rows(writer)), looks=str(_looks(writer)), samples=str(_samples(writer)),
            log=str(writer.logs / "clients-rpc.jsonl"), parent_pid=os.getpid(),
        )  # fmt: skip
        with (writer.logs / "operations.log").open("wb") as log:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "workloads.operations", msgspec.json.encode(plan).decode(),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {TOKEN_VARIABLE: self._secret},
            )  # fmt: skip

    async def wait(self, writer: RunWriter) -> None:
        """Wait until every operation has ended. Raises OperationsFailed if they were not driven to their end."""
        if self._child is None:
            raise RuntimeError("start comes before wait")
        limit_s = self._seconds + SPARE_S
        log = writer.logs / "operations.log"
        try:
            async with asyncio.timeout(limit_s):
                code = await self._child.wait()
        except TimeoutError as error:
            raise OperationsFailed(f"the operations did not end within {limit_s:.0f} s; see {log}") from error
        if code < 0:
            raise OperationsFailed(f"the operations were ended by {signal.Signals(-code).name}; see {log}")
        if code:
            raise OperationsFailed(f"the operations ended with {code}: {last_line(log)}")

    async def stop(self) -> None:
        """End the child if it still runs."""
        if self._child is not None:
            await end_child(self._child, STOP_LIMIT_S)


def gathered(writer: RunWriter, nodes: list[str]) -> ControlRows:
    """Return the whole history: the clients' rows, and what the nodes' stores hold. The services have ended."""
    if _samples(writer).exists():
        for sample in read_rows(_samples(writer), Sample):
            writer.metric(sample.t_ns, CLIENTS, sample.name, sample.value)
    asked = list(read_rows(_rows(writer), Invocation)) if _rows(writer).exists() else []
    looked = list(read_rows(_looks(writer), Look)) if _looks(writer).exists() else []
    stores = [(node, writer.parts / f"blocks-{node}.sqlite") for node in nodes]
    seen = ControlRows(invocations=asked, looks=looked)
    return joined([seen, *(_kept(node, path) for node, path in stores if path.exists())])


async def moves_ended(targets: dict[str, str], secret: str, limit_s: float) -> bool:
    """Wait until no group is on its way between nodes, at most `limit_s`; return whether it came to that.

    Nobody starts a migration any more. `targets`: where each node's block service listens; one that does not answer
    may have such a group.
    """
    who = Credentials(TENANT, credential(secret.encode(), TENANT))
    clients = [BlockClient(target, who, connections=1) for target in targets.values()]
    try:
        async with asyncio.timeout(limit_s):
            while await _moving(clients):
                await asyncio.sleep(MOVING_LOOK_S)
        return True
    except TimeoutError:
        return False
    finally:
        for client in clients:
            with contextlib.suppress(Exception):
                await client.close()


async def _moving(clients: list[BlockClient]) -> bool:
    """Whether a group may be on its way. Who leaves is asked for first: by then, what is left has arrived somewhere."""
    for state in (GroupState.MIGRATING_OUT, GroupState.MIGRATING_IN):
        for client in clients:
            listed = await client.list_groups(state=state, limit=1, timeout_s=MOVING_LIMIT_S)
            if not isinstance(listed.reply, pb.ListGroupsReply) or listed.reply.groups:
                return True
    return False


def _kept(node: str, path: Path) -> ControlRows:
    store = Store(path, node)
    try:
        return rows_of_store(node, store)
    finally:
        store.close()


def _rows(writer: RunWriter) -> Path:
    return writer.parts / "operations.rows"


def _looks(writer: RunWriter) -> Path:
    return writer.parts / "operations.looks"


def _samples(writer: RunWriter) -> Path:
    return writer.parts / "operations.samples"

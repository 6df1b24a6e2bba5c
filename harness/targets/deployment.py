"""A deployment that this machine runs, whoever built it: started, named and ended as one child process.

What every such process says and writes is told in `reference_impl.announcement` and `reference_impl.failover.worker`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from faults.fault import ProcessRef
from harness.errors import StartFailed
from reference_impl.announcement import ERROR_PREFIX, PROGRESS_PREFIX, Announcement
from reference_impl.failover.worker import ProcessInfo, read_status, status_path
from reference_impl.processes import end_child
from reference_impl.rules.lifecycle import EngineState
from reference_impl.secret import TOKEN_VARIABLE

START_LIMIT_S: Final = 900.0
STOP_LIMIT_S: Final = 20.0


class DeploymentTarget:
    """Starts, names and ends the processes of a deployment. Use `start`, and `stop` in any case.

    `command` returns the arguments behind `python -m`, given the deployment's private folder.
    """

    def __init__(self, command: Callable[[Path], Sequence[str]]) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="pdproof-"))
        self._command = command
        self._token = secrets.token_hex(32)
        self._child: asyncio.subprocess.Process | None = None
        self._announcement: Announcement | None = None
        self._watching: asyncio.Task[str] | None = None

    async def start(self, progress: Callable[[str], None]) -> Announcement:
        """Bring the deployment up. Raises StartFailed with the deployment's own last word."""
        self._child = child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *self._command(self.run_dir),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True, env=os.environ | {TOKEN_VARIABLE: self._token},
        )  # fmt: skip
        if child.stdout is None or child.stderr is None:
            raise StartFailed("the deployment has no pipes")
        self._watching = asyncio.create_task(_relay(child.stderr, progress))
        try:
            async with asyncio.timeout(START_LIMIT_S):
                line = await child.stdout.readline()
        except TimeoutError as error:
            raise StartFailed(f"the deployment was not ready within {START_LIMIT_S:g} s") from error
        if not line:
            failure = StartFailed(await self.ended())
            if child.returncode is not None and child.returncode > 0:
                failure.exit_code = child.returncode
            raise failure
        self._announcement = msgspec.json.decode(line, type=Announcement)
        return self._announcement

    async def ended(self) -> str:
        """Return when the deployment has ended by itself, with its last word."""
        if self._child is None or self._watching is None:
            raise RuntimeError("start comes before ended")
        code = await self._child.wait()
        error = await self._watching
        if code < 0:
            return f"the deployment was ended by {signal.Signals(-code).name}"
        return error or f"the deployment ended with {code}"

    @property
    def pid(self) -> int | None:
        """The deployment's process, None before the start."""
        return self._child.pid if self._child else None

    @property
    def url(self) -> str:
        """The router's address."""
        return self.announcement.url

    @property
    def token(self) -> str:
        """The secret that the router's own interface asks for."""
        return self._token

    @property
    def announcement(self) -> Announcement:
        """What the deployment said when it was ready."""
        if self._announcement is None:
            raise RuntimeError("start comes before everything else")
        return self._announcement

    def processes(self) -> list[tuple[str, ProcessInfo]]:
        """Return the workers' processes at this moment, each with its worker's id."""
        found = []
        for worker_id in self.announcement.workers:
            status = read_status(status_path(self.run_dir, worker_id))
            found += [(worker_id, p) for p in status.processes] if status else []
        return found

    def active_engine(self, worker_id: str) -> ProcessRef | None:
        """Return the engine of this worker that is awake, None if there is none."""
        return self._engine(worker_id, EngineState.ACTIVE)

    def parked_engine(self, worker_id: str) -> ProcessRef | None:
        """Return the shadow of this worker, None if none is parked."""
        return self._engine(worker_id, EngineState.STANDBY)

    def block_service(self, worker_id: str) -> ProcessRef | None:
        """Return the block service of this worker, None while none serves."""
        return self._first(worker_id, lambda p: p.role == "block-service")

    def part_of(self, worker_id: str, engine: str, role: str) -> ProcessRef | None:
        """Return the process of this role in an engine that has several, None if there is none."""
        return self._first(worker_id, lambda p: (p.engine, p.role) == (engine, role))

    def _engine(self, worker_id: str, state: EngineState) -> ProcessRef | None:
        return self._first(worker_id, lambda p: (p.role, p.state) == ("engine", state))

    def _first(self, worker_id: str, wanted: Callable[[ProcessInfo], bool]) -> ProcessRef | None:
        for worker, p in self.processes():
            if worker == worker_id and wanted(p):
                return ProcessRef(name=p.name, role=p.role, worker_id=worker, pid=p.pid, start_ticks=p.start_ticks)
        return None

    async def stop(self) -> None:
        """End the deployment and everything in it."""
        if self._child is not None:
            await end_child(self._child, STOP_LIMIT_S)  # if it must be killed, its children die with it
        if self._watching is not None:
            await asyncio.gather(self._watching, return_exceptions=True)
        shutil.rmtree(self.run_dir, ignore_errors=True)


async def _relay(stream: asyncio.StreamReader, progress: Callable[[str], None]) -> str:
    """Pass on what the deployment says of its progress; return its error, "" if it told none."""
    error = ""
    async for line in stream:
        text = line.decode(errors="replace").strip()
        if text.startswith(ERROR_PREFIX):
            error = text.removeprefix(ERROR_PREFIX)
        else:
            progress(text.removeprefix(PROGRESS_PREFIX))
    return error

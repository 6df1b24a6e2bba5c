"""A worker: its place, and the mocker processes that take it one after the other. Nothing is parked: a cold start each.

Dynamo leaves the restart of a dead worker to whoever runs it (Kubernetes, in its deployments), so the restart is ours,
at once; what a client notices of the death is Dynamo's. The moments, in `reference_impl.rules.events`:

- `process.exited`: the kernel told us, its parent.
- `engine.init_phase`: from the spawn until the front end's /health lists the new instance. There `engine.awake` is
  said: from then on it may be sent requests. Its epoch counts the processes in this place.
- `engine.promotion_phase` "canary": from there until a request of ours that the front end was to send to this very
  instance (`nvext.backend_instance_id`) has come back whole, and named it. Then `router.registered` is said: the front
  end demonstrably routes to it. That it was listed is no proof (see `frontend`); and a request left to the round robin
  would add to the moment how many other workers there are. Users' requests may have been sent to it before, and a long
  prefill of theirs is then in the canary's way: the moment is late by that, and never early.
- `router.removed`: /health lists the dead instance no more. Until then the front end may still send requests to it.

There is no failover lock, so no `lock.won` is said: "detection" as the reference has it does not exist here. What a
recovery begins with, from the kill to the spawn, is its first span.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from harness.targets.dynamo import launch
from harness.targets.dynamo.door import Engine
from harness.targets.dynamo.frontend import Frontend, listed_at
from reference_impl.event_log import EventLog
from reference_impl.failover.pidfd import start_ticks
from reference_impl.failover.worker import ProcessInfo, WorkerStatus, status_path, write_status
from reference_impl.processes import last_line
from reference_impl.realclock import host_ns
from reference_impl.rules.events import EventKind, Scalar
from reference_impl.rules.lifecycle import EngineState

RISE_LIMIT_S: Final = 45.0
"""From a process's start to its canary's answer."""
REMOVED_LIMIT_S: Final = 60.0
POLL_S: Final = 0.01
REMOVED_POLL_S: Final = 0.1
FAILED_STARTS_MAX: Final = 5
BACKOFF_S: Final = 0.2


class WorkerLost(Exception):
    """A worker's processes keep dying before they serve; the message says what the last one said."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is started from. Folders exist."""

    worker_id: str
    python: str
    arguments: list[str]
    """Of `dynamo.mocker`."""
    discovery: Path
    run_dir: Path
    events_dir: Path
    logs_dir: Path


class _Mocker:
    """One process in the worker's place."""

    def __init__(self, info: ProcessInfo, process: asyncio.subprocess.Process, *, port: int, begun_ns: int) -> None:
        self.info = info
        self.process = process
        self.port = port
        self.begun_ns = begun_ns
        self.listed = False


class Worker:
    """Keeps the worker up. `engines` learns, by Dynamo's id, who stands behind each instance."""

    def __init__(self, spec: WorkerSpec, frontend: Frontend, engines: dict[int, Engine]) -> None:
        self._spec = spec
        self._frontend = frontend
        self._engines = engines
        self._events = EventLog(
            spec.events_dir / f"events-{spec.worker_id}-deployment.jsonl", f"{spec.worker_id}-deployment"
        )
        self._now: _Mocker | None = None
        self._serving: Engine | None = None
        self._started = 0
        self._failed = 0
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def serving(self) -> Engine | None:
        """Who serves now, None while nobody does."""
        return self._serving

    async def run(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Run one process after the other until cancelled. Raises WorkerLost when they keep dying as they start."""
        try:
            while True:
                mocker = await self._start()
                served = await self._life(mocker, on_change)
                self._failed = 0 if served else self._failed + 1
                if self._failed >= FAILED_STARTS_MAX:
                    log = self._spec.logs_dir / f"{mocker.info.name}.log"
                    raise WorkerLost(
                        f"worker {self._spec.worker_id}: {self._failed} mockers in a row did not come to serve; the "
                        f"last one said: {last_line(log) or 'nothing'}; see {log}"
                    )
                if self._failed:
                    await asyncio.sleep(BACKOFF_S * 2**self._failed)
        finally:
            for task in self._leaving:
                task.cancel()
            await asyncio.gather(*self._leaving, return_exceptions=True)
            self._events.close()

    async def _start(self) -> _Mocker:
        spec = self._spec
        self._started += 1
        name = f"{spec.worker_id}-e{self._started}"
        # A port of its own: the front end may send requests to where its predecessor was for some seconds yet.
        port = launch.free_port()
        settings = launch.environment(spec.discovery, DYN_TCP_RPC_PORT=str(port))
        begun_ns = host_ns()
        process = await launch.start(
            spec.python, "dynamo.mocker", spec.arguments, settings, spec.logs_dir / f"{name}.log"
        )
        info = ProcessInfo(
            name=name, role="engine", pid=process.pid, start_ticks=start_ticks(process.pid) or 0,
            state=EngineState.INIT, epoch=self._started,
        )  # fmt: skip
        self._say_at(begun_ns, EventKind.PROCESS_STARTED, name, pid=process.pid, role=info.role,
                     start_ticks=info.start_ticks)  # fmt: skip
        self._now = mocker = _Mocker(info, process, port=port, begun_ns=begun_ns)
        self._publish()
        return mocker

    async def _life(self, mocker: _Mocker, on_change: Callable[[], None]) -> bool:
        """Follow a process to its end, or end it when this task is cancelled. Return whether it came to serve."""
        rising = asyncio.create_task(self._rise(mocker, on_change))
        gone = asyncio.create_task(mocker.process.wait())
        try:
            await asyncio.wait({rising, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not gone.done() and rising.exception() is None:
                await asyncio.wait({gone})  # to await the task itself would cancel it with this one
        finally:
            rising.cancel()
            await asyncio.gather(rising, return_exceptions=True)
            if mocker.process.returncode is None:
                mocker.process.kill()  # it has nothing to save, and takes as long as it likes over SIGTERM
            status = await gone
            self._say_at(host_ns(), EventKind.PROCESS_EXITED, mocker.info.name, pid=mocker.info.pid, status=status)
            served = self._serving is not None
            self._now = self._serving = None
            self._publish()
            on_change()
        if mocker.listed:
            leaving = asyncio.create_task(self._leave(mocker))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        return served

    async def _rise(self, mocker: _Mocker, on_change: Callable[[], None]) -> None:
        """Follow a process from its start to its first answer. Raises TimeoutError if none comes."""
        name = mocker.info.name
        async with asyncio.timeout(RISE_LIMIT_S):
            while (instance_id := await self._frontend.instance_at(mocker.port)) is None:
                await asyncio.sleep(POLL_S)
            listed_ns = host_ns()
            mocker.listed = True
            engine = Engine(self._spec.worker_id, name, mocker.info.epoch)
            self._engines[instance_id] = engine
            self._say_at(listed_ns, EventKind.INIT_PHASE, name, name="start until listed by the front end",
                         start_ns=mocker.begun_ns, end_ns=listed_ns, emulated=False)  # fmt: skip
            self._say_at(listed_ns, EventKind.ENGINE_AWAKE, name, epoch=engine.epoch)
            while not await self._frontend.serves(instance_id):
                await asyncio.sleep(POLL_S)
        served_ns = host_ns()
        self._say_at(served_ns, EventKind.CANARY_ANSWERED, name, ok=True)
        self._say_at(served_ns, EventKind.PROMOTION_PHASE, name, name="canary through the front end",
                     start_ns=listed_ns, end_ns=served_ns, emulated=False)  # fmt: skip
        self._say_at(served_ns, EventKind.ROUTER_REGISTERED, name, epoch=engine.epoch)
        mocker.info = msgspec.structs.replace(mocker.info, state=EngineState.ACTIVE)
        self._serving = engine
        self._publish()
        on_change()

    async def _leave(self, mocker: _Mocker) -> None:
        """Say when the front end lists a dead instance no more."""
        try:
            async with asyncio.timeout(REMOVED_LIMIT_S):
                while (health := await self._frontend.health()) is None or listed_at(health, mocker.port) is not None:
                    await asyncio.sleep(REMOVED_POLL_S)
        except TimeoutError:
            return
        self._say_at(host_ns(), EventKind.ROUTER_REMOVED, mocker.info.name, reason="no longer listed by the front end")

    def _say_at(self, t_ns: int, kind: EventKind, subject: str, **detail: Scalar) -> None:
        self._events.say_at(t_ns, kind, subject, **detail, worker_id=self._spec.worker_id)

    def _publish(self) -> None:
        processes = [self._now.info] if self._now is not None else []
        path = status_path(self._spec.run_dir, self._spec.worker_id)
        write_status(path, WorkerStatus(self._spec.worker_id, processes))

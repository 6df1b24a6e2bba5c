"""A worker under test: router and supervisor in the test's process, everything else in processes of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
from aiohttp import web

from reference_impl.engine.profile import Profile, load_profile
from reference_impl.engine.weights_file import ensure_weights
from reference_impl.event_log import EventLog
from reference_impl.failover.prober import ProbeLimits
from reference_impl.failover.supervisor import Supervisor
from reference_impl.failover.worker import ProcessInfo, WorkerConfig, read_status
from reference_impl.router.server import Router
from reference_impl.rules.events import Event, EventKind
from reference_impl.secret import TOKEN_VARIABLE
from tests.waiting import until_async

TOKEN = "token of a test"
SEED = 5
PROMPT = list(range(100, 180))
LIMIT_S = 30.0


class Worker:
    """Use as an async context; `folder` must be short enough for a Unix socket."""

    def __init__(
        self, folder: Path, *, shadow: bool = True, profile: Profile | None = None, probe: ProbeLimits | None = None
    ) -> None:
        self.folder = folder
        self._shadow = shadow
        self._profile = profile or load_profile("tiny")
        self._probe = probe or ProbeLimits()
        self._runner: web.AppRunner | None = None
        self._task: asyncio.Task[None] | None = None
        self.supervisor: Supervisor | None = None
        self.url = ""
        self.session = aiohttp.ClientSession()
        self._token_before = os.environ.get(TOKEN_VARIABLE)

    async def __aenter__(self) -> Self:
        os.environ[TOKEN_VARIABLE] = TOKEN
        router = Router(TOKEN, EventLog(self.folder / "events-router.jsonl", "router"))
        self._runner = web.AppRunner(router.app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        profile = self._profile
        self.config = WorkerConfig(
            worker_id="w0", shadow=self._shadow, profile=profile,
            weights_file=str(ensure_weights(self.folder, SEED, profile.weights_bytes)), weights_seed=SEED,
            router_url=self.url, run_dir=str(self.folder), events_dir=str(self.folder), logs_dir=str(self.folder),
            memory_bytes=2 * profile.weights_bytes + profile.kv_blocks * 4096, probe=self._probe,
        )  # fmt: skip
        self.supervisor = Supervisor(self.config)
        self._task = asyncio.create_task(self.supervisor.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            assert self.supervisor is not None
            assert self._task is not None
            self.supervisor.stop.set()
            await asyncio.wait_for(asyncio.gather(self._task, return_exceptions=True), LIMIT_S)
        finally:
            await self.session.close()
            if self._runner is not None:
                await self._runner.cleanup()
            os.environ.pop(TOKEN_VARIABLE, None)
            if self._token_before is not None:
                os.environ[TOKEN_VARIABLE] = self._token_before

    @property
    def task(self) -> asyncio.Task[None]:
        """The supervisor's run."""
        assert self._task is not None
        return self._task

    def processes(self) -> list[ProcessInfo]:
        status = read_status(self.config.status_path)
        return status.processes if status else []

    def engine(self, state: str) -> ProcessInfo | None:
        return next((p for p in self.processes() if p.role == "engine" and p.state == state), None)

    async def in_state(self, state: str, *, but: str = "") -> ProcessInfo:
        """Wait for an engine other than `but` in `state`."""

        def found() -> ProcessInfo | None:
            info = self.engine(state)
            return info if info is not None and info.name != but else None

        info = await until_async(found, LIMIT_S, f"an engine other than {but!r} is {state}")
        assert info is not None
        return info

    async def whole(self) -> tuple[ProcessInfo, ProcessInfo]:
        """Wait for the active engine and its shadow."""
        return await self.in_state("active"), await self.in_state("standby")

    async def answer(self) -> list[int]:
        """Ask for eight tokens through the router, trying again while no worker is registered."""
        body = {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True}
        for _ in range(2000):
            async with self.session.post(self.url + "/v1/completions", json=body) as response:
                if response.status == 200:
                    ids: list[int] = (await response.json())["choices"][0]["token_ids"]
                    return ids
                assert response.status in {502, 503}
            await asyncio.sleep(0.005)
        raise AssertionError("no worker answered")

    def events(self, *kinds: EventKind) -> list[Event]:
        found = []
        for path in self.folder.glob("events-*.jsonl"):
            found += [msgspec.json.decode(line, type=Event) for line in path.read_bytes().splitlines()]
        return sorted((e for e in found if not kinds or e.kind in kinds), key=lambda e: e.t_ns)


def kill(process: ProcessInfo, signum: signal.Signals = signal.SIGKILL) -> None:
    os.kill(process.pid, signum)

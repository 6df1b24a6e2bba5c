"""A vLLM deployment on this machine: a router, and guarded servers, kept up like the reference implementation's.

`python -m harness.targets.vllm.deployment CONFIG` speaks as `reference_impl.announcement` says. A worker is a share of
the machine's cores (or of its GPU) and the servers that take turns on it; with shadows, one of them is parked.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from harness.targets.vllm.engine import EngineSpec, Said
from reference_impl.announcement import Announcement, announce, say_error, say_progress, stop_at_end_of_input
from reference_impl.event_log import EventLog
from reference_impl.failover.pidfd import start_ticks
from reference_impl.failover.process_group import end_all, in_session
from reference_impl.failover.worker import ProcessInfo, WorkerStatus, status_path, write_status
from reference_impl.memory_service.vllm_loader import REPORT_VARIABLE, SOCKET_VARIABLE
from reference_impl.processes import end_child, last_line
from reference_impl.realclock import host_ns
from reference_impl.rules.events import EventKind
from reference_impl.rules.lifecycle import EngineState
from reference_impl.rules.routing import Role
from reference_impl.secret import TOKEN_VARIABLE
from reference_impl.time_namespace import EXIT_CODE as NO_SUCH_CLOCK
from reference_impl.time_namespace import available

ROUTER_LIMIT_S: Final = 30.0
READY_LIMIT_S: Final = 420.0
STOP_LIMIT_S: Final = 15.0
SUCCESSOR_LIMIT_S: Final = 30.0
FAILED_STARTS_MAX: Final = 3
BACKOFF_S: Final = 0.5
POLL_S: Final = 0.05
NICENESS: Final = 5
"""The servers leave the router, the clients and the probes the right of way: a connected worker spins on its core."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that there is to be."""

    worker_id: str
    role: Role
    cores: list[int]
    command: list[str]
    """The server's, with the placeholders {port} and {side_port}."""
    environment: dict[str, str]
    clock_offset_s: float = 0.0
    memory_bytes: int = 0
    """Capacity of the worker's memory service, from which its servers map the weights; 0: there is none."""


class VllmDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """What to bring up. Folders must exist."""

    places: list[Place]
    shadow: bool
    model: str
    canary: list[int]
    canary_answer: list[int]
    warm_tokens: int
    run_dir: str
    """Private: locks, status files, sockets."""
    events_dir: str
    logs_dir: str
    host: str = "127.0.0.1"
    port: int = 0


class DeploymentFailed(Exception):
    """The deployment cannot be brought up or kept up. `code`: exit code."""

    def __init__(self, message: str, code: int = 6) -> None:
        super().__init__(message)
        self.code = code


class Engine:
    """A guard process and what it has said."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.said = Said(EngineState.INIT)

    @property
    def processes(self) -> list[ProcessInfo]:
        """The guard, as the engine, and every process of its server."""
        pid = self.process.pid
        guard = ProcessInfo(name=self.name, role="engine", pid=pid, start_ticks=start_ticks(pid) or 0,
                            state=self.said.state, epoch=self.said.epoch)  # fmt: skip
        return [guard] + [
            ProcessInfo(name=f"{self.name}-{m.role}", role=m.role, pid=m.pid, start_ticks=m.start_ticks,
                        engine=self.name)
            for m in self.said.members
        ]  # fmt: skip


class Worker:
    """Keeps one worker's engines running: one, or one and its shadow (KVC-SHDW-003)."""

    def __init__(self, config: VllmDeployment, place: Place, router_url: str, environment: dict[str, str]) -> None:
        self._config = config
        self._place = place
        self._router_url = router_url
        self._environment = environment
        self._engines: dict[str, Engine] = {}
        self._memory: ProcessInfo | None = None
        self._started = 0
        self._failed = 0
        self._changed = asyncio.Condition()
        self._first_active = asyncio.Event()
        # Ports of a worker without a shadow stay: a restarted server stands where its predecessor stood.
        self._ports = [_free_ports() for _ in range(2 if config.shadow else 1)]
        events = Path(config.events_dir, f"events-{place.worker_id}-deployment.jsonl")
        self._events = EventLog(events, f"{place.worker_id}-deployment")

    async def run(self) -> None:
        """Keep the worker up until cancelled. Raises DeploymentFailed when servers keep dying while they start."""
        memory = await self._start_memory()
        try:
            async with asyncio.TaskGroup() as keepers:
                for number, ports in enumerate(self._ports):
                    keepers.create_task(self._keep(number, ports))
        except* DeploymentFailed as failed:
            raise failed.exceptions[0] from failed
        finally:
            await asyncio.gather(*(self._end(e) for e in list(self._engines.values())))
            if memory is not None:
                await end_child(memory, STOP_LIMIT_S)
            self._memory = None
            self._publish()

    def count(self, state: EngineState) -> int:
        """Return how many engines are in a state."""
        return sum(e.said.state == state for e in self._engines.values())

    async def _keep(self, number: int, ports: tuple[int, int]) -> None:
        if number:
            await self._first_active.wait()  # two at a time on one core would only start more slowly
        while True:
            engine = await self._start(ports)
            try:
                await self._follow(engine)
                code = await engine.process.wait()
            finally:
                await self._end(engine)
            self._after(engine, code)
            if self._failed:
                await asyncio.sleep(BACKOFF_S * 2**self._failed)
            else:
                await self._until_succeeded()

    def _after(self, engine: Engine, code: int) -> None:
        """Count an engine that died before it ever served."""
        if code == NO_SUCH_CLOCK:
            raise DeploymentFailed(self._last_word(engine), NO_SUCH_CLOCK)
        if engine.said.state in (EngineState.DEAD, EngineState.INIT):
            self._failed += 1
            if self._failed >= FAILED_STARTS_MAX:
                raise DeploymentFailed(f"worker {self._place.worker_id}: {self._failed} servers in a row did not come "
                                       f"up: {self._last_word(engine)}")  # fmt: skip

    def _last_word(self, engine: Engine) -> str:
        return engine.said.reason or last_line(Path(self._config.logs_dir, f"{engine.name}-guard.log")) or "no word"

    async def _until_succeeded(self) -> None:
        """Wait until the successor is awake, if there is one: a restart's own work must not slow its promotion."""

        def settled() -> bool:
            return bool(self.count(EngineState.ACTIVE)) or not (
                self.count(EngineState.STANDBY) or self.count(EngineState.WAKING)
            )

        try:
            async with asyncio.timeout(SUCCESSOR_LIMIT_S), self._changed:
                await self._changed.wait_for(settled)
        except TimeoutError:
            return

    async def _start(self, ports: tuple[int, int]) -> Engine:
        config, place = self._config, self._place
        self._started += 1
        name = f"{place.worker_id}-e{self._started}"
        port, side_port = ports
        values = {"port": str(port), "side_port": str(side_port)}
        spec = EngineSpec(
            engine_id=name, worker_id=place.worker_id, role=place.role,
            command=[filled(word, values) for word in place.command],
            environment={k: filled(v, values) for k, v in place.environment.items()} | self._weights(name),
            cores=place.cores, niceness=NICENESS, url=f"http://{config.host}:{port}", model=config.model,
            canary=config.canary, canary_answer=config.canary_answer, warm_tokens=config.warm_tokens,
            lock_path=str(Path(config.run_dir, f"{place.worker_id}.lock")),
            members_path=str(Path(config.run_dir, f"{place.worker_id}.members.json")),
            router_url=self._router_url, events_file=str(Path(config.events_dir, f"events-{name}.jsonl")),
            log_file=str(Path(config.logs_dir, f"{name}.log")), working_dir=config.run_dir,
            weights_report=str(Path(config.run_dir, f"{name}.weights")) if place.memory_bytes else "",
            clock_offset_s=place.clock_offset_s,
        )  # fmt: skip
        begun_ns = host_ns()
        with Path(config.logs_dir, f"{name}-guard.log").open("ab") as log:  # noqa: ASYNC230 # a log on local disk
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "harness.targets.vllm.engine", msgspec.json.encode(spec).decode(),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                env=self._environment, start_new_session=True, limit=2**20,
            )  # fmt: skip
        engine = Engine(name, process)
        self._engines[name] = engine
        self._events.say_at(begun_ns, EventKind.PROCESS_STARTED, name, pid=process.pid, role="engine",
                            start_ticks=start_ticks(process.pid) or 0, worker_id=place.worker_id)  # fmt: skip
        self._publish()
        return engine

    def _weights(self, engine: str) -> dict[str, str]:
        """Return where a server's loader finds the weights, and where it says what it shares."""
        if not self._place.memory_bytes:
            return {}
        run_dir = Path(self._config.run_dir)
        return {SOCKET_VARIABLE: str(self._memory_socket), REPORT_VARIABLE: str(run_dir / f"{engine}.weights")}

    @property
    def _memory_socket(self) -> Path:
        return Path(self._config.run_dir, f"{self._place.worker_id}.gms")

    async def _start_memory(self) -> asyncio.subprocess.Process | None:
        """Start the memory service, which outlives every server. Raises DeploymentFailed."""
        config, place = self._config, self._place
        if not place.memory_bytes:
            return None
        name = f"{place.worker_id}-gms"
        path = Path(config.logs_dir, f"{name}.log")
        with path.open("ab") as log:  # noqa: ASYNC230 # a log on local disk
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "reference_impl.memory_service.server", "--socket", str(self._memory_socket),
                "--device", place.worker_id, "--capacity-bytes", str(place.memory_bytes), "--die-with-parent",
                "--events", str(Path(config.events_dir, f"events-{name}.jsonl")),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        assert process.stdout is not None
        if (await process.stdout.readline()).strip() != b"ready":
            await end_child(process, STOP_LIMIT_S)
            raise DeploymentFailed(f"worker {place.worker_id}: no memory service: {last_line(path) or 'no word'}")
        self._memory = ProcessInfo(
            name=name, role="memory-service", pid=process.pid, start_ticks=start_ticks(process.pid) or 0
        )
        self._publish()
        return process

    async def _follow(self, engine: Engine) -> None:
        """Take in what the guard says, until it ends."""
        assert engine.process.stdout is not None
        async for line in engine.process.stdout:
            engine.said = msgspec.json.decode(line, type=Said)
            if engine.said.state == EngineState.ACTIVE:
                self._failed = 0
                self._first_active.set()
            self._publish()
            async with self._changed:
                self._changed.notify_all()

    async def _end(self, engine: Engine) -> None:
        """End the guard, which ends its server; what of it still runs then has lost its guard, and is ended here."""
        await end_child(engine.process, STOP_LIMIT_S)
        await end_all(in_session(engine.process.pid))
        self._events.say(EventKind.PROCESS_EXITED, f"{engine.name}-guard", pid=engine.process.pid,
                         status=engine.process.returncode, worker_id=self._place.worker_id)  # fmt: skip
        self._engines.pop(engine.name, None)
        self._publish()
        async with self._changed:
            self._changed.notify_all()

    def _publish(self) -> None:
        processes = [p for e in self._engines.values() for p in e.processes]
        processes += [self._memory] if self._memory else []
        path = status_path(Path(self._config.run_dir), self._place.worker_id)
        write_status(path, WorkerStatus(self._place.worker_id, processes))


class Deployment:
    """A router and its workers. `run` brings them up, says so, and keeps them until `stop`."""

    def __init__(self, config: VllmDeployment) -> None:
        self._config = config
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)
        self._environment = dict(os.environ) | {TOKEN_VARIABLE: token}

    async def run(self, stop: asyncio.Event, say: Callable[[str], None]) -> None:
        """Raises DeploymentFailed."""
        await self._check_clocks()
        say("router")
        router, url = await self._start_router()
        workers = [Worker(self._config, place, url, self._environment) for place in self._config.places]
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        ready = asyncio.create_task(self._until_ready(url, workers, say))
        ends = [asyncio.create_task(stop.wait()), asyncio.create_task(self._gone(router))]
        try:
            await asyncio.wait([*tasks, *ends, ready], return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                announce(self._announcement(url))
                await asyncio.wait([*tasks, *ends], return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                for task in [*tasks, *ends]:
                    if task.done():
                        task.result()
        finally:
            for task in [*tasks, *ends, ready]:
                task.cancel()
            await asyncio.gather(*tasks, *ends, ready, return_exceptions=True)
            await end_child(router, STOP_LIMIT_S)

    def _announcement(self, url: str) -> Announcement:
        places = self._config.places
        return Announcement(
            url=url, model=self._config.model, run_dir=self._config.run_dir,
            workers=[p.worker_id for p in places], roles={p.worker_id: p.role for p in places},
            ranks={p.worker_id: 1 for p in places},
            clock_offsets_s={p.worker_id: p.clock_offset_s for p in places},
        )  # fmt: skip

    async def _check_clocks(self) -> None:
        if any(place.clock_offset_s for place in self._config.places):
            problem = await asyncio.to_thread(available)
            if problem is not None:
                raise DeploymentFailed(f"no clock of their own for the workers: {problem}", NO_SUCH_CLOCK)

    async def _start_router(self) -> tuple[asyncio.subprocess.Process, str]:
        config = self._config
        path = Path(config.logs_dir, "router.log")
        with path.open("ab") as log:  # noqa: ASYNC230 # a log on local disk
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "reference_impl.router.process", "--host", config.host, "--port",
                str(config.port), "--parent-pid", str(os.getpid()),
                "--events", str(Path(config.events_dir, "events-router.jsonl")),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log,
                env=self._environment, start_new_session=True,
            )  # fmt: skip
        assert child.stdout is not None
        try:
            async with asyncio.timeout(ROUTER_LIMIT_S):
                line = await child.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            await end_child(child, STOP_LIMIT_S)
            raise DeploymentFailed(last_line(path) or "the router did not start", child.returncode or 6)
        return child, str(msgspec.json.decode(line)["url"])

    async def _gone(self, router: asyncio.subprocess.Process) -> None:
        code = await router.wait()
        raise DeploymentFailed(f"the router ended with {code}; see {self._config.logs_dir}/router.log")

    async def _until_ready(self, url: str, workers: list[Worker], say: Callable[[str], None]) -> None:
        """Wait until every worker is registered and, with shadows, has one parked."""
        wanted_parked = int(self._config.shadow)
        told = -1
        try:
            async with asyncio.timeout(READY_LIMIT_S), aiohttp.ClientSession() as session:
                while told < len(workers):
                    async with session.get(f"{url}/health") as response:
                        registered = len(msgspec.json.decode(await response.read())["workers"])
                    parked = sum(w.count(EngineState.STANDBY) >= wanted_parked for w in workers)
                    ready = min(registered, parked)
                    if ready != told:
                        say(f"{ready} of {len(workers)} workers ready")
                    told = ready
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise DeploymentFailed(
                f"not all workers were ready within {READY_LIMIT_S:.0f} s; see the logs in {self._config.logs_dir}"
            ) from error


def filled(text: str, values: dict[str, str]) -> str:
    """Return a text with its placeholders filled. Other braces, as JSON has them, stay."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _free_ports() -> tuple[int, int]:
    """Return two free ports: of the server's HTTP, and of its connector's side channel."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


async def _main(config: VllmDeployment) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    stop_at_end_of_input(stop)
    await Deployment(config).run(stop, say_progress)


def main() -> None:
    """Bring up and keep what the one argument, a `VllmDeployment` as JSON, describes."""
    try:
        asyncio.run(_main(msgspec.json.decode(sys.argv[1], type=VllmDeployment)))
    except DeploymentFailed as error:
        say_error(str(error))
        sys.exit(error.code)


if __name__ == "__main__":
    main()

"""A worker's supervisor: keeps a memory service, an active engine and a shadow running (KVC-SHDW-003, KVC-LOCK-005).

Where there is a block service, it lives and dies beside them, by itself.

A dead engine comes back as the new shadow, after its successor is awake: so the restart's own work does not slow the
promotion. With no other engine left it is started at once, a cold start. A hung engine is killed; the kernel then
frees the lock. If the memory service dies, everything of the worker is started anew.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec

from reference_impl.engine.config import EngineConfig, EngineStatus
from reference_impl.engine.ticks import TickPage
from reference_impl.event_log import EventLog
from reference_impl.failover.pidfd import start_ticks
from reference_impl.failover.prober import Prober
from reference_impl.failover.worker import ProcessInfo, WorkerConfig, WorkerStatus, write_status
from reference_impl.processes import die_with_parent, end_child, last_line
from reference_impl.realclock import host_ns, now_ns
from reference_impl.rules.clock import NS_PER_S
from reference_impl.rules.events import EventKind
from reference_impl.rules.lifecycle import EngineState
from reference_impl.time_namespace import EXIT_CODE as NO_SUCH_CLOCK
from reference_impl.time_namespace import TimeNamespaceError, enter_for_children

SUCCESSOR_LIMIT_S: Final = 30.0
"""How long a dead engine's restart waits for its successor to be awake."""
FAILED_STARTS_MAX: Final = 5
BACKOFF_S: Final = 0.2
BACKOFF_S_MAX: Final = 5.0
STOP_LIMIT_S: Final = 5.0
READY_LIMIT_S: Final = 20.0
START_SILENT_LIMIT_NS: Final = 30 * NS_PER_S
"""An engine that is still starting is not called hung before this."""


class WorkerFailed(Exception):
    """The worker cannot be kept running; the message says why and which log to read."""


class EngineHandle:
    """One engine process: its pipe, its tick page, its probe."""

    def __init__(self, process: asyncio.subprocess.Process, info: ProcessInfo, ticks: TickPage, status_fd: int) -> None:
        self.process = process
        self.info = info
        self.hung = False
        """Whether the probe has ended it."""
        self._ticks = ticks
        self._status_fd = status_fd

    async def statuses(self) -> asyncio.StreamReader:
        """Return the pipe on which the engine tells its state; it ends when the engine does."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(self._status_fd, "rb", buffering=0)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        return reader

    def ticks(self) -> int:
        """Return the engine's tick count."""
        return self._ticks.count

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self.process.returncode is None:
            self.process.kill()

    def close(self) -> None:
        """Give back the tick page."""
        self._ticks.close()


class Supervisor:
    """Runs one worker until `stop` is set."""

    ENGINE_MODULE = "reference_impl.engine.process"

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._events = EventLog(Path(config.events_dir, f"events-{config.worker_id}-supervisor.jsonl"), "supervisor")
        self.stop = asyncio.Event()
        self._engines: dict[str, EngineHandle] = {}
        self._memory: ProcessInfo | None = None
        self._blocks: ProcessInfo | None = None
        self._changed = asyncio.Condition()
        self._started = 0
        self._failed_starts = 0

    async def run(self) -> None:
        """Keep the worker up. Raises WorkerFailed when engines keep dying while they start."""
        blocks = asyncio.create_task(self._keep_blocks())
        try:
            while not self.stop.is_set():
                await self._life()
        finally:
            blocks.cancel()
            await asyncio.gather(blocks, return_exceptions=True)
            self._publish()
            self._events.close()

    async def _life(self) -> None:
        """From a fresh memory service to its death (or to the end): all engines live within."""
        service = await self._start_memory_service() if self._config.shadow else None
        tasks = [asyncio.create_task(self._keep_engine()) for _ in range(2 if self._config.shadow else 1)]
        ends: list[asyncio.Task[object]] = [asyncio.create_task(self.stop.wait())]
        if service is not None:
            ends.append(asyncio.create_task(self._service_died(service)))
        try:
            done, _ = await asyncio.wait([*tasks, *ends], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what an engine's keeper raised
        finally:
            for task in [*tasks, *ends]:
                task.cancel()
            await asyncio.gather(*tasks, *ends, return_exceptions=True)
            await self._end_engines()
            if service is not None:
                await end_child(service, STOP_LIMIT_S)
            self._memory = None

    async def _keep_engine(self) -> None:
        """Run one engine after the other in this place."""
        while True:
            handle = await self._start_engine()
            await self._watch(handle)
            await self._before_restart(handle)

    async def _before_restart(self, dead: EngineHandle) -> None:
        """Wait for the successor to be awake, or back off if engines keep dying while they start."""
        if dead.info.state == EngineState.INIT:
            self._failed_starts += 1
            if self._failed_starts >= FAILED_STARTS_MAX:
                log = Path(self._config.logs_dir, f"{dead.info.name}.log")
                raise WorkerFailed(
                    f"worker {self._config.worker_id}: {self._failed_starts} engines in a row died while starting; "
                    f"the last one {'hung' if dead.hung else 'said: ' + (last_line(log) or 'nothing')}; see {log}"
                )
            await asyncio.sleep(BACKOFF_S * 2**self._failed_starts)
            return
        try:
            async with asyncio.timeout(SUCCESSOR_LIMIT_S), self._changed:
                await self._changed.wait_for(self._need_not_wait)
        except TimeoutError:
            return

    def _need_not_wait(self) -> bool:
        others = [h.info.state for h in self._engines.values()]
        return EngineState.ACTIVE in others or not any(s in (EngineState.STANDBY, EngineState.WAKING) for s in others)

    async def _start_engine(self) -> EngineHandle:
        config = self._config
        self._started += 1
        name = f"{config.worker_id}-e{self._started}"
        ticks = TickPage.create()
        status_read, status_write = os.pipe()
        engine = EngineConfig(
            engine_id=name,
            worker_id=config.worker_id,
            role=config.role,
            terms=config.terms,
            ranks=config.ranks,
            profile=config.profile,
            weights_file=config.weights_file,
            weights_seed=config.weights_seed,
            lock_path=str(config.lock_path),
            memory_socket=str(config.memory_socket) if config.shadow else "",
            router_url=config.router_url,
            host=config.host,
            events_file=str(Path(config.events_dir, f"events-{name}.jsonl")),
            status_fd=status_write,
            ticks_fd=ticks.fd,
            spawned_ns=host_ns(),
            parent_pid=os.getpid(),
            blocks_socket=str(config.blocks_socket) if config.blocks else "",
        )
        try:
            process = await self._spawn(
                name, self.ENGINE_MODULE, [msgspec.json.encode(engine).decode()], (status_write, ticks.fd)
            )
        finally:
            os.close(status_write)
        info = ProcessInfo(
            name=name, role="engine", pid=process.pid, start_ticks=start_ticks(process.pid) or 0, state=EngineState.INIT
        )
        handle = EngineHandle(process, info, ticks, status_read)
        self._engines[name] = handle
        self._say_started(info, engine.spawned_ns)
        self._publish()
        return handle

    async def _watch(self, handle: EngineHandle) -> None:
        """Follow an engine to its end, or end it when this task is cancelled."""
        name = handle.info.name
        probing = asyncio.create_task(self._probe(handle))
        following = asyncio.create_task(self._follow(handle))
        try:
            await handle.process.wait()
        finally:
            handle.kill()
            status = await handle.process.wait()
            self._events.say(EventKind.PROCESS_EXITED, name, pid=handle.info.pid, status=status,
                             worker_id=self._config.worker_id)  # fmt: skip
            await asyncio.wait([following], timeout=1.0)  # what it said last is still in the pipe
            probing.cancel()
            following.cancel()
            await asyncio.gather(probing, following, return_exceptions=True)
            del self._engines[name]
            handle.close()
            self._publish()
            async with self._changed:
                self._changed.notify_all()

    async def _probe(self, handle: EngineHandle) -> None:
        """Kill the engine when it hangs. One that is starting may be silent for long: it waits for disk and for CPU."""
        begun_ns = now_ns()
        while True:
            silent: list[int] = []

            async def note(silent_ms: int, silent: list[int] = silent) -> None:
                silent.append(silent_ms)

            await Prober(handle.info.pid, handle.ticks, note, self._config.probe).run()
            if not silent:
                return
            starting = handle.info.state == EngineState.INIT
            if not starting or now_ns() - begun_ns > START_SILENT_LIMIT_NS:
                break
        self._events.say(EventKind.PROCESS_HUNG, handle.info.name, pid=handle.info.pid, silent_ms=silent[0],
                         worker_id=self._config.worker_id)  # fmt: skip
        handle.hung = True
        handle.kill()

    async def _follow(self, handle: EngineHandle) -> None:
        """Take in what the engine says of its state, until its pipe ends."""
        reader = await handle.statuses()
        async for line in reader:
            status = msgspec.json.decode(line, type=EngineStatus)
            handle.info = msgspec.structs.replace(handle.info, state=status.state, epoch=status.epoch)
            if status.state != EngineState.INIT:
                self._failed_starts = 0
            self._publish()
            async with self._changed:
                self._changed.notify_all()

    async def _keep_blocks(self) -> None:
        """Run one block service after the other: it keeps nothing that its successor does not find."""
        config = self._config
        if config.blocks is None:
            return
        name = f"{config.worker_id}-blocks"
        argument = msgspec.json.encode(msgspec.structs.replace(config.blocks, parent_pid=os.getpid())).decode()
        failed_starts = 0
        while True:
            process = await self._spawn(name, "reference_impl.blockservice.process", [argument], (), pipe=True)
            try:
                info = ProcessInfo(
                    name=name, role="block-service", pid=process.pid, start_ticks=start_ticks(process.pid) or 0
                )  # fmt: skip
                self._say_started(info, host_ns())
                ready = await self._is_ready(process)
                self._blocks = info if ready else None
                self._publish()
                await process.wait()
            finally:
                await end_child(process, STOP_LIMIT_S)
                self._events.say(EventKind.PROCESS_EXITED, name, pid=process.pid, status=process.returncode,
                                 worker_id=config.worker_id)  # fmt: skip
                self._blocks = None
                self._publish()
            failed_starts = 0 if ready else failed_starts + 1
            if failed_starts:
                await asyncio.sleep(min(BACKOFF_S * 2**failed_starts, BACKOFF_S_MAX))

    async def _is_ready(self, process: asyncio.subprocess.Process) -> bool:
        """Wait for a child's word that it serves."""
        if process.stdout is None:
            return False
        try:
            async with asyncio.timeout(READY_LIMIT_S):
                return (await process.stdout.readline()).strip() == b"ready"
        except TimeoutError:
            process.kill()
            return False

    async def _start_memory_service(self) -> asyncio.subprocess.Process:
        config = self._config
        name = f"{config.worker_id}-gms"
        arguments = ["--socket", str(config.memory_socket), "--device", config.worker_id,
                     "--capacity-bytes", str(config.memory_bytes), "--die-with-parent",
                     "--events", str(Path(config.events_dir, f"events-{name}.jsonl"))]  # fmt: skip
        process = await self._spawn(name, "reference_impl.memory_service.server", arguments, (), pipe=True)
        if not await self._is_ready(process):
            await end_child(process, STOP_LIMIT_S)
            log = Path(config.logs_dir, f"{name}.log")
            word = last_line(log) or "it said nothing"
            raise WorkerFailed(f"worker {config.worker_id}: the memory service did not come up: {word}; see {log}")
        self._memory = ProcessInfo(
            name=name, role="memory-service", pid=process.pid, start_ticks=start_ticks(process.pid) or 0
        )
        self._say_started(self._memory, host_ns())
        return process

    async def _service_died(self, service: asyncio.subprocess.Process) -> None:
        status = await service.wait()
        self._events.say(EventKind.PROCESS_EXITED, f"{self._config.worker_id}-gms", pid=service.pid, status=status,
                         worker_id=self._config.worker_id)  # fmt: skip

    async def _spawn(
        self, name: str, module: str, arguments: list[str], fds: tuple[int, ...], *, pipe: bool = False
    ) -> asyncio.subprocess.Process:
        with Path(self._config.logs_dir, f"{name}.log").open("ab") as log:  # noqa: ASYNC230 # a log on local disk
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, *arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE if pipe else log, stderr=log,
                pass_fds=fds, start_new_session=True,
            )  # fmt: skip

    def _say_started(self, info: ProcessInfo, at_ns: int) -> None:
        self._events.say_at(at_ns, EventKind.PROCESS_STARTED, info.name, pid=info.pid, role=info.role,
                         start_ticks=info.start_ticks, worker_id=self._config.worker_id)  # fmt: skip

    def _publish(self) -> None:
        beside = [info for info in (self._memory, self._blocks) if info is not None]
        processes = [h.info for h in self._engines.values()] + beside
        write_status(self._config.status_path, WorkerStatus(self._config.worker_id, processes))

    async def _end_engines(self) -> None:
        for handle in self._engines.values():
            handle.kill()
        await asyncio.gather(*(h.process.wait() for h in self._engines.values()))


async def _main(config: WorkerConfig) -> int:
    supervisor = Supervisor(config)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, supervisor.stop.set)
    try:
        await supervisor.run()
    except WorkerFailed as error:
        print(error, file=sys.stderr)  # noqa: T201 # the last line of its log
        return 6
    return 0


def main() -> None:
    """Run the worker that the one argument, a `WorkerConfig` as JSON, describes."""
    config = msgspec.json.decode(sys.argv[1], type=WorkerConfig)
    if config.parent_pid:
        die_with_parent(config.parent_pid)
    if config.clock_offset_s:
        try:
            enter_for_children(config.clock_offset_s)  # this process keeps the host's clock
        except TimeNamespaceError as error:
            print(f"worker {config.worker_id}: {error}", file=sys.stderr)  # noqa: T201 # the last line of its log
            sys.exit(NO_SUCH_CLOCK)
    sys.exit(asyncio.run(_main(config)))


if __name__ == "__main__":
    main()

"""The engine's process: start, park, wait for the lock, wake, serve. Every engine's life is this short election.

`python -m reference_impl.engine.process CONFIG` with an `EngineConfig` as JSON; started by the supervisor.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import uvloop

from reference_impl.content import BLOCK_WORDS
from reference_impl.engine.block_groups import BlockGroups
from reference_impl.engine.block_link import BlockLink
from reference_impl.engine.canary import Canary
from reference_impl.engine.config import MODEL_NAME, EngineConfig, EngineStatus
from reference_impl.engine.core import EngineCore
from reference_impl.engine.kv_transfer import KvTransfer, TransferUnavailable
from reference_impl.engine.loop import StepLoop
from reference_impl.engine.memory import EngineMemory, PrivateMemory, SharedMemory
from reference_impl.engine.metrics import EngineMetrics
from reference_impl.engine.profile import Profile
from reference_impl.engine.registration import Registration, RegistrationError
from reference_impl.engine.server import EngineServer
from reference_impl.engine.ticks import TickPage
from reference_impl.engine.weights_file import WeightsError
from reference_impl.event_log import EventLog
from reference_impl.failover.lock import FlockFailoverLock, LockError
from reference_impl.memory_service.errors import MemoryServiceError
from reference_impl.oracle import Weights
from reference_impl.processes import die_with_parent
from reference_impl.realclock import host_ns, wall_ns
from reference_impl.router.protocol import Register
from reference_impl.rules.clock import NS_PER_MS
from reference_impl.rules.events import EventKind, Scalar
from reference_impl.rules.lifecycle import EngineState, IllegalMove, Lifecycle, WakeFacts
from reference_impl.rules.routing import Role
from reference_impl.rules.transfer_tokens import is_token, node_key, why_not
from reference_impl.secret import TOKEN_VARIABLE

LOOPBACK: Final = ("127.0.0.1", "localhost")


class WakeFailed(Exception):
    """The engine must not serve: the message says why."""


class EngineProcess:
    """One engine from its start to its end."""

    def __init__(self, config: EngineConfig) -> None:
        profile = config.profile
        self._config = config
        self._weights = Weights(config.weights_seed, profile.weights_bytes // 8)
        self._events = EventLog(Path(config.events_file) if config.events_file else None, config.engine_id)
        self._life = Lifecycle(config.engine_id)
        self._metrics = EngineMetrics(MODEL_NAME, config.engine_id)
        self._server = EngineServer(
            model=MODEL_NAME, engine_id=config.engine_id, worker_id=config.worker_id, weights=self._weights,
            metrics=self._metrics, kv_hosts=tuple({config.host, *LOOPBACK}),
        )  # fmt: skip
        self._lock = FlockFailoverLock(Path(config.lock_path))
        self._registration = Registration(config.router_url, os.environ.get(TOKEN_VARIABLE, ""))
        self._memory = _memory(config)
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._broken: asyncio.Future[None] | None = None
        """Gets the error of a task that broke: an engine without its step loop must die, so that another takes over."""
        self._url = ""
        self._transfer = KvTransfer(config, self._say_of_kv) if config.role is not Role.BOTH else None

    async def run(self) -> None:
        """Live. Returns after SIGTERM; raises what made the engine unfit to serve."""
        loop = asyncio.get_running_loop()
        broken = self._broken = loop.create_future()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop.set)
        if self._config.ticks_fd >= 0:
            self._spawn(TickPage(self._config.ticks_fd).run())
        living = asyncio.create_task(self._live())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([living, stopping, broken], return_when=asyncio.FIRST_COMPLETED)
            for ended in (broken, living):
                if ended.done():
                    ended.result()
        finally:
            broken.cancel()
            for task in (living, stopping, *self._tasks):
                task.cancel()
            await asyncio.gather(living, stopping, *self._tasks, return_exceptions=True)
            await self._registration.close()
            if self._transfer is not None:
                await self._transfer.close()

    async def _live(self) -> None:
        self._tell(EngineState.INIT)
        await self._initialise()
        epoch = await self._park()
        try:
            await self._wake(epoch)
        except (MemoryServiceError, RegistrationError, IllegalMove, TransferUnavailable, WakeFailed) as error:
            self._life.die(str(error))
            self._say(EventKind.WAKE_FAILED, reason=str(error))
            raise
        self._spawn(asyncio.to_thread(self._memory.settle))
        if not self._config.router_url:
            await self._stop.wait()
            return
        await self._registration.wait_closed()
        raise WakeFailed("the router closed the registration: this engine must not serve any longer")

    async def _initialise(self) -> None:
        config = self._config
        self._phase_done("spawn and import", config.spawned_ns or host_ns(), host_ns())
        with self._phase("weights") as named:
            named(f"weights {await asyncio.to_thread(self._memory.prepare_weights, Path(config.weights_file))}")
        self._say(EventKind.WEIGHTS_MAPPED, bytes=self._memory.weights_bytes_mapped)
        with self._phase("KV pool"):
            await asyncio.to_thread(self._memory.prepare_kv)
        for phase in config.profile.init:
            with self._phase(phase.name, emulated=True):
                await asyncio.sleep(phase.seconds)
        with self._phase("warm up"):
            await asyncio.to_thread(warm_up, config.profile, self._memory)
            self._canary = Canary(self._weights)
            self._core = EngineCore(config.profile, self._transfer.generations if self._transfer else None)
        if self._transfer is not None:
            with self._phase("transport agents"):
                await self._transfer.prepare()
        with self._phase("listen and connect"):
            _, port = await self._server.listen(config.host, config.port)
            self._url = f"http://{config.host}:{port}"
            if config.router_url:
                await self._registration.connect()
        self._publish_memory()

    async def _park(self) -> int:
        """Give up what a shadow must not hold, wait for the lock, and return its epoch."""
        await asyncio.to_thread(self._memory.park)
        self._life.park()
        self._publish_memory()
        if self._config.memory_socket:
            self._say(EventKind.ENGINE_ASLEEP, pss_bytes=pss_bytes())
        self._tell(EngineState.STANDBY)
        self._say(EventKind.LOCK_WAITING)
        epoch = await self._lock.acquire(self._config.engine_id)
        if self._is_promotion(epoch) and self._config.profile.detection_s:
            with self._phase("notice the death", emulated=True, promotion=True):
                await asyncio.sleep(self._config.profile.detection_s)
        self._say(EventKind.LOCK_WON, epoch=epoch)
        return epoch

    def _is_promotion(self, epoch: int) -> bool:
        """Whether this wake follows another engine's death (a deployment's first wake does not)."""
        return bool(self._config.memory_socket) and epoch > 1

    async def _wake(self, epoch: int) -> None:
        """The critical path (KVC-SHDW-002): weights, KV, canary, register. Nothing else runs here."""
        self._life.wake(epoch)
        self._tell(EngineState.WAKING)
        self._say(EventKind.ENGINE_WAKING)
        with self._phase("map weights", promotion=True):
            await asyncio.to_thread(self._memory.wake_weights)
        with self._phase("map KV", promotion=True):
            await asyncio.to_thread(self._memory.wake_kv, epoch)
        self._say(EventKind.KV_MAPPED, bytes=self._memory.kv_bytes_mapped)
        if self._is_promotion(epoch) and self._config.profile.promotion_s:
            with self._phase("wake the model", emulated=True, promotion=True):
                await asyncio.sleep(self._config.profile.promotion_s)
        self._core.bind(self._memory.kv, self._memory.weights)
        connector = None
        if self._transfer is not None:
            with self._phase("register KV for transfer", promotion=True):
                connector = self._transfer.connect(self._core, self._memory)
            self._spawn(self._transfer.watch())
        with self._phase("canary", promotion=True):
            loop = StepLoop(self._core, connector)
            self._spawn(loop.run())
            right = await self._canary.ask(loop)
        self._say(EventKind.CANARY_ANSWERED, ok=right)
        if not right:
            raise WakeFailed("the canary's answer is wrong: weights or KV are not what they should be")
        self._life.activate(WakeFacts(weights_mapped=True, kv_mapped=True, canary_answered=right))
        self._server.loop, self._metrics.core, self._metrics.connector = loop, self._core, connector
        if self._config.blocks_socket:
            self._link_blocks(loop)
        self._publish_memory()
        self._say(EventKind.ENGINE_AWAKE, epoch=epoch)
        if self._config.router_url:
            with self._phase("register", promotion=True):
                config = self._config
                kv_engine_id = self._transfer.engine_id if self._transfer else ""
                me = Register(config.worker_id, config.engine_id, self._url, epoch, config.role, kv_engine_id)
                await self._registration.register(me)
        self._tell(EngineState.ACTIVE)

    def _link_blocks(self, loop: StepLoop) -> None:
        """Make the prefix cache the node's block groups."""
        config, connector = self._config, loop.connector
        incarnation = self._transfer.engine_id if self._transfer else f"{config.engine_id}.{secrets.token_hex(4)}"
        groups = BlockGroups(
            self._core, connector, worker_id=config.worker_id, hosts=tuple({config.host, *LOOPBACK})
        )  # fmt: skip
        if connector is not None:
            key = node_key(os.environb.get(TOKEN_VARIABLE.encode(), b""), config.worker_id)
            connector.producer.explain = lambda request_id: (
                why_not(key, request_id, wall_ns() // NS_PER_MS) if is_token(request_id) else ""
            )
        loop.groups = groups
        self._spawn(BlockLink(Path(config.blocks_socket), self._core, groups, incarnation).run())

    def _say_of_kv(self, kind: EventKind, subject: str, **detail: Scalar) -> None:
        self._events.say(kind, subject, engine_id=self._config.engine_id, worker_id=self._config.worker_id, **detail)

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[call-overload]
        task.add_done_callback(self._task_done)
        self._tasks.append(task)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _say(self, kind: EventKind, **detail: str | int | float | bool | None) -> None:
        self._events.say(kind, self._config.engine_id, worker_id=self._config.worker_id, **detail)

    def _phase_done(
        self, name: str, start_ns: int, end_ns: int, *, emulated: bool = False, promotion: bool = False
    ) -> None:
        kind = EventKind.PROMOTION_PHASE if promotion else EventKind.INIT_PHASE
        self._say(kind, name=name, start_ns=start_ns, end_ns=end_ns, emulated=emulated)

    @contextmanager
    def _phase(self, name: str, *, emulated: bool = False, promotion: bool = False) -> Iterator[Callable[[str], None]]:
        """Record a phase; what is yielded renames it."""
        start = host_ns()
        names = [name]
        yield names.append
        self._phase_done(names[-1], start, host_ns(), emulated=emulated, promotion=promotion)

    def _publish_memory(self) -> None:
        self._metrics.state = self._life.state
        self._metrics.weights_bytes_mapped = self._memory.weights_bytes_mapped
        self._metrics.kv_bytes_mapped = self._memory.kv_bytes_mapped

    def _tell(self, state: EngineState) -> None:
        """Tell the supervisor; one without a supervisor has nobody to tell."""
        self._metrics.state = self._life.state
        if self._config.status_fd >= 0:
            line = msgspec.json.encode(EngineStatus(state, self._life.epoch, self._url))
            os.write(self._config.status_fd, line + b"\n")


def _memory(config: EngineConfig) -> EngineMemory:
    profile = config.profile
    if config.memory_socket:
        return SharedMemory(
            Path(config.memory_socket), config.engine_id, profile.weights_bytes, profile.kv_blocks, config.init_limit_s
        )
    return PrivateMemory(profile.weights_bytes, profile.kv_blocks, shareable=config.ranks > 1)


def warm_up(profile: Profile, memory: EngineMemory) -> None:
    """Run real steps over a scratch pool, so that the first user's request meets no cold code."""
    blocks = min(profile.kv_blocks, 3 * profile.chunk_tokens // 16)
    scratch = msgspec.structs.replace(profile, kv_blocks=blocks)
    core = EngineCore(scratch).bind(np.zeros((blocks, BLOCK_WORDS), np.uint64), memory.weights)
    prompt = np.arange(min(profile.chunk_tokens * 2, profile.context_tokens_max // 2), dtype=np.int64) % 4096
    core.sequence("warm-up long", prompt, 32)
    for length in range(1, 33):
        core.sequence(f"warm-up {length}", prompt[:length], 4)
    while core.has_work:
        core.step()


def pss_bytes(pid: str = "self") -> int:
    """Return a process's proportional set size in bytes; shared pages count by their share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Run the engine described by the one argument."""
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    if config.parent_pid:
        die_with_parent(config.parent_pid)
    try:
        uvloop.run(EngineProcess(config).run())
    except (
        MemoryServiceError, RegistrationError, WeightsError, LockError, TransferUnavailable, WakeFailed, OSError,
    ) as error:  # fmt: skip
        print(f"engine {config.engine_id}: {error}", file=sys.stderr)  # noqa: T201 # the last line of its log
        sys.exit(6)


if __name__ == "__main__":
    main()

"""One vLLM server and its guard, which is this process: `python -m harness.targets.vllm.engine SPEC`.

The guard starts the server, waits until it serves, parks it, waits in the failover lock, and registers it with the
router once it has answered a canary and nothing of its predecessor runs any more. From then on it watches every process
of the server. The first death ends its turn: the router forgets it, the lock is free, and the rest of the group is
killed. So the death of any process releases the lock, and so does the guard's own, by the kernel; a successor trusts
neither and ends what is left of its predecessor itself.

The guard says its states on standard output (`Said`), and ends with the server and when its input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from reference_impl.announcement import stop_at_end_of_input
from reference_impl.engine.registration import Registration, RegistrationError
from reference_impl.event_log import EventLog
from reference_impl.failover.lock import FlockFailoverLock
from reference_impl.failover.process_group import (
    Member,
    Predecessor,
    become_subreaper,
    descendants,
    end_all,
    first_death,
    reap,
    silence_all,
)
from reference_impl.memory_service.weights_report import read_reports
from reference_impl.processes import last_line
from reference_impl.realclock import host_ns
from reference_impl.router.protocol import Register
from reference_impl.rules.events import EventKind
from reference_impl.rules.lifecycle import EngineState
from reference_impl.rules.routing import Role
from reference_impl.secret import TOKEN_VARIABLE
from reference_impl.time_namespace import EXIT_CODE as NO_SUCH_CLOCK
from reference_impl.time_namespace import TimeNamespaceError, enter_for_children

ROLES: Final = {"VLLM::EngineCor": "engine_core", "VLLM::Worker": "worker"}
"""What vLLM's processes call themselves, as far as /proc shows it."""
FIRST_ROLE: Final = "api_server"
START_LIMIT_S: Final = 300.0
LOOK_S: Final = 0.05
CANARY_LIMIT_S: Final = 60.0
FAILED: Final = 6


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A server to start and guard."""

    engine_id: str
    worker_id: str
    role: Role
    command: list[str]
    environment: dict[str, str]
    """Besides the guard's own."""
    cores: list[int]
    """Where its processes run; empty: anywhere."""
    niceness: int
    url: str
    model: str
    canary: list[int]
    """The prompt that it must answer before it serves."""
    canary_answer: list[int]
    """The right answer; empty: any is taken."""
    warm_tokens: int
    """The length of the prompt that warms it up before it parks."""
    lock_path: str
    members_path: str
    """Where the active engine of the worker writes what processes it has."""
    router_url: str
    events_file: str
    log_file: str
    working_dir: str
    """Where the server runs: not where this process does, whose folder may hide vLLM's plugins."""
    weights_report: str = ""
    """Where its weights loader tells what it shares; empty: it has vLLM's own."""
    clock_offset_s: float = 0.0


class Said(msgspec.Struct, frozen=True):
    """A change of state, told to the deployment."""

    state: str
    epoch: int = 0
    members: list[Member] = []
    reason: str = ""


class ServerFailed(Exception):
    """The server did not come up, or answered its canary wrongly; the message says how."""


class Guard:
    """A server's life, from its start to its last process's end."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        # An actor's name of its own: after its engine's death the guard still has something to say.
        self._events = EventLog(Path(spec.events_file), f"{spec.engine_id}-guard")
        self._lock = FlockFailoverLock(Path(spec.lock_path))
        self._registration = Registration(spec.router_url, os.environ[TOKEN_VARIABLE])
        self._session: aiohttp.ClientSession | None = None
        self._server: subprocess.Popen[bytes] | None = None

    async def run(self, stop: asyncio.Event) -> int:
        """Live until the server's first death, or until `stop`. Return the exit code."""
        life = asyncio.create_task(self._live())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({life, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
            return 0
        except (ServerFailed, RegistrationError) as error:
            self._say(EngineState.DEAD, reason=str(error))
            print(error, file=sys.stderr)  # noqa: T201 # the last line of its log
            return FAILED
        finally:
            life.cancel()
            stopping.cancel()
            await asyncio.gather(life, stopping, return_exceptions=True)
            await self._end()

    async def _live(self) -> None:
        spec = self._spec
        self._say(EngineState.INIT)
        async with aiohttp.ClientSession() as self._session:
            await self._start()
            members = self._members()
            if not {FIRST_ROLE, "engine_core"} <= {m.role for m in members}:
                raise ServerFailed(f"{spec.engine_id}: not all of its processes are there: {[m.role for m in members]}")
            for member in members:
                self._say_started(member)
            self._tell_weights()
            self._say(EngineState.STANDBY, members=members)
            self._told(EventKind.ENGINE_ASLEEP)
            dying = asyncio.create_task(first_death(members))
            serving = asyncio.create_task(self._serve(members))
            try:
                await asyncio.wait({dying, serving}, return_when=asyncio.FIRST_COMPLETED)
                if not dying.done():
                    serving.result()  # it never ends but by an error
                dead = dying.result()
                self._events.say(EventKind.PROCESS_EXITED, f"{spec.engine_id}-{dead.role}", pid=dead.pid,
                                 worker_id=spec.worker_id)  # fmt: skip
                # The lock first: the successor's wait ends here, and it ends what is left by itself.
                if self._lock.held:
                    self._lock.release()
            finally:
                dying.cancel()
                serving.cancel()
                await asyncio.gather(dying, serving, return_exceptions=True)

    async def _serve(self, members: list[Member]) -> None:
        """Wait for the turn, take it, and keep it."""
        spec = self._spec
        await self._registration.connect()
        self._told(EventKind.LOCK_WAITING)
        epoch = await self._lock.acquire(spec.engine_id)
        won_ns = host_ns()
        self._events.say_at(won_ns, EventKind.LOCK_WON, spec.engine_id, worker_id=spec.worker_id, epoch=epoch)
        self._say(EngineState.WAKING, epoch, members)
        self._told(EventKind.ENGINE_WAKING)
        await asyncio.gather(self._fence(won_ns), self._canary(won_ns))
        own = Predecessor(spec.engine_id, members)
        _write_whole(Path(spec.members_path), msgspec.json.encode(own))
        self._told(EventKind.ENGINE_AWAKE, epoch=epoch)
        await self._registration.register(Register(spec.worker_id, spec.engine_id, spec.url, epoch, spec.role))
        self._say(EngineState.ACTIVE, epoch, members)
        await self._registration.wait_closed()
        raise ServerFailed(f"{spec.engine_id}: the router ended its registration")

    async def _fence(self, won_ns: int) -> None:
        """End whatever of the predecessor still runs, and wait until none of it can run an instruction any more."""
        before = _predecessor(Path(self._spec.members_path))
        if before is None:
            return
        left = await silence_all(before.members)
        if left:
            raise ServerFailed(f"{self._spec.engine_id}: of {before.engine_id} there still run {left}")
        self._events.say(EventKind.PROCESS_EXITED, before.engine_id, pid=before.members[0].pid,
                         worker_id=self._spec.worker_id)  # fmt: skip
        self._phase(EventKind.PROMOTION_PHASE, "fence the predecessor", won_ns)

    async def _canary(self, won_ns: int) -> None:
        spec = self._spec
        answer = await self._ask(spec.canary, max(1, len(spec.canary_answer)))
        ok = not spec.canary_answer or answer == spec.canary_answer
        self._told(EventKind.CANARY_ANSWERED, ok=ok)
        self._phase(EventKind.PROMOTION_PHASE, "canary", won_ns)
        if not ok:
            raise ServerFailed(f"{spec.engine_id}: the canary's answer is {answer}, and not {spec.canary_answer}")

    async def _start(self) -> None:
        """Start the server and wait until it answers. Raises ServerFailed with its own last word."""
        spec = self._spec
        begun_ns = host_ns()
        with Path(spec.log_file).open("ab") as log:  # noqa: ASYNC230 # a log on local disk
            self._server = subprocess.Popen(  # noqa: ASYNC220 # a fork; nothing else runs here yet
                spec.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | spec.environment, cwd=spec.working_dir, preexec_fn=self._in_child,  # noqa: PLW1509 # no thread runs yet
            )  # fmt: skip
        try:
            async with asyncio.timeout(START_LIMIT_S):
                at_ns = await self._until_healthy(begun_ns)
                prompt = (spec.canary * (1 + spec.warm_tokens // len(spec.canary)))[: spec.warm_tokens]
                await self._ask(prompt[::-1], 2)
                self._phase(EventKind.INIT_PHASE, "first requests", at_ns)
        except TimeoutError as error:
            problem = f"{spec.engine_id}: not ready within {START_LIMIT_S:g} s; see {spec.log_file}"
            raise ServerFailed(problem) from error

    def _in_child(self) -> None:
        if self._spec.cores:
            os.sched_setaffinity(0, self._spec.cores)
        os.nice(self._spec.niceness)

    async def _until_healthy(self, since_ns: int) -> int:
        """Wait until the server says that it is well; return the moment. A phase ends where a process of it appears."""
        waited = {"engine_core": "start the API server", "worker": "start the engine core"}
        while not await self._healthy():
            self._check_alive()
            there = {m.role for m in self._members()} if waited else set()
            for role in [r for r in waited if r in there]:
                since_ns = self._phase(EventKind.INIT_PHASE, waited.pop(role), since_ns)
            await asyncio.sleep(LOOK_S)
        name = "start the engine core, load, warm up" if "worker" in waited else "start the worker, load, warm up"
        return self._phase(EventKind.INIT_PHASE, name, since_ns)

    def _check_alive(self) -> None:
        if self._server is not None and (code := self._server.poll()) is not None:
            log = Path(self._spec.log_file)
            raise ServerFailed(f"{self._spec.engine_id}: the server ended with {code} while it started; its last "
                               f"word: {last_line(log) or 'none'}; see {log}")  # fmt: skip

    async def _healthy(self) -> bool:
        assert self._session is not None
        try:
            async with self._session.get(f"{self._spec.url}/health", timeout=aiohttp.ClientTimeout(1.0)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _ask(self, prompt: list[int], tokens: int) -> list[int]:
        """Return the server's greedy answer to a prompt. Raises ServerFailed."""
        assert self._session is not None
        body = {"model": self._spec.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        limit = aiohttp.ClientTimeout(CANARY_LIMIT_S)
        try:
            async with self._session.post(f"{self._spec.url}/v1/completions", json=body, timeout=limit) as answer:
                said: Any = msgspec.json.decode(await answer.read())
            return list(said["choices"][0]["token_ids"])
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, LookupError, TypeError) as error:
            raise ServerFailed(f"{self._spec.engine_id}: no answer to a canary: {error!r}") from error

    def _tell_weights(self) -> None:
        """Say what the server's weights loader shares with others and what it has copied, where it tells."""
        if not self._spec.weights_report:
            return
        for report in read_reports(Path(self._spec.weights_report))[-1:]:
            self._told(EventKind.WEIGHTS_MAPPED, bytes=report.bytes_shared, copied=report.bytes_copied,
                       duplicated=report.bytes_duplicated, generation=report.generation,
                       role=str(report.role), linears=report.linears)  # fmt: skip

    def _members(self) -> list[Member]:
        return descendants(os.getpid(), ROLES, FIRST_ROLE)

    async def _end(self) -> None:
        """Take leave of the router, end every process, and only then let go of the lock."""
        await self._registration.close()
        left = await end_all(self._members())
        left += await end_all(self._members())  # what was being born while the first were ended
        reap()
        self._events.say(EventKind.PROCESS_EXITED, f"{self._spec.engine_id}-server", worker_id=self._spec.worker_id,
                         left=len(left))  # fmt: skip
        if self._lock.held:
            self._lock.release()
        self._events.close()

    def _phase(self, kind: EventKind, name: str, start_ns: int) -> int:
        """Say that a phase has ended now, and return that moment."""
        end_ns = host_ns()
        self._told(kind, name=name, start_ns=start_ns, end_ns=end_ns, emulated=False)
        return end_ns

    def _told(self, kind: EventKind, **detail: str | int | bool) -> None:
        self._events.say(kind, self._spec.engine_id, worker_id=self._spec.worker_id, **detail)

    def _say_started(self, member: Member) -> None:
        self._events.say(EventKind.PROCESS_STARTED, f"{self._spec.engine_id}-{member.role}", pid=member.pid,
                         role=member.role, start_ticks=member.start_ticks, worker_id=self._spec.worker_id)  # fmt: skip

    def _say(self, state: EngineState, epoch: int = 0, members: list[Member] | None = None, reason: str = "") -> None:
        line = msgspec.json.encode(Said(state, epoch, members or [], reason))
        with contextlib.suppress(BrokenPipeError):
            os.write(sys.stdout.fileno(), line + b"\n")


def _predecessor(path: Path) -> Predecessor | None:
    """Return whose turn it was before, None for the first."""
    return msgspec.json.decode(path.read_bytes(), type=Predecessor) if path.exists() else None


def _write_whole(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".part")
    partial.write_bytes(data)
    partial.rename(path)


async def _main(spec: EngineSpec) -> int:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    stop_at_end_of_input(stop)
    return await Guard(spec).run(stop)


def main() -> None:
    """Guard the server that the one argument, an `EngineSpec` as JSON, describes."""
    spec = msgspec.json.decode(sys.argv[1], type=EngineSpec)
    become_subreaper()
    if spec.clock_offset_s:
        try:
            enter_for_children(spec.clock_offset_s)  # the guard keeps the host's clock
        except TimeNamespaceError as error:
            print(f"{spec.engine_id}: {error}", file=sys.stderr)  # noqa: T201 # the last line of its log
            sys.exit(NO_SUCH_CLOCK)
    sys.exit(asyncio.run(_main(spec)))


if __name__ == "__main__":
    main()

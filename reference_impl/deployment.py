"""A whole reference deployment on this machine: a router and its workers, started, watched and ended together.

`python -m reference_impl.deployment --workers 2 --shadow --announce` prints one JSON line once every worker serves
(and has its shadow parked), and runs until SIGTERM or SIGINT. Nothing that it starts outlives it.

With `--prefill N --decode M` the workers are of two kinds, p0, p1 ... and d0, d1 ..., and KV moves between them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from reference_impl.announcement import Announcement, announce, say_error, say_progress, stop_at_end_of_input
from reference_impl.blockservice.buckets import Bucket, Limit, Rate
from reference_impl.blockservice.config import BlockServiceConfig
from reference_impl.blockservice.credentials import SECRET_BYTES_MIN
from reference_impl.blockservice.peers import read_address
from reference_impl.content import BLOCK_BYTES
from reference_impl.deployment_options import parse
from reference_impl.engine.config import MODEL_NAME
from reference_impl.engine.profile import Profile, ProfileError, load_profile
from reference_impl.engine.weights_file import WEIGHTS_SEED, WeightsError, default_weights_dir, ensure_weights
from reference_impl.failover.prober import ProbeLimits
from reference_impl.failover.worker import WorkerConfig, WorkerStatus, blocks_socket, read_status, status_path
from reference_impl.oracle import Weights
from reference_impl.processes import end_child, last_line
from reference_impl.rules.clock import NS_PER_MS
from reference_impl.rules.lifecycle import EngineState
from reference_impl.rules.routing import Role
from reference_impl.rules.terms import KvTerms
from reference_impl.secret import TOKEN_VARIABLE
from reference_impl.time_namespace import EXIT_CODE as NO_SUCH_CLOCK
from reference_impl.time_namespace import available, can_shift, uptime_s

START_LIMIT_S: Final = 120.0
STOP_LIMIT_S: Final = 10.0
POLL_S: Final = 0.02
SPARE_BYTES: Final = 64 * 2**20
"""Room on a device besides one copy of the weights and one KV pool."""


class DeploymentError(Exception):
    """The deployment cannot be brought up or kept up; the message says why and where to look. `code`: exit code."""

    def __init__(self, message: str, code: int = 6) -> None:
        super().__init__(message)
        self.code = code


class BlocksOptions(msgspec.Struct, frozen=True):
    """What is to be with the block services."""

    fail_points: bool = False
    """Whether they can be made to fail at named places."""
    migration_mib_per_s: float = 0.0
    """What a tenant's migrations may move to a node; 0: no limit."""

    @property
    def buckets(self) -> dict[Bucket, Limit]:
        """The limits of each node: a second's worth may come at once, and a whole group in any case, in pieces."""
        if not self.migration_mib_per_s:
            return {}
        per_s = self.migration_mib_per_s * 2**20
        return {Bucket.MIGRATION_BYTES: Limit(tenant=Rate(per_s=per_s, burst=per_s))}


class DeploymentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to bring up. Folders must exist."""

    profile: Profile
    """Already scaled."""
    workers: int = 0
    """Workers that do whole requests."""
    prefill: int = 0
    decode: int = 0
    """Workers that do one part of each; either both or none."""
    terms: KvTerms = KvTerms()
    """Of every worker. Already scaled."""
    prefill_ranks: int = 1
    decode_ranks: int = 1
    decode_slots: int = 0
    """Requests that a decode worker runs at once; 0: as many as the profile says."""
    decode_clock_offset_s: float = 0.0
    """How far the decode workers' clock is ahead of the prefill workers'."""
    blocks: BlocksOptions | None = None
    """Of the block service beside each worker's engines; None: there is none."""
    shadow: bool
    run_dir: Path
    """Private: locks, sockets, status files. Its path must be short enough for a Unix socket (under 90 bytes)."""
    events_dir: Path
    logs_dir: Path
    weights_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    probe: ProbeLimits = ProbeLimits()


class Place(msgspec.Struct, frozen=True):
    """A worker that there is to be."""

    worker_id: str
    role: Role = Role.BOTH
    ranks: int = 1
    clock_offset_s: float = 0.0


def places(config: DeploymentConfig) -> list[Place]:
    """Return the workers of a deployment, those of a kind together."""
    prefill_ahead_s, decode_ahead_s = clock_offsets_s(config.decode_clock_offset_s)
    kinds = (
        ("w", config.workers, Role.BOTH, 1, 0.0),
        ("p", config.prefill, Role.PREFILL, config.prefill_ranks, prefill_ahead_s),
        ("d", config.decode, Role.DECODE, config.decode_ranks, decode_ahead_s),
    )
    return [
        Place(f"{letter}{number}", role, ranks, ahead_s)
        for letter, count, role, ranks, ahead_s in kinds
        for number in range(count)
    ]


def clock_offsets_s(decode_offset_s: float) -> tuple[float, float]:
    """Return how far the clocks of the prefill and of the decode workers are to be ahead of the host's.

    No clock can stand before its boot. Where the decode side's would, the prefill side's is ahead instead: what the two
    make of each other's stamps is the same.
    """
    return (0.0, decode_offset_s) if can_shift(decode_offset_s) else (-decode_offset_s, 0.0)


class Deployment:
    """A router and supervisors as child processes. Use `start`, then `ended`, and `stop` in any case."""

    def __init__(self, config: DeploymentConfig) -> None:
        self._config = config
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = False
        self._places = places(config)
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)
        if config.blocks is not None and len(token.encode()) < SECRET_BYTES_MIN:
            raise DeploymentError(
                f"{TOKEN_VARIABLE} must have at least {SECRET_BYTES_MIN} bytes where there are block services: give it "
                "more, or unset it, and one is made", 2,
            )  # fmt: skip
        self._environment = os.environ | {TOKEN_VARIABLE: token}

    async def start(self, progress: Callable[[str], None] = lambda _: None) -> Announcement:
        """Bring everything up. Raises DeploymentError when something does not come up in time."""
        config = self._config
        await self._check_clocks(progress)
        weights_bytes = config.profile.weights_bytes
        progress(f"weights of {weights_bytes / 2**20:,.0f} MiB")
        try:
            file = await asyncio.to_thread(
                ensure_weights, config.weights_dir, WEIGHTS_SEED, weights_bytes, self._break_off
            )
        except WeightsError as error:
            raise DeploymentError(str(error), 7) from error
        progress("router")
        url = await self._start_router()
        progress(f"{len(self._places)} workers")
        for place in self._places:
            await self._start_supervisor(place, file, url)
        await self._until_ready(url, progress)
        return Announcement(
            url=url, model=MODEL_NAME, weights=Weights(WEIGHTS_SEED, weights_bytes // 8), run_dir=str(config.run_dir),
            workers=[place.worker_id for place in self._places],
            roles={place.worker_id: place.role for place in self._places},
            ranks={place.worker_id: place.ranks for place in self._places},
            clock_offsets_s={place.worker_id: place.clock_offset_s for place in self._places},
            terms=config.terms,
            blocks={place.worker_id: self._address(place.worker_id) for place in self._places if config.blocks},
        )  # fmt: skip

    def _address(self, worker_id: str) -> str:
        """Return where a worker's block service listens."""
        address = read_address(self._config.run_dir, worker_id)
        if address is None:
            raise DeploymentError(f"{worker_id}'s block service has no address")
        return address.target

    async def _check_clocks(self, progress: Callable[[str], None]) -> None:
        """Say whose clock is ahead, by how much. Raises DeploymentError where the kernel gives no such clock."""
        shifted = {place.role: place.clock_offset_s for place in self._places if place.clock_offset_s}
        if not shifted:
            return
        if (problem := await asyncio.to_thread(available)) is not None:
            raise DeploymentError(f"no clock of their own for the workers: {problem}", NO_SUCH_CLOCK)
        for role, ahead_s in shifted.items():
            text = f"the {role} workers' clock is {abs(ahead_s):g} s {'ahead' if ahead_s > 0 else 'behind'}"
            if role is Role.PREFILL:
                text += (
                    f", in place of the decode workers' behind: this machine has been up for {uptime_s():.0f} s only"
                )
            progress(text)

    def _break_off(self, _share: float) -> None:
        """Let a thread that makes weights end when the deployment does."""
        if self._stopping:
            raise WeightsError("interrupted while the weights were made")

    async def ended(self) -> str:
        """Return when a child has ended by itself, with a sentence that says which."""
        waits = {asyncio.create_task(c.wait()): name for name, c in self._children.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        name = waits[done.pop()]
        return f"{name} ended with {self._children[name].returncode}; see {self._config.logs_dir / name}.log"

    async def stop(self) -> None:
        """End every child."""
        self._stopping = True
        await asyncio.gather(*(end_child(child, STOP_LIMIT_S) for child in self._children.values()))

    async def _start_router(self) -> str:
        config = self._config
        child = await self._spawn(
            "router", "reference_impl.router.process",
            ["--host", config.host, "--port", str(config.port), "--parent-pid", str(os.getpid()),
             "--events", str(config.events_dir / "events-router.jsonl"), "--run-dir", str(config.run_dir),
             "--blocks-nodes", ",".join(p.worker_id for p in self._places if config.blocks)],
            pipe=True,
        )  # fmt: skip
        if child.stdout is None:
            raise DeploymentError("the router has no output pipe")
        try:
            async with asyncio.timeout(START_LIMIT_S):
                line = await child.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            code = await child.wait()
            raise DeploymentError(last_line(config.logs_dir / "router.log") or "the router did not start", code or 6)
        return str(msgspec.json.decode(line)["url"])

    async def _start_supervisor(self, place: Place, weights_file: Path, url: str) -> None:
        config = self._config
        profile = config.profile
        if place.role is Role.DECODE and config.decode_slots:
            profile = msgspec.structs.replace(profile, requests_max=config.decode_slots)
        worker = WorkerConfig(
            worker_id=place.worker_id,
            blocks=self._blocks_of(place.worker_id),
            role=place.role,
            terms=config.terms,
            ranks=place.ranks,
            clock_offset_s=place.clock_offset_s,
            shadow=config.shadow,
            profile=profile,
            weights_file=str(weights_file),
            weights_seed=WEIGHTS_SEED,
            router_url=url,
            run_dir=str(config.run_dir),
            events_dir=str(config.events_dir),
            logs_dir=str(config.logs_dir),
            memory_bytes=profile.weights_bytes + profile.kv_blocks * BLOCK_BYTES + SPARE_BYTES,
            host=config.host,
            probe=config.probe,
            parent_pid=os.getpid(),
        )
        await self._spawn(
            f"{place.worker_id}-supervisor", "reference_impl.failover.supervisor",
            [msgspec.json.encode(worker).decode()],
        )  # fmt: skip

    def _blocks_of(self, worker_id: str) -> BlockServiceConfig | None:
        config, options = self._config, self._config.blocks
        if options is None:
            return None
        run_dir = config.run_dir
        return BlockServiceConfig(
            node=worker_id, nodes=[place.worker_id for place in self._places], run_dir=str(run_dir),
            engine_socket=str(blocks_socket(run_dir, worker_id)), host=config.host,
            store=str(config.events_dir / f"blocks-{worker_id}.sqlite"),
            events_file=str(config.events_dir / f"events-{worker_id}-blocks.jsonl"),
            log_file=str(config.logs_dir / f"{worker_id}-rpc.jsonl"),
            loan_ms=config.terms.first_ns // NS_PER_MS, fail_points=options.fail_points,
            buckets=options.buckets,
        )  # fmt: skip

    async def _spawn(
        self, name: str, module: str, arguments: list[str], *, pipe: bool = False
    ) -> asyncio.subprocess.Process:
        with (self._config.logs_dir / f"{name}.log").open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, *arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE if pipe else log, stderr=log,
                env=self._environment, start_new_session=True,
            )  # fmt: skip
        self._children[name] = child
        return child

    async def _until_ready(self, url: str, progress: Callable[[str], None]) -> None:
        """Wait until every worker is registered and, with shadows, has one parked."""
        emulated_s = sum(phase.seconds for phase in self._config.profile.init)
        limit_s = START_LIMIT_S + 2 * emulated_s
        died = asyncio.create_task(self.ended())
        try:
            async with asyncio.timeout(limit_s), aiohttp.ClientSession() as session:
                ready = -1
                while ready < len(self._places):
                    if died.done():
                        raise DeploymentError(self._why(died.result()))
                    now = await self._ready(session, url)
                    if now != ready:
                        progress(f"{now} of {len(self._places)} workers ready")
                    ready = now
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise DeploymentError(
                f"not all workers were ready within {limit_s:.0f} s; see the logs in {self._config.logs_dir}"
            ) from error
        finally:
            died.cancel()

    def _why(self, ended: str) -> str:
        name = ended.partition(" ")[0]
        return last_line(self._config.logs_dir / f"{name}.log") or ended

    async def _ready(self, session: aiohttp.ClientSession, url: str) -> int:
        async with session.get(f"{url}/health") as response:
            health = msgspec.json.decode(await response.read())
        registered = {w["worker_id"] for w in health["workers"]}
        return sum(p.worker_id in registered and self._has_its_engines(p.worker_id) for p in self._places)

    def _has_its_engines(self, worker_id: str) -> bool:
        status = read_status(status_path(self._config.run_dir, worker_id))
        if status is None or not _redundant(status, self._config.shadow):
            return False
        return self._config.blocks is None or any(p.role == "block-service" for p in status.processes)


def _redundant(status: WorkerStatus, shadow: bool) -> bool:
    parked = len(status.engines(EngineState.STANDBY))
    return len(status.engines(EngineState.ACTIVE)) == 1 and parked == int(shadow)


def _blocks(arguments: argparse.Namespace) -> BlocksOptions | None:
    return BlocksOptions(arguments.fail_points, arguments.migration_mib_per_s) if arguments.blocks else None


async def _serve(arguments: argparse.Namespace) -> int:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    if arguments.end_with_stdin:
        stop_at_end_of_input(stop)
    run_dir = Path(arguments.run_dir or tempfile.mkdtemp(prefix="pdproof-"))
    deployment: Deployment | None = None
    work: set[asyncio.Task[object]] = set()
    try:
        folder = Path(arguments.folder) if arguments.folder else run_dir
        config = DeploymentConfig(
            profile=load_profile(arguments.profile).scaled(arguments.time_scale),
            workers=arguments.workers,
            prefill=arguments.prefill,
            decode=arguments.decode,
            terms=arguments.terms,
            prefill_ranks=arguments.prefill_ranks,
            decode_ranks=arguments.decode_ranks,
            decode_slots=arguments.decode_slots,
            decode_clock_offset_s=arguments.decode_clock_offset_s,
            blocks=_blocks(arguments),
            shadow=arguments.shadow,
            run_dir=run_dir,
            events_dir=_folder(folder / "parts" if arguments.folder else folder),
            logs_dir=_folder(folder / "logs"),
            weights_dir=Path(arguments.weights_dir) if arguments.weights_dir else default_weights_dir(),
            host=arguments.host,
            port=arguments.port,
            probe=ProbeLimits(silent_s=arguments.probe_silent_s),
        )
        deployment = Deployment(config)
        stopping = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(deployment.start(say_progress))
        work = {stopping, starting}
        await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return 0
        announcement = starting.result()
        if arguments.announce:
            announce(announcement)
        else:
            say_progress(f"serving at {announcement.url}/v1 (model {announcement.model}); Ctrl-C ends it")
        ending = asyncio.create_task(deployment.ended())
        work.add(ending)
        await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return 0
        raise DeploymentError(ending.result())
    except ProfileError as error:
        raise DeploymentError(str(error), 2) from error
    finally:
        for task in work:
            task.cancel()
        if deployment is not None:
            await deployment.stop()
        shutil.rmtree(run_dir, ignore_errors=True)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def main() -> None:
    """Bring a deployment up and keep it."""
    arguments = parse()
    try:
        sys.exit(asyncio.run(_serve(arguments)))
    except DeploymentError as error:
        say_error(str(error))
        sys.exit(error.code)


if __name__ == "__main__":
    main()

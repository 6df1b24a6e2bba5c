"""A whole reference deployment on this machine: a router and its workers, started, watched and ended together.

`python -m reference_impl.deployment --workers 2 --shadow --announce` prints one JSON line once every worker serves
(and has its shadow parked), and runs until SIGTERM or SIGINT. Nothing that it starts outlives it.
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

from reference_impl.content import BLOCK_BYTES
from reference_impl.engine.config import MODEL_NAME
from reference_impl.engine.profile import Profile, ProfileError, load_profile
from reference_impl.engine.weights_file import WeightsError, ensure_weights
from reference_impl.failover.prober import ProbeLimits
from reference_impl.failover.worker import WorkerConfig, WorkerStatus, read_status, status_path
from reference_impl.oracle import Weights
from reference_impl.processes import end_child, last_line
from reference_impl.router.protocol import TOKEN_VARIABLE
from reference_impl.rules.lifecycle import EngineState

WEIGHTS_SEED: Final = 20_260_601
PROGRESS_PREFIX: Final = "deployment: "
ERROR_PREFIX: Final = "deployment: error: "
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


class DeploymentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to bring up. Folders must exist."""

    profile: Profile
    """Already scaled."""
    workers: int
    shadow: bool
    run_dir: Path
    """Private: locks, sockets, status files. Its path must be short enough for a Unix socket (under 90 bytes)."""
    events_dir: Path
    logs_dir: Path
    weights_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    probe: ProbeLimits = ProbeLimits()


class Announcement(msgspec.Struct, frozen=True):
    """The line that says the deployment serves."""

    url: str
    model: str
    weights: Weights
    run_dir: str
    workers: list[str]


class Deployment:
    """A router and supervisors as child processes. Use `start`, then `ended`, and `stop` in any case."""

    def __init__(self, config: DeploymentConfig) -> None:
        self._config = config
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = False
        self._environment = os.environ | {TOKEN_VARIABLE: secrets.token_hex(32)}

    async def start(self, progress: Callable[[str], None] = lambda _: None) -> Announcement:
        """Bring everything up. Raises DeploymentError when something does not come up in time."""
        config = self._config
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
        progress(f"{config.workers} workers")
        for worker_id in self._worker_ids():
            await self._start_supervisor(worker_id, file, url)
        await self._until_ready(url, progress)
        weights = Weights(WEIGHTS_SEED, weights_bytes // 8)
        return Announcement(url, MODEL_NAME, weights, str(config.run_dir), self._worker_ids())

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

    def _worker_ids(self) -> list[str]:
        return [f"w{number}" for number in range(self._config.workers)]

    async def _start_router(self) -> str:
        config = self._config
        child = await self._spawn(
            "router", "reference_impl.router.process",
            ["--host", config.host, "--port", str(config.port), "--parent-pid", str(os.getpid()),
             "--events", str(config.events_dir / "events-router.jsonl")],
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

    async def _start_supervisor(self, worker_id: str, weights_file: Path, url: str) -> None:
        config = self._config
        profile = config.profile
        worker = WorkerConfig(
            worker_id=worker_id,
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
            f"{worker_id}-supervisor", "reference_impl.failover.supervisor", [msgspec.json.encode(worker).decode()]
        )

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
                while ready < self._config.workers:
                    if died.done():
                        raise DeploymentError(self._why(died.result()))
                    now = await self._ready(session, url)
                    if now != ready:
                        progress(f"{now} of {self._config.workers} workers ready")
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
        return sum(w in registered and self._has_its_engines(w) for w in self._worker_ids())

    def _has_its_engines(self, worker_id: str) -> bool:
        status = read_status(status_path(self._config.run_dir, worker_id))
        return status is not None and _redundant(status, self._config.shadow)


def _redundant(status: WorkerStatus, shadow: bool) -> bool:
    parked = len(status.engines(EngineState.STANDBY))
    return len(status.engines(EngineState.ACTIVE)) == 1 and parked == int(shadow)


def default_weights_dir() -> Path:
    """Return where made weights are kept between runs: PDPROOF_CACHE, or the user's cache folder."""
    if folder := os.environ.get("PDPROOF_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdproof"


async def _serve(arguments: argparse.Namespace) -> int:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    if arguments.end_with_stdin:
        _stop_at_end_of_input(stop)
    run_dir = Path(arguments.run_dir or tempfile.mkdtemp(prefix="pdproof-"))
    deployment: Deployment | None = None
    work: set[asyncio.Task[object]] = set()
    try:
        folder = Path(arguments.folder) if arguments.folder else run_dir
        config = DeploymentConfig(
            profile=load_profile(arguments.profile).scaled(arguments.time_scale),
            workers=arguments.workers,
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
        starting = asyncio.create_task(deployment.start(_progress))
        work = {stopping, starting}
        await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return 0
        announcement = starting.result()
        if arguments.announce:
            print(msgspec.json.encode(announcement).decode(), flush=True)  # noqa: T201 # this line is the interface
        else:
            _progress(f"serving at {announcement.url}/v1 (model {announcement.model}); Ctrl-C ends it")
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


def _stop_at_end_of_input(stop: asyncio.Event) -> None:
    """Set `stop` when standard input ends: its other side is held by whoever started us, and ends with it."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def look() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            stop.set()

    loop.add_reader(descriptor, look)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _progress(text: str) -> None:
    print(f"{PROGRESS_PREFIX}{text}", file=sys.stderr, flush=True)  # noqa: T201 # progress for people


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reference_impl.deployment", description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="workers, each one device (default 2)")
    parser.add_argument("--shadow", action=argparse.BooleanOptionalAction, default=True,
                        help="memory service and shadow beside each engine (default), or cold restarts")  # fmt: skip
    parser.add_argument("--profile", default="default", help="compute profile: a name or a .toml file")
    parser.add_argument("--time-scale", type=float, default=1.0, help="divide every emulated duration by this")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=0, help="the router's port (default: any free one)")
    parser.add_argument("--folder", default="", help="write events to FOLDER/parts and output to FOLDER/logs")
    parser.add_argument("--run-dir", default="", help="private folder for locks and sockets, with a short path")
    parser.add_argument("--weights-dir", default="", help="where made weights are kept")
    parser.add_argument("--probe-silent-s", type=float, default=ProbeLimits().silent_s,
                        help="kill an engine that is silent for this long")  # fmt: skip
    parser.add_argument("--announce", action="store_true", help="print one JSON line when everything serves")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input does")
    return parser


def main() -> None:
    """Bring a deployment up and keep it."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.workers < 1:
        parser.error(f"--workers must be at least 1, got {arguments.workers}")
    least_s = 4 * ProbeLimits().interval_s
    if arguments.probe_silent_s < least_s:
        parser.error(f"--probe-silent-s must be at least {least_s:g}, got {arguments.probe_silent_s}")
    if not arguments.time_scale > 0:
        parser.error(f"--time-scale must be above 0, got {arguments.time_scale}")
    try:
        sys.exit(asyncio.run(_serve(arguments)))
    except DeploymentError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)  # noqa: T201 # the one clear line
        sys.exit(error.code)


if __name__ == "__main__":
    main()

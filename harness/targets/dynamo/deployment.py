"""A Dynamo deployment on this machine: its own front end, mockers for workers, a door that names them (`door`).

`python -m harness.targets.dynamo.deployment --model DIR --announce` speaks as `reference_impl.announcement` says. The
interpreter that has Dynamo is named by PDPROOF_DYNAMO_PYTHON; Dynamo's own settings are taken from the environment
(such as DYN_MIGRATION_LIMIT, by which the front end moves requests off a dead worker; its default is not to).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from harness.errors import BadInput
from harness.targets.dynamo import launch
from harness.targets.dynamo.door import Door, Engine
from harness.targets.dynamo.frontend import Frontend
from harness.targets.dynamo.model import mocker_model
from harness.targets.dynamo.worker import Worker, WorkerLost, WorkerSpec
from reference_impl.announcement import Announcement, announce, say_error, say_progress, stop_at_end_of_input
from reference_impl.event_log import EventLog
from reference_impl.failover.pidfd import start_ticks
from reference_impl.processes import end_child, last_line
from reference_impl.rules.events import EventKind
from reference_impl.rules.routing import Role

MODEL_NAME: Final = "canary"
FRONTEND_LIMIT_S: Final = 30.0
READY_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 3.0
POLL_S: Final = 0.02
WORKERS: Final = 2


class DeploymentFailed(Exception):
    """The deployment cannot be brought up or kept up; the message says why. `code`: exit code."""

    def __init__(self, message: str, code: int = 6) -> None:
        super().__init__(message)
        self.code = code


class DynamoConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to bring up. Folders must exist."""

    python: str
    model: Path
    """A folder as `model` makes it."""
    workers: int
    speedup: float
    """By how much the mockers' emulated times are divided."""
    run_dir: Path
    events_dir: Path
    logs_dir: Path
    host: str = launch.HOST
    port: int = 0


class Deployment:
    """A front end, its workers and the door. `run` brings them up, says so, and keeps them until `stop`."""

    def __init__(self, config: DynamoConfig) -> None:
        self._config = config
        self._discovery = config.run_dir / "discovery"
        self._discovery.mkdir(mode=0o700, exist_ok=True)
        self._engines: dict[int, Engine] = {}
        self._workers: list[Worker] = []
        self._events = EventLog(config.events_dir / "events-frontend-deployment.jsonl", "frontend-deployment")

    async def run(self, stop: asyncio.Event, ready: Callable[[Announcement], None]) -> None:
        """Raises DeploymentFailed when something does not come up, or does not stay."""
        say_progress("Dynamo's front end")
        port = launch.free_port()
        url = f"http://{launch.HOST}:{port}"
        child = await self._start_frontend(port)
        door = Door(url, self._engines, lambda: [w.serving for w in self._workers if w.serving is not None])
        stopping = asyncio.create_task(stop.wait())
        async with aiohttp.ClientSession() as session:
            frontend = Frontend(session, url, MODEL_NAME)
            serving = asyncio.create_task(self._serve(frontend, door, ready))
            lost = asyncio.create_task(self._lost(child))
            tasks: set[asyncio.Task[object]] = {stopping, serving, lost}
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not stop.is_set():
                    for task in done:
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await door.stop()
                await end_child(child, STOP_LIMIT_S)
                self._events.close()

    async def _serve(self, frontend: Frontend, door: Door, ready: Callable[[Announcement], None]) -> None:
        """Bring everything up behind a front end that has been started, and keep the workers up."""
        config = self._config
        await self._until_answers(frontend)
        worker_ids = [f"w{number}" for number in range(config.workers)]
        self._workers = [Worker(self._worker(worker_id), frontend, self._engines) for worker_id in worker_ids]
        changed = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(worker.run(changed.set))
                await self._until_serving(changed)
                try:
                    url = await door.start(config.host, config.port)
                except OSError as error:
                    raise DeploymentFailed(f"port {config.port} of {config.host}: {error.strerror}", 2) from error
                ready(
                    Announcement(
                        url=url, model=MODEL_NAME, run_dir=str(config.run_dir), workers=worker_ids,
                        roles=dict.fromkeys(worker_ids, Role.BOTH), ranks=dict.fromkeys(worker_ids, 1),
                    )
                )  # fmt: skip
        except* DeploymentFailed as failed:
            raise failed.exceptions[0] from failed
        except* WorkerLost as failed:
            raise DeploymentFailed(str(failed.exceptions[0])) from failed

    async def _start_frontend(self, port: int) -> asyncio.subprocess.Process:
        config = self._config
        # What a vLLM knows and Dynamo does not (`return_token_ids`) is to be passed over, not refused.
        settings = launch.environment(self._discovery, DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS="1")
        child = await launch.start(
            config.python, "dynamo.frontend",
            ["--http-host", launch.HOST, "--http-port", str(port), "--router-mode", "round-robin"],
            settings, self._frontend_log,
        )  # fmt: skip
        self._events.say(EventKind.PROCESS_STARTED, "frontend", pid=child.pid, role="frontend",
                         start_ticks=start_ticks(child.pid) or 0, worker_id="")  # fmt: skip
        return child

    @property
    def _frontend_log(self) -> Path:
        return self._config.logs_dir / "frontend.log"

    async def _lost(self, child: asyncio.subprocess.Process) -> None:
        status = await child.wait()
        self._events.say(EventKind.PROCESS_EXITED, "frontend", pid=child.pid, status=status)
        word = last_line(self._frontend_log) or "nothing"
        raise DeploymentFailed(f"Dynamo's front end ended with {status}; it said: {word}; see {self._frontend_log}")

    async def _until_answers(self, frontend: Frontend) -> None:
        try:
            async with asyncio.timeout(FRONTEND_LIMIT_S):
                while await frontend.health() is None:
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise DeploymentFailed(
                f"Dynamo's front end did not answer within {FRONTEND_LIMIT_S:g} s; see {self._frontend_log}"
            ) from error

    async def _until_serving(self, changed: asyncio.Event) -> None:
        told = -1
        try:
            async with asyncio.timeout(READY_LIMIT_S):
                while told < len(self._workers):
                    now = sum(worker.serving is not None for worker in self._workers)
                    if now != told:
                        say_progress(f"{now} of {len(self._workers)} workers ready")
                        told = now
                        continue
                    changed.clear()
                    await changed.wait()
        except TimeoutError as error:
            raise DeploymentFailed(
                f"not all workers served within {READY_LIMIT_S:g} s; see the logs in {self._config.logs_dir}"
            ) from error

    def _worker(self, worker_id: str) -> WorkerSpec:
        config = self._config
        return WorkerSpec(
            worker_id=worker_id, python=config.python,
            arguments=["--model-path", str(config.model), "--model-name", MODEL_NAME,
                       "--speedup-ratio", str(config.speedup)],
            discovery=self._discovery, run_dir=config.run_dir, events_dir=config.events_dir, logs_dir=config.logs_dir,
        )  # fmt: skip


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m harness.targets.dynamo.deployment", description=__doc__)
    parser.add_argument("--model", required=True, help="folder with a model's config.json and tokenizer.json")
    parser.add_argument("--workers", type=int, default=WORKERS, help="mockers that do whole requests")
    parser.add_argument("--speedup", type=float, default=1.0, help="divide the mockers' emulated times by this")
    parser.add_argument("--host", default=launch.HOST, help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=0, help="the door's port (default: any free one)")
    parser.add_argument("--folder", default="", help="write events to FOLDER/parts and output to FOLDER/logs")
    parser.add_argument("--run-dir", default="", help="private folder for discovery and status files")
    parser.add_argument("--announce", action="store_true", help="print one JSON line when everything serves")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input does")
    arguments = parser.parse_args()
    if arguments.workers < 1:
        parser.error(f"--workers must be at least 1, got {arguments.workers}")
    if not 0 < arguments.speedup < math.inf:
        parser.error(f"--speedup must be above 0, got {arguments.speedup}")
    return arguments


async def _main(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    if arguments.end_with_stdin:
        stop_at_end_of_input(stop)
    python = launch.installed().python
    run_dir = Path(arguments.run_dir or tempfile.mkdtemp(prefix="pdproof-"))
    folder = Path(arguments.folder) if arguments.folder else run_dir
    try:
        config = DynamoConfig(
            python=python, model=mocker_model(Path(arguments.model), run_dir / "model"), workers=arguments.workers,
            speedup=arguments.speedup, run_dir=run_dir,
            events_dir=_folder(folder / "parts" if arguments.folder else folder), logs_dir=_folder(folder / "logs"),
            host=arguments.host, port=arguments.port,
        )  # fmt: skip

        def ready(announcement: Announcement) -> None:
            if arguments.announce:
                announce(announcement)
            else:
                say_progress(f"serving at {announcement.url}/v1 (model {announcement.model}); Ctrl-C ends it")

        await Deployment(config).run(stop, ready)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def main() -> None:
    """Bring a deployment up and keep it."""
    arguments = _parse()
    try:
        asyncio.run(_main(arguments))
    except BadInput as error:
        say_error(str(error))
        sys.exit(error.exit_code)
    except DeploymentFailed as error:
        say_error(str(error))
        sys.exit(error.code)


if __name__ == "__main__":
    main()

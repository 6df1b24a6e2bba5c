"""A deployment with prefill and decode apart, of real processes over real NIXL, and what tests ask of it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import aiohttp
import msgspec
import numpy as np

from reference_impl.announcement import Announcement
from reference_impl.engine.cli import EngineAnnouncement
from reference_impl.failover.worker import ProcessInfo, read_status, status_path
from reference_impl.oracle import Weights, expected_answers
from reference_impl.realclock import now_ns
from reference_impl.router.protocol import HOLD_PATH, TOKEN_HEADER
from reference_impl.rules.clock import s_to_ns
from reference_impl.rules.events import Event, EventKind
from reference_impl.secret import TOKEN_VARIABLE
from reference_impl.tokens import VOCABULARY
from tests.waiting import until

T = TypeVar("T")
LIMIT_S: Final = 20.0
TOKEN: Final = "the token of these tests"
POLL_S: Final = 0.01
KEEP: Final = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""What a router asks of the prefill side."""
HOLDING: Final = ("pdproof:leases_live", "pdproof:lease_blocks_held", "pdproof:loads_running",
                  "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")  # fmt: skip
PACED: Final = """
name = "paced"
about = "for tests: slow enough to be met in every stage"
prefill_tokens_per_s = 8000
decode_base_s = 0.01
decode_per_request_s = 0.0001
chunk_tokens = 256
requests_max = 32
context_tokens_max = 4096
kv_blocks = 1024
weights_mib = 4
"""


def prompt_of(seed: int, tokens: int) -> list[int]:
    """Return a prompt that begins like a longer one of its seed, and unlike any of another seed."""
    return random.Random(seed).choices(range(VOCABULARY), k=tokens)


def right_answer(prompt: list[int], tokens: int, weights: Weights) -> list[int]:
    """Return what the oracle answers."""
    answer: list[int] = expected_answers([np.array(prompt)], [tokens], weights)[0].tolist()
    return answer


class Answered:
    """What came back, whole: a JSON body, or the events of a stream."""

    def __init__(self, status: int, text: bytes, headers: dict[str, str]) -> None:
        self.status = status
        self.text = text
        self.headers = headers
        self.events: list[dict[str, Any]] = []
        if headers.get("Content-Type", "").startswith("text/event-stream"):
            lines = [line.removeprefix("data: ") for line in text.decode().splitlines() if line]
            assert lines[-1] == "[DONE]", lines[-1:]
            self.events = [json.loads(line) for line in lines[:-1]]
        self.body: dict[str, Any] = {} if self.events else json.loads(text or b"{}")

    @property
    def tokens(self) -> list[int]:
        """The answer's token ids."""
        assert self.status == 200, self.text[:500]
        bodies = self.events or [self.body]
        return [token for body in bodies for choice in body["choices"] for token in choice["token_ids"]]

    @property
    def params(self) -> dict[str, Any]:
        """The hand-off: of a stream it stands on the last event."""
        found: dict[str, Any] = (self.events[-1] if self.events else self.body)["kv_transfer_params"]
        return found

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the answering engine had in its prefix cache."""
        usage = (self.events[-1] if self.events else self.body)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def error(self) -> dict[str, Any]:
        """The error of a refusal."""
        found: dict[str, Any] = self.body["error"]
        return found


class Client:
    """One test's connections. Worker ids name engines; "" is the router."""

    def __init__(self, url: str, weights: Weights, urls: dict[str, str] | None = None) -> None:
        self.weights = weights
        self.url = url
        self._urls = urls or {}
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def health(self) -> list[dict[str, Any]]:
        """The registered engines."""
        async with self.session.get(self.url + "/health") as response:
            found: list[dict[str, Any]] = (await response.json())["workers"]
            return found

    async def at(self, worker_id: str) -> str:
        """Return an engine's address; waits until one is registered."""
        if not worker_id:
            return self.url
        if worker_id in self._urls:
            return self._urls[worker_id]

        async def found() -> str:
            return next((str(w["url"]) for w in await self.health() if w["worker_id"] == worker_id), "")

        return await eventually(found, LIMIT_S, f"{worker_id} is registered")

    async def post(self, worker_id: str, body: object, path: str = "/v1/completions") -> Answered:
        """Send a body (bytes are sent as they are) and return the whole answer."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        url = await self.at(worker_id) + path
        async with self.session.post(url, data=data, headers={"Content-Type": "application/json"}) as response:
            return Answered(response.status, await response.read(), dict(response.headers))

    async def complete(
        self, prompt: list[int], tokens: int, *, worker_id: str = "", params: object = None, **more: Any
    ) -> Answered:
        """Ask for a completion."""
        body = {"prompt": prompt, "max_tokens": tokens, "return_token_ids": True, **more}
        if params is not None:
            body["kv_transfer_params"] = params
        return await self.post(worker_id, body)

    async def prefilled(self, prompt: list[int], worker_id: str = "p0", **more: Any) -> dict[str, Any]:
        """Prefill a prompt, as a router does, and return the hand-off."""
        answer = await self.complete(prompt, 1, worker_id=worker_id, params={**KEEP, **more})
        assert answer.status == 200, answer.text
        return answer.params

    async def decoded(self, prompt: list[int], tokens: int, params: object, worker_id: str = "d0") -> Answered:
        """Hand a prompt over, as a router does."""
        return await self.complete(prompt, tokens, worker_id=worker_id, params=params)

    async def assert_serves(self, seed: int, tokens: int = 100, worker_id: str = "") -> None:
        """A good request, in two legs, is answered rightly."""
        prompt = prompt_of(seed, tokens)
        if worker_id:
            answer = await self.decoded(prompt, 5, await self.prefilled(prompt), worker_id)
        else:
            answer = await self.complete(prompt, 5)
        assert answer.tokens == self.right(prompt, 5)

    def right(self, prompt: list[int], tokens: int) -> list[int]:
        """Return what the oracle answers."""
        return right_answer(prompt, tokens, self.weights)

    async def hold(self, seconds: float, requests: int) -> None:
        """Have the router keep the next hand-offs to itself for a while."""
        order = {"seconds": seconds, "requests": requests}
        async with self.session.post(self.url + HOLD_PATH, json=order, headers={TOKEN_HEADER: TOKEN}) as response:
            assert response.status == 200

    async def metrics(self, worker_id: str) -> dict[str, float]:
        """Return an engine's metrics by name, without labels."""
        async with self.session.get(await self.at(worker_id) + "/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
        return {name.partition("{")[0]: float(value) for name, _, value in pairs}

    async def grown(self, worker_id: str, before: dict[str, float], *names: str) -> list[float]:
        """Return by how much some of an engine's counters have grown."""
        now = await self.metrics(worker_id)
        return [now[name] - before[name] for name in names]

    async def until_metric(
        self, worker_id: str, name: str, holds: Callable[[float], bool], what: str, timeout_s: float = LIMIT_S
    ) -> float:
        """Wait until an engine's metric is as wanted; return it."""
        value = float("nan")

        async def found() -> bool:
            nonlocal value
            value = (await self.metrics(worker_id))[name]
            return holds(value)

        await eventually(found, timeout_s, f"{what} ({name} of {worker_id})")
        return value

    async def until_free(self, *worker_ids: str, timeout_s: float = LIMIT_S) -> None:
        """Wait until engines hold nothing: no request, no lease, no block (K1)."""
        for worker_id in worker_ids:
            left: dict[str, float] = {}

            async def free(worker_id: str = worker_id) -> bool:
                nonlocal left
                metrics = await self.metrics(worker_id)
                left = {name: metrics[name] for name in HOLDING if metrics[name]}
                return not left

            try:
                await eventually(free, timeout_s, f"{worker_id} holds nothing")
            except AssertionError as error:
                raise AssertionError(f"{error}: {left}") from None


async def eventually(condition: Callable[[], Awaitable[T]], timeout_s: float, what: str) -> T:
    """Return the first true value of `condition`, asked again and again. Raises AssertionError after `timeout_s`."""
    deadline_ns = now_ns() + s_to_ns(timeout_s)
    while True:
        value = await condition()
        if value:
            return value
        if now_ns() > deadline_ns:
            raise AssertionError(f"waited {timeout_s} s in vain until {what}")
        await asyncio.sleep(POLL_S)


class History:
    """What the processes that write their events to `folder` have said."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def events(self, *kinds: EventKind) -> list[Event]:
        """Return the events of all processes, in order."""
        lines = [line for path in self._folder.glob("*.jsonl") for line in path.read_bytes().splitlines()]
        events = [msgspec.json.decode(line, type=Event) for line in lines if line.endswith(b"}")]
        return sorted((e for e in events if not kinds or e.kind in kinds), key=lambda e: e.t_ns)

    def event_of(self, kind: EventKind, subject: str, timeout_s: float = LIMIT_S) -> Event:
        """Wait for one event of a kind and a subject, and return it."""

        def found() -> Event | None:
            return next((e for e in self.events(kind) if e.subject == subject), None)

        event = until(found, timeout_s, f"{kind} of {subject}")
        assert event is not None
        return event


class Split(History):
    """A deployment that serves."""

    def __init__(self, said: Announcement, folder: Path) -> None:
        super().__init__(folder / "parts")
        self.said = said

    def client(self) -> Client:
        """Return a client of the router and of each engine; use it as an async context."""
        return Client(self.said.url, self.said.weights)

    def engine(self, worker_id: str) -> ProcessInfo:
        """Return the active engine of a worker; waits until there is one."""

        def active() -> ProcessInfo | None:
            status = read_status(status_path(Path(self.said.run_dir), worker_id))
            return next(iter(status.engines("active")), None) if status else None

        found = until(active, LIMIT_S, f"{worker_id} has an active engine")
        assert found is not None
        return found

    def kill(self, worker_id: str) -> int:
        """SIGKILL a worker's engine; return the moment."""
        pid = self.engine(worker_id).pid
        moment_ns = now_ns()
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.engine(worker_id).pid != pid, LIMIT_S, f"{worker_id} is back")
        return moment_ns

    @contextmanager
    def stopped(self, worker_id: str) -> Iterator[None]:
        """Have an engine stand still (SIGSTOP) for a while."""
        pid = self.engine(worker_id).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", 5, "it stands")
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def split(folder: Path, *options: str, profile: str = PACED) -> Iterator[Split]:
    """Bring a deployment up, without shadows, and end it. `profile` is a name or a TOML text."""
    if "\n" in profile:
        (folder / "profile.toml").write_text(profile)
        profile = str(folder / "profile.toml")
    command = [sys.executable, "-m", "reference_impl.deployment", "--no-shadow", "--profile", profile]
    command += ["--folder", str(folder), "--announce", "--end-with-stdin", "--probe-silent-s", "60", *options]
    with (
        (folder / "deployment.log").open("wb") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {TOKEN_VARIABLE: TOKEN},
        ) as child,
    ):
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line, f"it did not come up: {(folder / 'deployment.log').read_text()}"
            yield Split(msgspec.json.decode(line, type=Announcement), folder)
        finally:
            child.terminate()
            child.wait(20)


@contextmanager
def lone_engine(folder: Path, role: str, terms: dict[str, object], *options: str) -> Iterator[EngineAnnouncement]:
    """Start one engine by `pdproof-engine`, without router or supervisor, and end it."""
    (folder / "profile.toml").write_text(PACED)
    command = [sys.executable, "-m", "reference_impl.engine.cli", "--role", role, "--announce", *options]
    command += ["--profile", str(folder / "profile.toml"), "--kv-transfer-config", json.dumps(terms)]
    command += ["--events", str(folder / f"{role}-{terms.get('kv_load_failure_policy')}.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line, f"the {role} engine did not come up"
            yield msgspec.json.decode(line, type=EngineAnnouncement)
            assert child.poll() is None, f"the {role} engine ended with {child.returncode}"
        finally:
            child.terminate()
            child.wait(20)


@asynccontextmanager
async def under_way(work: Awaitable[T]) -> AsyncIterator[asyncio.Future[T]]:
    """Let a request run beside what the test does; one that still runs at the end is broken off."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

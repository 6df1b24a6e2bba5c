"""Brings up the pair of servers that a case asks for, keeps it for the next case with the same terms, and ends it.

A case sees a `Pair`; a target is a `Maker` (`makers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp
import msgspec

from faults.fault import ProcessRef
from harness.cases.terms import Need, PairTerms, Size, pool_tokens
from harness.content import Oracle, judge
from reference_impl.announcement import Announcement
from reference_impl.failover.worker import ProcessInfo
from reference_impl.rules.events import Event
from reference_impl.rules.lifecycle import EngineState
from reference_impl.rules.routing import Role
from workloads.rows import RequestRecord

HEALTH_LIMIT_S: Final = 5.0
ROUTE_LIMIT_S: Final = 60.0
LOOK_S: Final = 0.05
BLOCKER_TOKENS_MAX: Final = 30_000
ENGINE: Final = "engine"
"""The role of a server that is one process."""


class Deployment(Protocol):
    """A deployment as a child process (`harness.targets.deployment.DeploymentTarget`)."""

    async def start(self, progress: Callable[[str], None]) -> Announcement:
        """Bring it up. Raises StartFailed."""
        ...

    async def stop(self) -> None:
        """End it and everything in it."""
        ...

    @property
    def token(self) -> str:
        """The router's secret."""
        ...

    def processes(self) -> list[tuple[str, ProcessInfo]]:
        """Return the workers' processes, each with its worker's id."""
        ...


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says of a target."""

    configuration: dict[str, Any]
    emulated: list[str]
    versions: dict[str, str] = {}
    profile: str


class Maker(Protocol):
    """A target: what it can do, and how its servers are made."""

    name: str

    def offers(self) -> set[Need]:
        """Return what cases may ask of it."""
        ...

    def deployment(self, terms: PairTerms, size: Size, folder: Path, faults: Path) -> Deployment:
        """Return a prefill and a decode server, not started, that write into `folder`; orders of faults in `faults`."""
        ...

    def oracle(self, announcement: Announcement) -> Oracle | None:
        """Return who knows the right answers, None if nobody does."""
        ...

    def describe(self) -> Described:
        """Return what a manifest says of it."""
        ...

    def environment(self, faults: Path) -> dict[str, str]:
        """Return what the servers must find in their environment for notification faults."""
        ...

    def adapted(self, terms: PairTerms) -> PairTerms:
        """Return the terms on which a case that wants these is run. Raises Misfit where none will do."""
        ...

    def pair(self, deployment: Deployment, said: Announcement, folder: Path, faults: Path, blocker_tokens: int) -> Pair:
        """Return the servers of a deployment that has come up."""
        ...


class Misfit(Exception):
    """A case cannot be run on a target whose terms are not the harness's to choose; the message says why."""


class Pair:
    """One prefill and one decode server that serve."""

    def __init__(
        self, deployment: Deployment, said: Announcement, oracle: Oracle | None, folder: Path, faults: Path,
        blocker_tokens: int,
    ) -> None:  # fmt: skip
        self.said = said
        self.oracle = oracle
        self.faults = faults
        """The folder of orders to the servers' NIXL agents."""
        self.blocker_tokens = blocker_tokens
        """How long an answer may be that only keeps a slot busy."""
        self.warm = False
        self._deployment = deployment
        self._folder = folder
        self._routes: dict[str, dict[str, Any]] = {}
        roles = {role: worker for worker, role in said.roles.items()}
        self.prefill, self.decode = roles[Role.PREFILL], roles[Role.DECODE]

    @property
    def router(self) -> tuple[str, str]:
        """The router's address, and its secret."""
        return self.said.url, self._deployment.token

    def url_of(self, worker: str) -> str:
        """Return a server's address, as it was last registered."""
        return str(self._routes[worker]["url"])

    def metrics_url(self, worker: str) -> str:
        """Return where a server's metrics are."""
        return f"{self.url_of(worker)}/metrics"

    def headers(self) -> dict[str, str]:
        """Return what each request must carry besides."""
        return {}

    def engine_of(self, worker: str) -> str:
        """Return the name of a server's life, as it was last registered."""
        return str(self._routes[worker]["engine_id"])

    async def serves(self, worker: str, *, after: str = "") -> bool:
        """Whether a server is registered, and is not the life `after`. Notes its address."""
        timeout = aiohttp.ClientTimeout(HEALTH_LIMIT_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{self.said.url}/health") as got:
                routes = msgspec.json.decode(await got.read())["workers"]
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
            return False
        found = {route["worker_id"]: route for route in routes}
        if worker not in found or found[worker]["engine_id"] == after:
            return False
        self._routes[worker] = found[worker]
        return True

    async def until_registered(self) -> None:
        """Wait until both servers are. Raises TimeoutError."""
        async with asyncio.timeout(ROUTE_LIMIT_S):
            for worker in (self.prefill, self.decode):
                while not await self.serves(worker):
                    await asyncio.sleep(LOOK_S)

    def parts_of(self, worker: str, roles: tuple[str, ...]) -> list[str]:
        """Return those of the roles that a server has processes for; `engine` where it is one process."""
        parts = [p.role for p in self._parts(worker)]
        return [role for role in roles if role in parts] or parts[-1:]

    def process_of(self, worker: str, role: str) -> ProcessRef | None:
        """Return a server's process of this role, None if there is none now."""
        for p in self._parts(worker):
            if p.role == role:
                return ProcessRef(name=p.name, role=p.role, worker_id=worker, pid=p.pid, start_ticks=p.start_ticks)
        return None

    def _parts(self, worker: str) -> list[ProcessInfo]:
        """Return the processes that a server's active engine consists of; a guard that watches them is none of it."""
        ours = [p for w, p in self._deployment.processes() if w == worker]
        active = [p for p in ours if p.role == ENGINE and p.state == EngineState.ACTIVE]
        members = [p for p in ours if active and p.engine == active[0].name]
        return members or active

    async def judged(self, records: Sequence[RequestRecord], folder: Path) -> list[bool | None]:  # noqa: ARG002
        """Return for each record whether its answer is right, None where nobody can tell.

        How that was found out may be written into `folder`, the run's.
        """
        if self.oracle is None:
            return [None] * len(records)
        return await asyncio.to_thread(judge, records, self.oracle)

    def logs(self) -> list[Path]:
        """Return the servers' log files."""
        return sorted((self._folder / "logs").glob("*.log"))

    def events(self, since_ns: int, until_ns: int) -> list[Event]:
        """Return what the deployment's own processes said between two moments, where they say anything."""
        decode = msgspec.json.Decoder(Event).decode
        found: list[Event] = []
        for path in sorted((self._folder / "parts").glob("events-*.jsonl")):
            with path.open("rb") as lines:
                found += [decode(line) for line in lines if line.endswith(b"\n")]
        return [event for event in found if since_ns <= event.t_ns <= until_ns]


class Bench:
    """Keeps at most one pair. Use `pair`, and `close` in any case."""

    def __init__(self, maker: Maker, folder: Path, progress: Callable[[str], None]) -> None:
        self.maker = maker
        self._folder = folder
        self._progress = progress
        self._wanted: tuple[PairTerms, Size] | None = None
        self._pair: Pair | None = None
        self._deployment: Deployment | None = None
        self._made = 0
        self._faults: Path | None = None

    async def pair(self, terms: PairTerms, size: Size) -> Pair:
        """Return a pair with these terms: the one that stands, or a new one. Raises PdproofError, TimeoutError."""
        if self._pair is not None and self._wanted == (terms, size):
            with contextlib.suppress(TimeoutError):  # if the case before has left it dead, a new one is made
                await self._pair.until_registered()
                return self._pair
        await self.spoil()
        self._made += 1
        folder = self._folder / f"pair-{self._made}"
        (folder / "parts").mkdir(parents=True)
        (folder / "logs").mkdir()
        self._faults = Path(tempfile.mkdtemp(prefix="pdproof-faults-"))
        self._progress(f"bringing up a pair of {self.maker.name}: {_told(terms)}")
        self._deployment = self.maker.deployment(terms, size, folder, self._faults)
        with _environment(self.maker.environment(self._faults)):
            said = await self._deployment.start(self._progress)
        longest = size.input_tokens + size.output_tokens
        spare = (pool_tokens(terms.pool, size) - longest) // (2 * max(1, terms.decode_slots))
        blocker_tokens = min(BLOCKER_TOKENS_MAX, spare)
        self._pair = self.maker.pair(self._deployment, said, folder, self._faults, blocker_tokens)
        self._wanted = (terms, size)
        await self._pair.until_registered()
        return self._pair

    async def spoil(self) -> None:
        """End the pair that stands, so that the next case gets a new one."""
        self._pair, self._wanted = None, None
        if self._deployment is not None:
            deployment, self._deployment = self._deployment, None
            await asyncio.shield(deployment.stop())
        if self._faults is not None:
            shutil.rmtree(self._faults, ignore_errors=True)
            self._faults = None

    async def close(self) -> None:
        """End what stands."""
        await self.spoil()


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    """Have children started meanwhile find these variables."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _told(terms: PairTerms) -> str:
    defaults = msgspec.structs.asdict(PairTerms())
    other = {name: value for name, value in msgspec.structs.asdict(terms).items() if value != defaults[name]}
    return ", ".join(f"{name} {value}" for name, value in other.items()) or "usual terms"

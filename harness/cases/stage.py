"""What a drive may do to its pair of servers. Everything that is done here is written down.

A drive says what is to happen and waits for events; it draws no conclusion. What it cannot do raises `Hindered`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp

from faults.fault import Fault, FaultMissed, ProcessRef
from faults.kill import Kill
from faults.nixl.channel import Desk
from faults.nixl.fault import NixlFault
from faults.nixl.orders import Action, Direction, Kind, Order, What
from faults.stop import Stop
from harness.cases.bench import Pair
from harness.cases.case import Hindered
from harness.cases.client import Client, Meddler, Params, Reply
from harness.cases.metrics import RUNNING, USAGE, summed
from harness.cases.steps import Line, Look, Mark, StepLog
from harness.cases.terms import PairTerms, Size, spare_share
from harness.run_folder import RunWriter
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S, s_to_ns
from reference_impl.rules.events import EventKind, Scalar
from workloads.rows import PromptSpec

T = TypeVar("T")
POKE_TOKENS: Final = 8
TICK_S: Final = 0.02
LOOK_S: Final = 0.25
FOLLOW_S: Final = 0.1
METRICS_LIMIT_S: Final = 5.0
REQUEST_LIMIT_S: Final = 90.0
FINALE_SPARE_S: Final = 5.0
RETURN_LIMIT_S: Final = 180.0
"""How long a server that was killed may take to serve again."""
LINE_CHARS_MAX: Final = 500
_KEEP: Final[Params] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""What a router asks of the prefill side."""


class Stage:
    """One case's hold on its pair. `p` and `d` are the workers' ids."""

    def __init__(
        self,
        pair: Pair,
        writer: RunWriter,
        steps: StepLog,
        client: Client,
        *,
        terms: PairTerms,
        size: Size,
        seed: int,
        settle_s: float,
    ) -> None:
        self.terms = terms
        """As the case declares them."""
        self.size = size
        self.pair = pair
        self.p, self.d = pair.prefill, pair.decode
        self._settle_s = settle_s
        self.rate_per_s = 0.0
        """Tokens a second of one undisturbed answer, as the calibration found."""
        self._writer = writer
        self._steps = steps
        self._client = client
        self._seed = seed
        self._numbers = itertools.count()
        self._faults = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stops: list[Stop] = []
        self._desk = Desk(pair.faults)
        self._orders = itertools.count(1)
        self._base: dict[str, float] = {}
        self._dead: dict[str, str] = {}
        self._late_ns = 0
        self._driving = False
        self.strikes = 0
        """How many orders of the drive have been carried out."""
        self.deaf = False
        """Whether the hop between client and servers keeps to itself that a client has gone: a twin's doing."""

    # -- requests ---------------------------------------------------------------------------------------------------

    @property
    def meddler(self) -> Meddler:
        """The hop between client and servers that a twin breaks."""
        return self._client.meddler

    def prompt(self, tokens: int | None = None) -> PromptSpec:
        """Return a prompt that nobody has sent yet; as long as the size says, if nothing else is asked."""
        return PromptSpec(seed=self._seed, index=next(self._numbers), input_tokens=tokens or self.size.input_tokens)

    def next_turn(self, before: Reply, more_tokens: int) -> PromptSpec:
        """Return the prompt of the turn after `before`."""
        tokens = before.prompt.input_tokens + len(before.output_ids) + more_tokens
        return PromptSpec(seed=self._seed, index=next(self._numbers), input_tokens=tokens,
                          after=before.call.request_id, turn=before.prompt.turn + 1)  # fmt: skip

    async def prefilled(
        self, label: str, prompt: PromptSpec | None = None, *, turn: Params | None = None, limit_s: float | None = None
    ) -> Reply:
        """Send the first leg of a request, as a router does; `turn` is the hand-off of the turn before."""
        params = _KEEP | (turn or {}) | {"do_remote_decode": True}
        return await self._ask(label, self.p, "prefill", prompt or self.prompt(), 1, params=params,
                               limit_s=limit_s or REQUEST_LIMIT_S)  # fmt: skip

    async def prefilled_well(self, label: str, prompt: PromptSpec | None = None) -> Reply:
        """As `prefilled`. Raises Hindered if no hand-off came back."""
        reply = await self.prefilled(label, prompt)
        if not reply.ok or not reply.hand_off:
            raise Hindered(f"{label}: the prefill gave no hand-off: {reply.call.error or reply.hand_off}")
        return reply

    async def decoded(
        self, label: str, leg: Reply, *, hand_off: Params | None = None, tokens: int | None = None,
        stream: bool = True, limit_s: float | None = None, more: Params | None = None,
    ) -> Reply:  # fmt: skip
        """Send the second leg of a request: the same prompt, with its hand-off or the one given."""
        params = leg.hand_off if hand_off is None else hand_off
        return await self._ask(label, self.d, "decode", leg.prompt, tokens or self.size.output_tokens, params=params,
                               stream=stream, limit_s=limit_s or REQUEST_LIMIT_S, more=more)  # fmt: skip

    async def request(self, label: str, prompt: PromptSpec | None = None, tokens: int | None = None) -> Reply:
        """Send a whole request, in two legs. The reply is the second's, or the first's if it failed."""
        leg = await self.prefilled(label, prompt)
        return await self.decoded(label, leg, tokens=tokens) if leg.ok and leg.hand_off else leg

    async def plain(
        self, label: str, worker: str, prompt: PromptSpec, tokens: int, *, stream: bool = True,
        limit_s: float | None = None, more: Params | None = None,
    ) -> Reply:  # fmt: skip
        """Ask one server alone: no KV is to move."""
        return await self._ask(label, worker, "plain", prompt, tokens, stream=stream,
                               limit_s=limit_s or REQUEST_LIMIT_S, more=more)  # fmt: skip

    async def poke(self, worker: str, limit_s: float = 20.0) -> bool:
        """Ask a server for a token of its own, so that its gauges are new; return whether it gave one."""
        reply = await self._ask("poke", worker, "poke", self.prompt(POKE_TOKENS), 1, limit_s=limit_s)
        return reply.ok

    async def _ask(
        self, label: str, worker: str, leg: str, prompt: PromptSpec, tokens: int, **more: Any
    ) -> Reply:  # fmt: skip
        request_id = f"{label}-{next(self._numbers)}-{leg}"
        return await self._client.ask(request_id, label, worker, self.pair.url_of(worker), leg, prompt, tokens, **more)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Let something run beside what the drive does; it is cancelled when the drive ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    async def gone(self, *tasks: asyncio.Task[Reply]) -> None:
        """Have the clients of requests go away."""
        if self.deaf:
            return
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def slots_taken(self, *, to_the_end: bool = True) -> AsyncIterator[None]:
        """Keep the decode server's slots busy with long answers, so that what comes now waits in its queue.

        `to_the_end`: nothing is to end these answers meanwhile, such as the server's death.
        """
        tokens = self.pair.blocker_tokens
        work = [
            self.start(self.plain("blocker", self.d, self.prompt(64), tokens, limit_s=900))
            for _ in range(self.terms.decode_slots)
        ]
        try:
            if not await self.until(lambda v: v.get(RUNNING, 0) >= len(work), self.d, 30):
                raise Hindered(f"the decode server does not run {len(work)} requests at once")
            self.mark("slots-taken")
            yield
            if to_the_end and any(task.done() for task in work):
                raise Hindered("a request that was to keep a slot busy ended before its time")
        finally:
            self.mark("slots-freed")
            await self.gone(*work)

    # -- time and looks ---------------------------------------------------------------------------------------------

    def mark(self, name: str, **detail: Scalar) -> int:
        """Name this moment, and return it."""
        t_ns = now_ns()
        self._steps.add(Mark(t_ns=t_ns, name=name, detail=detail))
        return t_ns

    async def pass_time(self, seconds: float) -> None:
        """Let time pass that a case is about: a lease's, a queue's."""
        until_ns = now_ns() + s_to_ns(seconds)
        while (left_ns := until_ns - now_ns()) > 0:
            await asyncio.sleep(min(0.25, left_ns / NS_PER_S))

    async def look(self, name: str, worker: str, *, poke: bool = True) -> dict[str, float]:
        """Read a server's metrics and write them down under a name; poke it first, unless told not to."""
        if poke:
            await self.poke(worker)
        values = await self.metrics(worker)
        self._steps.add(Look(t_ns=now_ns(), name=name, worker=worker, poked=poke, values=values))
        return values

    async def metrics(self, worker: str) -> dict[str, float]:
        """Return a server's metrics by name, labels summed up; {} if it gives none."""
        url = self.pair.metrics_url(worker)
        try:
            async with self._client.session.get(
                url, headers=self.pair.headers(), timeout=aiohttp.ClientTimeout(METRICS_LIMIT_S)
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return {}
        return summed(text)

    async def until(self, holds: Callable[[dict[str, float]], bool], worker: str, limit_s: float) -> bool:
        """Wait until a server's metrics are as wanted, within a limit. Only for gauges of a server that is busy."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not holds(await self.metrics(worker)):
                    await asyncio.sleep(LOOK_S / 2)
                return True
        return False

    async def until_free(self, name: str, worker: str, limit_s: float, *, poke: bool = True) -> bool:
        """Look at a server under this name until its blocks are as free as when the case began, within a limit."""
        limit = self._base.get(worker, 0.0) + spare_share(self.terms.pool, self.size)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while True:
                    values = await self.look(name, worker, poke=poke)
                    if USAGE in values and values[USAGE] <= limit:
                        return True
                    await asyncio.sleep(LOOK_S)
        return False

    async def rest(self) -> None:
        """Wait until what came before is no longer held: a calibration's turn is kept for its time to live."""
        for worker in (self.p, self.d):
            await self.until_free("rest", worker, self._settle_s + FINALE_SPARE_S)

    async def begin(self) -> None:
        """Write down how things stand before the drive."""
        self._driving = True
        for worker in (self.p, self.d):
            self._base[worker] = (await self.look("baseline", worker)).get(USAGE, 0.0)

    async def held(self, name: str, worker: str) -> float:
        """Look at a server, and return what it holds more than when the case began."""
        values = await self.look(name, worker)
        return values.get(USAGE, 0.0) - self._base.get(worker, 0.0)

    # -- faults -----------------------------------------------------------------------------------------------------

    async def strike(self, fault: Fault, worker: str, **detail: Scalar) -> None:
        """Cause a fault and prove it. Raises Hindered if it cannot be caused, or cannot be shown to have happened."""
        fault_id = f"{fault.name}-{next(self._faults)}"
        if (hindered := fault.available()) is not None:
            raise Hindered(hindered)
        try:
            moment = await fault.inject()
        except FaultMissed as error:
            raise Hindered(str(error)) from error
        events = self._writer.events
        events.say_at(moment, EventKind.FAULT_INJECTED, fault_id, worker_id=worker, fault=fault.name, **detail)
        self._steps.add(Mark(t_ns=moment, name=fault.name, detail={"worker": worker, **detail}))
        proof = await fault.prove()
        kind = EventKind.FAULT_PROVED if proof.holds else EventKind.FAULT_UNPROVED
        events.say(kind, fault_id, worker_id=worker, evidence=proof.shown_by, reason=proof.shown_by)
        if not proof.holds:
            raise Hindered(f"{fault_id}: {proof.shown_by}")

    async def kill(self, worker: str, *roles: str) -> None:
        """SIGKILL a server's process: the first role of these that it has, or its engine."""
        victim = self._process(worker, roles)
        self._dead[worker] = self.pair.engine_of(worker)
        await self.strike(Kill(victim), worker, process=victim.role, pid=victim.pid)

    async def stop(self, worker: str, *roles: str) -> None:
        """Have a server stand still: its processes of these roles, or its engine."""
        for victim in [self._process(worker, (role,)) for role in self.pair.parts_of(worker, roles)]:
            fault = Stop(victim)
            self._stops.append(fault)
            await self.strike(fault, worker, process=victim.role, pid=victim.pid)

    async def go_on(self) -> None:
        """Let everything that stands still go on."""
        while self._stops:
            fault = self._stops.pop()
            await fault.heal()
            proof = await fault.prove_healed()
            self.mark("goes-on", pid=fault.target.pid, evidence=proof.shown_by)

    async def order(  # each says one thing of what is to go wrong
        self, worker: str, action: Action, *, what: What = What.NOTIFICATION, kind: Kind = Kind.ANY,
        direction: Direction = Direction.RECEIVED, request: str = "", skip: int = 0, count: int = 0,
        seconds: float = 0.0, within_s: float = 30.0, announced: bool = True,
    ) -> NixlFault:  # fmt: skip
        """Have something go wrong in a server's NIXL agent from now on; a twin does not announce it.

        Returns the fault; `proved` waits until it has happened, and `lifted` takes it back. Raises Hindered.
        """
        # Reports of earlier cases stay in the pair's folder: an order's id must never have been used before.
        order = Order(
            id=f"{self._writer.path.name}-{next(self._orders)}",
            action=action,
            what=what,
            kind=kind,
            direction=direction,
            request=request,
            engine=f"{worker}-",
            skip=skip,
            count=count,
            seconds=seconds,
        )
        fault = NixlFault(self._desk, order, within_s=within_s)
        try:
            if (hindered := fault.available()) is not None:
                raise Hindered(hindered)
            moment = await fault.inject()
        except FaultMissed as error:
            raise Hindered(str(error)) from error
        if announced:
            detail: dict[str, Scalar] = {"action": action, "what": what, "message": kind, "request": request}
            self._writer.events.say_at(moment, EventKind.FAULT_INJECTED, order.id, worker_id=worker, fault=fault.name,
                                       **detail)  # fmt: skip
            self._steps.add(Mark(t_ns=moment, name="order", detail={"worker": worker, **detail}))
        return fault

    async def proved(self, fault: NixlFault, worker: str) -> None:
        """Wait until an order has been carried out as often as it says, once at least. Raises Hindered."""
        proof = await fault.prove()
        kind = EventKind.FAULT_PROVED if proof.holds else EventKind.FAULT_UNPROVED
        self._writer.events.say(kind, fault.order.id, worker_id=worker, evidence=proof.shown_by, reason=proof.shown_by)
        self.strikes += proof.holds
        self.mark("struck" if proof.holds else "not-struck", worker=worker, evidence=proof.shown_by)
        if not proof.holds:
            raise Hindered(proof.shown_by)

    async def lifted(self, fault: NixlFault) -> None:
        """Take an order back."""
        await fault.heal()
        self.mark("lifted", evidence=(await fault.prove_healed()).shown_by)

    def _process(self, worker: str, roles: tuple[str, ...]) -> ProcessRef:
        parts = self.pair.parts_of(worker, roles)
        found = self.pair.process_of(worker, parts[0]) if parts else None
        if found is None:
            raise Hindered(f"{worker} has no process {' or '.join(roles) or 'engine'}")
        return found

    async def returned(self, worker: str) -> None:
        """Wait until a server serves; if it was killed, in another life. Raises Hindered in the end."""
        try:
            async with asyncio.timeout(RETURN_LIMIT_S):
                while not (
                    await self.pair.serves(worker, after=self._dead.get(worker, "")) and await self.poke(worker)
                ):
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise Hindered(f"{worker} did not serve again within {RETURN_LIMIT_S:g} s") from error
        self.mark("returned", worker=worker)

    async def alive(self, worker: str) -> bool:
        """Whether a server answers a poke."""
        return await self.poke(worker, limit_s=30.0)

    async def finale(self) -> None:
        """After the drive: let everything go on, wait until nothing is held, and send one normal request."""
        self._driving = False
        await self.go_on()
        self._desk.remove(*(order.id for order in self._desk.orders()))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in (self.p, self.d):
            if not (await self.pair.serves(worker, after=self._dead.get(worker, "")) and await self.alive(worker)):
                with contextlib.suppress(Hindered):
                    await self.returned(worker)
        for worker in (self.p, self.d):
            await self.until_free("end", worker, self._settle_s + FINALE_SPARE_S)
        meddler, self._client.meddler = self._client.meddler, Meddler()
        await self.request("after")
        self._client.meddler = meddler
        for worker in (self.p, self.d):
            await self.look("final", worker)
        self.mark("end")

    # -- behind the drive's back ------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def observed(self) -> AsyncIterator[None]:
        """Follow logs, sample metrics and watch this client's own lateness while the drive goes on."""
        watching = [asyncio.create_task(work) for work in (self._follow(), self._sample(), self._tick())]
        try:
            yield
        finally:
            await self.go_on()
            for task in (*self._tasks, *watching):
                task.cancel()
            await asyncio.gather(*self._tasks, *watching, return_exceptions=True)
            self.mark("machine", late_ms=self._late_ns / 1e6, rate_per_s=self.rate_per_s)

    async def _tick(self) -> None:
        """Find out how long this loop ever stood still: then the servers may have been starved as well."""
        while True:
            due_ns = now_ns() + s_to_ns(TICK_S)
            await asyncio.sleep(TICK_S)
            if self._driving:
                self._late_ns = max(self._late_ns, now_ns() - due_ns)

    async def _sample(self) -> None:
        while True:
            t_ns = now_ns()
            for worker in (self.p, self.d):
                for name, value in (await self.metrics(worker)).items():
                    self._writer.metric(t_ns, worker, name, value)
            await asyncio.sleep(2 * LOOK_S)

    async def _follow(self) -> None:
        """Write down what the servers log, from now on."""
        places = {path: path.stat().st_size for path in self.pair.logs()}
        while True:
            await asyncio.sleep(FOLLOW_S)
            for path in self.pair.logs():
                places[path] = self._read(path, places.get(path, 0))

    def _read(self, path: Path, at: int) -> int:
        with path.open("rb") as log:
            log.seek(at)
            data = log.read()
        whole, newline, _ = data.rpartition(b"\n")
        worker = path.name.partition("-")[0]
        t_ns = now_ns()
        for line in whole.splitlines() if newline else []:
            text = line.decode("utf-8", "replace")[:LINE_CHARS_MAX]
            if text.strip() and "GET /metrics" not in text:
                self._steps.add(Line(t_ns=t_ns, worker=worker, file=path.name, text=text))
        return at + len(whole) + len(newline)

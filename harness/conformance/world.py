"""A world: engines of one subject on clocks and a network turned by hand, their clients, and a watch over all of it.

Nothing happens between two calls of `World.step`: what is on its way arrives, then each living engine does one turn of
its loop, then the watch looks. All chance comes from one seed.
"""

from __future__ import annotations

import itertools
import json
import sysconfig
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from faults.nixl.dialects import Meaning
from faults.nixl.orders import Kind
from harness.conformance.checked import check_asking, check_later, check_reading, check_sending, checked
from harness.conformance.clocks import Skew
from harness.conformance.network import ASK_LIMIT_NS, Network, NetworkFlight
from harness.conformance.subject import (
    Ending,
    Engine,
    EngineSpec,
    How,
    Misuse,
    Params,
    ReadState,
    Refused,
    Request,
    Role,
    Subject,
    Terms,
)
from harness.conformance.timeline import ENTRIES_MAX, Entry
from harness.conformance.watch import Breach, Watch
from reference_impl.rules.clock import NS_PER_S, s_to_ns
from reference_impl.rules.events import Scalar
from workloads.chance import generator

STEP_NS: Final = NS_PER_S // 20
"""No engine goes longer without a turn."""
PORT: Final = 7_000
EPOCH_NS: Final = 10 * 86_400 * NS_PER_S
"""Where the true time begins: no clock ever shows less than nothing."""
DRAIN_SPARE_S: Final = 60.0
ERROR_CHARS_MAX: Final = 2_000
_HERE: Final = str(Path(__file__).parent) + "/"
_STANDARD: Final = sysconfig.get_path("stdlib") + "/"
_NUMPY: Final = str(Path(np.__file__).parent) + "/"

T = TypeVar("T")


class EngineDied(Exception):
    """A method of an engine raised; the watch has it as a breach of R1."""


@dataclass(eq=False)
class Leg:
    """One request at one engine, until its end."""

    request: Request
    life: Life
    source: Leg | None
    """Whose hand-off it was given."""
    sent_ns: int
    end: Ending | None = None
    end_ns: int = 0

    @property
    def name(self) -> str:
        """Its request's id."""
        return self.request.request_id

    @property
    def hand_off(self) -> Params | None:
        """What its end handed over, as router and client pass it on: JSON."""
        handed = self.end.hand_off if self.end is not None else None
        return None if handed is None else json.loads(json.dumps(handed))

    @property
    def right(self) -> bool:
        """Whether it was answered, and rightly as far as anybody can tell."""
        return self.end is not None and self.end.how is How.ANSWERED and self.end.right is not False


@dataclass(eq=False)
class Life:
    """One life of an engine: what a world knows of it. It is also the engine's `Host`."""

    world: World
    spec: EngineSpec
    skew: Skew
    engine: Engine = field(init=False)
    alive: bool = True
    frozen: bool = False
    legs: dict[str, Leg] = field(default_factory=dict)
    """Those that have not ended, by request id."""
    thawed_ns: int = 0

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.spec.name

    @property
    def runs(self) -> bool:
        """Whether it is there, and does something."""
        return self.alive and not self.frozen

    # What the engine sees (`subject.Host`).

    def now_ns(self) -> int:
        """What its clock shows."""
        return self.skew.shows(self.world.network.now_ns)

    def send(self, receiver: str, message: bytes, *, rank: int = 0, to_rank: int = 0) -> bool:
        """Send a message."""
        check_sending(receiver, message, rank, to_rank)
        return self.alive and self.world.sent(self, receiver, message, rank, to_rank)

    def read(self, holder: str, land: Callable[[], None]) -> NetworkFlight:
        """Start a read."""
        check_reading(holder, land)
        return self.world.reading(self, holder, land)

    def ask(self, port: int, question: bytes, answer: Callable[[bytes | None, int, int], None]) -> None:
        """Ask whoever listens at a port."""
        check_asking(port, question, answer)
        self.world.asked(self, port, question, answer)

    def later(self, delay_ns: int, act: Callable[[], None]) -> None:
        """Have something happen, unless it is dead by then."""
        check_later(delay_ns, act)
        self.world.network.after(delay_ns, partial(self.world.call, self, act))


class World:
    """Everything. `watch.breaches` holds what was seen broken; a search stops at the first."""

    def __init__(
        self, subject: Subject, seed: int = 0, terms: Terms | None = None, watch: Callable[[World], Watch] = Watch
    ) -> None:
        self.subject = checked(subject)
        self.chance = generator(seed, "world")
        self.seed = seed
        self.terms = terms or Terms()
        self.network = Network()
        self.network.now_ns = EPOCH_NS
        self.timeline: deque[Entry] = deque(maxlen=ENTRIES_MAX)
        self.watch = watch(self)
        self.lives: dict[str, Life] = {}
        """All that ever were, by name."""
        self.places: dict[str, Life] = {}
        """The last life of each place."""
        self.legs: list[Leg] = []
        """All that ever were."""
        self._skews: dict[str, Skew] = {}
        self._names = itertools.count(1)
        self._endless: list[NetworkFlight] = []

    # Engines.

    def start(
        self, place: str, role: Role, *, skew: Skew | None = None, terms: Terms | None = None, **more: Any
    ) -> Life:
        """Start an engine at a place, the first there or the next. Raises EngineDied if it does not come up."""
        before = self.places.get(place)
        if before is not None and before.alive:
            raise ValueError(f"{before.name} still lives at {place}")
        number = sum(life.spec.place == place for life in self.lives.values()) + 1
        if skew is not None:
            self._skews[place] = skew
        if before is not None:
            was = before.spec
            more = {"blocks": was.blocks, "slots": was.slots, "ranks": was.ranks, **more}
            terms = terms or was.terms
        port = before.spec.port if before is not None else PORT + 10 * len(self.places)
        spec = EngineSpec(
            name=f"{place}.{number}", place=place, role=role, port=port, terms=terms or self.terms, **more
        )
        life = Life(self, spec, self._skews.get(place, Skew()))
        self.note(life.name, "starts", clock_offset_s=life.skew.offset_s, drift_ppm=life.skew.drift_ppm)
        try:
            life.engine = self.subject.engine(spec, life)
        except Exception as error:
            if _ours(error):
                raise
            self.watch.breach("R1", f"{life.name} does not come up: {_words(error)}")
            raise EngineDied(life.name) from error
        self.lives[life.name] = self.places[place] = life
        return life

    def crash(self, life: Life) -> None:
        """Kill an engine: nothing of it is sent, received, read or answered any more."""
        if not life.alive:
            return
        self.note("world", "crash", life.name)
        self._bury(life)

    def freeze(self, life: Life) -> None:
        """Stop an engine, as SIGSTOP does: what peers read in its memory goes on."""
        self.note("world", "freeze", life.name)
        life.frozen = True

    def thaw(self, life: Life) -> None:
        """Let it go on."""
        self.note("world", "thaw", life.name)
        life.frozen, life.thawed_ns = False, self.network.now_ns
        self.watch.thawed(life)

    def _bury(self, life: Life) -> None:
        life.alive = False
        self.watch.died(life)
        for leg in list(life.legs.values()):
            self._over(leg, Ending(request_id=leg.name, how=How.FAILED, error="its engine died"))
        self._close(life)

    def _close(self, life: Life) -> None:
        try:
            life.engine.close()
        except Exception as error:
            if _ours(error):
                raise
            self.watch.breach("R1", f"{life.name} cannot be closed: {_words(error)}")

    def living(self) -> list[Life]:
        """Return the engines that live, frozen ones as well."""
        return [life for life in self.places.values() if life.alive]

    def call(self, life: Life, act: Callable[[], T], *, may_refuse: bool = False) -> T | None:
        """Have an engine do something at its own time. What it raises ends it, and is a breach of R1."""
        if not life.alive:
            return None
        try:
            return act()
        except Exception as error:
            if (may_refuse and isinstance(error, Refused)) or _ours(error):
                raise
            self.watch.breach("R1", f"{life.name} ended: {_words(error)}")
            self._bury(life)
            return None

    # Clients.

    def submit(
        self, life: Life, prompt: list[int], *, params: Params | None = None, source: Leg | None = None,
        max_tokens: int = 1, name: str = "",
    ) -> Leg:  # fmt: skip
        """Send a request to an engine. Its end is `Leg.end`, some steps later. Raises Refused, EngineDied."""
        request_id = name or f"r{next(self._names)}"
        external_id = source.request.external_id if source is not None else request_id
        request = Request(
            request_id=request_id, prompt=prompt, max_tokens=max_tokens, params=params, external_id=external_id
        )  # fmt: skip
        leg = Leg(request, life, source, self.network.now_ns)
        self.note("client", "request", request_id, engine=life.name, tokens=len(prompt))
        if not life.runs:
            raise EngineDied(life.name)
        life.legs[request_id] = leg
        self.legs.append(leg)
        self.watch.submitted(leg)
        try:
            self.call(life, partial(life.engine.submit, request), may_refuse=True)
        except Refused as refusal:
            del life.legs[request_id]
            self.legs.remove(leg)
            self.note(life.name, "refused", request_id, why=_text(refusal))
            raise
        if not life.alive:
            raise EngineDied(life.name)
        return leg

    def abort(self, leg: Leg) -> None:
        """Its client goes away."""
        self.note("client", "gone", leg.name)
        self.watch.aborted(leg)
        self.call(leg.life, partial(leg.life.engine.abort, leg.name))

    def renew(self, leg: Leg) -> Params | None:
        """A client keeps a finished turn alive; return the hand-off to use from then on."""
        given = leg.hand_off
        if given is None:
            return None
        self.note("client", "renews", leg.name)
        found = self.call(leg.life, partial(leg.life.engine.renew, given))
        if found is not None:
            self.watch.renewed(leg)
        return found

    def _over(self, leg: Leg, end: Ending) -> None:
        leg.life.legs.pop(leg.name, None)
        leg.end, leg.end_ns = end, self.network.now_ns
        self.note(leg.life.name, end.how, leg.name, right=end.right, loaded=end.loaded,
                  handed_over=end.hand_off is not None, error=end.error[:200])  # fmt: skip
        self.watch.ended(leg, end)

    # What engines do.

    def sent(self, life: Life, receiver: str, data: bytes, rank: int = 0, to_rank: int = 0) -> bool:
        """Take a message on its way. False if its receiver is gone."""
        there = self.lives.get(receiver)
        message = self.network.message(life.name, receiver, data)
        meaning = self.meaning(data)
        if there is None or not there.alive:
            self.note(life.name, "unsent", receiver, says=_said(meaning))
            self.watch.unsent(life, meaning)
            return False
        deliveries = self.network.link(message)
        self.note(life.name, "sends", receiver, says=_said(meaning), arrives=len(deliveries))
        self.watch.sent(life, there, meaning, data, [delay for delay, _ in deliveries], message.number)
        for delay_ns, arrived in deliveries:
            number = message.number if arrived == data else 0
            self.network.after(delay_ns, partial(self._arrive, life, there, arrived, rank, to_rank, number))
        return True

    def inject(self, sender: Life, receiver: Life, data: bytes, number: int = 0) -> None:
        """Have bytes arrive that nobody sent; or, with its `number`, a message once more."""
        self.note("world", "injects", receiver.name, bytes=len(data), says=_said(self.meaning(data)))
        self._arrive(sender, receiver, data, number=number)

    def _arrive(
        self, sender: Life, receiver: Life, data: bytes, rank: int = 0, to_rank: int = 0, number: int = 0
    ) -> None:
        """`number`: of the message that these bytes are, unharmed; 0 if they are none that was sent."""
        if receiver.alive:
            self.watch.arrived(receiver, sender, self.meaning(data), data, number)
            self.call(receiver, partial(receiver.engine.deliver, sender.name, data, rank, to_rank))

    def reading(self, life: Life, holder: str, land: Callable[[], None]) -> NetworkFlight:
        """Take a read on its way."""
        flight = NetworkFlight()
        plan = self.network.reads(life.name, holder)
        there = self.lives.get(holder)
        self.note(life.name, "reads", holder, takes_s=plan.takes_ns / NS_PER_S, fails=plan.fails)
        self.watch.reading(life)

        def landed() -> None:
            if life.alive and there is not None and there.alive and flight.state is ReadState.RUNNING:
                self.call(life, land)

        def over() -> None:
            gone = there is None or not there.alive
            flight.end(ReadState.FAILED if plan.fails or gone else ReadState.DONE)
            if flight.state is ReadState.DONE:
                self.watch.moved(life)

        if not plan.fails:
            self.network.after(round(plan.takes_ns * plan.lands), landed)
        if plan.never_ends:
            self._endless.append(flight)
        else:
            self.network.after(plan.takes_ns, over)
        return flight

    def asked(self, life: Life, port: int, question: bytes, answer: Callable[[bytes | None, int, int], None]) -> None:
        """Take a question on its way to whoever listens at a port, and the answer back."""
        sent_ns = life.now_ns()
        times = self.network.asks(life.name, port)
        told = False

        def back(reply: bytes | None) -> None:
            nonlocal told
            if not told:
                told = True
                self.call(life, lambda: answer(reply, sent_ns, life.now_ns()))

        def there() -> None:
            peer = next((p for p in self.places.values() if p.spec.port == port and p.alive), None)
            if peer is None or peer.frozen or times is None:
                return
            reply = self.call(peer, partial(peer.engine.answer, question))
            if reply is not None:
                self.network.after(times[1], partial(back, reply))

        self.note(life.name, "asks", f"port {port}")
        self.watch.asking(life)
        if times is not None:
            self.network.after(times[0], there)
        self.network.after(ASK_LIMIT_NS, partial(back, None))

    # Time.

    def step(self, dt_ns: int = STEP_NS) -> None:
        """Let time pass, and each engine do one turn."""
        self.network.deliver(self.network.now_ns + dt_ns)
        for life in self.living():
            if life.runs:
                self.call(life, life.engine.step)
            if life.runs:
                for end in self.call(life, life.engine.ended) or []:
                    leg = life.legs.get(end.request_id)
                    if leg is not None:
                        self._over(leg, end)
        self.watch.step()

    def pass_time(self, seconds: float, step_ns: int = STEP_NS) -> None:
        """Let time pass in steps."""
        end_ns = self.network.now_ns + s_to_ns(seconds)
        while self.network.now_ns < end_ns:
            self.step(min(step_ns, end_ns - self.network.now_ns))

    def until(self, holds: Callable[[], bool], limit_s: float, step_ns: int = STEP_NS) -> bool:
        """Let time pass until something holds; False if it does not within the limit."""
        end_ns = self.network.now_ns + s_to_ns(limit_s)
        while not holds():
            if self.network.now_ns >= end_ns:
                return False
            self.step(step_ns)
        return True

    def over(self, *legs: Leg, limit_s: float = 30.0) -> bool:
        """Let time pass until requests have ended; False if one has not within the limit."""
        return self.until(lambda: all(leg.end is not None for leg in legs), limit_s)

    def drain(self, longest_s: float | None = None, step_ns: int = STEP_NS) -> None:
        """Heal the network and let everything come to rest; what does not is a breach (K1)."""
        from harness.conformance.network import at_once, there_and_back, well

        self.network.link, self.network.reads, self.network.asks = at_once, well, there_and_back
        for flight in self._endless:
            flight.end(ReadState.FAILED)
        for life in self.living():
            if life.frozen:
                self.thaw(life)
        terms = [life.spec.terms for life in self.lives.values()]
        held_s = max(max(t.lease_s, t.ttl_s if t.two_turn else 0) for t in terms)
        limit_s = DRAIN_SPARE_S + held_s if longest_s is None else longest_s
        self.until(lambda: not any(life.legs or self.held(life) for life in self.living()), limit_s, step_ns)
        self.watch.rest()

    # Looks.

    def held(self, life: Life) -> dict[str, list[int]]:
        """Return who holds which blocks of an engine."""
        return self.call(life, life.engine.holds) or {}

    def metrics(self, life: Life) -> dict[str, float]:
        """Return an engine's counters. Raises EngineDied."""
        counters = self.call(life, life.engine.metrics)
        if counters is None:
            raise EngineDied(life.name)
        return counters

    def meaning(self, data: bytes) -> Meaning:
        """Return what a message says. A subject that cannot tell is a breach of R1."""
        try:
            return self.subject.meaning(data)
        except Exception as error:
            if _ours(error):
                raise
            self.watch.breach("R1", f"the subject cannot say what a message means: {_words(error)}")
            return Meaning(Kind.UNKNOWN)

    @property
    def breaches(self) -> list[Breach]:
        """What was seen broken."""
        return self.watch.breaches

    def note(self, who: str, what: str, subject: str = "", **detail: Scalar) -> None:
        """Write down what happened."""
        self.timeline.append(
            Entry(t_ns=self.network.now_ns - EPOCH_NS, who=who, what=what, subject=subject, detail=detail)
        )

    def close(self) -> None:
        """End every engine."""
        for life in self.living():
            life.alive = False
            self._close(life)


def _said(meaning: Meaning) -> str:
    return f"{meaning.kind}: {','.join(meaning.requests)}" if meaning.requests else str(meaning.kind)


def _ours(error: BaseException) -> bool:
    """Whether what was raised is a mistake of the suite, or of a subject's adapter in it, and not of the connector.

    It is of whoever called last, the standard library and numpy left aside: they raise for others. What stands in for
    the transport, and whoever looks at what a connector returns, raise Misuse.
    """
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    last = next((file for file in reversed(files) if not _library(file)), "")
    return last.startswith(_HERE) and not isinstance(error, Misuse)


def _library(file: str) -> bool:
    installed = "/site-packages/" in file or "/dist-packages/" in file
    return file.startswith(("<frozen ", _NUMPY)) or (file.startswith(_STANDARD) and not installed)


def _text(error: BaseException) -> str:
    """Return an error's text, in characters that can be written down."""
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception:  # a stranger's __str__
        return "(its text cannot be had)"


def _words(error: BaseException) -> str:
    """Return what was raised, and where."""
    frames: Iterable[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(
        f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})" for frame in reversed([*frames])
    )
    return f"{type(error).__name__}: {_text(error)} in {places}"[:ERROR_CHARS_MAX]

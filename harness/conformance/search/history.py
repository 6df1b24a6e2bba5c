"""One generated history: a world made from parameters, actions done to it one after the other, and what came of it."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from faults.nixl.dialects import damaged, garbled
from faults.nixl.orders import Kind
from harness.conformance.clocks import Skew
from harness.conformance.network import HOP_NS, Delivery, Message, ReadPlan
from harness.conformance.search.actions import (
    FAULTS,
    Abort,
    Action,
    Again,
    Arrive,
    Crash,
    Decode,
    Freeze,
    Inject,
    LinkFault,
    Local,
    Messages,
    NextTurn,
    Pass,
    Prompt,
    Questions,
    ReadFault,
    Reads,
    Renew,
    Restart,
    Thaw,
)
from harness.conformance.search.witness import Witness
from harness.conformance.subject import Capability, Params, Policy, Refused, Role, Subject, Terms
from harness.conformance.timeline import Entry
from harness.conformance.trial import FOR_REMOTE, VOCABULARY
from harness.conformance.watch import Breach
from harness.conformance.world import EngineDied, Leg, Life, World
from reference_impl.rules.clock import NS_PER_MS, NS_PER_S
from workloads.chance import generator

LENGTHS: Final = (40, 1, 15, 16, 17, 32, 33, 48, 64, 65, 97, 130)
"""Tokens of a prompt, around the edges of blocks; the first is what most have, longer than a block of any subject."""
CONTEXT_TOKENS_MAX: Final = 900
TOO_LONG: Final = 64
"""An answer that asks for more than an engine can hold."""
OVERLONG_TOKENS: Final = 5_000
PREFILL_STEPS_MAX: Final = 40
TURN_STEPS_MAX: Final = 60
SETTLING_STEP_NS: Final = NS_PER_S // 4
"""When all is over but the waiting, the world goes on in steps no longer than this."""
T = TypeVar("T")
F = TypeVar("F")
_Ms = Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=512)]


class Side(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engines of one side are like."""

    engines: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    lease_ms: _Ms = 1_200
    ttl_ms: _Ms = 20_000
    slots: _Count = 2
    blocks: _Count = 40
    ranks: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    model: str = "world"
    offset_s: float = 0.0
    drift_ppm: Annotated[int, msgspec.Meta(ge=-200, le=200)] = 0


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a world is like."""

    prefill: Side = Side()
    decode: Side = Side()
    two_turn: bool = False
    policy: Policy = Policy.RECOMPUTE
    step_ms: _Ms = 100
    """No engine goes longer without a turn."""


@dataclass(frozen=True)
class Outcome:
    """What came of a history."""

    breaches: list[Breach]
    timeline: list[Entry]
    happened: Counter[str]
    """What was done, what went wrong, and what came of requests."""


Signature = tuple[str, str]
"""A rule, and of what kind its breach is."""


def perform(
    parameters: Parameters, actions: Sequence[Action], subject: Subject, *, known: Collection[Signature] = (),
    wanted: Signature | None = None,
) -> Outcome:  # fmt: skip
    """Do what a history says, and look.

    It ends at rest, or at the first breach of a kind that is not `known`; with `wanted`, at the first of that kind.
    """

    def ends(breach: Breach) -> bool:
        return signature(breach) == wanted if wanted is not None else signature(breach) not in known

    history = _History(parameters, subject, ends)
    world = history.world
    try:
        history.begin()
        for action in actions:
            history.do(action)
            if history.broken:
                break
        else:
            history.settle()
    except EngineDied:
        pass  # the watch has it
    _closed(world) if history.broken else world.close()
    return Outcome(list(world.breaches), list(world.timeline), history.happened + history.witness.seen)


def _closed(world: World) -> None:
    """End a world in which something went wrong: what else goes wrong while it ends is not what was found."""
    kept = list(world.breaches)
    world.close()
    world.breaches[:] = kept


_RAISED: Final = re.compile(r"(\w+): .* in (\w+) \((\S+):\d+\)")


def signature(breach: Breach) -> Signature:
    """Return what tells a breach from others of its rule: its kind, or for R1 what was raised and in which function."""
    raised = _RAISED.search(breach.what) if breach.rule == "R1" else None
    return breach.rule, breach.where or (f"{raised[1]} in {raised[2]}" if raised else "")


@functools.lru_cache(4_096)
def text(number: int, tail: int, tokens: int) -> tuple[int, ...]:
    """Return a prompt: texts of unlike numbers differ in their first token, those of unlike tails in their second half.

    The same in every history, so that right answers are worked out once.
    """
    own = [(17 + number * 131) % VOCABULARY, *_words(number, 0)]
    half = tokens // 2 if tail else tokens
    return (*own[:half], *_words(number, tail)[: tokens - half])


@functools.lru_cache(1_024)
def _words(number: int, tail: int) -> list[int]:
    found: list[int] = generator(number, "history", tail).integers(VOCABULARY, size=max(LENGTHS)).tolist()
    return found


@dataclass
class _Standing(Generic[F]):
    """A fault that is to strike, and how often yet."""

    fault: F
    left: int


class _History:
    def __init__(self, parameters: Parameters, subject: Subject, ends: Callable[[Breach], bool]) -> None:
        self.parameters = parameters
        self._ends = ends
        self._judged = 0
        self._broken = False
        self.happened: Counter[str] = Counter()
        self.world = World(subject, watch=Witness)
        watch = self.world.watch
        assert isinstance(watch, Witness)
        self.witness = watch
        watch.alike = _alike(parameters)
        self.claims = self.world.subject.capabilities
        self.step_ns = parameters.step_ms * NS_PER_MS
        self._texts: list[tuple[int, int]] = []
        self._fresh = 0
        self._messages: list[_Standing[Messages]] = []
        self._reads: list[_Standing[Reads]] = []
        self._questions: list[_Standing[Questions]] = []
        self._renewals: dict[str, Params] = {}
        network = self.world.network
        network.link, network.reads, network.asks = self._link, self._read, self._ask

    @property
    def broken(self) -> bool:
        """Whether a breach was seen that ends it. Each is looked at once: this is asked at every step."""
        breaches = self.world.breaches
        while self._judged < len(breaches):
            self._broken = self._broken or self._ends(breaches[self._judged])
            self._judged += 1
        return self._broken

    def begin(self) -> None:
        """Start the engines. Raises EngineDied."""
        for letter, role, side in (
            ("p", Role.PREFILL, self.parameters.prefill), ("d", Role.DECODE, self.parameters.decode)
        ):  # fmt: skip
            skew = Skew(offset_s=side.offset_s, drift_ppm=side.drift_ppm)
            terms = Terms(
                lease_s=side.lease_ms / 1_000, policy=self.parameters.policy, two_turn=self.parameters.two_turn,
                ttl_s=side.ttl_ms / 1_000,
            )  # fmt: skip
            for number in range(side.engines):
                self.world.start(
                    f"{letter}{number}", role, skew=skew, terms=terms, blocks=side.blocks, slots=side.slots,
                    ranks=side.ranks, model=side.model,
                )  # fmt: skip

    def settle(self) -> None:
        """Heal everything, and wait until all is at rest."""
        shortest_ms = min(self.parameters.prefill.lease_ms, self.parameters.decode.lease_ms)
        step_ns = min(max(self.step_ns, shortest_ms * NS_PER_MS // 12), SETTLING_STEP_NS)
        self.world.drain(step_ns=step_ns)

    def do(self, action: Action) -> None:
        """Do something, if it can be done."""
        done = self._DO[type(action)](self, action)
        name = type(action).__struct_config__.tag
        self.happened[str(name)] += done
        if done and isinstance(action, FAULTS):
            self.witness.quiet = False

    # What clients do.

    def _arrive(self, action: Arrive) -> bool:
        life = self._life(Role.PREFILL, action.engine)
        if life is None:
            return False
        params = dict(FOR_REMOTE)
        if action.readers > 1 and Capability.READERS in self.claims:
            params["remote_readers"] = action.readers
        leg = self._submitted(life, list(self._text(action)), params, name=self._named(action.name))
        if leg is not None and not action.hurried:
            self._until(leg, PREFILL_STEPS_MAX)
        return True

    def _until(self, leg: Leg, steps: int) -> None:
        for _ in range(steps):
            if leg.end is not None or self.broken:
                return
            self.world.step(self.step_ns)

    def _text(self, action: Arrive) -> tuple[int, ...]:
        """Return a prompt, and remember which it is."""
        tokens = LENGTHS[action.size % len(LENGTHS)]
        if action.prompt is Prompt.FRESH or not self._texts:
            self._fresh += 1
            self._texts.append((self._fresh, 0))
        elif action.prompt is Prompt.SHARES:
            number, _ = self._texts[-1]
            self._texts.append((number, len(self._texts)))
        return text(*self._texts[-1], tokens)

    def _named(self, name: str) -> str:
        """Return a name that nobody has; "" as it is: the world gives plain ones."""
        there = {leg.name for leg in self.world.legs}
        found, number = name, len(there)
        while found in there:
            found, number = f"{name}{number}", number + 1
        return found

    def _decode(self, action: Decode) -> bool:
        life = self._life(Role.DECODE, action.engine)
        source = _at([leg for leg in self.world.legs if leg.hand_off and leg.life.spec.role is Role.PREFILL],
                     action.which)  # fmt: skip
        if life is None or source is None:
            return False
        samples = action.samples if Capability.READERS in self.claims else 1
        for _ in range(samples):
            tokens = OVERLONG_TOKENS if action.answer == TOO_LONG else action.answer
            self._submitted(life, source.request.prompt, source.hand_off, source=source, max_tokens=tokens)
        self.happened["samples"] += samples > 1
        return True

    def _next_turn(self, action: NextTurn) -> bool:
        life = self._life(Role.PREFILL, action.engine)
        under_way = [leg for leg in self.world.legs if leg.end is None and leg.source is not None and leg.life.runs]
        if life is not None and not self._turns() and under_way and self.parameters.two_turn:
            self._until(under_way[0], TURN_STEPS_MAX)  # whoever says more has first heard the answer
        turn = _at(self._turns(), action.which)
        if life is None or turn is None or turn.end is None or not life.runs:
            return False
        more = text(0, len(self.world.legs), LENGTHS[action.size % len(LENGTHS)])
        prompt = [*turn.request.prompt, *turn.end.answer, *more]
        if len(prompt) > CONTEXT_TOKENS_MAX:
            return False
        params = {**(self._renewals.get(turn.name) or turn.hand_off or {}), "do_remote_decode": True}
        self._submitted(life, prompt, params, source=turn)
        return True

    def _local(self, action: Local) -> bool:
        life = self._life(Role.DECODE, action.engine)
        if life is None:
            return False
        self._fresh += 1
        tokens = min(action.answer, TOO_LONG - 1)
        self._submitted(life, list(text(self._fresh, 0, LENGTHS[action.size % len(LENGTHS)])), None, max_tokens=tokens)
        return True

    def _submitted(
        self, life: Life, prompt: list[int], params: Params | None, *, source: Leg | None = None, max_tokens: int = 1,
        name: str = "",
    ) -> Leg | None:  # fmt: skip
        try:
            return self.world.submit(life, prompt, params=params, source=source, max_tokens=max_tokens, name=name)
        except Refused:
            self.happened["refused"] += 1
        except EngineDied:
            pass  # the watch has it, if it was the engine's fault
        return None

    def _abort(self, action: Abort) -> bool:
        legs = [leg for leg in self.world.legs if leg.life.runs]
        leg = _at([leg for leg in legs if leg.end is None] or [leg for leg in legs if leg.hand_off], action.which)
        if leg is None:
            return False
        self.happened["aborted hand-offs"] += leg.end is not None
        self.world.abort(leg)
        return True

    def _renew(self, action: Renew) -> bool:
        turn = _at([leg for leg in self._turns() if leg.life.runs], action.which)
        if turn is None or Capability.RENEWAL not in self.claims:
            return False
        found = self.world.renew(turn)
        if found is not None:
            self._renewals[turn.name] = found
        return True

    def _turns(self) -> list[Leg]:
        return [leg for leg in self.world.legs if leg.hand_off and leg.life.spec.role is Role.DECODE]

    # What goes wrong.

    def _pass(self, action: Pass) -> bool:
        left_ns = action.ms * NS_PER_MS
        while left_ns > 0 and not self.broken:
            step_ns = min(self.step_ns, left_ns)
            self.world.step(step_ns)
            left_ns -= step_ns
        return True

    def _crash(self, action: Crash) -> bool:
        life = _at(self.world.living(), action.which)
        if life is not None:
            self.world.crash(life)
        return life is not None

    def _restart(self, action: Restart) -> bool:
        dead = _at([life for life in self.world.places.values() if not life.alive], action.which)
        if dead is not None:
            self.world.start(dead.spec.place, dead.spec.role, model=dead.spec.model)
        return dead is not None

    def _freeze(self, action: Freeze) -> bool:
        life = _at([life for life in self.world.living() if life.runs], action.which)
        if life is not None:
            self.world.freeze(life)
        return life is not None

    def _thaw(self, action: Thaw) -> bool:
        life = _at([life for life in self.world.living() if life.frozen], action.which)
        if life is not None:
            self.world.thaw(life)
        return life is not None

    def _faulty_messages(self, action: Messages) -> bool:
        if action.count:
            self._messages.append(_Standing(action, action.count))
        return action.count > 0

    def _faulty_reads(self, action: Reads) -> bool:
        if action.count:
            self._reads.append(_Standing(action, action.count))
        return action.count > 0

    def _faulty_questions(self, action: Questions) -> bool:
        if action.count:
            self._questions.append(_Standing(action, action.count))
        return action.count > 0

    def _again(self, action: Again) -> bool:
        messages = self.witness.messages
        if action.kind is not Kind.ANY:
            messages = [message for message in messages if message.meaning.kind is action.kind]
        sent = _at(messages, action.which)
        if sent is None:
            return False
        sender, receiver = self.world.lives[sent.sender], self.world.lives[sent.receiver]
        if not receiver.alive:
            return False
        self.world.inject(sender, receiver, sent.data, sent.number)
        return True

    def _inject(self, action: Inject) -> bool:
        living = self.world.living()
        receiver = _at(living, action.engine)
        sender = _at([life for life in living if life is not receiver], 0)
        if receiver is None or sender is None:
            return False
        self.world.inject(sender, receiver, action.data)
        return True

    # The network.

    def _link(self, message: Message) -> list[Delivery]:
        data = message.data
        fault = _struck(self._messages, lambda f: f.kind in (Kind.ANY, self.world.meaning(data).kind))
        if fault is None:
            return [(HOP_NS, data)]
        self.happened[f"messages: {fault.fault}"] += 1
        later_ns = HOP_NS + fault.ms * NS_PER_MS
        match fault.fault:
            case LinkFault.LOSE:
                return []
            case LinkFault.REPEAT:
                return [(HOP_NS, data), (later_ns, data)]
            case LinkFault.DELAY:
                return [(later_ns, data)]
            case LinkFault.REORDER:
                return [(HOP_NS + 2 * self.step_ns, data)]
            case LinkFault.DAMAGE:
                return [(HOP_NS, _damaged(data, fault.place))]

    def _read(self, _reader: str, _holder: str) -> ReadPlan:
        fault = _struck(self._reads)
        if fault is None:
            return ReadPlan()
        self.happened[f"reads: {fault.fault}"] += 1
        lands = 0.0 if fault.early else 1.0
        return ReadPlan(
            takes_ns=HOP_NS + (fault.ms * NS_PER_MS if fault.fault is ReadFault.SLOW else 0), lands=lands,
            fails=fault.fault is ReadFault.FAIL, never_ends=fault.fault is ReadFault.NEVER_END,
        )  # fmt: skip

    def _ask(self, _asker: str, _port: int) -> tuple[int, int] | None:
        fault = _struck(self._questions)
        if fault is None:
            return HOP_NS, HOP_NS
        self.happened["questions: struck"] += 1
        if not fault.there_ms and not fault.back_ms:
            return None
        return HOP_NS + fault.there_ms * NS_PER_MS, HOP_NS + fault.back_ms * NS_PER_MS

    # Looks.

    def _life(self, role: Role, index: int) -> Life | None:
        """Return an engine of a role that does something; the first is 0."""
        lives = [life for life in self.world.living() if life.spec.role is role and life.runs]
        return lives[index % len(lives)] if lives else None

    _DO: Final[dict[type, Callable[[Any, Any], bool]]] = {
        Arrive: _arrive, Decode: _decode, NextTurn: _next_turn, Local: _local, Abort: _abort, Renew: _renew,
        Pass: _pass, Crash: _crash, Restart: _restart, Freeze: _freeze, Thaw: _thaw, Messages: _faulty_messages,
        Reads: _faulty_reads, Questions: _faulty_questions, Again: _again, Inject: _inject,
    }  # fmt: skip


def _at(things: Sequence[T], index: int) -> T | None:
    """Return a thing, counted from the newest and round; None of none."""
    return things[-1 - index % len(things)] if things else None


def _struck(standing: list[_Standing[F]], fits: Callable[[F], bool] = lambda _: True) -> F | None:
    """Return the first fault that fits, and take one off what it has left; None: nothing goes wrong."""
    for one in standing:
        if fits(one.fault):
            one.left -= 1
            if not one.left:
                standing.remove(one)
            return one.fault
    return None


def _damaged(data: bytes, place: int) -> bytes:
    """Return a message with one thing wrong: a bit somewhere, its end gone, more behind it, or all of it garbled."""
    match place % 8:
        case 0:
            return damaged(data)
        case 1:
            return data[: len(data) // 2]
        case 2:
            return data + b":1"
        case 3:
            return garbled(data)
    at = place % max(1, len(data))
    return data[:at] + bytes([byte ^ (1 << place % 8) for byte in data[at : at + 1]]) + data[at + 1 :]


def _alike(parameters: Parameters) -> bool:
    """Whether all engines suit each other."""
    p, d = parameters.prefill, parameters.decode
    return (p.lease_ms, p.ttl_ms, p.model) == (d.lease_ms, d.ttl_ms, d.model)

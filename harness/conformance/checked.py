"""A stranger's subject at arm's length: what its code returns is looked at before a world builds on it.

What is not as `subject` says raises `Misuse` with one clear line: a breach of R1 by the connector, no mistake of ours.
"""

from __future__ import annotations

import inspect
import json
import math
import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any, Final

import msgspec

from faults.nixl.dialects import Meaning
from faults.nixl.orders import Kind
from harness.conformance.subject import Capability, Ending, Engine, EngineSpec, Host, Misuse, Params, Request, Subject

SHOWN_CHARS_MAX: Final = 120
_ENGINE: Final = {
    "submit": ("request",), "abort": ("request_id",), "deliver": ("sender", "message", "rank", "to_rank"),
    "answer": ("question",), "step": (), "ended": (), "holds": (), "metrics": (), "close": (),
}  # fmt: skip
_TAKES: Final[set[tuple[Any, bool, tuple[str, ...]]]] = set()
"""Code that was looked at and can be called so: a search calls the same a million times."""
_NO_JSON: Final = (TypeError, ValueError, RecursionError, msgspec.MsgspecError)


class CheckedSubject:
    """A subject of which every return value is checked."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.name, self.versions = subject.name, subject.versions
        self.capabilities = frozenset(Capability(c) for c in subject.capabilities)

    def engine(self, spec: EngineSpec, host: Host) -> Engine:
        """Return a new engine."""
        check_takes("engine", self._subject.engine, ("spec", "host"))
        engine = self._subject.engine(spec, host)
        check_has("what engine() returns is no engine", engine, _ENGINE)
        return CheckedEngine(engine, spec)

    def meaning(self, message: bytes) -> Meaning:
        """Return what a message says."""
        check_takes("meaning", self._subject.meaning, ("message",))
        found = self._subject.meaning(message)
        if not (isinstance(found, tuple) and len(found) == 2):  # kind and requests
            raise Misuse(f"meaning() must return a Meaning, got {shown(found)}")
        kind, requests = found
        if not (isinstance(kind, Kind) and isinstance(requests, tuple) and all(is_text(r) for r in requests)):
            raise Misuse(f"meaning() must return a Meaning: a Kind, and a tuple of request ids; got {shown(found)}")
        return Meaning(kind, requests)

    def close(self) -> None:
        """Give back what all its engines share."""
        self._subject.close()


class CheckedEngine:
    """An engine of which every return value is checked."""

    def __init__(self, engine: Engine, spec: EngineSpec) -> None:
        self._engine, self._spec = engine, spec
        self._asked: set[str] = set()
        self._counted: set[str] = set()

    def submit(self, request: Request) -> None:
        """Take a request in."""
        self._asked.add(request.request_id)
        self._engine.submit(request)

    def abort(self, request_id: str) -> None:
        """Its client has gone."""
        self._engine.abort(request_id)

    def deliver(self, sender: str, message: bytes, rank: int, to_rank: int) -> None:
        """A message has arrived."""
        self._engine.deliver(sender, message, rank, to_rank)

    def answer(self, question: bytes) -> bytes | None:
        """Answer at the side channel."""
        reply = self._engine.answer(question)
        if reply is not None and not isinstance(reply, bytes):
            raise Misuse(f"answer() must return bytes or None, got {shown(reply)}")
        return reply

    def step(self) -> None:
        """Do one turn of its loop."""
        self._engine.step()

    def ended(self) -> list[Ending]:
        """Return the requests that ended since the last call, as JSON carries them."""
        found: Any = self._engine.ended()
        if not isinstance(found, list | tuple):
            raise Misuse(f"ended() must return a list of Ending, got {shown(found)}")
        return [self._ending(end) for end in found]

    def _ending(self, end: Any) -> Ending:
        if not isinstance(end, Ending):
            raise Misuse(f"ended() must return a list of Ending, got one with {shown(end)}")
        try:
            read = msgspec.json.decode(msgspec.json.encode(end), type=Ending)
            json.dumps(end.hand_off)
        except _NO_JSON as error:
            raise Misuse(f"ended() returns an Ending that is none: {error}") from error
        if read.request_id not in self._asked:
            raise Misuse(f"ended() tells of {read.request_id}, which was never asked of {self._spec.name}")
        return read

    def renew(self, hand_off: Params) -> Params | None:
        """Keep a finished turn alive."""
        check_takes("renew", getattr(self._engine, "renew", None), ("hand_off",))
        found: Any = self._engine.renew(hand_off)
        if found is not None and not isinstance(found, dict):
            raise Misuse(f"renew() must return a hand-off or None, got {shown(found)}")
        return found

    def holds(self) -> dict[str, list[int]]:
        """Return who holds which blocks now."""
        found: Any = self._engine.holds()
        if not isinstance(found, Mapping):
            raise Misuse(f"holds() must return request ids with their block numbers, got {shown(found)}")
        return {self._known(name): self._blocks(name, blocks) for name, blocks in found.items()}

    def _known(self, name: Any) -> str:
        if not is_text(name):
            raise Misuse(f"holds() must name requests by their ids, got {shown(name)}")
        return str(name)

    def _blocks(self, name: str, blocks: Any) -> list[int]:
        try:
            numbers = [operator.index(block) for block in blocks]
        except TypeError as error:
            raise Misuse(f"holds() must give block numbers for {name}, got {shown(blocks)}") from error
        if numbers and not 0 <= min(numbers) <= max(numbers) < self._spec.blocks:
            raise Misuse(f"holds() gives {name} blocks that there are not: {self._spec.name} has "
                         f"{self._spec.blocks}, got {shown(numbers)}")  # fmt: skip
        return numbers

    def metrics(self) -> dict[str, float]:
        """Return its counters; what it has counted once, it counts always."""
        found: Any = self._engine.metrics()
        if not isinstance(found, Mapping):
            raise Misuse(f"metrics() must return numbers by names, got {shown(found)}")
        for name, value in found.items():
            if not is_text(name) or not isinstance(value, Real) or not math.isfinite(value):
                raise Misuse(f"metrics() must return numbers by names, got {shown(name)}: {shown(value)}")
        gone = self._counted - set(found)
        if gone:
            raise Misuse(f"metrics() no longer has {', '.join(sorted(gone))}")
        self._counted |= set(found)
        return {str(name): float(value) for name, value in found.items()}

    def close(self) -> None:
        """End it."""
        self._engine.close()


def checked(subject: Subject) -> CheckedSubject:
    """Return a subject at arm's length."""
    return subject if isinstance(subject, CheckedSubject) else CheckedSubject(subject)


def check_takes(name: str, function: Any, parameters: tuple[str, ...]) -> None:
    """Raise Misuse if a stranger's function cannot be called so: the error would else look like ours."""
    if not callable(function):
        raise Misuse(f"there is no {name}(): {shown(function)}")
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    looked_at = (code, inspect.ismethod(function), parameters)
    if looked_at in _TAKES:
        return
    try:
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError) as error:
        if isinstance(error, ValueError) and not (inspect.isfunction(function) or inspect.ismethod(function)):
            return  # what is not written in Python need not say what it takes
        raise Misuse(f"{name}() must take ({', '.join(parameters)}): {error}") from error
    if code is not None:
        _TAKES.add(looked_at)


def check_has(what: str, thing: Any, methods: Mapping[str, tuple[str, ...]]) -> None:
    """Raise Misuse if a stranger's object lacks a method, or has one that cannot be called as it will be."""
    lacking = [method for method in methods if not callable(getattr(thing, method, None))]
    if lacking:
        raise Misuse(f"{what}, it has no {', '.join(lacking)}: {shown(thing)}")
    for method, parameters in methods.items():
        check_takes(method, getattr(thing, method), parameters)


def check_sending(receiver: Any, message: Any, rank: Any, to_rank: Any) -> None:
    """Raise Misuse if what is to be sent cannot be."""
    if not is_text(receiver):
        raise Misuse(f"send() needs the name of its receiver, got {shown(receiver)}")
    if not isinstance(message, bytes):
        raise Misuse(f"send() takes bytes, got {shown(message)}")
    if not (isinstance(rank, int) and isinstance(to_rank, int)):
        raise Misuse(f"send() takes ranks by their numbers, got {shown(rank)} and {shown(to_rank)}")


def check_reading(holder: Any, land: Any) -> None:
    """Raise Misuse if such a read cannot be."""
    if not is_text(holder) or not callable(land):
        raise Misuse(f"read() needs a holder's name and what to do, got {shown(holder)} and {shown(land)}")
    check_takes("what read() is to do", land, ())


def check_asking(port: Any, question: Any, answer: Any) -> None:
    """Raise Misuse if such a question cannot be asked."""
    if not isinstance(port, int) or not isinstance(question, bytes) or not callable(answer):
        raise Misuse(f"ask() needs a port's number, bytes, and whom to tell; got {shown(port)}, {shown(question)} and "
                     f"{shown(answer)}")  # fmt: skip
    check_takes("what ask() is to tell", answer, ("reply", "sent_ns", "got_ns"))


def check_later(delay_ns: Any, act: Any) -> None:
    """Raise Misuse if nothing can be done later."""
    if not isinstance(delay_ns, int) or not callable(act):
        raise Misuse(f"later() needs whole nanoseconds and what to do, got {shown(delay_ns)} and {shown(act)}")
    check_takes("what later() is to do", act, ())


def is_text(value: Any) -> bool:
    """Whether this is a text that can be written down."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """Return a value for an error's text: what it is, and its beginning."""
    try:
        text = ascii(value)
    except Exception:  # a stranger's __repr__
        text = "?"
    short = text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 3] + "..."
    return f"{type(value).__name__} {short}"

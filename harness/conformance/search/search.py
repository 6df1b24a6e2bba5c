"""The search: hypothesis draws histories until one breaks an invariant, makes it short, and goes on for others.

It runs for as long as it is told, not for so many histories; its chance comes from one seed. Nothing is kept from one
search to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import HypothesisException

from harness.conformance.search.actions import Action
from harness.conformance.search.found import Figures, Found, History
from harness.conformance.search.history import Outcome, Parameters, Side, Signature, perform, signature
from harness.conformance.search.strategies import histories
from harness.conformance.subject import Subject
from harness.conformance.watch import Breach
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_MS, NS_PER_S, s_to_ns

ROUND_HISTORIES: Final = 4_000
"""Then hypothesis begins anew: what it remembers of a run grows with it."""
SHRINK_LIMIT_S: Final = 30.0
FOUND_MAX: Final = 12
"""Kinds of breaches; a subject that breaks more is described well enough."""
TELL_EVERY_NS: Final = 2 * NS_PER_S
_SEEDS_APART: Final = 1_000_003


class _Broken(Exception):
    """What hypothesis is to make short."""


class _Over(BaseException):
    """Time is up: no error to hypothesis, and so not made short."""


class _Stumbled(BaseException):
    """A mistake of the suite's own, which is no breach, and is not to be made short."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class Searched:
    """What came of a search."""

    figures: Figures
    found: list[Found]


def search(
    subject: Subject, seed: int, seconds: float, *, tell: Callable[[Figures, list[Found]], None] | None = None,
    before: Callable[[History], None] | None = None, most: int = 0, first_only: bool = False,
) -> Searched:  # fmt: skip
    """Search for so long, but no more than `most` histories (0: any number); with `first_only` until the first breach.

    `before` is told each history before it is run. A mistake of the suite's own raises what it raised.
    """
    running = _Search(subject, seed, seconds, tell, before, most)
    number = 0
    while running.goes_on and not (first_only and running.found):
        running.round(number)
        number += 1
    return Searched(running.figures(), running.found)


@dataclass
class _Hunt:
    """One round: until a breach of a new kind, and then that made short."""

    until_ns: int
    wanted: Signature | None = None
    best: History | None = None
    best_outcome: Outcome | None = None
    breach: Breach | None = None
    found_ns: int = 0


@dataclass
class _Search:
    subject: Subject
    seed: int
    seconds: float
    tell: Callable[[Figures, list[Found]], None] | None
    before: Callable[[History], None] | None
    most: int
    found: list[Found] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begun_ns = now_ns()
        self._until_ns = self._begun_ns + s_to_ns(self.seconds)
        self._known: set[Signature] = set()
        self._took_ns: list[int] = []
        self._happened: Counter[str] = Counter()
        self._told_ns = self._begun_ns

    @property
    def goes_on(self) -> bool:
        """Whether there is time, and something to look for."""
        done = self.most and len(self._took_ns) >= self.most
        return now_ns() < self._until_ns and len(self.found) < FOUND_MAX and not done

    def figures(self) -> Figures:
        """Return what it has done so far."""
        took = sorted(self._took_ns)
        count = len(took)
        return Figures(
            histories=count, seconds=(now_ns() - self._begun_ns) / NS_PER_S,
            median_ms=took[count // 2] / NS_PER_MS if took else 0.0,
            p99_ms=took[count * 99 // 100] / NS_PER_MS if took else 0.0, happened=dict(sorted(self._happened.items())),
        )  # fmt: skip

    def round(self, number: int) -> None:
        """Draw histories until a breach of a new kind is found and made short, or enough were drawn."""
        hunt = _Hunt(self._until_ns)

        @seeded(self.seed * _SEEDS_APART + number)
        @settings(
            max_examples=ROUND_HISTORIES,
            database=None,
            deadline=None,
            print_blob=False,
            verbosity=Verbosity.quiet,
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(histories(self.subject.capabilities, getattr(self.subject, "whole_seconds", False)))
        def one(drawn: tuple[Parameters, list[Action]]) -> None:
            if now_ns() > hunt.until_ns or (hunt.wanted is None and not self.goes_on):
                raise _Over
            self._try(hunt, History(parameters=drawn[0], actions=drawn[1]))

        try:
            one()
        except (_Broken, _Over, HypothesisException):
            pass  # the last: a history that was to be made short broke nothing when time was up
        except _Stumbled as stumbled:
            raise stumbled.error from None
        if hunt.best is not None:
            self._keep(hunt)

    def _try(self, hunt: _Hunt, history: History) -> None:
        """Run a history. Raises _Broken if it broke what is looked for."""
        if self.before is not None:
            self.before(history)
        begun_ns = now_ns()
        outcome = self._performed(history)
        ended_ns = now_ns()
        if hunt.wanted is None:
            self._took_ns.append(ended_ns - begun_ns)
            self._happened.update(outcome.happened)
            if self.tell is not None and ended_ns - self._told_ns > TELL_EVERY_NS:
                self._told_ns = ended_ns
                self.tell(self.figures(), self.found)
        breach = self._new(outcome)
        if breach is None:
            return
        if hunt.wanted is None:
            hunt.wanted, hunt.found_ns = signature(breach), ended_ns
            hunt.until_ns = ended_ns + s_to_ns(SHRINK_LIMIT_S)  # also beyond the search's end: a long one helps nobody
        if signature(breach) != hunt.wanted:
            return  # it will be found by itself
        if hunt.best is None or history.size < hunt.best.size:
            hunt.best, hunt.best_outcome, hunt.breach = history, outcome, breach
        raise _Broken

    def _performed(self, history: History) -> Outcome:
        try:
            return perform(history.parameters, history.actions, self.subject, known=self._known)
        except Exception as error:
            raise _Stumbled(error) from error

    def _new(self, outcome: Outcome) -> Breach | None:
        return next((breach for breach in outcome.breaches if signature(breach) not in self._known), None)

    def _keep(self, hunt: _Hunt) -> None:
        assert hunt.wanted is not None
        self._tidy(hunt)
        assert hunt.best is not None
        assert hunt.best_outcome is not None
        assert hunt.breach is not None
        self.found.append(
            Found(
                history=hunt.best, breach=hunt.breach, timeline=hunt.best_outcome.timeline,
                found_s=(hunt.found_ns - self._begun_ns) / NS_PER_S, shrunk_s=(now_ns() - hunt.found_ns) / NS_PER_S,
            )
        )  # fmt: skip
        self._known.add(hunt.wanted)

    def _tidy(self, hunt: _Hunt) -> None:
        """Take out what hypothesis has left: single actions that are not needed, and values that do not matter."""
        again = True
        while again and now_ns() < hunt.until_ns:
            again = False
            assert hunt.best is not None
            for simpler in _simpler(hunt.best):
                if now_ns() > hunt.until_ns:
                    return
                if simpler.size >= hunt.best.size:
                    continue
                try:
                    self._try(hunt, simpler)
                except _Broken:
                    again = True
                    break


def _simpler(history: History) -> Iterator[History]:
    """Yield histories with one thing less."""
    actions, parameters = history.actions, history.parameters
    for place in reversed(range(len(actions))):
        yield msgspec.structs.replace(history, actions=_without(actions, place))
    for simple in _plain_parameters(parameters):
        yield msgspec.structs.replace(history, parameters=simple)
    for place, action in enumerate(actions):
        for name in action.__struct_fields__:
            plain = msgspec.structs.replace(action, **{name: getattr(type(action)(), name)})
            yield msgspec.structs.replace(history, actions=[*actions[:place], plain, *actions[place + 1 :]])


def _plain_parameters(parameters: Parameters) -> Iterator[Parameters]:
    """Yield parameters with one of them, or one of both sides, as it usually is."""
    usual = Parameters()
    for name in ("two_turn", "policy", "step_ms", "prefill", "decode"):
        yield msgspec.structs.replace(parameters, **{name: getattr(usual, name)})
    for name in Side.__struct_fields__:
        plain = {name: getattr(Side(), name)}
        for sides in (("prefill", "decode"), ("prefill",), ("decode",)):
            changed = {side: msgspec.structs.replace(getattr(parameters, side), **plain) for side in sides}
            yield msgspec.structs.replace(parameters, **changed)


def _without(actions: Sequence[Action], place: int) -> list[Action]:
    return [*actions[:place], *actions[place + 1 :]]

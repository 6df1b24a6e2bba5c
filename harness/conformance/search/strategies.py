"""What hypothesis draws a history from. Whatever is drawn can be performed; what cannot be done there does nothing.

Drawn at random, most histories would do a little of everything and come to nothing much. So each is of a style: which
kinds of actions it is made of, and how often each comes.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from faults.nixl.orders import Kind
from harness.conformance.search.actions import (
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
from harness.conformance.search.history import LENGTHS, TOO_LONG, Parameters, Side
from harness.conformance.subject import Capability, Policy

ACTIONS_MAX: Final = 24
PRINTABLE: Final = "".join(c for c in string.printable if c.isprintable())
"""Of ASCII, the space among them."""
NAMES: Final = ("a,b", "a:1", "HB:a", "0", "a b", "{}", "é")
"""Where lists, numbers and other messages begin, in whatever way a connector writes them down."""

_small = st.integers(0, 3)
_ms = st.one_of(st.integers(1, 300), st.integers(100, 3_000))
_long_ms = st.one_of(st.integers(1, 300), st.integers(100, 3_000), st.integers(2_000, 12_000))
_sizes = st.one_of(st.just(0), st.integers(0, len(LENGTHS) - 1))
_names = st.one_of(
    st.just(""), st.sampled_from(NAMES), st.text(PRINTABLE, max_size=8), st.text(PRINTABLE, min_size=60, max_size=100)
)
_named = st.sampled_from((False, False, False, True))
_prompts = st.sampled_from((Prompt.FRESH, Prompt.FRESH, Prompt.REPEATED, Prompt.SHARES))
_known_prompts = st.sampled_from((Prompt.REPEATED, Prompt.SHARES))
_readers = st.sampled_from((1, 1, 1, 2, 3))
_more_readers = st.sampled_from((2, 2, 3))
_samples = st.sampled_from((1, 1, 1, 2))
_answers = st.one_of(st.integers(1, 4), st.integers(5, 24))
_spoken = st.integers(9, 24)
"""Only the decode side has the KV of an answer's own blocks: the next turn must read them."""
_long_answers = st.integers(1, 30)
_count = st.integers(1, 4)
_place = st.integers(0, 63)
_booleans = st.booleans()
_link_faults, _read_faults = st.sampled_from(LinkFault), st.sampled_from(ReadFault)
_kinds = st.sampled_from((Kind.ANY, Kind.HEARTBEAT, Kind.COMPLETION, Kind.CLAIM, Kind.ANSWER))
_repeated = st.sampled_from((Kind.ANY, Kind.CLAIM, Kind.COMPLETION, Kind.CLAIM, Kind.HEARTBEAT))
_recent = st.sampled_from((0, 0, 1, 2, 5))
_ways = st.one_of(st.just(0), _ms)
_noise = st.binary(max_size=24)
_words = st.builds(
    lambda head, name, tail: (head + name + tail).encode(), st.sampled_from(("", "HB:", "PDP1", "PUSH_REG:")),
    st.text(PRINTABLE, max_size=8), st.sampled_from(("", ":1", ":", ",", ":-1", ":99999999999")),
)  # fmt: skip
_bytes = st.one_of(_noise, _words)

_MAKE: Final[Mapping[str, Callable[[DrawFn], Action]]] = {
    "arrive": lambda draw: Arrive(
        engine=draw(_small), prompt=draw(_prompts), size=draw(_sizes), name=draw(_names) if draw(_named) else "",
        readers=draw(_readers), hurried=draw(_booleans),
    ),
    "plain": lambda draw: Arrive(size=draw(_sizes)),
    "shared": lambda draw: Arrive(size=draw(_sizes), prompt=draw(_known_prompts)),
    "samples": lambda draw: Arrive(readers=draw(_more_readers)),
    "decode": lambda draw: Decode(
        which=draw(_small), engine=draw(_small), samples=draw(_samples), answer=draw(_answers)
    ),
    "newest": lambda draw: Decode(answer=draw(_answers)),
    "spoken": lambda draw: Decode(answer=draw(_spoken)),
    "refused": lambda draw: Decode(which=draw(_small), answer=TOO_LONG),
    "turn": lambda draw: NextTurn(which=draw(_small), engine=draw(_small), size=draw(_sizes)),
    "local": lambda draw: Local(engine=draw(_small), answer=draw(_long_answers)),
    "abort": lambda draw: Abort(which=draw(_small)),
    "pass": lambda draw: Pass(ms=draw(_ms)),
    "wait": lambda draw: Pass(ms=draw(_long_ms)),
    "crash": lambda draw: Crash(which=draw(_small)),
    "restart": lambda draw: Restart(which=draw(_small)),
    "freeze": lambda draw: Freeze(which=draw(_small)),
    "thaw": lambda draw: Thaw(which=draw(_small)),
    "messages": lambda draw: Messages(
        fault=draw(_link_faults), kind=draw(_kinds), count=draw(_count), ms=draw(_ms), place=draw(_place)
    ),
    "reads": lambda draw: Reads(fault=draw(_read_faults), count=draw(_count), ms=draw(_ms), early=draw(_booleans)),
    "questions": lambda draw: Questions(count=draw(_count), there_ms=draw(_ways), back_ms=draw(_ways)),
    "again": lambda draw: Again(which=draw(_recent), kind=draw(_repeated)),
    "inject": lambda draw: Inject(engine=draw(_small), data=draw(_bytes)),
    "renew": lambda draw: Renew(which=draw(_small)),
}  # fmt: skip
_CALM: Final = "arrive plain decode decode newest pass pass wait abort local"
_STYLES: Final = (
    _CALM,
    f"{_CALM} shared samples refused",
    "plain newest newest pass wait abort",
    f"{_CALM} messages messages",
    f"{_CALM} reads reads questions",
    "reads reads plain newest newest newest pass pass abort",
    f"{_CALM} crash restart restart freeze thaw",
    f"{_CALM} again inject inject",
    "samples samples decode newest newest pass pass messages again again abort",
    "samples newest newest newest pass pass again again again",
    "samples newest newest newest pass pass messages messages abort",
    "plain shared shared decode newest pass wait local",
    f"{_CALM} messages reads questions crash restart freeze thaw again inject shared samples refused",
)
_TURNS: Final = (
    "plain spoken spoken turn turn pass wait",
    "plain spoken spoken turn turn pass wait renew",
    f"{_CALM} turn turn renew wait spoken spoken",
    f"{_CALM} spoken turn turn renew wait messages reads questions crash restart freeze thaw",
)


@st.composite
def _action(draw: DrawFn, kinds: tuple[str, ...]) -> Action:
    return _MAKE[draw(st.sampled_from(kinds))](draw)


def _lists(style: str, left_out: Collection[str]) -> st.SearchStrategy[list[Action]]:
    """Return what draws a style's actions: few, or so many that something comes of them."""
    one = _action(tuple(kind for kind in style.split() if kind not in left_out))
    return st.one_of(st.lists(one, max_size=ACTIONS_MAX), st.lists(one, min_size=7, max_size=ACTIONS_MAX))


@st.composite
def histories(
    draw: DrawFn, claims: Collection[Capability], whole_seconds: bool = False
) -> tuple[Parameters, list[Action]]:
    """Draw a history for a subject that claims so much; with `whole_seconds` its terms are that."""
    parameters = draw(_parameters(frozenset(claims), whole_seconds))
    left_out = () if Capability.RENEWAL in claims else ("renew",)
    style = draw(_turn_styles if parameters.two_turn else _styles)
    return parameters, draw(_lists(style, left_out))


_styles, _turn_styles = st.sampled_from(_STYLES), st.sampled_from(_TURNS)
_engines = st.sampled_from(((1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 2)))
_slots = st.sampled_from(((2, 2), (2, 1), (1, 1), (4, 4)))
_blocks = st.sampled_from(((40, 40), (12, 40), (40, 12), (12, 12), (20, 20)))
_ranks = st.sampled_from(((1, 1), (1, 1), (1, 1), (1, 1), (4, 1), (1, 4), (2, 2), (8, 2)))
_two_turn = st.sampled_from((False, False, True, False, True))
_leases = st.one_of(st.just(1_200), st.integers(600, 3_000))
_other_leases = st.integers(300, 6_000)
_lives = st.one_of(st.just(20_000), st.integers(700, 20_000))
_whole_leases = st.sampled_from((6_000, 6_000, 3_000, 7_000, 2_000))
_whole_lives = st.sampled_from((20, 1, 3, 9, 20)).map(lambda seconds: 1_000 * seconds)
_unlike = st.integers(0, 24)
_offsets = st.one_of(st.integers(-5_000, 5_000), st.sampled_from((-500_000, 500_000)))
_drifts = st.sampled_from(((0, 0), (0, 0), (200, -200), (-200, 200), (0, 200)))
_policies = st.sampled_from(Policy)
_steps = st.sampled_from((12, 24))


@st.composite
def _parameters(draw: DrawFn, claims: frozenset[Capability], whole: bool) -> Parameters:
    """Draw a world: odd lengths of time, unequal ones now and then, and clocks that differ by seconds or days."""
    two_turn = Capability.TWO_TURN in claims and draw(_two_turn)
    leases, other_leases, lives = (_whole_leases, _whole_leases, _whole_lives) if whole else (
        _leases, _other_leases, _lives
    )  # fmt: skip
    engines, slots, blocks = draw(_engines), draw(_slots), draw(_blocks)
    ranks = draw(_ranks) if Capability.RANKS in claims else (1, 1)
    lease_ms, ttl_ms = draw(leases), draw(lives) if two_turn else 20_000
    offset_s, drifts = (draw(_offsets), draw(_drifts)) if two_turn else (0, (0, 0))
    sides = [
        Side(engines=engines[n], slots=slots[n], blocks=blocks[n], ranks=ranks[n], lease_ms=lease_ms, ttl_ms=ttl_ms,
             offset_s=n * offset_s, drift_ppm=drifts[n])
        for n in range(2)
    ]  # fmt: skip
    match draw(_unlike):
        case 24:
            sides[1] = msgspec.structs.replace(sides[1], lease_ms=draw(other_leases))
        case 23:
            sides[1] = msgspec.structs.replace(sides[1], ttl_ms=draw(lives))
        case 22:
            sides[1] = msgspec.structs.replace(sides[1], model="another")
    shortest_ms = min(side.lease_ms for side in sides)
    return Parameters(
        prefill=sides[0], decode=sides[1], two_turn=two_turn, policy=draw(_policies),
        step_ms=min(250 if whole else 100, shortest_ms // draw(_steps)),
    )  # fmt: skip

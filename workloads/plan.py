"""What to send and when: a schedule or a trace, joined with the prompts. Pure.

Everything is a session. A request that stands alone is a session of one turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from workloads.chance import generator
from workloads.mooncake import TraceRequest, read_trace
from workloads.options import ArrivalOptions, LoadOptions, PdOptions, SessionOptions, TraceOptions
from workloads.rows import PromptSpec
from workloads.schedule import ArrivalSchedule, stripe

NS_PER_S: Final = 1e9


class Turn(msgspec.Struct, frozen=True):
    """One request of a session. Of a later turn's `prompt` only the turn's own tokens are counted yet."""

    prompt: PromptSpec
    max_tokens: int
    think_ms: float = 0.0
    """From the end of the turn before to the start of this one."""


class Planned(msgspec.Struct, frozen=True):
    """One session of the plan: the start of its first turn in ns from the origin, and its turns."""

    offset_ns: int
    turns: list[Turn]
    kv_handoff: bool = False
    """Whether a turn sends on the hand-off that the turn before ended with."""
    keep_alive_s: float = 0.0
    """How often that hand-off is renewed during think time; 0: never."""

    @property
    def index(self) -> int:
        """Number of the session in the whole plan."""
        return self.turns[0].prompt.index


def plan(options: LoadOptions, shard: int = 0, shards: int = 1) -> Iterator[Planned]:
    """Yield a shard's sessions in the order of their starts. All shards together are the whole plan, each once.

    Raises `mooncake.BadTrace` and OSError for a trace that cannot be read.
    """
    return stripe(_whole(options), shard, shards)


def longest_ns(options: LoadOptions) -> int | None:
    """Return how long after the origin the last request starts at the latest; None if the plan never ends.

    Raises as `plan`.
    """
    match options:
        case TraceOptions():
            return max(request.offset_ns for request in _requests_of(options))
        case ArrivalOptions():
            end_ns = _schedule(options).end_ns()
            return None if end_ns is None else end_ns + round(_talk_s(options) * NS_PER_S)
    raise TypeError(f"no plan is known for {type(options).__name__}")


def _talk_s(options: ArrivalOptions) -> float:
    """Return how long after its start a session begins its last turn at the latest."""
    if not isinstance(options, SessionOptions):
        return 0.0
    return (options.turns - 1) * (options.request_timeout_s + max(options.thinks_s))


def _whole(options: LoadOptions) -> Iterator[Planned]:
    match options:
        case TraceOptions():
            return _from_trace(options)
        case SessionOptions():
            return _sessions(options)
        case PdOptions():
            return _single(options)
    raise TypeError(f"no plan is known for {type(options).__name__}")


def _schedule(options: ArrivalOptions) -> ArrivalSchedule:
    return ArrivalSchedule(
        seed=options.seed,
        rate_per_s=options.rate_per_s,
        arrivals=options.arrivals,
        duration_s=options.duration_s or None,
        count=options.arrivals_max or None,
    )


def _single(options: PdOptions) -> Iterator[Planned]:
    groups = _groups(options)
    for arrival in _schedule(options):
        prompt = PromptSpec(options.seed, arrival.index, options.input_tokens, next(groups), options.prefix_tokens)
        yield Planned(arrival.offset_ns, [Turn(prompt, options.output_tokens)])


def _groups(options: PdOptions) -> Iterator[int]:
    """Yield each request's prefix group: any is as likely, so that shards and groups do not fall together."""
    if not options.prefix_groups:
        yield from itertools.repeat(-1)
    chance = generator(options.seed, "groups")
    while True:
        yield from (int(group) for group in chance.integers(options.prefix_groups, size=1024))


def _sessions(options: SessionOptions) -> Iterator[Planned]:
    for arrival in _schedule(options):
        seed, session = options.seed, arrival.index
        turns = [Turn(PromptSpec(seed, session, options.input_tokens), options.output_tokens)]
        drawn = generator(seed, "think", session).integers(len(options.thinks_s), size=options.turns - 1)
        for number, choice in enumerate(drawn, 1):
            prompt = PromptSpec(seed, session, options.turn_tokens, turn=number)
            turns.append(Turn(prompt, options.output_tokens, options.thinks_s[int(choice)] * 1e3))
        yield Planned(arrival.offset_ns, turns, options.kv_handoff, options.keep_alive_s)


def _from_trace(options: TraceOptions) -> Iterator[Planned]:
    for index, request in enumerate(_requests_of(options)):
        prompt = PromptSpec(
            options.seed, index, request.input_tokens, block_ids=request.block_ids, block_tokens=request.block_tokens
        )
        yield Planned(request.offset_ns, [Turn(prompt, request.output_tokens)])


def _requests_of(options: TraceOptions) -> list[TraceRequest]:
    end_ns = options.duration_s * NS_PER_S or float("inf")
    requests = read_trace(Path(options.trace), options.time_scale, options.length_scale)
    return [request for request in requests[: options.requests or None] if request.offset_ns < end_ns]

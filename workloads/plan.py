"""What to send and when: a schedule or a trace, joined with the prompts. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from workloads.chance import generator
from workloads.mooncake import read_trace
from workloads.options import LoadOptions
from workloads.rows import PromptSpec
from workloads.schedule import ArrivalSchedule, stripe


class Planned(msgspec.Struct, frozen=True):
    """One request of the plan: its start in ns from the origin, its prompt, and the tokens asked for."""

    offset_ns: int
    prompt: PromptSpec
    max_tokens: int


def plan(options: LoadOptions, shard: int = 0, shards: int = 1) -> Iterator[Planned]:
    """Yield a shard's requests in the order of their starts. All shards together are the whole plan, each once.

    Raises `mooncake.BadTrace` and OSError for a trace that cannot be read.
    """
    return stripe(_from_trace(options) if options.trace else _from_schedule(options), shard, shards)


def _from_schedule(options: LoadOptions) -> Iterator[Planned]:
    schedule = ArrivalSchedule(
        seed=options.seed,
        rate_per_s=options.rate_per_s,
        arrivals=options.arrivals,
        duration_s=options.duration_s or None,
        count=options.requests or None,
    )
    groups = _groups(options)
    for arrival in schedule:
        prompt = PromptSpec(options.seed, arrival.index, options.input_tokens, next(groups), options.prefix_tokens)
        yield Planned(arrival.offset_ns, prompt, options.output_tokens)


def _groups(options: LoadOptions) -> Iterator[int]:
    """Yield each request's prefix group: any is as likely, so that shards and groups do not fall together."""
    if not options.prefix_groups:
        yield from itertools.repeat(-1)
    chance = generator(options.seed, "groups")
    while True:
        yield from (int(group) for group in chance.integers(options.prefix_groups, size=1024))


def _from_trace(options: LoadOptions) -> Iterator[Planned]:
    end_ns = options.duration_s * 1e9 or float("inf")
    for index, request in enumerate(read_trace(Path(options.trace))[: options.requests or None]):
        if request.offset_ns >= end_ns:
            return
        group, tokens = request.prefix_group, request.prefix_tokens
        yield Planned(
            request.offset_ns,
            PromptSpec(options.seed, index, request.input_tokens, group, tokens if group >= 0 else 0),
            request.output_tokens,
        )

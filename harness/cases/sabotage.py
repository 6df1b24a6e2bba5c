"""What twins do behind a drive's back: a pair, or the hop before it, that is broken in one way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from faults.nixl.orders import Action, Kind
from harness.cases.case import Twin
from harness.cases.client import Params
from harness.cases.stage import Stage
from harness.cases.terms import Need, PairTerms
from reference_impl.tokens import VOCABULARY

LOOK_S: Final = 0.05
NOTIFICATIONS: Final = frozenset({Need.NOTIFICATIONS})


def _wrong_last(ids: list[int]) -> list[int]:
    return [*ids[:-1], (ids[-1] + 1) % VOCABULARY]


async def _wrong_token(stage: Stage) -> None:
    stage.meddler.answer = _wrong_last


async def _deaf_hop(stage: Stage) -> None:
    stage.deaf = True


async def _no_completions(stage: Stage) -> None:
    await stage.order(stage.p, Action.DROP, kind=Kind.COMPLETION, announced=False)


async def _no_heartbeats(stage: Stage) -> None:
    await stage.order(stage.p, Action.DROP, kind=Kind.HEARTBEAT, announced=False)


WRONG_TOKEN: Final = Twin(
    name="wrong_token", title="one token of each answer is another, as damaged KV would make it", fails="content",
    sabotage=_wrong_token,
)  # fmt: skip


def deaf_hop(fails: str) -> Twin:
    """Nobody tells the servers that a client has gone."""
    return Twin(name="deaf_hop", title="nobody tells the servers that a client has gone", fails=fails,
                sabotage=_deaf_hop)  # fmt: skip


def no_completions(fails: str, name: str = "no_completions") -> Twin:
    """The prefill side never hears that its blocks were read."""
    return Twin(name=name, title="the prefill side never hears that its blocks were read", fails=fails,
                sabotage=_no_completions, needs=NOTIFICATIONS)  # fmt: skip


def no_heartbeats(fails: str) -> Twin:
    """The prefill side never hears a heartbeat."""
    return Twin(name="no_heartbeats", title="the prefill side hears no heartbeat", fails=fails,
                sabotage=_no_heartbeats, needs=NOTIFICATIONS)  # fmt: skip


def heartbeats_end(fails: str, strikes: int) -> Twin:
    """After so many of the drive's own orders were carried out, no heartbeat comes through any more."""

    async def later(stage: Stage) -> None:
        while stage.strikes < strikes:
            await asyncio.sleep(LOOK_S)
        await _no_heartbeats(stage)

    async def sabotage(stage: Stage) -> None:
        stage.start(later(stage))

    return Twin(name="heartbeats_end", title="from then on the prefill side hears no heartbeat", fails=fails,
                sabotage=sabotage, needs=NOTIFICATIONS)  # fmt: skip


def other_terms(name: str, title: str, fails: str, **changes: Any) -> Twin:
    """The pair runs on other terms than it was told to; what the case declares stays."""
    return Twin(name=name, title=title, fails=fails, terms=PairTerms(**changes))


def long_lease(fails: str, **terms: Any) -> Twin:
    """Blocks are kept for 40 s, and not for the lease that was asked for."""
    return other_terms("long_lease", "blocks are kept for 40 s", fails, **{**terms, "lease_s": 40})


def single_timeout(fails: str, seconds: float, **terms: Any) -> Twin:
    """The old design: one timeout, no heartbeats (KVC-LEASE-013)."""
    return other_terms(f"single_timeout_{seconds:g}", f"the old design: one timeout of {seconds:g} s", fails,
                       **{**terms, "design": "single-timeout", "single_timeout_s": seconds})  # fmt: skip


def hop_alters(name: str, title: str, fails: str, alter: Callable[[Params], Params]) -> Twin:
    """What lies between prefill and decode alters hand-offs."""

    async def sabotage(stage: Stage) -> None:
        stage.meddler.hand_off = alter

    return Twin(name=name, title=title, fails=fails, sabotage=sabotage)

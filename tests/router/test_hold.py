"""Holding hand-offs back: as long as ordered and never less, since that is what the fault's proof compares."""

from __future__ import annotations

import asyncio

import uvloop

from reference_impl.router.hold import HandoffHold, Hold


def test_none_is_held_for_less_than_was_ordered() -> None:
    """The loop's own timers count whole milliseconds from a moment that may have passed."""
    hold = HandoffHold()
    seconds = 0.0104

    async def many() -> None:
        hold.order(Hold(seconds, 40))
        await asyncio.gather(*(hold.pass_through() for _ in range(40)))

    uvloop.run(many())
    report = hold.report()
    assert (report.held, report.holding, report.requests_left) == (40, 0, 0)
    assert report.held_s_min >= seconds

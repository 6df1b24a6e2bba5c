"""How soon a prefill engine has its blocks back once a reader has died: a whole deployment, decode engines killed.

    python -m benchmarks.reclaim --out FILE [--quick]

One prefill and two decode engines, leases of 6 s (so a heartbeat every second, which extends to 4 s from its arrival),
one request at a time in a decode engine: while a long answer holds its slot, hand-offs wait in its queue and are kept
alive by its heartbeats. Then SIGKILL, each time at another moment after a heartbeat. Measured on the prefill engine, by
its events: from the kill to the end of the last lease. Only leases count that live by a heartbeat: one that is younger
than 2 s still has its first 6 s. Prints a table and writes {name: {unit, median, min, max, p99, n}} as JSON. Target:
within one extension (4 s) plus 0.5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import tempfile
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Final

from benchmarks.figures import Figures, figure, show, write
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S, s_to_ns
from reference_impl.rules.events import Event, EventKind
from reference_impl.rules.terms import EXTENSION_SHARE
from tests.deployment.split import LIMIT_S, Client, Split, eventually, prompt_of, split, under_way

LEASE_S: Final = 6.0
EXTENSION_S: Final = LEASE_S * EXTENSION_SHARE
SINGLE_TIMEOUT_S: Final = 480 * LEASE_S / 30
"""What the old design's 480 s are where a lease lasts 6 s in place of 30."""
KILLS: Final = 8
WAITING: Final = 4
"""Hand-offs in the queue of the engine that is killed."""
PROMPT_TOKENS: Final = 2000
LONG_ANSWER_TOKENS: Final = 8000
"""A minute's: nobody waits for it."""
INTERVAL_S: Final = 1.0
"""Between two heartbeats: the moments of the kills are spread over it."""


class Bench:
    """A deployment and the hand-offs made so far."""

    def __init__(self, served: Split, client: Client) -> None:
        self._served = served
        self._client = client
        self._seeds = count(1)

    async def kill(self, worker_id: str, after_heartbeat_s: float) -> tuple[float, float]:
        """Kill a decode engine on which hand-offs wait; return seconds to the last lease's end, and the leases' blocks.

        Raises SystemExit if something else happened than a reclaim.
        """
        async with AsyncExitStack() as stack:
            long = prompt_of(next(self._seeds), 100)
            answer = self._client.decoded(long, LONG_ANSWER_TOKENS, await self._client.prefilled(long), worker_id)
            await stack.enter_async_context(under_way(answer))
            await self._client.until_metric(worker_id, "vllm:num_requests_running", bool, "its slot is taken")
            leases: list[str] = []
            for _ in range(WAITING):
                prompt = prompt_of(next(self._seeds), PROMPT_TOKENS)
                handoff = await self._client.prefilled(prompt)
                leases.append(handoff["remote_request_id"])
                await stack.enter_async_context(under_way(self._client.decoded(prompt, 2, handoff, worker_id)))
            beat = await self._heartbeat(leases)
            await asyncio.sleep(max(0.0, after_heartbeat_s - (now_ns() - beat.t_ns) / NS_PER_S))
            killed_ns = await asyncio.to_thread(self._served.kill, worker_id)
        ended = await self._ended(leases)
        if any(event.kind is not EventKind.LEASE_EXPIRED or event.t_ns < killed_ns for event in ended):
            raise SystemExit(f"void: leases ended otherwise: {[(e.kind, e.detail) for e in ended]}")
        blocks = sum(int(event.detail["blocks"] or 0) for event in ended)
        return (max(event.t_ns for event in ended) - killed_ns) / NS_PER_S, blocks

    async def _heartbeat(self, leases: list[str]) -> Event:
        """Wait for a heartbeat that moves every lease's deadline past its first."""
        granted = [e for e in self._served.events(EventKind.LEASE_GRANTED) if e.subject in leases]
        from_ns = max(event.t_ns for event in granted) + s_to_ns(LEASE_S - EXTENSION_S)

        async def found() -> Event | None:
            beats = self._served.events(EventKind.LEASE_EXTENDED)
            return next((e for e in beats if e.t_ns >= from_ns and e.detail["leases"] == len(leases)), None)

        beat = await eventually(found, LIMIT_S, "a heartbeat renews all leases")
        assert beat is not None
        return beat

    async def _ended(self, leases: list[str]) -> list[Event]:
        async def found() -> list[Event]:
            over = self._served.events(EventKind.LEASE_EXPIRED, EventKind.LEASE_RELEASED)
            ended = [event for event in over if event.subject in leases]
            return ended if len(ended) == len(leases) else []

        return await eventually(found, LIMIT_S, "all leases have ended")


async def measure(kills: int) -> Figures:
    """Kill the decode engines in turn."""
    options = ("--prefill", "1", "--decode", "2", "--decode-slots", "1", "--kv-lease-duration", f"{LEASE_S:g}")
    with tempfile.TemporaryDirectory() as folder, split(Path(folder), *options, profile="pd") as served:
        async with served.client() as client:
            bench = Bench(served, client)
            found = [await bench.kill(f"d{n % 2}", INTERVAL_S * n / kills) for n in range(kills)]
    seconds = [took_s for took_s, _ in found]
    return {
        "kill_to_last_leases_end": figure("s", seconds),
        "extension": figure("s", [EXTENSION_S]),
        "beyond_the_extension": figure("s", [took_s - EXTENSION_S for took_s in seconds]),
        "blocks_reclaimed_a_kill": figure("blocks", [blocks for _, blocks in found]),
        "single_timeout_over_reclaim": figure("x", [SINGLE_TIMEOUT_S / took_s for took_s in seconds]),
    }


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="one kill, to see that it runs")
    options = parser.parse_args()
    if importlib.util.find_spec("nixl") is None:
        print("skipped: it needs the package nixl", file=sys.stderr)
        return 0
    found = asyncio.run(measure(1 if options.quick else KILLS))
    show(found)
    if options.out:
        write(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

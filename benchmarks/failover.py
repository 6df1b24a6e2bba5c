"""Cold start against shadow recovery without load: whole deployments, killed again and again.

    python -m benchmarks.failover --out FILE [--quick]

Shadow and cold workers are measured in the same run with the same build and profile (1 GiB of weights), in pairs: some
kills of the one, then some of the other. Targets: SIGKILL to lock won p99 < 50 ms, lock won to registered p99 < 150 ms,
SIGKILL to registered p99 < 250 ms, cold start at least 39 times the shadow's recovery.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.figures import Figures, figure, show, write
from faults.fault import ProcessRef
from faults.kill import Kill
from harness.plan import RunPlan
from harness.scenario import Arm, load_scenario
from harness.targets.deployment import DeploymentTarget
from harness.targets.reference import REFERENCE
from reference_impl.rules.events import Event, EventKind

ROUNDS: Final = 3
KILLS: Final = {Arm.SHADOW: 10, Arm.COLD: 3}
"""A round's kills of each arm."""
LIMIT_S: Final = 60.0
SETTLE_S: Final = 0.5
"""Between an engine's readiness and its kill, so that its start-up work is over."""


class Samples(msgspec.Struct):
    """Milliseconds of each kill."""

    detection: list[float] = msgspec.field(default_factory=list)
    promotion: list[float] = msgspec.field(default_factory=list)
    recovery: list[float] = msgspec.field(default_factory=list)


async def measure_arm(arm: Arm, kills: int, samples: Samples) -> None:
    """Bring one worker up, kill its active engine `kills` times, and add what its events tell."""
    with tempfile.TemporaryDirectory() as folder:
        scenario = msgspec.structs.replace(load_scenario("kill-active"), workers=1)
        target = REFERENCE.target(RunPlan(
            scenario=scenario, system=REFERENCE, arm=arm, profile="default", time_scale=1, seed=1, folder=Path(folder),
            command=[],
        ))  # fmt: skip
        try:
            await target.start(lambda _: None)
            moments = [await kill_once(target, arm) for _ in range(kills)]
            await whole(target, arm)
        finally:
            await target.stop()
        events = [
            msgspec.json.decode(line, type=Event)
            for path in Path(folder, "parts").glob("events-*.jsonl")
            for line in path.read_bytes().splitlines()
        ]
    for moment in moments:
        lock = first_after(events, EventKind.LOCK_WON, moment)
        registered = first_after(events, EventKind.ROUTER_REGISTERED, moment)
        samples.detection.append((lock - moment) / 1e6)
        samples.promotion.append((registered - lock) / 1e6)
        samples.recovery.append((registered - moment) / 1e6)


async def whole(target: DeploymentTarget, arm: Arm) -> ProcessRef:
    """Wait until the worker has its active engine, and its shadow where it should; return the active one."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            active = target.active_engine("w0")
            parked = target.parked_engine("w0")
            if active is not None and (parked is not None or arm is Arm.COLD):
                return active
            await asyncio.sleep(0.02)


async def kill_once(target: DeploymentTarget, arm: Arm) -> int:
    """Kill the active engine of a whole worker; return the moment once another has taken its place."""
    active = await whole(target, arm)
    await asyncio.sleep(SETTLE_S)

    def successor() -> str | None:
        found = target.active_engine("w0")
        return found.name if found and found.name != active.name else None

    fault = Kill(active, successor)
    moment = await fault.inject()
    for evidence in (await fault.prove(), await fault.prove_healed()):
        if not evidence.holds:
            raise SystemExit(f"benchmark void: {evidence.shown_by}")
    return moment


def first_after(events: list[Event], kind: EventKind, moment: int) -> int:
    """Return when the first event of this kind after `moment` happened."""
    return min(e.t_ns for e in events if e.kind is kind and e.t_ns > moment)


async def measure(rounds: int) -> Figures:
    """Measure both arms in turn."""
    samples = {arm: Samples() for arm in Arm}
    ratios = []
    for _ in range(rounds):
        for arm, kills in KILLS.items():
            await measure_arm(arm, kills, samples[arm])
        ratios.append(
            statistics.median(samples[Arm.COLD].recovery[-KILLS[Arm.COLD] :])
            / statistics.median(samples[Arm.SHADOW].recovery[-KILLS[Arm.SHADOW] :])
        )
    shadow, cold = samples[Arm.SHADOW], samples[Arm.COLD]
    return {
        "shadow_sigkill_to_lock_won_1GiB_resident": figure("ms", shadow.detection),
        "shadow_lock_won_to_registered": figure("ms", shadow.promotion),
        "shadow_sigkill_to_registered": figure("ms", shadow.recovery),
        "cold_sigkill_to_registered": figure("ms", cold.recovery),
        "cold_over_shadow": figure("x", ratios),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="one round instead of three")
    given = parser.parse_args()
    found = asyncio.run(measure(1 if given.quick else ROUNDS))
    show(found)
    if given.out:
        write(given.out, found)


if __name__ == "__main__":
    main()

"""A retry storm with the retry budget and without: `python -m benchmarks.retry_storm [--out FILE] [--quick]`.

200 clients, a server that does 250 attempts a second, calls at 70 % of that, and an outage of two fifths of the run:
see `workloads/retry_storm.py`. Runs with the budget and without take turns. `amplification_in_outage` is attempts a
call while the server stands still, `goodput_after` the share of calls that succeeded after it while the load was still
high, `recovered` how long after its end 80 % of half a second's calls succeeded (only of runs that came to that).
Prints a table and writes {name: {unit, median, min, max, p99, n}} as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Final

from benchmarks.figures import Figures, figure, show, write
from workloads.retry_storm import StormResult, storm

SECONDS: Final = 20.0
QUICK_SECONDS: Final = 6.0
REPEATS: Final = 3


def figures_of(name: str, runs: list[StormResult]) -> Figures:
    """Return the figures of runs of one kind."""
    found = {
        f"{name}.amplification_in_outage": figure("attempts a call", [run.storm_amplification for run in runs]),
        f"{name}.amplification": figure("attempts a call", [run.amplification() for run in runs]),
        f"{name}.goodput_after": figure("of the calls", [run.goodput_after for run in runs]),
        f"{name}.runs_that_recovered": figure("1 or 0", [run.recovered_ms >= 0 for run in runs]),
    }
    recovered = [run.recovered_ms for run in runs if run.recovered_ms >= 0]
    return found | ({f"{name}.recovered": figure("ms after the outage", recovered)} if recovered else {})


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="one short run of each kind")
    given = parser.parse_args()
    runs: dict[bool, list[StormResult]] = {True: [], False: []}
    for seed in range(1, 2 if given.quick else REPEATS + 1):
        for budget, of_kind in runs.items():
            seconds = QUICK_SECONDS if given.quick else SECONDS
            of_kind.append(asyncio.run(storm(budget=budget, seconds=seconds, seed=seed)))
    found = figures_of("with_budget", runs[True]) | figures_of("without_budget", runs[False])
    show(found)
    if given.out is not None:
        write(given.out, found)


if __name__ == "__main__":
    main()

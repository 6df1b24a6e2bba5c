"""How wrong the load client is: `python -m benchmarks.load_client [--out FILE]`.

Against the golden server, client on core 0 and server on core 1, several runs of each: the TTFT error (client minus
truth) at a number of chunks a second (20 ms a token, 500 in, 200 out, constant arrivals), then the default load
(32,000 in, 1,000 out, 0.7 requests/s). A figure's samples are the runs: `ttft_error_p99` of five runs has n = 5.

Where others use the cores as well, their work is what is measured. `chrt -f 1 python -m benchmarks.load_client` keeps
it off; what is left then are the stops of the machine itself. Rows that the client marked as spoilt are left out of
the figures that say `good_rows`.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Figures, figure, show, write
from tests.golden import Errors, errors, golden, load, pinnable, rows_of
from tests.golden_server import Plan
from workloads.summary import quantile

GAP_MS = 20.0
TOKENS = 200
INPUT_TOKENS = 500


class Run(NamedTuple):
    """One run's figures: value and unit by name."""

    figures: dict[str, tuple[float, str]]


def run(plan: Plan, options: tuple[object, ...]) -> Run:
    """Run one load against one server."""
    with tempfile.TemporaryDirectory() as folder, golden(Path(folder), [plan], core=1) as server:
        rows_path = Path(folder) / "rows.jsonl"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = load("--host", server.url, "--rows", rows_path, *options, core=0)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)  # the server still runs, so this is the client alone
        if done.returncode:
            raise SystemExit(f"the client ended with {done.returncode}\n{done.stderr}\n{done.stdout}")
        rows, truths = rows_of(rows_path), server.truths()
    good = {request_id: row for request_id, row in rows.items() if not row.spoilt}
    found = errors(rows, truths)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures = error_figures(found, "") | (error_figures(errors(good, truths), "_good_rows") if good else {})
    lags = [row.schedule_lag_ms for row in rows.values()]
    return Run(
        figures
        | {
            "schedule_lag_p50": (statistics.median(lags), "ms"),
            "schedule_lag_p99": (quantile(lags, 0.99), "ms"),
            "spoilt_share": (1 - len(good) / len(rows), ""),
            "client_cpu_per_chunk": (1e6 * cpu_s / len(found.chunks), "us with the start of locust"),
        }
    )


def error_figures(found: Errors, suffix: str) -> dict[str, tuple[float, str]]:
    """Return the middle and the tail of a run's errors."""
    return {
        f"ttft_error_p50{suffix}": (statistics.median(found.ttft), "ms"),
        f"ttft_error_p99{suffix}": (quantile(found.ttft, 0.99), "ms"),
        f"chunk_error_p50{suffix}": (statistics.median(found.chunks), "ms"),
        f"chunk_error_p99{suffix}": (quantile(found.chunks, 0.99), "ms"),
    }


def measure(name: str, repeats: int, plan: Plan, *options: object) -> Figures:
    """Repeat a load; print and return its figures over the runs."""
    runs = [run(plan, options) for _ in range(repeats)]
    names = dict.fromkeys(key for one in runs for key in one.figures)
    found = {}
    for key in names:
        samples = [one.figures[key] for one in runs if key in one.figures]
        found[f"{name}.{key}"] = figure(samples[0][1], [value for value, _ in samples])
    show(found)
    return found


def steady(chunks_per_s: int, seconds: float, repeats: int) -> Figures:
    """Measure at a steady number of chunks a second."""
    rate = chunks_per_s / TOKENS
    return measure(
        f"{chunks_per_s}_chunks_per_s",
        repeats,
        Plan(gap_ms=GAP_MS, first_ms=GAP_MS),
        *("--arrivals", "constant", "--rate-per-s", rate, "--requests", round(rate * seconds)),
        *("--input-tokens", INPUT_TOKENS, "--output-tokens", TOKENS),
    )


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    parser.add_argument("--quick", action="store_true", help="one short run, to see that it works")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rates", default="1000,4000,16000,32000", help="chunks a second")
    parser.add_argument("--seconds", type=float, default=6.0, help="of arrivals at each rate")
    parser.add_argument("--long-seconds", type=float, default=40.0, help="of arrivals of the default load; 0: none")
    parser.add_argument("--long-repeats", type=int, default=1)
    given = parser.parse_args()
    if not pinnable():
        raise SystemExit("client and server need a core each")
    figures: Figures = {}
    if given.quick:
        given.repeats, given.rates, given.seconds, given.long_seconds = 1, "1000", 2.0, 0.0
    for rate in map(int, filter(None, given.rates.split(","))):
        figures |= steady(rate, given.seconds, given.repeats)
    if given.long_seconds:
        plan = Plan(first_ms=500.0, gap_ms=GAP_MS)
        requests = round(0.7 * given.long_seconds)
        figures |= measure("32k_1k_at_0.7_per_s", given.long_repeats, plan, "--requests", requests)
    if given.out:
        write(given.out, figures)


if __name__ == "__main__":
    main()

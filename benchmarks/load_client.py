"""How wrong the load client is: `python benchmarks/load_client.py [--out FILE] [--seconds S]`.

Against the golden server, client on core 0 and server on core 1: TTFT error at a number of chunks a second (20 ms a
token, 500 in, 200 out, constant arrivals), then the default load (32,000 in, 1,000 out, 0.7 requests/s).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.golden import errors, golden, load, pinnable, rows_of
from tests.golden_server import Plan
from workloads.summary import quantile

GAP_MS = 20.0
TOKENS = 200
INPUT_TOKENS = 500


class Figure(msgspec.Struct):
    """One measured quantity over all its samples."""

    unit: str
    median: float
    min: float
    max: float
    p99: float
    n: int


def figure(values: list[float], unit: str = "ms") -> Figure:
    """Return the spread of `values`."""
    return Figure(unit, statistics.median(values), min(values), max(values), quantile(values, 0.99), len(values))


def measure(name: str, plan: Plan, *options: object) -> dict[str, Figure]:
    """Run one load; return its figures."""
    with tempfile.TemporaryDirectory() as folder, golden(Path(folder), [plan], core=1) as server:
        rows_path = Path(folder) / "rows.jsonl"
        cpu_before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = load("--host", server.url, "--rows", rows_path, *options, core=0)
        if done.returncode:
            raise SystemExit(f"{name}: the client ended with {done.returncode}\n{done.stderr}\n{done.stdout}")
        rows = rows_of(rows_path)
        found = errors(rows, server.truths())
        lags = [row.schedule_lag_ms for row in rows.values()]
        spoilt = sum(bool(row.spoilt) for row in rows.values())
        cpu = resource.getrusage(resource.RUSAGE_CHILDREN)  # the server is not reaped yet, so this is the client's
        cpu_s = cpu.ru_utime + cpu.ru_stime - cpu_before.ru_utime - cpu_before.ru_stime
    return {
        f"{name}.ttft_error": figure(found.ttft),
        f"{name}.first_chunk_error": figure(found.first_chunk),
        f"{name}.chunk_error": figure(found.chunks),
        f"{name}.schedule_lag": figure(lags),
        f"{name}.spoilt_rows": figure([float(spoilt)], "rows"),
        f"{name}.client_cpu_per_chunk": figure([1e6 * cpu_s / len(found.chunks)], "us, start of locust included"),
    }


def steady(chunks_per_s: int, seconds: float) -> dict[str, Figure]:
    """Measure at a steady number of chunks a second."""
    rate = chunks_per_s / TOKENS
    return measure(
        f"{chunks_per_s}_chunks_per_s",
        Plan(gap_ms=GAP_MS, first_ms=GAP_MS),
        *("--arrivals", "constant", "--rate-per-s", rate, "--requests", round(rate * seconds)),
        *("--input-tokens", INPUT_TOKENS, "--output-tokens", TOKENS),
    )


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals at each rate")
    parser.add_argument("--rates", default="1000,4000,16000,32000", help="chunks a second")
    parser.add_argument("--long-seconds", type=float, default=40.0, help="of arrivals of the default load")
    given = parser.parse_args()
    if not pinnable():
        raise SystemExit("client and server need a core each")
    figures: dict[str, Figure] = {}
    for rate in map(int, filter(None, given.rates.split(","))):
        figures |= show(steady(rate, given.seconds))
    if given.long_seconds:
        long = Plan(first_ms=500.0, gap_ms=GAP_MS)
        figures |= show(measure("32k_1k_at_0.7", long, "--requests", round(0.7 * given.long_seconds)))
    if given.out:
        given.out.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2))


def show(figures: dict[str, Figure]) -> dict[str, Figure]:
    """Print the figures and return them."""
    for name, found in figures.items():
        spread = f"median {found.median:9.3f}  p99 {found.p99:9.3f}  max {found.max:9.3f}"
        print(f"{name:38} {spread} {found.unit}  n={found.n}", flush=True)
    return figures


if __name__ == "__main__":
    main()

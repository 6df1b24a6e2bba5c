"""What every benchmark reports: medians with their spread, as a table and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """One measured quantity over its repeats. `p99` is by nearest rank: below 100 repeats it is the largest."""

    unit: str
    median: float
    min: float
    max: float
    p99: float
    n: int


Figures = dict[str, Figure]


def figure(unit: str, values: Iterable[float]) -> Figure:
    """Return the figures of the repeats `values`, of which there is one at least."""
    ranked = sorted(values)
    p99 = ranked[math.ceil(0.99 * len(ranked)) - 1]
    return Figure(unit, statistics.median(ranked), ranked[0], ranked[-1], p99, len(ranked))


def show(found: Mapping[str, Figure], last: Mapping[str, Figure] | None = None) -> None:
    """Print a table; with the figures of an earlier run, how the median compares with it."""
    print(f"{'':56}{'median':>10}{'min':>10}{'max':>10}{'p99':>10}{'n':>7}  unit")
    for name, f in found.items():
        row = f"{name:56}{f.median:>10.3f}{f.min:>10.3f}{f.max:>10.3f}{f.p99:>10.3f}{f.n:>7}  {f.unit}"
        before = (last or {}).get(name)
        if before is not None and before.median:
            row += f"   {f.median / before.median:.2f} x the last"
        print(row)


def write(path: Path, found: Figures) -> None:
    """Write figures as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def read(path: Path) -> Figures:
    """Return the figures in a file, none if there is no such file."""
    return msgspec.json.decode(path.read_bytes(), type=Figures) if path.is_file() else {}

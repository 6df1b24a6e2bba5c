"""What the memory service costs: admission after a death, attach cycles, a second engine, freeing.

    python -m benchmarks.memory_service --out FILE [--quick]

Prints a table and writes {name: {unit, median, min, max, p99, n}} as JSON. Whole processes, on this machine's clock.
Targets: admission p99 under 50 ms; no descriptor and no page gained; a second engine adds at most 5 %.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figures import Figures, figure, show, write
from reference_impl.memory_service.client import MemoryClient, service_figures
from reference_impl.realclock import now_ns
from reference_impl.rules.sessions import Mode, Tag

GIB = 1 << 30
ALLOCATIONS = 10_000
PAGE_BYTES = 4096

_DYING = """
import sys
from reference_impl.memory_service.client import MemoryClient, Mode, Tag
path, mapped = sys.argv[1], sys.argv[2] == "mapped"
client = MemoryClient(path, tag=Tag.KV_CACHE, mode=Mode.WRITER, engine_id="dying")
for number in range(10_000):
    client.allocate(f"a{number}", 4096)
if mapped:
    region = client.region()
    region.map(populate=True)
print("ready", flush=True)
sys.stdin.read()
"""

_HOLDING = """
import sys
from reference_impl.memory_service.client import MemoryClient, Mode, Tag
client = MemoryClient(sys.argv[1], tag=Tag.KV_CACHE, mode=Mode.WRITER, engine_id="dying")
client.allocate("kv", 1 << 30)
region = client.region()
region.map(populate=True)
print("ready", flush=True)
sys.stdin.read()
"""

_READING = """
import sys
import numpy
from reference_impl.memory_service.client import MemoryClient, Mode, Tag
client = MemoryClient(sys.argv[1], tag=Tag.WEIGHTS, mode=Mode.READER, engine_id="reader")
numpy.ones(8).sum()
print("ready", flush=True)
sys.stdin.readline()
region = client.region()
region.map(populate=True)
print(int(region.array("w").sum()), flush=True)
sys.stdin.read()
"""


@contextmanager
def service(capacity_bytes: int) -> Iterator[tuple[Path, int]]:
    """Run a service and return its socket and process id."""
    with tempfile.TemporaryDirectory(prefix="mem") as folder:
        path = Path(folder, "s")
        command = [sys.executable, "-m", "reference_impl.memory_service.server", "--socket", str(path)]
        command += ["--device", "gpu0", "--capacity-bytes", str(capacity_bytes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield path, process.pid
            process.terminate()


@contextmanager
def child(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run an engine up to its word `ready`."""
    command = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def wait_freed(path: Path) -> None:
    """Wait until nothing is being freed."""
    while service_figures(path).freeing_bytes:
        pass


def admission(repeats: int, how: str) -> list[float]:
    """Return ms from SIGKILL of a writer with 10,000 allocations to its successor's open session."""
    found = []
    with service(GIB) as (path, _):
        for _ in range(repeats):
            with child(_DYING, str(path), how) as dying:
                killed_ns = now_ns()
                os.kill(dying.pid, signal.SIGKILL)
                with MemoryClient(path, tag=Tag.KV_CACHE, mode=Mode.WRITER, engine_id="next", wait_s=10):
                    found.append((now_ns() - killed_ns) / 1e6)
            wait_freed(path)
    return found


def room_again(repeats: int) -> tuple[list[float], list[float]]:
    """Return ms from SIGKILL of a writer with 1 GiB resident to admission, and to the same GiB allocated anew."""
    admitted, allocated = [], []
    with service(GIB) as (path, _):
        for _ in range(repeats):
            with child(_HOLDING, str(path)) as dying:
                killed_ns = now_ns()
                os.kill(dying.pid, signal.SIGKILL)
                with MemoryClient(path, tag=Tag.KV_CACHE, mode=Mode.WRITER, engine_id="next", wait_s=10) as client:
                    admitted.append((now_ns() - killed_ns) / 1e6)
                    client.allocate("kv", GIB, wait_s=10)
                    allocated.append((now_ns() - killed_ns) / 1e6)
            wait_freed(path)
    return admitted, allocated


def _publish(path: Path, size_bytes: int) -> None:
    with MemoryClient(path, tag=Tag.WEIGHTS, mode=Mode.WRITER, engine_id="writer") as client:
        client.allocate("w", size_bytes)
        with client.region() as region:
            region.map(populate=True)
            region.array("w")[:] = 1
        client.commit()


def _counts(pid: int) -> tuple[int, int]:
    """Return a process's descriptors, and its resident pages of shared memory."""
    shared = int(Path(f"/proc/{pid}/statm").read_text().split()[2])
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), shared


def cycles(count: int) -> tuple[list[float], list[float], list[float]]:
    """Return ms of each export, attach and detach cycle, descriptors gained, and pages gained (service and client)."""
    taken = []
    with service(GIB) as (path, pid):
        _publish(path, 1 << 20)

        def cycle() -> None:
            with MemoryClient(path, tag=Tag.WEIGHTS, mode=Mode.READER, engine_id="e") as client:
                os.close(client.export("w"))
                with client.region() as region:
                    region.map()
                    assert region.array("w")[0] == 1

        for _ in range(100):
            cycle()
        used = service_figures(path).used_bytes
        before = [_settled_counts(pid, None), _counts(os.getpid())]
        for _ in range(count):
            start_ns = now_ns()
            cycle()
            taken.append((now_ns() - start_ns) / 1e6)
        after = [_settled_counts(pid, before[0]), _counts(os.getpid())]
        gained_pages = (service_figures(path).used_bytes - used) / PAGE_BYTES
    descriptors = [float(then[0] - now[0]) for now, then in zip(before, after, strict=True)]
    pages = [float(then[1] - now[1]) for now, then in zip(before, after, strict=True)]
    return taken, descriptors, [*pages, gained_pages]


def _settled_counts(pid: int, like: tuple[int, int] | None) -> tuple[int, int]:
    """Count once the service has closed what its last peer left: it does so a moment after."""
    deadline_ns = now_ns() + 2_000_000_000
    found = _counts(pid)
    while now_ns() < deadline_ns and (like is None or found[0] != like[0]):
        found = _counts(pid)
    return found


def _pss_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


def second_engine(repeats: int, size_bytes: int) -> tuple[list[float], list[float]]:
    """Return what a second engine adds in PSS, in percent of the weights, and ms until it has read them all."""
    added, took = [], []
    with service(2 * GIB) as (path, _):
        _publish(path, size_bytes)
        for _ in range(repeats):
            with child(_READING, str(path)) as first, child(_READING, str(path)) as second:
                _read(first)
                before = _pss_bytes(first.pid) + _pss_bytes(second.pid)
                start_ns = now_ns()
                _read(second)
                took.append((now_ns() - start_ns) / 1e6)
                after = _pss_bytes(first.pid) + _pss_bytes(second.pid)
                added.append(100 * (after - before) / size_bytes)
    return added, took


def _read(engine: subprocess.Popen[str]) -> None:
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write("\n")
    engine.stdin.flush()
    assert int(engine.stdout.readline()) > 0


def measure(quick: bool) -> Figures:
    """Measure everything."""
    repeats, count, size = (3, 200, GIB // 16) if quick else (25, ALLOCATIONS, GIB)
    admitted, allocated = room_again(3 if quick else 10)
    taken, descriptors, pages = cycles(count)
    added, took = second_engine(1 if quick else 5, size)
    return {
        "admission_after_death_with_10000_allocations": figure("ms", admission(repeats, "unmapped")),
        "admission_after_death_with_10000_mapped_allocations": figure("ms", admission(repeats, "mapped")),
        "admission_after_death_with_1GiB_resident": figure("ms", admitted),
        "same_1GiB_allocated_again_after_death": figure("ms", allocated),
        "attach_export_detach_cycle": figure("ms", taken),
        "descriptors_gained_by_cycles": figure("descriptors", descriptors),
        "pages_gained_by_cycles": figure("pages", pages),
        "second_engine_added_pss": figure("%", added),
        "second_engine_attach_and_read_all": figure("ms", took),
    }


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that it runs")
    options = parser.parse_args()
    found = measure(options.quick)
    show(found)
    write(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

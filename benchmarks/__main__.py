"""`python -m benchmarks --out DIR`: every benchmark, one after the other, each compared with its last results.

Results stay in DIR as NAME.json, the ones before as NAME.last.json. Takes about twelve minutes; run it on a quiet
machine. One that cannot run here (no NIXL, no vLLM) says why and is skipped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.figures import read, show

WHOLE_PROCESS: Final = (
    "failover", "lock", "memory_service", "load_client", "leases", "transfer", "reclaim", "operations", "retry_storm",
)  # fmt: skip
LIMIT_S: Final = 1200.0


def keep_last(path: Path) -> None:
    """Set the results of the run before aside."""
    if path.is_file():
        path.replace(path.with_name(f"{path.stem}.last.json"))


def whole_process(name: str, out: Path, quick: bool) -> int:
    """Run one module and print its figures beside the last."""
    path = out / f"{name}.json"
    keep_last(path)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(path), *(["--quick"] if quick else [])]
    print(f"\n== {name}", flush=True)
    code = subprocess.run(command, timeout=LIMIT_S, stdout=subprocess.DEVNULL, check=False).returncode
    if path.is_file():  # none if it was skipped; it has said why
        show(read(path), read(path.with_name(f"{name}.last.json")))
    return code


def in_process(out: Path) -> int:
    """Run pytest-benchmark, which compares with its own last run."""
    print("\n== in process", flush=True)
    storage = out / "in-process"
    compare = ["--benchmark-compare"] if any(storage.rglob("*.json")) else []
    command = [
        sys.executable, "-m", "pytest", "benchmarks/test_in_process.py", "-q", "-m", "bench", "-p", "no:cacheprovider",
        "--benchmark-only", f"--benchmark-storage={storage}", "--benchmark-autosave", *compare,
        "--benchmark-columns=median,min,max,iqr,rounds",
    ]  # fmt: skip
    return subprocess.run(command, timeout=LIMIT_S, check=False).returncode


def main() -> int:
    """Run all; return 0 if every one ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that everything runs")
    parser.add_argument("--only", choices=[*WHOLE_PROCESS, "in_process"], action="append", help="run only this")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = given.only or [*WHOLE_PROCESS, "in_process"]
    codes = [whole_process(name, given.out, given.quick) for name in WHOLE_PROCESS if name in chosen]
    if "in_process" in chosen:
        codes.append(in_process(given.out))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())

"""The house keeps its floors: who may import whom, who may read a clock, and what a rule may know."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = {"reference_impl": 0, "faults": 1, "workloads": 1, "harness": 2, "reports": 3}
CLOCKS = {"time", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time_ns"}
RULES_MAY_IMPORT = {"msgspec", "reference_impl"} | set(sys.stdlib_module_names)
RULES_MAY_NOT = {"asyncio", "os", "random", "secrets", "select", "signal", "socket", "subprocess", "threading", "time"}


def sources(*packages: str) -> Iterator[tuple[str, ast.Module]]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def upward(package: str, tree: ast.Module) -> list[str]:
    """Return the imports that point up, or sideways between floors' rooms."""
    wrong = []
    for line, name in imports(tree):
        other = name.partition(".")[0]
        if other in FLOORS and other != package and FLOORS[other] >= FLOORS[package]:
            wrong.append(f"line {line}: {name}")
        if other == "tests":
            wrong.append(f"line {line}: {name}")
    return wrong


def impure(tree: ast.Module) -> list[str]:
    """Return what a rule may not import."""
    return [
        f"line {line}: {name}" for line, name in imports(tree)
        if (top := name.partition(".")[0]) in RULES_MAY_NOT or top not in RULES_MAY_IMPORT
        or (top == "reference_impl" and not name.startswith("reference_impl.rules"))
    ]  # fmt: skip


def clocks_read(tree: ast.Module) -> list[str]:
    """Return the places that read a clock of the standard library."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
            found += [f"line {node.lineno}: time.{node.attr}"] if node.attr in CLOCKS else []
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"line {node.lineno}: from time import {a.name}" for a in node.names if a.name in CLOCKS]
    return found


def chance_made(tree: ast.Module) -> list[str]:
    """Return the places that make chance of their own."""
    return [f"line {line}: {name}" for line, name in imports(tree) if name in {"random", "numpy.random"}] + [
        f"line {node.lineno}: {ast.unparse(node)}" for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"np.random.default_rng", "np.random.seed"}
    ]  # fmt: skip


@pytest.mark.parametrize("package", FLOORS)
def test_imports_only_point_down(package: str) -> None:
    assert {path: wrong for path, tree in sources(package) if (wrong := upward(package, tree))} == {}


def test_rules_are_pure() -> None:
    assert {path: wrong for path, tree in sources("reference_impl/rules") if (wrong := impure(tree))} == {}


def test_only_one_file_reads_a_clock() -> None:
    found = {path: where for path, tree in sources(*FLOORS) if (where := clocks_read(tree))}
    assert set(found) == {"reference_impl/realclock.py"}, found


def test_only_one_file_makes_chance() -> None:
    found = {path: where for path, tree in sources(*FLOORS) if (where := chance_made(tree))}
    assert set(found) <= {"workloads/chance.py"}, found


def test_no_peer_is_unpickled() -> None:
    users = [path for path, tree in sources(*FLOORS) if any(n in {"pickle", "shelve"} for _, n in imports(tree))]
    assert users == []


@pytest.mark.parametrize(
    ("finder", "text"),
    [
        (lambda t: upward("reference_impl", t), "from harness.run_folder import RunFolder"),
        (lambda t: upward("faults", t), "import workloads.rows"),
        (lambda t: upward("harness", t), "from reports import page"),
        (impure, "import socket"),
        (impure, "from reference_impl.realclock import now_ns"),
        (impure, "import numpy"),
        (clocks_read, "import time\ntime.perf_counter()"),
        (clocks_read, "from time import monotonic"),
        (chance_made, "import random"),
        (chance_made, "np.random.default_rng(1)"),
    ],
)
def test_each_finder_catches_its_twin(finder: object, text: str) -> None:
    assert finder(ast.parse(text))  # type: ignore[operator]

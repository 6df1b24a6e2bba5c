"""The catalogue of rules (`catalogue.toml`), and which tests of a checkout show each: marked `pytest.mark.rule(ids)`.

Tests are found in their source, not by running pytest: so a rule that nobody tests can be told anywhere.
"""

from __future__ import annotations

import ast
import enum
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Final, TypeGuard

import msgspec

MARKER: Final = "pytest.mark.rule"


class Level(enum.StrEnum):
    """How binding a rule is."""

    MUST = "M"
    SHOULD = "S"
    STOCHASTIC = "T"
    """Passing proves little, a failure proves much."""
    UNTESTED = "U"


class Face(enum.StrEnum):
    """Where a rule can be looked at."""

    IN_PROCESS = "I"
    """Through an adapter, on a manual clock."""
    BLACK_BOX = "B"
    """Over HTTP, metrics and process faults."""
    REFERENCE = "R"
    """The reference implementation's own."""


class Source(enum.StrEnum):
    """Where a rule comes from."""

    LEASE = "L"
    """The lease document (vLLM's NIXL KV-cache lease renewal)."""
    SHADOW = "G"
    """The shadow-engine document (Dynamo, GPU memory service)."""
    RPC = "P"
    """The RPC document (deadlines, idempotency)."""
    USERS = "U"
    """What users report."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the catalogue. Ids are stable and never used again."""

    id: str
    level: Level
    faces: list[Face]
    source: list[Source]
    rule: str
    untested: str = ""
    """Why no test shows it. A rule that has tests has no reason not to."""

    @property
    def group(self) -> str:
        """The middle of the id: LEASE, HB, REL ..."""
        return self.id.split("-")[1]


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    rule: list[Rule]


def catalogue() -> list[Rule]:
    """Return all rules, in the catalogue's order."""
    text = resources.files("harness").joinpath("catalogue.toml").read_text()
    return msgspec.convert(tomllib.loads(text), Catalogue).rule


def checkout_tests() -> Path | None:
    """Return the folder of the tests of the checkout that this package runs from, None if it was installed."""
    folder = Path(__file__).resolve().parents[1] / "tests"
    return folder if (folder / "repository").is_dir() else None


def marked_tests(folder: Path) -> dict[str, list[str]]:
    """Return the tests below `folder` that carry each rule's id, as `file::test`, in order of file and line."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        for name, ids in _marked(ast.parse(path.read_text())):
            for rule_id in ids:
                found.setdefault(rule_id, []).append(f"{path.relative_to(folder)}::{name}")
    return found


def _marked(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield each test of a module with its own ids and those of its class and of its module."""
    everywhere = _pytestmark(tree.body)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            ids = everywhere + _decorated(node) + _pytestmark(node.body)
            methods = [n for n in node.body if _is_test(n)]
            for method in methods:
                yield f"{node.name}::{method.name}", ids + _decorated(method)
            if not methods and _decorated(node):
                yield node.name, ids
        elif _is_test(node):
            yield node.name, everywhere + _decorated(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            yield from _made(node.targets, node.value, everywhere)


def _made(targets: list[ast.expr], value: ast.Call, everywhere: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield a state machine's test: `TestPool = pytest.mark.rule(ids)(Pool.TestCase)`."""
    if ids := _ids(value.func):
        yield from ((target.id, everywhere + ids) for target in targets if isinstance(target, ast.Name))


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def _decorated(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[str]:
    return [rule_id for decorator in node.decorator_list for rule_id in _ids(decorator)]


def _pytestmark(body: list[ast.stmt]) -> list[str]:
    ids = []
    for node in body:
        if isinstance(node, ast.Assign) and any(ast.unparse(t) == "pytestmark" for t in node.targets):
            marks = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
            ids += [rule_id for mark in marks for rule_id in _ids(mark)]
    return ids


def _ids(node: ast.expr) -> list[str]:
    """Return the ids of `pytest.mark.rule("...", ...)`, none for anything else."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != MARKER:
        return []
    return [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]

"""The tutorial's steps as modules, to be spoilt."""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType

from harness.conformance.registry import CASES
from harness.conformance.simple_connector import Factory
from harness.conformance.simple_engine import SimpleSubject
from harness.conformance.subject import Capability, Subject
from harness.conformance.trial import Judged, tried
from tests.repository.test_docs import ROOT

STEPS = ROOT / "examples" / "toy_connector" / "steps"


@functools.cache
def step(number: int) -> ModuleType:
    name = f"tutorial_step_{number}"
    spec = importlib.util.spec_from_file_location(name, STEPS / f"step_{number}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def subject(factory: Factory, **changes: object) -> SimpleSubject:
    given = {"meaning": step(4).meaning, "capabilities": (Capability.LEASES, Capability.PREFIX_HITS)}
    return SimpleSubject("spoilt", factory, **(given | changes))  # type: ignore[arg-type]


def judged(case: str, made: Subject, seed: int = 2) -> Judged:
    return tried(CASES[case], made, seed)

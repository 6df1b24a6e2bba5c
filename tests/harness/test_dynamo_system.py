"""What a plan may ask of Dynamo, and what a manifest says of it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from harness.errors import BadInput
from harness.plan import RunPlan
from harness.scenario import Arm, FaultKind, FaultSpec, KvSpec, Load, Phase, Scenario
from harness.targets.dynamo.launch import PYTHON_VARIABLE, settings
from harness.targets.dynamo.system import DynamoSystem
from reference_impl.announcement import Announcement

KILL = FaultSpec(kind=FaultKind.KILL, worker="w0")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DynamoSystem:
    installed = tmp_path / "ai_dynamo-0.0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ai-dynamo\nVersion: 0.0.1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    return DynamoSystem()


def plan_of(system: DynamoSystem, arm: Arm = Arm.COLD, fault: FaultSpec = KILL, **changes: object) -> RunPlan:
    phases = [Phase(name="fault", seconds=1, fault=fault), Phase(name="drain", seconds=1)]
    scenario = msgspec.convert({"name": "s", "title": "s", "phases": phases} | changes, Scenario)
    return RunPlan(
        scenario=scenario, arm=arm, system=system, profile="default", time_scale=1, seed=1, folder=Path("run"),
        command=[],
    )  # fmt: skip


def test_a_manifest_tells_what_stands_in_an_engines_place(
    system: DynamoSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_MIGRATION_LIMIT", "3")
    manifest = plan_of(system).manifest()
    assert manifest.versions["ai-dynamo"] == "0.0.1"
    assert manifest.configuration["dynamo"]["settings"] == {"DYN_MIGRATION_LIMIT": "3"}
    assert any("drawn by chance" in sentence for sentence in manifest.emulated)
    assert not any("time scale" in sentence for sentence in manifest.emulated)
    faster = msgspec.structs.replace(plan_of(system), time_scale=4)
    assert any("time scale 4" in sentence for sentence in faster.manifest().emulated)


def test_nobody_knows_the_right_answers(system: DynamoSystem) -> None:
    assert system.oracle(Announcement(url="", model="canary", run_dir="", workers=[])) is None


def test_what_dynamo_does_not_have_is_refused_in_one_line(system: DynamoSystem) -> None:
    with pytest.raises(BadInput, match="no shadows: run it with --arm cold"):
        plan_of(system, arm=Arm.SHADOW).manifest()
    with pytest.raises(BadInput, match="move no KV"):
        plan_of(system, kv=KvSpec(), phases=[Phase(name="calm", seconds=1), Phase(name="drain", seconds=1)]).manifest()
    with pytest.raises(BadInput, match="dynamo has no engine_core"):
        plan_of(system, fault=FaultSpec(kind=FaultKind.KILL, worker="w0", process="engine_core")).manifest()
    with pytest.raises(BadInput, match="exceed the context"):
        plan_of(system, load=Load(input_tokens=40_000, output_tokens=1_000)).manifest()


def test_only_dynamos_own_settings_are_told() -> None:
    assert settings({"DYN_LOG": "debug", "HOME": "/h", "MY_DYN_KEY": "x"}) == {"DYN_LOG": "debug"}


def test_without_an_interpreter_it_says_which_variable_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    with pytest.raises(BadInput, match=PYTHON_VARIABLE):
        DynamoSystem()
    monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/python")
    with pytest.raises(BadInput, match="/nowhere/python: no such file"):
        DynamoSystem()

"""Recoveries by the process that died: each has a row of its own, with a ratio that both arms were measured for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.run_folder import RunFolder
from reference_impl.rules.events import Event
from reports.page import comparison_page
from reports.summary import summarise
from reports.victims import victims
from tests.reports.runs import pair


def killed(run: RunFolder, processes: list[str]) -> RunFolder:
    """Say of each kill, in order, which process of its engine it struck."""
    path = run.path / "events.jsonl"
    lines, left = path.read_bytes().splitlines(), list(processes)
    for number, line in enumerate(lines[1:-1], 1):
        event = msgspec.json.decode(line, type=Event)
        if event.kind == "fault.injected":
            told = msgspec.structs.replace(event, detail=event.detail | {"process": left.pop(0)})
            lines[number] = msgspec.json.encode(told)
    assert not left
    path.write_bytes(b"\n".join(lines) + b"\n")
    return RunFolder(run.path)


def kills(run: RunFolder) -> int:
    return sum(e.kind == "fault.injected" for e in run.events)


def test_engines_of_one_process_have_no_victims(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    assert victims(cold, shadow) == []
    assert 'id="victims"' not in comparison_page(cold, shadow, summarise(cold, shadow))


def test_each_process_has_its_own_figures(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    names = ["worker", *["api_server"] * (kills(cold) - 1)]
    cold, shadow = killed(cold, names), killed(shadow, names)
    found = victims(cold, shadow)
    assert [v.process for v in found] == ["worker", "api_server"]
    assert [v.cold_recovery_s.n for v in found] == [1, len(names) - 1]
    for victim in found:
        assert victim.cold_recovery_s.median is not None
        assert victim.shadow_recovery_s.median is not None
        assert victim.ratio_recovery == pytest.approx(victim.cold_recovery_s.median / victim.shadow_recovery_s.median)
        assert victim.ratio_recovery_min is not None
        assert victim.ratio_recovery_min <= victim.ratio_recovery
    page = comparison_page(cold, shadow, summarise(cold, shadow))
    assert 'id="victims"' in page
    assert "api server" in page


def test_a_process_that_one_arm_never_lost_has_no_ratio(tmp_path: Path) -> None:
    cold, shadow = pair(tmp_path)
    cold = killed(cold, ["worker"] * kills(cold))
    shadow = killed(shadow, ["engine_core"] * kills(shadow))
    found = {v.process: v for v in victims(cold, shadow)}
    assert found.keys() == {"worker", "engine_core"}
    assert {v.ratio_recovery for v in found.values()} == {None}

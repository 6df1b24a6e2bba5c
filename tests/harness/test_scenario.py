"""Scenarios are checked at the door: what could not be run is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import BadInput
from harness.scenario import load_scenario, scenario_names

GOOD = """
name = "x"
title = "X"
{extra}
[load]
{load}
[[phases]]
name = "baseline"
seconds = 1
[[phases]]
name = "fault"
seconds = 1
{fault}
[[phases]]
name = "drain"
seconds = 1
{drain}
"""


def write(folder: Path, *, extra: str = "", load: str = "", fault: str = "", drain: str = "") -> str:
    path = folder / "s.toml"
    path.write_text(GOOD.format(extra=extra, load=load, fault=fault, drain=drain))
    return str(path)


def test_the_scenarios_that_ship_load() -> None:
    names = set(scenario_names())
    assert {"kill-active", "d_crash", "surge", "p_restart", "d_restart", "router_hold", "two_turn"} <= names
    without = {name for name in names if not load_scenario(name).faults}
    assert without == {"surge", "two_turn"}  # the load, and the passing of time, are what they try


def test_a_good_file_loads(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, fault='fault = { kind = "kill", worker = "w1" }\nrepeats = 3'))
    assert (scenario.faults, scenario.load_s, scenario.waits_s) == (3, 4.0, 0.0)


def test_a_kill_may_wait_until_the_deployment_is_whole(tmp_path: Path) -> None:
    fault = 'fault = { kind = "kill", worker = "w1", when_whole_s = 60 }\nrepeats = 3'
    scenario = load_scenario(write(tmp_path, fault=fault))
    assert (scenario.load_s, scenario.waits_s) == (4.0, 180.0)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"extra": "workers = 0"}, "workers"),
        ({"fault": 'fault = { kind = "kill" }'}, "needs the worker"),
        ({"fault": 'fault = { kind = "router_hold", seconds = 1 }'}, "seconds and requests"),
        ({"fault": 'fault = { kind = "router_hold", seconds = 1, requests = 1 }'}, "needs [kv]"),
        ({"fault": 'fault = { kind = "kill", worker = "w0", requests = 3 }'}, "of a router_hold"),
        ({"fault": 'fault = { kind = "router_hold", seconds = 1, requests = 1, process = "worker" }'}, "of a kill"),
        ({"fault": 'fault = { kind = "kill", worker = "w0", process = "Not One" }'}, "process"),
        ({"fault": 'fault = { kind = "router_hold", seconds = 1, requests = 1, when_whole_s = 9 }'}, "of a kill"),
        ({"fault": 'fault = { kind = "kill", worker = "w0", when_whole_s = -1 }'}, "when_whole_s"),
        ({"load": "utilisation = 1.5"}, "utilisation"),
        ({"extra": "kv = { prefill = 0 }"}, "prefill"),
        ({"extra": "kv = { decode_ranks = 3 }"}, "decode_ranks"),
        ({"extra": "kv = { kv_lease_duration = 0 }"}, "kv_lease_duration"),
        ({"extra": "kv = { decode = 1 }", "fault": 'fault = { kind = "kill", worker = "w0" }'}, "there are p0, d0"),
        ({"load": "sessions = { turns = 2, think_s = [1] }"}, "bidirectional_kv_xfer"),
        ({"extra": "workers = 1000"}, "workers"),
        ({"extra": "surprise = 1"}, "surprise"),
        ({"extra": "requests_min = 0"}, "requests_min"),
        ({"load": "rate_per_s = 0"}, "rate_per_s"),
        ({"load": "rate_per_s = nan"}, "rate_per_s"),
        ({"load": "rate_per_s = inf"}, "rate_per_s"),
        ({"load": 'arrivals = "burst"'}, "arrivals"),
        ({"load": "input_tokens = 0"}, "input_tokens"),
        ({"load": "output_tokens = -1"}, "output_tokens"),
        ({"load": "request_timeout_s = 0"}, "request_timeout_s"),
        ({"fault": 'fault = { kind = "nuke" }'}, "fault.kind"),
        ({"fault": 'fault = { kind = "kill", worker = "w9" }'}, "no worker w9"),
        ({"fault": "repeats = 0"}, "repeats"),
        ({"drain": "repeats = 2"}, "drain"),
        ({"drain": 'fault = { kind = "kill", worker = "w0" }'}, "drain"),
        ({"drain": '[[phases]]\nname = "more"\nseconds = 1'}, "named drain"),
        ({"drain": '[[phases]]\nname = "drain"\nseconds = 1'}, "named drain"),
    ],
)
def test_what_could_not_be_run_is_refused_in_one_line(tmp_path: Path, parts: dict[str, str], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_scenario(write(tmp_path, **parts))
    assert words in str(caught.value)
    assert "s.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_a_drain_is_no_scenario(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('name = "x"\ntitle = "X"\n[[phases]]\nname = "drain"\nseconds = 1\n')
    with pytest.raises(BadInput, match="named drain"):
        load_scenario(str(path))


CONTROL = """
name = "x"
title = "x"
[kv]
[control]
[[phases]]
name = "fault"
seconds = 1
fault = {fault}
[[phases]]
name = "drain"
seconds = 1
"""


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ('{ kind = "fail_point", worker = "p0", action = "exit" }', "needs worker, point and action"),
        ('{ kind = "fail_point", worker = "p9", point = "received", action = "exit" }', "no worker p9"),
        ('{ kind = "fail_point", worker = "p0", point = "nowhere", action = "exit" }', "nowhere"),
        ('{ kind = "fail_point", worker = "p0", point = "before_commit", action = "drop" }', "cannot be done"),
        ('{ kind = "fail_point", worker = "p0", point = "received", action = "delay" }', "seconds"),
        ('{ kind = "fail_point", worker = "p0", point = "received", action = "drop", method = "Nope" }', "is none of"),
        ('{ kind = "fail_point", worker = "p0", point = "migration_copied", action = "exit", method = "Pin" }',
         "no call passes"),
        ('{ kind = "fail_point", worker = "p0", point = "received", action = "exit", requests = 5 }', "ends once"),
        ('{ kind = "kill", worker = "p0", when_whole_s = 9 }', "a schedule of their own"),
        ('{ kind = "blocks_kill" }', "needs the worker"),
        ('{ kind = "blocks_kill", worker = "p0", method = "Pin" }', "are of a fail_point"),
    ],
)  # fmt: skip
def test_a_fault_of_the_control_plane_that_could_not_happen_is_refused(tmp_path: Path, fault: str, named: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(CONTROL.format(fault=fault))
    with pytest.raises(BadInput, match=named):
        load_scenario(str(path))


def test_without_a_control_plane_there_are_no_block_services_to_strike(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(CONTROL.format(fault='{ kind = "blocks_kill", worker = "p0" }').replace("[control]\n", ""))
    with pytest.raises(BadInput, match=r"needs \[control\]"):
        load_scenario(str(path))

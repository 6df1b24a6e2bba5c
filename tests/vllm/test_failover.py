"""A shadow of real vLLM: it takes over when a process of the active server dies, far sooner than a server starts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from harness.targets.vllm.config import installed, load_config
from harness.targets.vllm.shape import Shape, vllm_target
from reference_impl.failover.pidfd import can_run
from reference_impl.realclock import host_ns
from reference_impl.rules.events import Event, EventKind

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]
LIMIT_S = 60.0
RATIO_MIN = 20.0
"""Far below what an idle machine shows (more than 200): this one may be busy."""


@pytest.mark.rule("KVC-SHDW-001", "KVC-SHDW-002", "KVC-SHDW-004", "KVC-MEM-001", "KVC-MEM-002")
async def test_the_shadow_serves_long_before_a_server_could_have_started(tmp_path: Path) -> None:
    target = vllm_target(load_config("nixl"), installed(), Shape(workers=1, shadow=True), tmp_path)
    try:
        await target.start(lambda _: None)
        active, shadow = target.active_engine("w0"), target.parked_engine("w0")
        assert active is not None
        assert shadow is not None
        group = [p for _, p in target.processes() if p.engine == active.name]
        struck_ns = host_ns()
        os.kill(next(p.pid for p in group if p.role == "engine_core"), signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            while (now := target.active_engine("w0")) is None or now.name != shadow.name:
                await asyncio.sleep(0.01)
        assert not [p for p in group if can_run(p.pid, p.start_ticks)]
    finally:
        await target.stop()
    lines = [line for path in (tmp_path / "parts").glob("events-*.jsonl") for line in path.read_bytes().splitlines()]
    events = [msgspec.json.decode(line, type=Event) for line in lines]
    registered = next(e for e in events if e.kind is EventKind.ROUTER_REGISTERED and e.subject == shadow.name)
    start_ns = sum(
        int(e.detail["end_ns"] or 0) - int(e.detail["start_ns"] or 0)
        for e in events if e.kind is EventKind.INIT_PHASE and e.subject == shadow.name
    )  # fmt: skip
    assert start_ns > RATIO_MIN * (registered.t_ns - struck_ns)
    mapped = {e.subject: e.detail for e in events if e.kind is EventKind.WEIGHTS_MAPPED}
    assert mapped[active.name]["role"] == "writer"
    assert mapped[shadow.name]["role"] == "reader"
    assert int(mapped[shadow.name]["copied"] or 0) < int(mapped[shadow.name]["bytes"] or 0) / 1000

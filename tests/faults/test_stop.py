"""SIGSTOP: proved by the kernel, undone by SIGCONT, and not provable of a process that runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from faults.fault import FaultMissed, ProcessRef
from faults.stop import Stop
from reference_impl.failover.pidfd import process_state, start_ticks

SPIN = "while True: pass"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SPIN]) as process:
        yield process
        process.kill()


def ref(process: subprocess.Popen[bytes]) -> ProcessRef:
    ticks = start_ticks(process.pid) or 0
    return ProcessRef(name="child", role="worker", worker_id="w0", pid=process.pid, start_ticks=ticks)


async def test_a_stopped_process_stands_still_until_it_is_healed(child: subprocess.Popen[bytes]) -> None:
    fault = Stop(ref(child))
    assert fault.available() is None
    await fault.inject()
    proof = await fault.prove()
    assert proof.holds
    assert "stopped" in proof.shown_by
    assert process_state(child.pid) == "T"
    await fault.heal()
    healed = await fault.prove_healed()
    assert healed.holds
    assert process_state(child.pid) != "T"


async def test_a_stop_that_never_struck_cannot_be_proved(child: subprocess.Popen[bytes]) -> None:
    fault = Stop(ref(child))
    assert not (await fault.prove()).holds
    await fault.inject()
    await fault.heal()  # aimed wrongly: it goes on before anybody looks
    assert (await fault.prove_healed()).holds


async def test_a_process_that_has_gone_is_missed(child: subprocess.Popen[bytes]) -> None:
    fault = Stop(ref(child))
    child.kill()
    child.wait()
    assert fault.available() is not None
    with pytest.raises(FaultMissed):
        await fault.inject()


async def test_closing_lets_a_stopped_process_go_on(child: subprocess.Popen[bytes]) -> None:
    fault = Stop(ref(child))
    await fault.inject()
    assert (await fault.prove()).holds
    fault.close()
    fault.close()
    assert process_state(child.pid) != "T"

"""The fault `kill`: proved by the kernel, and not provable when it was aimed wrongly."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from faults import kill
from faults.fault import FaultMissed, ProcessRef
from faults.kill import Kill
from reference_impl.failover.pidfd import start_ticks


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def ref(process: subprocess.Popen[bytes], *, ticks: int | None = None) -> ProcessRef:
    started = start_ticks(process.pid) if ticks is None else ticks
    return ProcessRef(name="child", role="engine", worker_id="w0", pid=process.pid, start_ticks=started or 0)


async def test_a_kill_is_proved_by_the_kernel(child: subprocess.Popen[bytes]) -> None:
    fault = Kill(ref(child), successor=lambda: "another")
    assert fault.available() is None
    assert await fault.inject() > 0
    proof = await fault.prove()
    assert proof.holds
    assert str(child.pid) in proof.shown_by
    assert (await fault.prove_healed()).holds


async def test_aimed_at_another_process_of_that_pid_it_misses(child: subprocess.Popen[bytes]) -> None:
    """The negative control: right pid, wrong start."""
    fault = Kill(ref(child, ticks=1))
    assert "not running" in str(fault.available())
    with pytest.raises(FaultMissed):
        await fault.inject()
    assert not (await fault.prove()).holds
    assert child.poll() is None


async def test_a_target_that_ended_by_itself_was_not_killed(child: subprocess.Popen[bytes]) -> None:
    fault = Kill(ref(child))
    child.terminate()
    child.wait()
    with pytest.raises(FaultMissed):
        await fault.inject()
    assert not (await fault.prove()).holds


async def test_a_signal_that_does_not_kill_proves_nothing(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken twin: a kill that sends a harmless signal."""
    monkeypatch.setattr(kill.signal, "SIGKILL", signal.SIGWINCH)
    monkeypatch.setattr(kill, "DEATH_LIMIT_S", 0.2)
    fault = Kill(ref(child))
    await fault.inject()
    proof = await fault.prove()
    assert not proof.holds
    assert "still runs" in proof.shown_by


async def test_without_a_successor_it_is_not_healed(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill, "HEAL_LIMIT_S", 0.1)
    fault = Kill(ref(child), successor=lambda: None)
    await fault.inject()
    await fault.prove()
    assert not (await fault.prove_healed()).holds
    assert not (await Kill(ref(child)).prove_healed()).holds

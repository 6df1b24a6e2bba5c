"""A clock of one's own: shifted for the children, the same base for every event (KVC-CLK-005, C2)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from reference_impl.realclock import host_ns, now_ns
from reference_impl.rules.clock import NS_PER_S
from reference_impl.rules.events import Event
from reference_impl.time_namespace import (
    BOOT_MARGIN_S,
    EXIT_CODE,
    OFFSET_MAX_S,
    TimeNamespaceError,
    available,
    can_shift,
    check_offset,
    uptime_s,
)

PROBLEM = available()
shifted = pytest.mark.skipif(PROBLEM is not None, reason=f"no time namespace here: {PROBLEM}")

PARENT = """
import subprocess, sys
from reference_impl.realclock import host_ns, now_ns
from reference_impl.time_namespace import enter_for_children
enter_for_children(float(sys.argv[1]))
print(now_ns(), host_ns())
sys.stdout.flush()
sys.exit(subprocess.run([sys.executable, "-c", *sys.argv[2:]]).returncode)
"""
CHILD = """
import os, pathlib, subprocess, sys
from reference_impl.event_log import EventLog
from reference_impl.failover.pidfd import start_ticks
from reference_impl.realclock import host_ns, now_ns
from reference_impl.rules.events import EventKind
print(now_ns(), host_ns())
EventLog(pathlib.Path(sys.argv[1]), "child").say(EventKind.ENGINE_WAKING, "e")
print(start_ticks(os.getppid()))
sys.stdout.flush()
subprocess.run([sys.executable, "-c", "from reference_impl.realclock import *; print(now_ns(), host_ns())"])
"""


def family(offset_s: float, events: Path) -> list[list[int]]:
    """Return what a parent, its child and its grandchild printed, as numbers, line by line."""
    ran = subprocess.run(
        [sys.executable, "-c", PARENT, str(offset_s), CHILD, str(events)], capture_output=True, text=True, timeout=30,
        check=True,
    )  # fmt: skip
    return [[int(word) for word in line.split()] for line in ran.stdout.splitlines()]


@shifted
@pytest.mark.parametrize("offset_s", [5000.0, 0.25, 3.2e7, -1.0])
def test_the_children_get_the_clock_and_everybody_the_same_host_clock(tmp_path: Path, offset_s: float) -> None:
    before_ns = now_ns()
    parent, child, ticks, grandchild = family(offset_s, tmp_path / "events.jsonl")
    after_ns = now_ns()
    assert parent[0] == pytest.approx(parent[1], abs=NS_PER_S / 100)
    for own_ns, host in (child, grandchild):
        assert own_ns - host == pytest.approx(offset_s * NS_PER_S, abs=NS_PER_S / 100)
        assert before_ns < host < after_ns
    event = msgspec.json.decode((tmp_path / "events.jsonl").read_bytes(), type=Event)
    assert before_ns < event.t_ns < after_ns
    assert ticks[0] > 0


@shifted
def test_a_process_start_time_reads_the_same_from_within() -> None:
    """Half of a process's name: the supervisor, its engines and the harness must agree on it."""
    code = "import os; from reference_impl.failover.pidfd import start_ticks; print(start_ticks(os.getppid()))"
    parent = PARENT.replace("print(now_ns(), host_ns())", f"exec({code.replace('getppid', 'getpid')!r})")
    ran = subprocess.run(
        [sys.executable, "-c", parent, "5000", code], capture_output=True, text=True, timeout=30, check=True
    )
    own, seen = ran.stdout.split()
    assert own == seen


def test_outside_of_a_namespace_the_two_clocks_are_one() -> None:
    a, b, c = now_ns(), host_ns(), now_ns()
    assert a <= b <= c or Path("/proc/self/timens_offsets").read_text().split()[1] != "0"


def test_no_clock_stands_before_its_boot() -> None:
    assert can_shift(-(uptime_s() - BOOT_MARGIN_S - 5)) == (uptime_s() > BOOT_MARGIN_S)
    assert not can_shift(-(uptime_s() - BOOT_MARGIN_S + 5))
    assert can_shift(1e6)


@pytest.mark.parametrize("offset_s", [-1e9, float("nan"), float("inf"), OFFSET_MAX_S * 2, -1e8])
def test_an_offset_that_no_clock_can_have_is_refused(offset_s: float) -> None:
    with pytest.raises(TimeNamespaceError):
        check_offset(offset_s)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up the right")
def test_without_the_right_the_error_says_which_one_it_takes() -> None:
    code = (
        "import os\nfrom reference_impl.time_namespace import enter_for_children, TimeNamespaceError\n"
        "os.setuid(65534)\ntry:\n    enter_for_children(5)\nexcept TimeNamespaceError as error:\n    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert "CAP_SYS_ADMIN" in ran.stdout


def test_its_exit_code_is_no_other_ones() -> None:
    """As README lists them."""
    assert EXIT_CODE not in {0, 1, 2, 3, 4, 5, 6, 7, 130}

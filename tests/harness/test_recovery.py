"""Recoveries are read off events by the words for time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.latency import percentiles, spread
from harness.recovery import recoveries
from reference_impl.rules.events import EventKind
from tests.harness.histories import History, clean


def test_a_shadow_recovery_has_its_moments(tmp_path: Path) -> None:
    first, second = recoveries(clean(tmp_path / "run"))
    assert (first.victim, first.successor) == ("w0-e1", "w0-e2")
    assert (second.victim, second.successor) == ("w0-e2", "w0-e3")
    assert first.detection_s == pytest.approx(0.010)
    assert first.promotion_s == pytest.approx(0.012)
    assert first.recovery_s == pytest.approx(0.022)
    assert first.redundancy_s == pytest.approx(1.0)


@pytest.mark.parametrize("arm", ["cold", "shadow"])
def test_spans_cover_the_recovery_without_gap_or_overlap(tmp_path: Path, arm: str) -> None:
    for recovery in recoveries(clean(tmp_path / "run", arm)):
        spans = recovery.spans
        assert spans[0].start_ns == recovery.fault_ns
        assert spans[-1].end_ns == recovery.registered_ns
        assert all(a.end_ns == b.start_ns for a, b in pairwise(spans))
        assert sum(s.seconds for s in spans) == pytest.approx(recovery.recovery_s)


def test_the_names_of_the_spans_tell_what_happened(tmp_path: Path) -> None:
    shadow = recoveries(clean(tmp_path / "shadow"))[0]
    assert [s.name for s in shadow.spans] == ["process death to lock", "map weights", "canary", "register"]
    cold = recoveries(clean(tmp_path / "cold", "cold"))[0]
    assert [s.name for s in cold.spans][:2] == ["detect death and spawn", "weights read from file"]


def test_an_unproved_fault_has_no_recovery(tmp_path: Path) -> None:
    history = History()
    history.drop(lambda e: e.kind is EventKind.FAULT_PROVED and e.subject == "kill-1")
    assert [r.fault_id for r in recoveries(history.write(tmp_path / "run"))] == ["kill-2"]


def test_a_worker_that_never_came_back_has_open_moments(tmp_path: Path) -> None:
    history = History()
    history.drop(lambda e: e.subject == "w0-e3" and e.kind in (EventKind.ROUTER_REGISTERED, EventKind.LOCK_WON))
    lost = recoveries(history.write(tmp_path / "run"))[1]
    assert lost.recovery_s is None
    assert lost.detection_s is None
    assert lost.spans == []


def test_another_workers_events_are_not_mixed_in(tmp_path: Path) -> None:
    history = History()
    history.say(20.001, "router", EventKind.ROUTER_REGISTERED, "w1-e9", worker_id="w1", epoch=9)
    assert recoveries(history.write(tmp_path / "run"))[0].successor == "w0-e2"


def test_censored_observations_lie_beyond_all_measured() -> None:
    found = percentiles(pd.Series([1.0, 2.0, 3.0, np.nan]))
    assert (found.n, found.censored) == (4, 1)
    assert (found.p50, found.p99, found.max_measured) == (2.0, None, 3.0)
    nothing = percentiles(pd.Series([], dtype=float))
    assert (nothing.n, nothing.p50) == (0, None)
    assert percentiles(pd.Series([np.nan, np.nan])).p50 is None


def test_percentiles_are_values_that_occurred() -> None:
    found = percentiles(pd.Series(np.arange(1, 101, dtype=float)))
    assert (found.p50, found.p90, found.p99) == (50.0, 90.0, 99.0)


def test_a_spread_counts_what_has_a_value() -> None:
    found = spread([3.0, None, 1.0, 2.0])
    assert (found.median, found.min, found.max, found.n) == (2.0, 1.0, 3.0, 3)
    assert spread([None]).n == 0

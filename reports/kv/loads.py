"""Loads of KV from a peer: how many, and where their time goes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pandas as pd

from harness.errors import BadRunFolder
from harness.latency import Percentiles, percentiles
from harness.run_folder import RunFolder
from reference_impl.content import BLOCK_BYTES
from reference_impl.rules.events import Event, EventKind


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """All loads of a run, by whichever side. Times in ms, as measured."""

    done: int
    failed: int
    """Without turns that came too late: those are no failures."""
    bytes_read: int
    waited_ms: Percentiles
    """Destination there -> read begun: handshake and claim."""
    handshake_ms: Percentiles
    """Of those handshakes that succeeded; one serves all loads from a peer."""
    read_ms: Percentiles
    bytes_per_s: Percentiles
    """Of single reads; p99 is the fastest hundredth."""


def loads(run: RunFolder) -> Loads:
    """Return the loads of `run`."""
    done = run.events_of(EventKind.LOAD_DONE)
    failed = [e for e in run.events_of(EventKind.LOAD_FAILED) if not e.detail.get("expired")]
    read = [(number(run, e, "blocks") * BLOCK_BYTES, number(run, e, "read_ms")) for e in done]
    return Loads(
        done=len(done), failed=len(failed), bytes_read=round(sum(size for size, _ in read)),
        waited_ms=_percentiles(number(run, e, "waited_ms") for e in done),
        handshake_ms=_percentiles(number(run, e, "handshake_ms") for e in run.events_of(EventKind.PEER_CONNECTED)),
        read_ms=_percentiles(ms for _, ms in read),
        bytes_per_s=_percentiles(size / ms * 1e3 for size, ms in read if size and ms > 0),
    )  # fmt: skip


def _percentiles(values: Iterable[float]) -> Percentiles:
    return percentiles(pd.Series(list(values), dtype=float))


def number(run: RunFolder, event: Event, name: str) -> float:
    """Return a number of an event's detail. Raises `BadRunFolder` where there is none."""
    value = event.detail.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRunFolder(run.path, f"events.jsonl: {event.kind} of {event.subject}: {name} is {value!r}, no number")
    return float(value)

"""A search in the process of its subject, seen from the run: a subject that is lost in a history has broken R1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from harness.conformance.orders import Search, Searched, Searching
from harness.conformance.process import SubjectLost, SubjectProcess
from harness.conformance.search.found import Figures, Found, History
from harness.conformance.watch import Breach
from harness.errors import PdproofError
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import NS_PER_S

SILENCE_LIMIT_S: Final = 60.0
"""Real seconds without a word: one history takes milliseconds, on vLLM a second."""
LOST_MAX: Final = 3
"""Subjects that were lost; then the search ends."""


class SearchFailed(PdproofError):
    """A search could not be made."""


def searched(
    process: SubjectProcess, seed: int, seconds: float, folder: Path, say: Callable[[str], None]
) -> tuple[Figures, list[Found]]:
    """Search for so long on a subject, made anew where it is lost. Raises BadSubject, SearchFailed."""
    current = folder / "current-history.json"
    done, found = Figures(), list[Found]()
    begun_ns = now_ns()
    for attempt in range(LOST_MAX + 1):
        left_s = seconds - (now_ns() - begun_ns) / NS_PER_S
        if left_s <= 0 or attempt == LOST_MAX:
            break
        try:
            if not process.alive:
                process.start()
            figures, new, lost = _once(process, Search(seed=seed + attempt, seconds=left_s, current=str(current)), say)
        finally:
            last = _last(current)
        done, found = _together(done, figures), [*found, *new]
        if not lost:
            break
        if last is None:
            raise SearchFailed(f"the search did not begin: {lost}")
        breach = Breach(rule="R1", what=f"the subject's process was lost in this history: {lost}", t_ns=0, where="lost")
        found.append(Found(history=last, breach=breach))
    return done, _kinds(found)


def _once(process: SubjectProcess, order: Search, say: Callable[[str], None]) -> tuple[Figures, list[Found], str]:
    """Return what one subject came to, and how it was lost, "" if it was not."""
    figures, found = Figures(), list[Found]()
    try:
        reply = process.ask(order, SILENCE_LIMIT_S)
        while isinstance(reply, Searching):
            figures, found = reply.figures, reply.found
            broken = ", ".join(sorted({each.breach.rule for each in found})) or "nothing"
            say(f"{figures.histories} histories in {figures.seconds:.0f} s; broken: {broken}")
            reply = process.more(SILENCE_LIMIT_S)
    except SubjectLost as lost:
        return figures, found, str(lost)
    assert isinstance(reply, Searched)
    if reply.problem:
        raise SearchFailed(f"the search could not be made: {reply.problem}")
    return reply.figures, reply.found, ""


def _last(current: Path) -> History | None:
    """Return the history that was run last, and forget it."""
    try:
        data = current.read_bytes()
        current.unlink()
        return msgspec.json.decode(data, type=History)
    except (OSError, msgspec.DecodeError):
        return None


def _together(one: Figures, other: Figures) -> Figures:
    larger = one if one.histories > other.histories else other
    return Figures(
        histories=one.histories + other.histories, seconds=one.seconds + other.seconds, median_ms=larger.median_ms,
        p99_ms=max(one.p99_ms, other.p99_ms), happened=dict(Counter(one.happened) + Counter(other.happened)),
    )  # fmt: skip


def _kinds(found: list[Found]) -> list[Found]:
    """Return the shortest of each kind."""
    kinds: dict[tuple[str, str], Found] = {}
    for each in sorted(found, key=lambda f: f.history.size):
        kinds.setdefault((each.breach.rule, each.breach.where), each)
    return list(kinds.values())

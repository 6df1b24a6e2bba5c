"""One subject in a process of its own: takes orders line by line, answers with a line each.

Answers go through a descriptor of their own, so that a connector may print what it likes. Whatever it does to this
process (hang, exit, crash) is for the parent to notice.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Final

import msgspec

from harness.conformance.defects import broken
from harness.conformance.naming import BadSubject, made
from harness.conformance.orders import (
    Make,
    Order,
    Ready,
    Replay,
    Reply,
    Search,
    Searched,
    Searching,
    Tried,
    Try,
    Unfit,
)
from harness.conformance.registry import CASES
from harness.conformance.search.found import Figures, Found, History
from harness.conformance.search.history import perform
from harness.conformance.subject import Subject
from harness.conformance.trial import tried
from harness.verdicts import Verdict
from reference_impl.processes import die_with_parent

PROBLEM_CHARS_MAX: Final = 400
_DECODER: Final[msgspec.json.Decoder[Make | Try | Search | Replay]] = msgspec.json.Decoder(Make | Try | Search | Replay)


def main(replies_fd: int, parent: int) -> None:
    """Serve until standard input ends."""
    die_with_parent(parent)
    subject: Subject | None = None
    for line in sys.stdin.buffer:
        order: Order = _DECODER.decode(line)
        reply: Reply
        if isinstance(order, Make):
            subject, reply = _make(order)
        else:
            assert subject is not None
            match order:
                case Try():
                    reply = _try(order, subject)
                case Search():
                    reply = _search(order, subject, lambda told: _write(replies_fd, told))
                case Replay():
                    reply = _replay(order, subject)
        _write(replies_fd, reply)


def _make(order: Make) -> tuple[Subject | None, Reply]:
    try:
        subject = made(order.subject)
        reply = Ready(
            subject=subject.name, versions=dict(subject.versions), capabilities=sorted(subject.capabilities)
        )  # fmt: skip
    except BadSubject as error:
        return None, Unfit(problem=str(error))
    except BaseException as error:  # whatever a stranger's module raises while it is imported
        traceback.print_exc()
        return None, Unfit(problem=" ".join(f"{type(error).__name__}: {error}".split())[:PROBLEM_CHARS_MAX])
    return subject, reply


def _try(order: Try, subject: Subject) -> Tried:
    with broken(order.twin):
        try:
            judged = tried(CASES[order.case], subject, order.seed)
        except Exception as error:  # a mistake of the suite's own: said, and the run goes on
            return Tried(verdict=Verdict.ERROR, found=_stumbled(error))
    return Tried(
        verdict=judged.verdict, found=judged.found, note=judged.note, breaches=judged.breaches,
        timeline=judged.timeline,
    )  # fmt: skip


def _search(order: Search, subject: Subject, tell: Callable[[Reply], None]) -> Searched:
    try:
        from harness.conformance.search.search import search
    except ImportError as error:  # the subject's Python is not always ours
        problem = f"the search needs hypothesis in the subject's Python ({error}): pip install hypothesis"
        return Searched(figures=Figures(), found=[], problem=problem)

    def before(history: History) -> None:
        data = msgspec.json.encode(history)
        os.pwrite(current, data, 0)
        os.ftruncate(current, len(data))

    def told(figures: Figures, found: list[Found]) -> None:
        tell(Searching(figures=figures, found=found))

    current = os.open(order.current, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with broken(order.twin):
            done = search(subject, order.seed, order.seconds, tell=told, before=before)
    except Exception as error:  # a mistake of the suite's own
        return Searched(figures=Figures(), found=[], problem=_stumbled(error))
    finally:
        os.close(current)
    return Searched(figures=done.figures, found=done.found)


def _replay(order: Replay, subject: Subject) -> Tried:
    with broken(order.twin):
        try:
            wanted = (order.rule, order.where) if order.rule else None
            outcome = perform(order.history.parameters, order.history.actions, subject, wanted=wanted)
        except Exception as error:
            return Tried(verdict=Verdict.ERROR, found=_stumbled(error))
    said = "; ".join(f"{breach.rule}: {breach.what}" for breach in outcome.breaches)
    return Tried(
        verdict=Verdict.FAIL if outcome.breaches else Verdict.PASS, found=said or "nothing was broken",
        breaches=outcome.breaches, timeline=outcome.timeline,
    )  # fmt: skip


def _stumbled(error: Exception) -> str:
    traceback.print_exception(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"the suite stumbled: {type(error).__name__}: {error} ({last.filename.rpartition('/')[2]}:{last.lineno})"


def _write(fd: int, reply: Reply) -> None:
    left = memoryview(msgspec.json.encode(reply) + b"\n")
    while left:
        left = left[os.write(fd, left) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

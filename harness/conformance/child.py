"""One subject in a process of its own: takes orders line by line, answers with a line each.

Answers go through a descriptor of their own, so that a connector may print what it likes. Whatever it does to this
process (hang, exit, crash) is for the parent to notice.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Final

import msgspec

from harness.conformance.defects import broken
from harness.conformance.naming import BadSubject, made
from harness.conformance.orders import Make, Order, Ready, Reply, Tried, Try, Unfit
from harness.conformance.registry import CASES
from harness.conformance.subject import Subject
from harness.conformance.trial import tried
from harness.verdicts import Verdict
from reference_impl.processes import die_with_parent

PROBLEM_CHARS_MAX: Final = 400
_DECODER: Final[msgspec.json.Decoder[Make | Try]] = msgspec.json.Decoder(Make | Try)


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
            reply = _try(order, subject)
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
            traceback.print_exc()
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
            return Tried(verdict=Verdict.ERROR, found=f"the suite stumbled: {type(error).__name__}: {error} ({place})")
    return Tried(
        verdict=judged.verdict, found=judged.found, note=judged.note, breaches=judged.breaches,
        timeline=judged.timeline,
    )  # fmt: skip


def _write(fd: int, reply: Reply) -> None:
    left = memoryview(msgspec.json.encode(reply) + b"\n")
    while left:
        left = left[os.write(fd, left) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

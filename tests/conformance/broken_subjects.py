"""Subjects that a search is to find broken, as a third party would bring them."""

from __future__ import annotations

import os
from contextlib import ExitStack

from harness.conformance.defects import broken
from harness.conformance.subject import Engine, EngineSpec, Host
from harness.conformance.subjects.reference import ReferenceEngine, ReferenceSubject

_KEPT = ExitStack()


def wrong_id() -> ReferenceSubject:
    """Heartbeats name the reader's own request, for as long as this process lives."""
    _KEPT.enter_context(broken("wrong_id"))
    return ReferenceSubject()


class _Leaving(ReferenceEngine):
    def abort(self, request_id: str) -> None:  # noqa: ARG002 # the interface's
        os._exit(3)


class _LeavingSubject(ReferenceSubject):
    def engine(self, spec: EngineSpec, host: Host) -> Engine:
        engine = self._engines[spec.name] = _Leaving(self, spec, host)
        return engine


def leaves() -> ReferenceSubject:
    """An abort ends the process."""
    return _LeavingSubject()

"""Keeps a session's KV blocks while its user thinks: renews the hand-off every so often (KVC-CLK-007)."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Any, Final

import gevent
import msgspec
from geventhttpclient.response import HTTPParseError

from reference_impl.realclock import now_ns
from workloads.host import Host, post_json

RENEW_PATH: Final = "/v1/kv/renew"
ANSWER_TIMEOUT_S: Final = 5.0
NS_PER_S: Final = 1e9


class _Renewal(msgspec.Struct, frozen=True):
    """The body of a renewal."""

    kv_transfer_params: msgspec.Raw


class KeepAlive:
    """Renews `hand_off` at `host` every `every_s` from `since_ns` on, for as long as the block runs.

    An answer with `kv_transfer_params` of its own (the blocks have a new end now) takes the place of `hand_off`. A
    renewal that fails is counted and no more; the next one tries again. Without a hand-off, or with `every_s` 0, it
    does nothing.
    """

    def __init__(self, host: Host, hand_off: bytes, every_s: float, since_ns: int) -> None:
        self.hand_off = hand_off
        self.renewals = 0
        self.failed = 0
        self._host = host
        self._every_s = every_s
        self._since_ns = since_ns
        self._greenlet: Any = None

    def __enter__(self) -> None:
        if self.hand_off and self._every_s:
            self._greenlet = gevent.spawn(self._run)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._greenlet is not None:
            self._greenlet.kill(block=False)

    def _run(self) -> None:
        for beat in itertools.count(1):
            due_ns = self._since_ns + beat * self._every_s * NS_PER_S
            gevent.sleep(max(0.0, (due_ns - now_ns()) / NS_PER_S))
            self._renew()

    def _renew(self) -> None:
        body = msgspec.json.encode(_Renewal(msgspec.Raw(self.hand_off)))
        try:
            status, answer = post_json(self._host, RENEW_PATH, body, min(self._every_s, ANSWER_TIMEOUT_S))
        except (OSError, HTTPParseError):
            status, answer = 0, None
        if status != 200:
            self.failed += 1
            return
        self.renewals += 1
        if isinstance(answer, dict) and isinstance(renewed := answer.get("kv_transfer_params"), dict):
            self.hand_off = msgspec.json.encode(renewed)

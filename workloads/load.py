"""The open loop: one dispatcher walks the plan in absolute time, and each request runs in a greenlet of its own.

A request's bytes are made and its connection is opened `LEAD_S` before its moment, so that at the moment only the
write is left. A slow server never holds back the next request.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import gevent
import msgspec
from gevent.event import Event
from gevent.pool import Group

from reference_impl.realclock import now_ns
from workloads.host import Host
from workloads.lateness import TICK_S, LagLog, spoilt
from workloads.options import LoadOptions
from workloads.plan import Planned, plan
from workloads.prompts import request_body
from workloads.rows import NS_PER_MS, RequestRecord
from workloads.streaming import Stopped, StreamedRequest
from workloads.summary import Figures, figures

LEAD_S: Final = 0.1
NS_PER_S: Final = 1e9
START_AHEAD_S: Final = 0.3
"""From the start to the schedule's origin where none is given: more than the lead of the first request."""
CUT_S: Final = 5.0
"""How long broken-off requests may take to write their rows."""

DESCRIPTORS: Final = 8192
"""Connections that a load is ready for at once; more work as well, with a pause when the table grows."""

OnRow = Callable[[RequestRecord, Figures], None]


def make_room_for_descriptors(count: int) -> None:
    """Let the kernel make its table of this process's descriptors large enough for `count` now.

    It grows the table of a process with threads only after a grace period of its own: the connection that opens
    descriptor 64, 256, 512 and so on would stop the event loop for about 10 ms.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open("rb") as nothing:
        os.close(fcntl.fcntl(nothing, fcntl.F_DUPFD_CLOEXEC, min(count, soft - 1)))


class LoadPart(msgspec.Struct, frozen=True, kw_only=True):
    """One process's part of a load: the origin (monotonic ns), and which shard of how many."""

    origin_ns: int
    model: str
    shard: int = 0
    shards: int = 1
    round: int = 0
    """How often this locust started a load before (its web page can): keeps request ids apart."""


class Load:
    """Sends one part of the load to `host`. `on_row` is called when a request ends; an OSError there ends the load."""

    def __init__(self, options: LoadOptions, host: Host, part: LoadPart, on_row: OnRow) -> None:
        self.rows: list[Figures] = []
        self.broken = ""
        self.ended = Event()
        self._options = options
        self._host = host
        self._part = part
        self._on_row = on_row
        self._lags = LagLog()
        self._stopping = Event()
        self._running = Group()

    def start(self) -> None:
        """Begin; `ended` is set when the last row is written."""
        gc.collect()
        gc.freeze()  # what lives now lives to the end: no later collection has to walk it
        make_room_for_descriptors(DESCRIPTORS)
        ticker = gevent.spawn(self._tick)
        gevent.spawn(self._run, plan(self._options, self._part.shard, self._part.shards)).link(lambda _: ticker.kill())

    def stop(self) -> None:
        """Start no more requests; those that run get the drain time."""
        self._stopping.set()

    def cut(self) -> None:
        """Start no more requests, and end those that run as unknown."""
        self._stopping.set()
        gevent.killall(list(self._running), exception=Stopped, block=False)

    def _run(self, planned: Iterator[Planned]) -> None:
        try:
            for item in planned:
                ahead_s = (self._part.origin_ns + item.offset_ns - now_ns()) / NS_PER_S - LEAD_S
                self._stopping.wait(max(ahead_s, 0.0))
                if self._stopping.is_set():
                    break
                self._running.start(gevent.Greenlet(self._one, item))
            self._running.join(timeout=self._options.drain_s)
            self.cut()
            self._running.join(timeout=CUT_S)
        finally:
            self.ended.set()

    def _tick(self) -> None:
        while True:
            self._lags.expect(now_ns() + round(TICK_S * NS_PER_S))
            gevent.sleep(TICK_S)
            self._lags.tick(now_ns())

    def _one(self, item: Planned) -> None:
        """Send one request at its moment, and write its row. A load that stops before the moment leaves no row."""
        options, part = self._options, self._part
        intended_ns = part.origin_ns + item.offset_ns
        request_id = f"{options.seed}-{part.round}-{item.prompt.index}"
        request = StreamedRequest(self._host, options.api.path, request_id, self._body(item))
        try:
            request.prepare()
            self._stopping.wait(max((intended_ns - now_ns()) / NS_PER_S, 0.0))
        except Stopped:
            request.close()
            return
        if self._stopping.is_set():
            request.close()
            return
        request.exchange(options.request_timeout_s)
        self._row(request_id, item, intended_ns, request)

    def _body(self, item: Planned) -> bytes:
        options = self._options
        return request_body(
            item.prompt,
            model=self._part.model,
            max_tokens=item.max_tokens,
            api=options.api,
            prompt_format=options.format,
            strict_openai=options.strict_openai,
        )

    def _row(self, request_id: str, item: Planned, intended_ns: int, request: StreamedRequest) -> None:
        seen, answer = request.seen, request.answer
        chunks = answer.chunks
        stamps = [seen.sent_ns, *(chunk.t_ns for chunk in (chunks[:1] + chunks[-1:]))]
        schedule_lag_ms = (seen.send_began_ns - intended_ns) / NS_PER_MS
        record = RequestRecord(
            request_id=request_id,
            prompt=item.prompt,
            max_tokens=item.max_tokens,
            intended_ns=intended_ns,
            sent_ns=seen.sent_ns,
            send_began_ns=seen.send_began_ns,
            first_byte_ns=seen.first_byte_ns,
            end_ns=seen.end_ns,
            chunks=chunks,
            output_ids=answer.output_ids,
            outcome=seen.outcome,
            http_status=seen.http_status,
            error=seen.error,
            node_d=seen.node_d,
            node_p=seen.node_p,
            spoilt=spoilt(schedule_lag_ms, self._lags.worst_at_ms(stamps)),
        )
        row = figures(record, seen.stopped)
        self.rows.append(row)
        try:
            self._on_row(record, row)
        except OSError as error:
            self.broken = self.broken or f"cannot write rows: {error}"
            self._stopping.set()

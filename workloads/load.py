"""The open loop: one dispatcher walks the plan in absolute time, and each session runs in a greenlet of its own.

A request's bytes are made and its connection is opened `LEAD_S` before its moment, so that at the moment only the
write is left. A slow server never holds back the next session; inside a session, a turn waits for the one before.
"""

from __future__ import annotations

import contextlib
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
from workloads.conversation import Conversation, Said
from workloads.host import Host
from workloads.keep_alive import KeepAlive
from workloads.lateness import TICK_S, LagLog, spoilt
from workloads.options import LoadOptions
from workloads.plan import NS_PER_S, Planned, Turn, plan
from workloads.prompts import request_body
from workloads.rows import NS_PER_MS, Outcome, RequestRecord
from workloads.streaming import Stopped, StreamedRequest
from workloads.summary import Figures, figures

LEAD_S: Final = 0.1
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
        self._unbegun = 1
        """Sessions under way whose last turn has not begun yet; the dispatcher counts as one."""
        self._all_begun = Event()

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
        self._all_begun.set()

    def cut(self) -> None:
        """Start no more requests, and end those that run as unknown."""
        self.stop()
        gevent.killall(list(self._running), exception=Stopped, block=False)

    def _run(self, planned: Iterator[Planned]) -> None:
        try:
            for item in planned:
                ahead_s = (self._part.origin_ns + item.offset_ns - now_ns()) / NS_PER_S - LEAD_S
                self._stopping.wait(max(ahead_s, 0.0))
                if self._stopping.is_set():
                    break
                self._unbegun += 1
                self._running.start(gevent.Greenlet(self._session, item))
            self._last_turn_begun()
            self._all_begun.wait()
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

    def _last_turn_begun(self) -> None:
        self._unbegun -= 1
        if not self._unbegun:
            self._all_begun.set()

    def _session(self, item: Planned) -> None:
        """Send a session's turns. One that is not whole is the last; a load that stops before a turn leaves no row."""
        options, part = self._options, self._part
        name = f"{options.seed}-{part.round}-{item.index}"
        talk = Conversation(item, name, part.origin_ns + item.offset_ns)
        with contextlib.ExitStack() as unbegun, contextlib.suppress(Stopped):
            unbegun.callback(self._last_turn_begun)
            for turn in item.turns:
                self._think(talk, turn)
                if self._stopping.is_set():
                    return
                said = talk.say(turn)
                with contextlib.closing(self._request(said)) as request:
                    request.prepare()
                    self._wait_until(said.intended_ns)
                    if self._stopping.is_set():
                        return
                    if talk.is_last(turn):
                        unbegun.close()
                    request.exchange(options.request_timeout_s)
                talk.hear(said, request.answer, request.seen)
                self._row(said, request)
                if request.seen.outcome is not Outcome.OK:
                    return

    def _think(self, talk: Conversation, turn: Turn) -> None:
        """Wait until it is time to make a turn's bytes, and keep its hand-off alive meanwhile."""
        keep_alive = KeepAlive(self._host, talk.hand_off, talk.keep_alive_s, talk.end_ns)
        with keep_alive:
            self._wait_until(talk.moment_ns(turn) - round(LEAD_S * NS_PER_S))
        talk.renewed(keep_alive.hand_off, keep_alive.renewals, keep_alive.failed)

    def _wait_until(self, moment_ns: int) -> None:
        """Wait until `moment_ns`, or until the load is told to stop."""
        self._stopping.wait(max((moment_ns - now_ns()) / NS_PER_S, 0.0))

    def _request(self, said: Said) -> StreamedRequest:
        options = self._options
        body = request_body(
            said.tokens,
            model=self._part.model,
            max_tokens=said.turn.max_tokens,
            api=options.api,
            prompt_format=options.format,
            strict_openai=options.strict_openai,
            logprobs=options.logprobs,
            hand_off=said.hand_off,
        )
        return StreamedRequest(self._host, options.api.path, said.request_id, body)

    def _row(self, said: Said, request: StreamedRequest) -> None:
        seen, answer = request.seen, request.answer
        chunks = answer.chunks
        stamps = [seen.sent_ns, *(chunk.t_ns for chunk in (chunks[:1] + chunks[-1:]))]
        schedule_lag_ms = (seen.send_began_ns - said.intended_ns) / NS_PER_MS
        record = RequestRecord(
            request_id=said.request_id,
            prompt=said.prompt,
            session=said.prompt.index,
            turn=said.prompt.turn,
            think_ms=said.turn.think_ms,
            max_tokens=said.turn.max_tokens,
            intended_ns=said.intended_ns,
            sent_ns=seen.sent_ns,
            send_began_ns=seen.send_began_ns,
            first_byte_ns=seen.first_byte_ns,
            end_ns=seen.end_ns,
            chunks=chunks,
            output_ids=answer.output_ids,
            logprobs=answer.logprobs,
            cached_tokens=answer.cached_tokens,
            kv_handed=bool(said.hand_off),
            renewals=said.renewals,
            renewals_failed=said.renewals_failed,
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
            self.stop()

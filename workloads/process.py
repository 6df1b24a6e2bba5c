"""What one locust process does from start to end: alone, as a worker with its shard, or as the master of workers."""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import sys
from abc import ABC, abstractmethod
from typing import Any, Final

import gevent
import msgspec
import psutil
from gevent.event import Event
from geventhttpclient.response import HTTPParseError

from reference_impl.realclock import now_ns
from workloads.host import Host, HostRefused, get_json
from workloads.load import CUT_S, START_AHEAD_S, Load, LoadPart
from workloads.mooncake import BadTrace
from workloads.options import BadOption, LoadOptions, from_namespace, shard_path
from workloads.plan import longest_ns
from workloads.row_file import RowFile
from workloads.rows import NS_PER_MS, RequestRecord
from workloads.summary import Figures, summary

logger = logging.getLogger("pdproof")

USAGE: Final = 2
NO_ANSWER: Final = 7
CANNOT_WRITE: Final = 7
LOST_WORKER: Final = 4
PROBE_S: Final = 5.0
WORKER_GRACE_S: Final = 10.0
"""How long a worker's last rows may take to reach the master after its load must have ended, and how long a worker may
be silent before it is given up: one that locust misses for a moment on a busy machine comes back."""
WORKER_END_S: Final = 2 * CUT_S
"""How long workers may take to end after one of them was given up; then they are killed."""
ENDED: Final = "pdproof_ended"
STOP: Final = "pdproof_stop"


class CannotStart(Exception):
    """The load cannot start: one clear line, and the exit code that says why."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(line)
        self.code = code


def checked_options(environment: Any, kind: type[LoadOptions]) -> LoadOptions:
    """Return the options of a `kind` of load. Raises `CannotStart`."""
    try:
        options = from_namespace(environment.parsed_options, kind)
        options.check_start(now_ns())
    except BadOption as error:
        raise CannotStart(str(error), USAGE) from None
    return options


def probe(url: str, model: str) -> tuple[Host, str]:
    """Return the host and the model to ask for. Raises `CannotStart` if nothing answers there or no model is known."""
    try:
        host = Host(url)
        listed = get_json(host, "/v1/models", PROBE_S)
    except HostRefused as error:
        raise CannotStart(str(error), USAGE) from None
    except HTTPParseError as error:
        raise CannotStart(f"host {url} does not speak HTTP ({error}); check --host", NO_ANSWER) from None
    except OSError as error:
        raise CannotStart(f"host {url} does not answer ({error}); start it or check --host", NO_ANSWER) from None
    if model:
        return host, model
    try:
        return host, str(listed["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise CannotStart(f"host {url} lists no model at /v1/models; name one with --model", USAGE) from None


class Process(ABC):
    """The load of this process, as locust's events drive it. `Alone` and `Worker` say what follows its end."""

    def __init__(self, environment: Any, kind: type[LoadOptions]) -> None:
        self._environment = environment
        self._kind = kind
        self._runner = environment.runner
        self._load: Load | None = None
        self._file: RowFile | None = None
        self._round = 0
        self._told_to_stop = False

    def test_start(self) -> None:
        """Start the load that the options ask for."""
        try:
            options = checked_options(self._environment, self._kind)
            host, model = probe(self._environment.host or "", options.model)
            load = self._load_of(options, host, model)
        except CannotStart as error:
            self._cannot(str(error), error.code)
            return
        self._told_to_stop = False
        self._load = load
        self._round += 1
        load.start()
        gevent.spawn(self._follow, load)

    def enough(self) -> None:
        """Start no more requests; the load ends by itself when those that run have ended."""
        if self._load is not None:
            self._load.stop()

    def test_stopping(self) -> None:
        """Let the running requests drain, and return when the last row is written."""
        self._told_to_stop = True
        if self._load is not None:
            self._load.stop()
            self._load.ended.wait()
            self._end()

    def quitting(self) -> None:
        """Break off what still runs; its rows are written as unknown."""
        self._told_to_stop = True
        if self._load is not None:
            self._load.cut()
            self._load.ended.wait(2 * CUT_S)
            self._end()

    @abstractmethod
    def place(self) -> LoadPart:
        """Return this process's part, its model left open."""

    @abstractmethod
    def over(self, rows: list[Figures], problem: str, code: int) -> None:
        """Make known what the load came to; `code` is the exit code if there is a `problem`."""

    @abstractmethod
    def _cannot(self, line: str, code: int) -> None:
        """Make known that the load cannot start."""

    def _load_of(self, options: LoadOptions, host: Host, model: str) -> Load:
        part = msgspec.structs.replace(self.place(), model=model, round=self._round)
        try:
            self._file = RowFile(shard_path(options.rows, part.shard, part.shards)) if options.rows else None
            return Load(options, host, part, self._on_row)
        except (BadTrace, OSError, ValueError) as error:
            raise CannotStart(str(error), USAGE) from None

    def _follow(self, load: Load) -> None:
        load.ended.wait()
        self._end()

    def _end(self) -> None:
        load, self._load = self._load, None
        if load is None:
            return
        if self._file is not None:
            self._file.close()
        self.over(load.rows, load.broken, CANNOT_WRITE)

    def _on_row(self, record: RequestRecord, row: Figures) -> None:
        """Write the row, and show it in locust's own statistics."""
        if self._file is not None:
            self._file.write(record)
        fire = self._environment.events.request.fire
        problem = RuntimeError(record.error) if row.counts_as_failure else None
        elapsed_ms = (record.end_ns - record.send_began_ns) / NS_PER_MS
        self._fire(fire, "E2E", elapsed_ms, record, problem)
        if row.ttft_ms is not None:
            self._fire(fire, "TTFT", row.ttft_ms, record, None)
        if row.mean_decode_gap_ms is not None:
            self._fire(fire, "decode gap", row.mean_decode_gap_ms, record, None)

    @staticmethod
    def _fire(fire: Any, kind: str, value_ms: float, record: RequestRecord, problem: Exception | None) -> None:
        fire(
            request_type=kind,
            name="stream",
            response_time=value_ms,
            response_length=record.output_tokens,
            exception=problem,
            context={},
        )


class Alone(Process):
    """The only process: it ends locust when the plan is done."""

    def place(self) -> LoadPart:
        """Return the whole load."""
        return LoadPart(
            origin_ns=self._environment.parsed_options.start_at_ns or now_ns() + round(START_AHEAD_S * 1e9), model=""
        )

    def over(self, rows: list[Figures], problem: str, code: int) -> None:
        """Print the summary; end locust unless it is ending already."""
        conclude(self._environment, [Ended(rows, problem, code)])
        if not self._told_to_stop:
            gevent.spawn(end_run, self._environment)

    def _cannot(self, line: str, code: int) -> None:
        refuse(self._environment, line, code)


class Ended(msgspec.Struct, frozen=True):
    """What a worker tells the master at its end."""

    rows: list[Figures]
    problem: str = ""
    code: int = 0


class Worker(Process):
    """One of several processes: sends its shard, and tells the master when it is done."""

    def __init__(self, environment: Any, kind: type[LoadOptions]) -> None:
        super().__init__(environment, kind)
        self._runner.register_message(STOP, self._on_stop, concurrent=True)

    def place(self) -> LoadPart:
        """Return the shard that the master's origin and this worker's index name."""
        given = self._environment.parsed_options
        return LoadPart(
            origin_ns=given.pdproof_origin_ns, model="", shard=self._runner.worker_index, shards=given.pdproof_shards
        )

    def over(self, rows: list[Figures], problem: str, code: int) -> None:
        """Send the figures to the master."""
        self._runner.send_message(ENDED, {"ended": msgspec.msgpack.encode(Ended(rows, problem, code))})

    def _cannot(self, line: str, code: int) -> None:
        self.over([], f"worker {self._runner.worker_index}: {line}", code)

    def _on_stop(self, msg: Any, **_: Any) -> None:
        self._told_to_stop = True
        if self._load is not None:
            if msg.data["cut"]:
                self._load.cut()
            else:
                self._load.stop()


class Master:
    """Gives all workers one origin, and gathers what they came to."""

    def __init__(self, environment: Any, kind: type[LoadOptions]) -> None:
        self._environment = environment
        self._kind = kind
        self._runner = environment.runner
        self._ended: list[Ended] = []
        self._shards = 0
        self._drain_s = 0.0
        self._all_ended = Event()
        self._end_limit_ns: int | None = None
        self._told_to_stop = False
        self._lost = False
        self._runner.register_message(ENDED, self._on_ended)

    def test_start(self) -> None:
        """Fix the origin and the number of shards; locust sends them to the workers with the options."""
        try:
            options = checked_options(self._environment, self._kind)
            longest = _longest_ns(options)
            self._shards = self._runner.worker_count
            if self._shards != self._runner.worker_index_max:
                raise CannotStart("a worker was lost before the start, and its shard with it; start again", LOST_WORKER)
        except CannotStart as error:
            refuse(self._environment, str(error), error.code)
            return
        given = self._environment.parsed_options
        given.pdproof_origin_ns = options.start_at_ns or now_ns() + round((1 + START_AHEAD_S) * 1e9)
        given.pdproof_shards = self._shards
        self._ended = []
        self._told_to_stop = self._lost = False
        self._drain_s = options.drain_s
        after_s = options.drain_s + CUT_S + WORKER_GRACE_S
        self._end_limit_ns = None if longest is None else given.pdproof_origin_ns + longest + round(after_s * 1e9)
        self._all_ended = Event()
        gevent.spawn(self._follow, self._all_ended)

    def test_stopping(self) -> None:
        """Let all workers drain."""
        self._stop(cut=False, within_s=self._drain_s + CUT_S + WORKER_GRACE_S)

    def quitting(self) -> None:
        """Let all workers break off."""
        self._stop(cut=True, within_s=2 * CUT_S)

    def _stop(self, *, cut: bool, within_s: float) -> None:
        self._told_to_stop = True
        if self._shards and not self._all_ended.is_set():
            self._runner.send_message(STOP, {"cut": cut})
            if not self._all_ended.wait(within_s):
                self._conclude()

    def _follow(self, all_ended: Event) -> None:
        """Wait for all workers, but not for one that is gone, nor past the moment at which the plan must be over."""
        seen_ns = now_ns()
        while not all_ended.wait(1.0):
            if self._runner.worker_count >= self._shards:
                seen_ns = now_ns()
            silent = now_ns() - seen_ns > WORKER_GRACE_S * 1e9
            if silent or (self._end_limit_ns is not None and now_ns() > self._end_limit_ns):
                self._conclude()
        # A stop that locust itself began because every worker is gone leaves a headless run open for ever.
        if self._lost or not self._told_to_stop:
            end_run(self._environment)

    def _on_ended(self, msg: Any, **_: Any) -> None:
        self._ended.append(msgspec.msgpack.decode(msg.data["ended"], type=Ended))
        if len(self._ended) == self._shards:
            self._conclude()

    def _conclude(self) -> None:
        if self._all_ended.is_set():
            return
        if missing := self._shards - len(self._ended):
            line = f"{missing} of {self._shards} workers never said how they ended: their rows are not whole"
            self._ended.append(Ended([], line, LOST_WORKER))
            self._lost = True
            if self._environment.parsed_options.processes:
                atexit.register(end_workers, _workers(), WORKER_END_S)
        conclude(self._environment, self._ended)
        self._all_ended.set()


def _longest_ns(options: LoadOptions) -> int | None:
    try:
        return longest_ns(options)
    except (BadTrace, OSError, ValueError) as error:
        raise CannotStart(str(error), USAGE) from None


def _workers() -> list[int]:
    """Return the workers that locust forked; an embedded deployment is a child as well, but in a session of its own."""
    pids = [child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [pid for pid in pids if os.getsid(pid) == os.getsid(0)]


def end_workers(pids: list[int], within_s: float) -> None:
    """Kill those of these children that do not end `within_s`: locust itself waits for each of them without a limit."""
    limit_ns = now_ns() + round(within_s * 1e9)
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if not select.select([descriptor], [], [], max(0.0, (limit_ns - now_ns()) / 1e9))[0]:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


def conclude(environment: Any, parts: list[Ended]) -> None:
    """Print the summary of all parts and settle the exit code."""
    rows = [row for part in parts for row in part.rows]
    for part in parts:
        if part.problem:
            logger.error(part.problem)
            environment.process_exit_code = environment.process_exit_code or part.code
    if environment.process_exit_code is None and any(row.counts_as_failure for row in rows):
        environment.process_exit_code = environment.parsed_options.exit_code_on_error
    sys.stdout.write(summary(rows))
    sys.stdout.flush()


def refuse(environment: Any, line: str, code: int) -> None:
    """Say why no load starts, and end the run. At the web page the next start may be good, so only the line is left."""
    logger.error(line)
    if environment.parsed_options.headless:
        environment.process_exit_code = code
    gevent.spawn(end_run, environment)


def end_run(environment: Any) -> None:
    """End locust, or only the test where its web page stays open."""
    if environment.parsed_options.headless:
        environment.runner.quit()
    else:
        environment.runner.stop()

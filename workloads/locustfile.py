"""What all locustfiles of pdproof share: one kind of load, joined to locust's events.

Locust gives the command line, the web page, `--processes` and its live statistics; the load itself is ours
(`workloads/load.py`), and so are all figures that count.

Exit codes: 0 all good, 1 a request failed (locust's --exit-code-on-error), 2 wrong usage, 4 a worker was lost, 6 the
embedded deployment did not start, 7 the host does not answer or the rows cannot be written.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import sys
from typing import Any, Final, NoReturn

import gevent
import gevent.event
from locust import FastHttpUser, events, task
from locust.runners import MasterRunner, WorkerRunner

from reference_impl.processes import die_with_parent
from workloads import embedded
from workloads.options import LOOPBACK, LoadOptions, add_options, shard_path
from workloads.process import USAGE, Alone, CannotStart, Master, Worker, checked_options, probe
from workloads.rows import ENOUGH, PARENT_VARIABLE

logger = logging.getLogger("pdproof")
NO_DEPLOYMENT: Final = 6
INTERRUPTED: Final = 130


class IdleUser(FastHttpUser):
    """The one user that locust insists on. It idles: the load's own dispatcher sends, whatever -u and -r say."""

    fixed_count = 1

    @task
    def idle(self) -> None:
        """Wait to be stopped."""
        gevent.event.Event().wait()


class Locustfile:
    """One `kind` of load, joined to locust's events; `file` is its locustfile's name for the help."""

    def __init__(self, kind: type[LoadOptions], file: str) -> None:
        self._kind = kind
        self._file = file
        self._process: Alone | Worker | Master | None = None
        self._started_early = False
        # A shell without job control starts background commands with SIGINT ignored; rows must be flushed all the same.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        events.init_command_line_parser.add_listener(choose_master_port)
        events.init_command_line_parser.add_listener(lambda parser: add_options(parser, kind, file))
        events.init.add_listener(self._init)
        events.test_start.add_listener(self._test_start)
        events.test_stopping.add_listener(self._test_stopping)
        events.quitting.add_listener(self._quitting)

    def _init(self, environment: Any, runner: Any, **_: Any) -> None:
        """Check what can be checked before the start, and take this process's part."""
        if parent := os.environ.pop(PARENT_VARIABLE, ""):
            die_with_parent(int(parent))
        if isinstance(runner, WorkerRunner):
            if environment.parsed_options.processes:  # forked by the master: not to outlive it
                die_with_parent(os.getppid())
            self._process = Worker(environment, self._kind)
        else:
            try:
                self._before_start(environment, runner)
            except CannotStart as error:
                _give_up(str(error), error.code)
            part = Master if isinstance(runner, MasterRunner) else Alone
            self._process = part(environment, self._kind)
        if not isinstance(self._process, Master):
            gevent.signal_handler(ENOUGH, self._process.enough)
        if self._started_early:
            self._process.test_start()

    def _test_start(self, **_: Any) -> None:
        """Start. A master may say so as soon as a worker is connected, which is before locust says `init` there.

        The worker's greenlet handles "ack" and "spawn" in one go if both wait in its socket, and whoever asks to be
        told of `test_start` only in `init` never hears of it: a load that does not begin, and a master that waits.
        """
        if self._process is None:
            self._started_early = True
        else:
            self._process.test_start()

    def _test_stopping(self, **_: Any) -> None:
        if self._process is not None:
            self._process.test_stopping()

    def _quitting(self, **_: Any) -> None:
        if self._process is not None:
            self._process.quitting()

    def _before_start(self, environment: Any, runner: Any) -> None:
        given = environment.parsed_options
        if given.num_users or given.spawn_rate:
            logger.warning("-u and -r are ignored: the schedule says when a request starts")
        options = checked_options(environment, self._kind)
        if options.rows and isinstance(runner, MasterRunner):
            taken = [shard_path(options.rows, n, given.expect_workers) for n in range(given.expect_workers)]
            for path in taken:
                if path.exists() and path.stat().st_size:
                    raise CannotStart(f"--rows: {path} holds something already; name another file or remove it", USAGE)
        if environment.host:
            probe(environment.host, options.model)
        else:
            _embed(environment)


def choose_master_port(parser: Any) -> None:
    """With `--processes` on this machine alone, let master and workers meet at a free port and not at locust's own.

    Locust's fixed port (5557) would let only one such load run at a time. A port that is given stays.
    """
    given, _ = parser.parse_known_args()
    usual = parser.get_default("master_port")
    if given.processes and not given.worker and given.master_port == given.master_bind_port == usual:
        with socket.socket() as free:
            free.bind((LOOPBACK, 0))
            port = free.getsockname()[1]
        parser.set_defaults(master_port=port, master_bind_port=port)


def _embed(environment: Any) -> None:
    try:
        deployment = embedded.start()
    except embedded.EmbeddedFailed as error:
        _give_up(str(error), NO_DEPLOYMENT)
    except KeyboardInterrupt:
        _give_up("interrupted while the embedded deployment was starting; it has been ended", INTERRUPTED)
    atexit.register(deployment.stop)
    environment.host = deployment.url
    environment.parsed_options.model = environment.parsed_options.model or deployment.model


def _give_up(line: str, code: int) -> NoReturn:
    sys.stderr.write(f"pdproof: error: {line}\n")
    sys.exit(code)

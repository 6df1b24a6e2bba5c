"""The locustfile: `locust -f workloads/pd.py [--host URL] [--headless]`.

Without a host it starts the embedded reference deployment. Locust gives the command line, the web page, `--processes`
and its live statistics; the load itself is ours (`workloads/load.py`), and so are all figures that count. Its options:
`locust -f workloads/pd.py --help-load`.

Exit codes: 0 all good, 1 a request failed (locust's --exit-code-on-error), 2 wrong usage, 4 a worker was lost, 6 the
embedded deployment did not start, 7 the host does not answer or the rows cannot be written.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from typing import Any, Final, NoReturn

import gevent.event
from locust import FastHttpUser, events, task
from locust.runners import MasterRunner, WorkerRunner

from reference_impl.processes import die_with_parent
from workloads import embedded
from workloads.options import add_options, shard_path
from workloads.rows import PARENT_VARIABLE
from workloads.session import USAGE, Alone, CannotStart, Master, Worker, checked_options, probe

logger = logging.getLogger("pdproof")
NO_DEPLOYMENT: Final = 6
INTERRUPTED: Final = 130


# A shell without job control starts background commands with SIGINT ignored; rows must be flushed all the same.
signal.signal(signal.SIGINT, signal.default_int_handler)


class PdUser(FastHttpUser):
    """The one user that locust insists on. It idles: the load's own dispatcher sends, whatever -u and -r say."""

    fixed_count = 1

    @task
    def idle(self) -> None:
        """Wait to be stopped."""
        gevent.event.Event().wait()


events.init_command_line_parser.add_listener(add_options)


@events.init.add_listener
def on_init(environment: Any, runner: Any, **_: Any) -> None:
    """Check what can be checked before the start, and take this process's part."""
    if parent := os.environ.pop(PARENT_VARIABLE, ""):
        die_with_parent(int(parent))
    if isinstance(runner, WorkerRunner):
        if environment.parsed_options.processes:  # forked by the master: not to outlive it
            die_with_parent(os.getppid())
        session: Any = Worker(environment)
    else:
        try:
            _before_start(environment, runner)
        except CannotStart as error:
            _give_up(str(error), error.code)
        session = Master(environment) if isinstance(runner, MasterRunner) else Alone(environment)
    environment.events.test_start.add_listener(lambda **_: session.test_start())
    environment.events.test_stopping.add_listener(lambda **_: session.test_stopping())
    environment.events.quitting.add_listener(lambda **_: session.quitting())


def _before_start(environment: Any, runner: Any) -> None:
    given = environment.parsed_options
    if given.num_users or given.spawn_rate:
        logger.warning("-u and -r are ignored: the schedule says when a request starts (--rate-per-s, --trace)")
    options = checked_options(environment)
    if options.rows and isinstance(runner, MasterRunner):
        taken = [shard_path(options.rows, n, given.expect_workers) for n in range(given.expect_workers)]
        for path in taken:
            if path.exists() and path.stat().st_size:
                raise CannotStart(f"--rows: {path} holds something already; name another file or remove it", USAGE)
    if environment.host:
        probe(environment.host, options.model)
    else:
        _embed(environment)


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

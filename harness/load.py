"""The load, as a child process: locust with our locustfile, so that gevent stays out of the harness."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from typing import Final

from harness.errors import PdproofError
from harness.run_folder import RunWriter
from harness.scenario import Load
from reference_impl.processes import end_child, last_line
from reference_impl.realclock import now_ns
from reference_impl.rules.clock import s_to_ns
from workloads.rows import PARENT_VARIABLE

LEAD_S: Final = 3.0
"""Between the child's start and the first scheduled moment: locust takes about two seconds to import."""
SPARE_S: Final = 30.0
STOP_LIMIT_S: Final = 10.0
_CODES_OF_A_RUN: Final = (0, 1)
"""Locust ends with 1 when a request failed; whether that is well is for the checks to say."""


class LoadFailed(PdproofError):
    """The load could not be driven; the message holds its last word."""


class LocustLoad:
    """One open-loop load of `load_s` seconds at `rate_per_s`, whose rows land in the run's parts."""

    def __init__(self, *, load: Load, rate_per_s: float, load_s: float, drain_s: float, seed: int) -> None:
        self._load = load
        self._rate_per_s = rate_per_s
        self._load_s = load_s
        self._drain_s = drain_s
        self._seed = seed
        self._child: asyncio.subprocess.Process | None = None

    async def start(self, url: str, model: str, writer: RunWriter) -> int:
        """Start the child and return the moment at which its schedule begins (monotonic ns)."""
        origin_ns = now_ns() + s_to_ns(LEAD_S)
        load = self._load
        locustfile = importlib.util.find_spec("workloads.pd")
        if locustfile is None or locustfile.origin is None:
            raise LoadFailed("workloads.pd is not installed: run `make` again")
        arguments = [
            "-f", locustfile.origin, "--headless", "--host", url, "--model", model,
            "--rate-per-s", str(self._rate_per_s), "--arrivals", load.arrivals, "--duration-s", str(self._load_s),
            "--input-tokens", str(load.input_tokens), "--output-tokens", str(load.output_tokens),
            "--seed", str(self._seed), "--request-timeout-s", str(load.request_timeout_s),
            "--drain-s", str(self._drain_s), "--start-at-ns", str(origin_ns),
            "--rows", str(writer.parts / "requests-0.jsonl"),
        ]  # fmt: skip
        with (writer.logs / "locust.log").open("wb") as log:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "locust", *arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
            )  # fmt: skip
        return origin_ns

    async def wait(self, writer: RunWriter) -> None:
        """Wait until every request has ended. Raises LoadFailed if the load did not run to its end."""
        if self._child is None:
            raise RuntimeError("start comes before wait")
        limit_s = LEAD_S + self._load_s + self._drain_s + SPARE_S
        try:
            async with asyncio.timeout(limit_s):
                code = await self._child.wait()
        except TimeoutError as error:
            raise LoadFailed(
                f"the load did not end within {limit_s:.0f} s; see {writer.logs / 'locust.log'}"
            ) from error
        if code < 0:
            raise LoadFailed(f"the load was ended by {signal.Signals(-code).name}; see {writer.logs / 'locust.log'}")
        if code not in _CODES_OF_A_RUN:
            raise LoadFailed(f"the load ended with {code}: {last_line(writer.logs / 'locust.log')}")

    async def stop(self) -> None:
        """End the child if it still runs; it writes its running requests as unknown."""
        if self._child is not None:
            await end_child(self._child, STOP_LIMIT_S)

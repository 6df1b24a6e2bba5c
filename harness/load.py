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
from workloads.rows import ENOUGH, PARENT_VARIABLE

LEAD_S: Final = 3.0
"""Between the child's start and the first scheduled moment: locust takes about two seconds to import."""
SPARE_S: Final = 30.0
STOP_LIMIT_S: Final = 10.0
_CODES_OF_A_RUN: Final = (0, 1)
"""Locust ends with 1 when a request failed; whether that is well is for the checks to say."""


class LoadFailed(PdproofError):
    """The load could not be driven; the message holds its last word."""


class LocustLoad:
    """One open-loop load of `load_s` seconds, whose rows land in the run's parts. Durations are as they pass.

    With `logprobs` answers come with the probabilities of their tokens, for an oracle that looks at them.
    With a `time_scale` arrivals come so many times faster, and think times are divided by it.
    """

    def __init__(
        self, *, load: Load, time_scale: float, load_s: float, drain_s: float, seed: int, logprobs: bool = False
    ) -> None:
        self._load = load
        self._logprobs = logprobs
        self._time_scale = time_scale
        self._load_s = load_s
        self._drain_s = drain_s
        self._seed = seed
        self._child: asyncio.subprocess.Process | None = None

    async def start(self, url: str, model: str, writer: RunWriter) -> int:
        """Start the child and return the moment at which its schedule begins (monotonic ns)."""
        origin_ns = now_ns() + s_to_ns(LEAD_S)
        load = self._load
        arguments = [
            "-f", _locustfile("workloads.multiturn" if load.sessions else "workloads.pd"), "--headless",
            "--host", url, "--model", model, "--rate-per-s", str(load.rate_per_s * self._time_scale),
            "--arrivals", load.arrivals, "--duration-s", str(self._load_s),
            "--input-tokens", str(load.input_tokens), "--output-tokens", str(load.output_tokens),
            "--seed", str(self._seed), "--request-timeout-s", str(load.request_timeout_s),
            "--drain-s", str(self._drain_s), "--start-at-ns", str(origin_ns),
            "--rows", str(writer.parts / "requests-0.jsonl"), *self._of_sessions(),
            *(["--logprobs"] if self._logprobs else []),
        ]  # fmt: skip
        with (writer.logs / "locust.log").open("wb") as log:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "locust", *arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
            )  # fmt: skip
        return origin_ns

    def _of_sessions(self) -> list[str]:
        sessions = self._load.sessions
        if sessions is None:
            return []
        think_s = ",".join(str(seconds / self._time_scale) for seconds in sessions.think_s)
        return [
            "--turns", str(sessions.turns), "--turn-tokens", str(sessions.turn_tokens), "--think-s", think_s,
            "--keep-alive-s", str(sessions.keep_alive_s / self._time_scale),
        ]  # fmt: skip

    async def wait(self, writer: RunWriter) -> None:
        """Wait until every request has ended. Raises LoadFailed if the load did not run to its end."""
        if self._child is None:
            raise RuntimeError("start comes before wait")
        limit_s = LEAD_S + self._load_s + self._later_turns_s() + self._drain_s + SPARE_S
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

    def _later_turns_s(self) -> float:
        """Return how long the last session may take after its first turn: its drain begins with its last turn."""
        sessions = self._load.sessions
        if sessions is None:
            return 0.0
        longest_s = max(sessions.think_s) / self._time_scale + self._load.request_timeout_s
        return (sessions.turns - 1) * longest_s

    def enough(self) -> None:
        """Have no more requests start; those that run come to their end."""
        if self._child is not None and self._child.returncode is None:
            self._child.send_signal(ENOUGH)

    async def stop(self) -> None:
        """End the child if it still runs; it writes its running requests as unknown."""
        if self._child is not None:
            await end_child(self._child, STOP_LIMIT_S)


def _locustfile(module: str) -> str:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise LoadFailed(f"{module} is not installed: run `make` again")
    return found.origin

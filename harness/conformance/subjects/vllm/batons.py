"""Runs a connector's background work one piece at a time, so that a world with threads in it is still one history.

A task runs in a thread of its own, and only while its engine waits for it: until it asks somebody something, or is
done. As with vLLM's own executor, one task is under way at a time; those behind it wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from harness.conformance.subject import Host
from harness.conformance.subjects.vllm.virtual_time import WorldTime

_PATIENCE_S: Final = 20.0
"""A task that runs longer without asking anything hangs."""


class TaskEnded(BaseException):
    """Its engine has ended."""


class TaskHangs(Exception):
    """A background task neither asks nor ends."""


class _Task:
    def __init__(self, act: Callable[[], Any], future: Future[Any]) -> None:
        self.act, self.future = act, future
        self.go, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.question: tuple[int, bytes] | None = None
        self.reply: bytes | None = None
        self.over = False
        self.thread: threading.Thread | None = None


class TurnTaker:
    """Stands in for `ThreadPoolExecutor(max_workers=1)` of one engine."""

    def __init__(self, host: Host, world_time: WorldTime) -> None:
        self._host, self._time = host, world_time
        self._waiting: deque[_Task] = deque()
        self._running: _Task | None = None
        self._closed = False

    def submit(self, act: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a task. It begins a little later, when nobody is in the middle of something."""
        future: Future[Any] = Future()
        self._waiting.append(_Task(lambda: act(*args, **kwargs), future))
        self._host.later(0, self._next)
        return future

    def shutdown(self, wait: bool = True, **_: Any) -> None:  # noqa: ARG002 # the executor's
        """Begin nothing more, and end what runs."""
        self._closed = True
        self._waiting.clear()
        task, self._running = self._running, None
        if task is not None and task.thread is not None:
            task.over = True
            task.go.release()
            task.thread.join(_PATIENCE_S)

    def ask(self, port: int, question: bytes) -> bytes | None:
        """Called by a task: ask whoever listens at a port, and wait for the answer; None: none came in time."""
        task = self._running
        assert task is not None
        task.question = port, question
        task.back.release()
        task.go.acquire()
        if task.over:
            raise TaskEnded
        return task.reply

    def _next(self) -> None:
        if self._running is not None or not self._waiting or self._closed:
            return
        task = self._running = self._waiting.popleft()
        task.thread = threading.Thread(target=self._run, args=(task,), daemon=True, name="pdproof-task")
        task.thread.start()
        self._on(task)

    def _run(self, task: _Task) -> None:
        task.go.acquire()
        try:
            if not task.over:
                task.future.set_running_or_notify_cancel()
                task.future.set_result(task.act())
        except TaskEnded:
            pass
        except BaseException as error:  # the future carries it
            task.future.set_exception(error)
        finally:
            task.question = None
            task.back.release()

    def _on(self, task: _Task) -> None:
        """Let a task run until it asks, or ends."""
        with self._time.of(self._host):
            task.go.release()
            if not task.back.acquire(timeout=_PATIENCE_S):
                raise TaskHangs(f"a background task of the connector hangs for {_PATIENCE_S:g} s")
        if task.question is None:
            self._running = None
            self._host.later(0, self._next)
            return
        port, question = task.question

        def answered(reply: bytes | None, _sent_ns: int, _got_ns: int) -> None:
            if self._running is task:
                task.reply = reply
                self._on(task)

        self._host.ask(port, question, answered)

"""The asynchronous front of a store: coroutines queue their writes, one thread commits them in batches.

A batch is whatever has queued while the last commit ran, so nobody waits for a batch to fill: alone a write is
committed at once, and under load many share one sync (group commit), each as durable as before. One write that fails
does not fail its neighbours. Source: KVC-IDEM-006, -007, -012.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

import msgspec

from reference_impl.blockservice.store import PURGE_ROWS, Done, Store, StoreError, Write

T = TypeVar("T")

PURGE_PAUSE_S: Final = 0.05
"""Between two slices of a purge: what has queued meanwhile is committed, and more."""
QUEUE_MAX: Final = 1024
BATCH_MAX: Final = 128


class QueueFull(Exception):
    """The queue has no room: nothing was taken in. Try again later."""


class WriterClosed(QueueFull):
    """The writer takes in nothing more: its process is about to end."""


class _Task(msgspec.Struct, gc=False, eq=False):
    """A write, or anything else that is to be done on the store, and who waits for it."""

    waiter: asyncio.Future[Any]
    write: Write | None = None
    method: Callable[[Store], Any] | None = None


class _Ended(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What came of a task: a result or an error."""

    waiter: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class Writer:
    """Runs writes on `store`, which belongs to the writer's thread from now until `close`.

    `queue_max` tasks may wait, `batch_max` writes are committed as one. Used from one event loop.
    """

    def __init__(self, store: Store, *, queue_max: int = QUEUE_MAX, batch_max: int = BATCH_MAX) -> None:
        for name, value in (("queue_max", queue_max), ("batch_max", batch_max)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._store = store
        self._queue_max = queue_max
        self._batch_max = batch_max
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._closed = False
        self.batches = 0
        """Transactions in which writes were committed, or answered without one."""
        self.writes = 0
        """Writes in them."""
        self._thread = threading.Thread(target=self._work, name="store-writer", daemon=True)
        self._thread.start()

    @property
    def queue_length(self) -> int:
        """Tasks that wait for the commit that runs."""
        return self._tasks.qsize()

    async def run(self, write: Write) -> Done:
        """Return what came of a write, once it is durable. Raises StoreError, QueueFull.

        A caller that is cancelled before its batch has begun has had no effect; later it may have had one, and its
        answer is kept for the retry. `Store.look` tells which.
        """
        done: Done = await self._queued(write=write)
        return done

    async def call(self, method: Callable[[Store], T]) -> T:
        """Return what `method` makes of the store, after the writes that were queued before. Raises what it raises.

        QueueFull as well.
        """
        result: T = await self._queued(method=method)
        return result

    async def close(self) -> None:
        """Finish what has been taken in, and end the thread. The store is its owner's again, and still open."""
        if not self._closed:
            self._closed = True
            self._tasks.put(None)
        await asyncio.to_thread(self._thread.join)

    def _queued(self, write: Write | None = None, method: Callable[[Store], Any] | None = None) -> asyncio.Future[Any]:
        if self._closed:
            raise WriterClosed("the store takes in nothing more: its process is about to end")
        if self._tasks.qsize() >= self._queue_max:
            raise QueueFull(f"{self._queue_max} writes wait for the store already: try again later")
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._tasks.put(_Task(waiter, write, method))
        return waiter

    # In the thread.

    def _work(self) -> None:
        """Take what has queued, again and again, until `close`: its writes together, and then all else."""
        closing = False
        while not closing:
            writes, calls, closing = self._gather()
            _tell(self._committed(writes))
            _tell([self._called(task) for task in calls if not task.waiter.cancelled()])

    def _gather(self) -> tuple[list[_Task], list[_Task], bool]:
        """Wait for a task; return what has queued by then, writes and calls, and whether it was the last.

        The writes go first, so that reads between them do not cut a batch into many. A call still comes after every
        write that was queued before it; those that were queued after it run at the same time as it, so either may be
        first.
        """
        writes: list[_Task] = []
        calls: list[_Task] = []
        task = self._tasks.get()
        while task is not None:
            (calls if task.write is None else writes).append(task)
            if len(writes) == self._batch_max or len(calls) == self._queue_max:
                return writes, calls, False
            try:
                task = self._tasks.get_nowait()
            except Empty:
                return writes, calls, False
        return writes, calls, True

    def _committed(self, batch: list[_Task]) -> list[_Ended]:
        wanted = [task for task in batch if not task.waiter.cancelled()]  # nobody waits any more for the others
        if not wanted:
            return []
        self.batches += 1
        self.writes += len(wanted)
        try:
            done = self._store.run([_write(task) for task in wanted])
        except Exception as error:
            return self._one_by_one(wanted, error)
        return [_Ended(task.waiter, result) for task, result in zip(wanted, done, strict=True)]

    def _one_by_one(self, batch: list[_Task], error: Exception) -> list[_Ended]:
        """Try each write of a batch that failed alone, so that only those fail that have to."""
        if len(batch) == 1:
            return [_Ended(batch[0].waiter, error=error)]
        if isinstance(error, StoreError) and error.code == "locked":
            # Every one of them would wait for the same lock, as long as the batch has waited.
            return [self._attempt(task, lambda write: self._known_or(write, error)) for task in batch]
        return [self._attempt(task, lambda write: self._store.run([write])[0]) for task in batch]

    def _known_or(self, write: Write, error: Exception) -> Done:
        """Return what needs no lock; else raise the error."""
        done = self._store.answered(write)
        if done is None:
            raise error
        return done

    def _attempt(self, task: _Task, attempt: Callable[[Write], Done]) -> _Ended:
        try:
            return _Ended(task.waiter, attempt(_write(task)))
        except Exception as error:
            return _Ended(task.waiter, error=error)

    def _called(self, task: _Task) -> _Ended:
        assert task.method is not None
        try:
            return _Ended(task.waiter, task.method(self._store))
        except Exception as error:
            return _Ended(task.waiter, error=error)


async def purge(writer: Writer, *, rows_max: int = PURGE_ROWS, pause_s: float = PURGE_PAUSE_S) -> int:
    """Have a store forget what it may, in slices between which it runs writes; return how many rows that were.

    Raises StoreError, QueueFull; what was forgotten by then stays forgotten.
    """
    gone = 0
    while True:
        rows = await writer.call(lambda store: store.purge(rows_max=rows_max))
        gone += rows
        if rows < rows_max:
            return gone
        await asyncio.sleep(pause_s)


def _write(task: _Task) -> Write:
    assert task.write is not None
    return task.write


def _tell(ended: list[_Ended]) -> None:
    """Hand results to their event loop, one wake-up for all of a batch."""
    if not ended:
        return
    try:
        ended[0].waiter.get_loop().call_soon_threadsafe(_deliver, ended)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return


def _deliver(ended: list[_Ended]) -> None:
    for one in ended:
        if one.waiter.done():
            continue  # cancelled meanwhile
        if one.error is not None:
            one.waiter.set_exception(one.error)
        else:
            one.waiter.set_result(one.result)

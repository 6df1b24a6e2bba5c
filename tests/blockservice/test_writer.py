import asyncio
import threading

import pytest

from reference_impl.blockservice.store import Done, StoreError
from reference_impl.blockservice.writer import QueueFull, Writer, WriterClosed, purge
from reference_impl.rules.blockgroups import MigrationStatus, Refusal
from tests.blockservice.store_kit import (
    BG,
    RESERVE,
    START,
    Clock,
    Crash,
    effects_of,
    make,
    make_with_small_pages,
    write,
)

LIMIT_S = 30


class Gate:
    """Stops the store's thread before a commit, until it is opened; counts the commits."""

    def __init__(self, *, shut=False):
        self.commits = 0
        self.at_commit = lambda _number: None
        self.reached = threading.Event()
        self._open = threading.Event()
        if not shut:
            self._open.set()

    def shut(self):
        self.reached.clear()
        self._open.clear()

    def open(self):
        self._open.set()

    def __call__(self, point):
        if point == "before_commit":
            self.commits += 1
            self.reached.set()
            assert self._open.wait(LIMIT_S)
            self.at_commit(self.commits)

    async def arrived(self):
        assert await asyncio.to_thread(self.reached.wait, LIMIT_S)


@pytest.fixture
async def gate():
    return Gate()


@pytest.fixture
async def store(tmp_path, gate):
    made = make(tmp_path / "node.db", reached=gate)
    yield made
    made.close()


@pytest.fixture
async def writer(store, gate):
    made = Writer(store)
    yield made
    gate.open()
    await made.close()


def queued(writer, *operation_ids):
    """Callers that wait for writes, each in a task of its own."""
    return [asyncio.create_task(writer.run(write(name, RESERVE))) for name in operation_ids]


async def until_queued(writer, count):
    while writer.queue_length < count:
        await asyncio.sleep(0)


async def behind(writer, gate, *operation_ids):
    """Callers whose writes have queued behind a commit that stands at the gate, with the one that stands there."""
    gate.shut()
    first = queued(writer, "first")
    await gate.arrived()
    rest = queued(writer, *operation_ids)
    await until_queued(writer, len(operation_ids))
    return first[0], rest


async def test_a_write_alone_is_committed_at_once(writer, gate):
    done = await writer.run(write("op", RESERVE))
    assert (done.answer.reserved, done.replayed, gate.commits) == (1, False, 1)
    assert (writer.batches, writer.writes, writer.queue_length) == (1, 1, 0)


async def test_what_queued_during_a_commit_is_committed_together(writer, gate, store):
    first, rest = await behind(writer, gate, *(f"op-{n}" for n in range(40)))
    gate.open()
    told = await asyncio.gather(first, *rest)
    assert gate.commits == 2
    assert (writer.batches, writer.writes) == (2, 41)
    assert [done.answer.reserved for done in told] == list(range(1, 42)), "in the order in which they came"
    assert store.group("t", BG).reserved == 41


async def test_a_batch_is_bounded(store, gate):
    writer = Writer(store, batch_max=10)
    first, rest = await behind(writer, gate, *(f"op-{n}" for n in range(25)))
    gate.open()
    await asyncio.gather(first, *rest)
    assert gate.commits == 1 + 3
    await writer.close()


async def test_a_full_queue_takes_nothing_in(store, gate):
    writer = Writer(store, queue_max=3)
    first, rest = await behind(writer, gate, "a", "b", "c")
    with pytest.raises(QueueFull, match="3 writes wait for the store already"):
        await writer.run(write("d", RESERVE))
    gate.open()
    await asyncio.gather(first, *rest)
    assert (await writer.run(write("d", RESERVE))).replayed is False
    await writer.close()


@pytest.mark.parametrize("name", ["queue_max", "batch_max"])
async def test_sizes_that_make_no_sense_are_refused_by_name(store, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Writer(store, **{name: 0})


@pytest.mark.rule("KVC-IDEM-006")
async def test_concurrent_retries_have_one_effect_and_one_answer(writer, store):
    told = await asyncio.gather(*queued(writer, *["op"] * 50))
    assert sum(not done.replayed for done in told) == 1
    assert len({done.answer for done in told}) == 1
    assert store.group("t", BG).reserved == len(effects_of(store, "op")) == 1


# Failures.


async def test_one_write_that_cannot_be_run_does_not_fail_its_neighbours(writer, gate, store, monkeypatch):
    keep = type(store)._keep

    def fails(self, asked, *rest):
        if asked.operation_id == "bad":
            raise Crash("this one")
        keep(self, asked, *rest)

    monkeypatch.setattr(type(store), "_keep", fails)
    first, rest = await behind(writer, gate, "a", "bad", "b")
    gate.open()
    await first
    told = await asyncio.gather(*rest, return_exceptions=True)
    assert [type(one) for one in told] == [Done, Crash, Done]
    assert store.group("t", BG).reserved == 3
    assert effects_of(store, "bad") == []


async def test_a_full_disk_fails_only_those_that_find_no_room(tmp_path):
    store = make_with_small_pages(tmp_path / "small.db")
    writer = Writer(store)
    known = await writer.run(write("known", RESERVE))
    await writer.call(lambda s: s._db.execute("PRAGMA max_page_count = 1").fetchone())
    names = [f"{n}-{'x' * 110}" for n in range(20)]
    told = await asyncio.gather(*queued(writer, "known", *names), return_exceptions=True)
    assert told[0] == Done(known.answer, replayed=True)
    failed = [one for one in told if isinstance(one, Exception)]
    assert failed
    assert {(type(one), one.code) for one in failed} == {(StoreError, "full")}
    await writer.call(lambda s: s._db.execute("PRAGMA max_page_count = 1073741823").fetchone())
    retried = await asyncio.gather(*queued(writer, *names))
    assert all(done.answer.applied for done in retried)
    assert store.group("t", BG).reserved == 21
    await writer.close()
    store.close()


@pytest.mark.rule("KVC-IDEM-001")
async def test_a_locked_file_is_waited_for_once_a_batch_and_replays_are_answered(tmp_path):
    gate = Gate()
    store = make(tmp_path / "node.db", reached=gate, busy_timeout_s=0.05)
    holder = make(tmp_path / "node.db")
    writer = Writer(store)
    known = await writer.run(write("known", RESERVE))
    holder._db.execute("BEGIN IMMEDIATE")
    waits = []
    run = store.run
    store.run = lambda writes: (waits.append(len(writes)), run(writes))[1]
    told = await asyncio.gather(*queued(writer, "a", "known", "b", "c"), return_exceptions=True)
    assert told[1] == Done(known.answer, replayed=True)
    assert {one.code for one in (told[0], *told[2:])} == {"locked"}
    assert len(waits) == writer.batches - 1
    holder._db.execute("ROLLBACK")
    assert (await writer.run(write("a", RESERVE))).answer.reserved == 2
    await writer.close()
    holder.close()
    store.close()


async def test_a_denial_is_an_answer_and_no_failure(writer):
    done = await writer.run(write("old", RESERVE, issued_ms=1))
    assert done.answer.refusal is Refusal.ID_EXPIRED


# Callers that have gone.


@pytest.mark.rule("KVC-IDEM-012")
async def test_a_caller_that_goes_while_it_queues_has_no_effect(writer, gate, store):
    first, (gone, stays) = await behind(writer, gate, "gone", "stays")
    gone.cancel()
    await asyncio.wait([gone])
    gate.open()
    await asyncio.gather(first, stays)
    assert (store.look("t", "gone"), effects_of(store, "gone")) == (None, [])
    assert (await writer.run(write("gone", RESERVE))).replayed is False
    assert store.group("t", BG).reserved == 3


@pytest.mark.rule("KVC-IDEM-003", "KVC-IDEM-012")
async def test_a_caller_that_goes_during_its_commit_finds_its_answer_later(writer, gate, store):
    gate.shut()
    (gone,) = queued(writer, "op")
    await gate.arrived()
    gone.cancel()
    await asyncio.wait([gone])
    gate.open()
    again = await writer.run(write("op", RESERVE))
    assert (again.replayed, again.answer.reserved) == (True, 1)
    assert len(effects_of(store, "op")) == 1


async def test_a_caller_that_goes_during_a_commit_keeps_no_answer_from_its_neighbours(writer, gate, store):
    first, (gone, stays) = await behind(writer, gate, "gone", "stays")
    loop, cancelled = asyncio.get_running_loop(), threading.Event()

    def cancel():
        gone.cancel()
        cancelled.set()

    def at_commit(number):
        if number == 2:
            loop.call_soon_threadsafe(cancel)
            assert cancelled.wait(LIMIT_S)

    gate.at_commit = at_commit
    gate.open()
    await first
    assert (await asyncio.wait_for(stays, LIMIT_S)).answer.reserved == 3
    assert gone.cancelled()
    assert store.look("t", "gone").answer.reserved == 2


@pytest.mark.rule("KVC-IDEM-011")
async def test_a_caller_that_gives_up_on_a_migration_does_not_cancel_it(writer, gate, store):
    gate.shut()
    gone = asyncio.create_task(writer.run(write("m", START)))
    await gate.arrived()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gone, 0.01)
    gate.open()
    again = await writer.run(write("m", START))
    assert again.replayed
    assert store.migration("t", "m") == again.answer.migration
    assert [migration.status for _, migration in store.open_migrations()] == [MigrationStatus.PENDING]


async def test_a_batch_whose_callers_have_all_gone_is_not_run(writer, gate):
    first, rest = await behind(writer, gate, "a", "b")
    for task in rest:
        task.cancel()
    gate.open()
    await first
    assert await writer.call(lambda store: store.group("t", BG).reserved) == 1
    assert (writer.batches, writer.writes) == (1, 1)


# Anything else on the store.


async def test_a_call_comes_after_the_writes_before_it_and_does_not_part_them_from_those_after(writer, gate):
    first, before = await behind(writer, gate, "a", "b")
    seen = asyncio.create_task(writer.call(lambda store: store.group("t", BG).reserved))
    await until_queued(writer, 3)
    after = queued(writer, "c")
    await until_queued(writer, 4)
    gate.open()
    await asyncio.gather(first, *before, *after)
    assert await seen == 4
    assert gate.commits == 2


async def test_a_call_whose_caller_has_gone_is_not_made(writer, gate):
    first, _ = await behind(writer, gate)
    made = []
    gone = asyncio.create_task(writer.call(lambda _store: made.append(1)))
    await until_queued(writer, 1)
    gone.cancel()
    gate.open()
    await first
    await writer.call(lambda _store: None)
    assert made == []


async def test_what_a_call_raises_reaches_its_caller_and_nobody_else(writer):
    def fails(_store):
        raise Crash("mine")

    with pytest.raises(Crash, match="mine"):
        await writer.call(fails)
    assert (await writer.run(write("op", RESERVE))).answer.applied


@pytest.mark.rule("KVC-IDEM-008")
async def test_a_purge_lets_writes_in_between_its_slices(tmp_path):
    clock = Clock()
    store = make(tmp_path / "node.db", clock=clock)
    writer = Writer(store)
    await asyncio.gather(*queued(writer, *(f"op-{n}" for n in range(100))))
    clock.now_ms += 3_600_000
    calls, seen = writer.call, []

    async def call(method):
        rows = await calls(method)
        seen.append(len(list(store.records())))
        done = await writer.run(write(f"new-{len(seen)}", RESERVE, issued_ms=clock.now_ms))
        assert done.answer.applied
        return rows

    writer.call = call
    assert await purge(writer, rows_max=30, pause_s=0.0) == 201, "operations, and effects with that of the publication"
    assert seen[:4] == [70, 41, 12, 3], "with those that came in between"
    writer.call = calls
    assert await purge(writer) == 0
    await writer.close()
    store.close()


# The end.


async def test_close_finishes_what_was_taken_in_and_takes_in_nothing_more(writer, gate, store):
    first, rest = await behind(writer, gate, "a", "b")
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0)
    with pytest.raises(WriterClosed, match="takes in nothing more"):
        await writer.run(write("late", RESERVE))
    assert not closing.done()
    gate.open()
    await closing
    assert [done.answer.reserved for done in await asyncio.gather(first, *rest)] == [1, 2, 3]
    await writer.close()
    assert store.group("t", BG).reserved == 3


def test_a_loop_that_ends_first_leaves_no_thread_behind(tmp_path):
    gate = Gate(shut=True)
    store = make(tmp_path / "node.db", reached=gate)
    made = []

    async def leaves():
        made.append(Writer(store))
        task = queued(made[0], "op")[0]
        await gate.arrived()
        task.cancel()

    asyncio.run(leaves())
    gate.open()
    asyncio.run(made[0].close())
    assert store.group("t", BG).reserved == 1
    store.close()

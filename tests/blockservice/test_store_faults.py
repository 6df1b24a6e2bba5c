"""Sweeps: the first, second, ... nth step of every kind of request fails, until a run is clean; then it is retried."""

import random
import resource
import sqlite3
import subprocess
import sys
from contextlib import contextmanager

import msgspec
import pytest

from reference_impl.blockservice import schema
from reference_impl.blockservice.store import Done, Store, StoreError, wall_ms
from reference_impl.rules.blockgroups import Group
from tests.blockservice.one_request import EXIT_CODE, Order, Told
from tests.blockservice.store_kit import (
    BG,
    EVERY_KIND,
    RESERVE,
    Crash,
    ask,
    effects_of,
    make,
    make_with_small_pages,
    pages_left,
    picture,
    write,
)
from tests.blockservice.witness import breaches

LONG = "x" * 100  # so that a write soon needs another page
STEPS_MAX = 200
KILLS = 10


@pytest.fixture
def path(tmp_path):
    return tmp_path / "node.db"


def long_named(one):
    """An operation whose names take room."""
    return msgspec.structs.replace(one, operation_id=one.operation_id + LONG)


def undisturbed(folder, case):
    """What a store holds, and answers, when nothing fails."""
    store = make_with_small_pages(folder / "undisturbed.db")
    store.run(case.before)
    done = store.run([long_named(case.asked)])[0]
    found = done, picture(store)
    store.close()
    return found


# A crash.


@pytest.mark.rule("KVC-IDEM-002", "KVC-IDEM-003")
@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_a_process_that_ends_at_a_commit_leaves_all_or_nothing_and_the_retry_the_rest(tmp_path, path, name, point):
    case = EVERY_KIND[name]
    asked = long_named(case.asked)
    expected, whole = undisturbed(tmp_path, case)

    def reached(passed):
        if passed == point:
            raise Crash

    store = make(path)
    store.run(case.before)
    before = picture(store)
    store.close()
    store = make(path, reached=reached)
    with pytest.raises(Crash):
        store.run([asked])
    store.close()
    store = make(path)
    assert picture(store) == (before if point == "before_commit" else whole)
    again = store.run([asked])[0]
    assert again == Done(expected.answer, replayed=point == "after_commit")
    assert picture(store) == whole
    assert breaches(store.effects(), [(asked, expected), (asked, again)]) == []
    store.close()


@pytest.mark.rule("KVC-IDEM-002", "KVC-IDEM-003")
@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_the_same_with_processes_that_are_really_gone(path, point):
    """Every kind in turn, on one file; a store's clock there is the machine's, and so are the issue times."""
    store = make(path, clock=wall_ms)
    for number, (name, case) in enumerate(EVERY_KIND.items()):
        group = f"bg-{number}"
        store.publish("t", [Group(block_group_id=group, location="a", epoch=7)])
        *before, asked = (_of(group, number, one) for one in (*case.before, case.asked))
        store.run(before)
        order = Order(exit_at=point, writes=[asked])
        command = [sys.executable, "-m", "tests.blockservice.one_request", str(path)]
        line = msgspec.json.encode(order) + b"\n"
        gone = subprocess.run(command, input=line, capture_output=True, timeout=30, check=False)
        assert (gone.returncode, gone.stdout) == (EXIT_CODE, b""), (name, gone.stderr)
        assert (store.look("t", asked.operation_id) is None) is (point == "before_commit")
        first = store.run([asked])[0]
        assert first.replayed is (point == "after_commit")
        assert first.answer.outcome is case.outcome, name
        assert store.run([asked])[0] == Done(first.answer, replayed=True)
        assert breaches(store.effects(), [(asked, first)]) == []
    store.check()
    store.close()


def _of(group, number, one):
    """The same operation on another group, issued now."""
    request = msgspec.structs.replace(one.request, block_group_id=group)
    if hasattr(request, "migration_id"):
        request = msgspec.structs.replace(request, migration_id=f"{request.migration_id}-{number}")
    name = f"{one.operation_id}-{number}"
    return msgspec.structs.replace(one, request=request, operation_id=name, issued_ms=wall_ms())


@pytest.mark.rule("KVC-IDEM-002", "KVC-IDEM-003", "KVC-IDEM-007")
def test_a_process_killed_at_any_instant_has_told_nothing_that_is_not_so(path):
    make(path, clock=wall_ms).close()
    chance, told = random.Random(4), []
    for kill in range(KILLS):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.blockservice.one_request", str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        process.stdin.write(msgspec.json.encode(Order(loop_from=kill * 10_000)) + b"\n")
        process.stdin.flush()
        lines = [process.stdout.readline() for _ in range(chance.randint(1, 300))]
        process.kill()
        rest, _ = process.communicate(timeout=30)
        lines += rest.splitlines(keepends=True)
        told += [msgspec.json.decode(line, type=Told) for line in lines if line.endswith(b"\n")]
        store = make(path, clock=wall_ms)
        store.check()
        for one in told:
            assert store.look("t", one.operation_id).answer == one.done.answer
        kept = list(store.records())
        reserves = [record.operation_id for record in kept if record.method == "reserve"]
        assert store.group("t", BG).reserved == len(reserves)
        assert breaches(store.effects(), []) == []
        assert {e.operation_id for e in store.effects() if e.cause == "client"} == {r.operation_id for r in kept}
        assert len(told) <= len(kept)
        assert len(kept) % 3 == 0, "a batch is whole or not there"
        store.close()
    assert len(reserves) > KILLS


# No room.


@pytest.mark.rule("KVC-IDEM-002", "KVC-IDEM-007")
@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_disk_that_is_full_after_any_page_leaves_nothing_and_the_retry_finds_room(tmp_path, name):
    case = EVERY_KIND[name]
    asked = long_named(case.asked)
    expected, whole = undisturbed(tmp_path, case)
    for count in range(STEPS_MAX):
        store = make_with_small_pages(tmp_path / f"{count}.db")
        store.run(case.before)
        before = picture(store)
        with pages_left(store, count):
            failed = fails(store, asked)
        if failed is None:
            break
        assert (failed.code, failed.retry) == ("full", True)
        assert picture(store) == before
        assert store.run([asked])[0] == expected
        assert picture(store) == whole
        store.check()
        store.close()
    assert count > 0, "no step has failed"
    assert picture(store) == whole
    store.close()


def fails(store, asked):
    """The error of a write, None if it has none."""
    try:
        store.run([asked])
    except StoreError as error:
        return error
    return None


@contextmanager
def file_size_limit(size_bytes):
    """Let this process make no file longer: the write beyond fails with EFBIG, as a broken disk's would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.rule("KVC-IDEM-002", "KVC-IDEM-007")
@pytest.mark.parametrize("name", EVERY_KIND)
def test_an_input_or_output_error_at_any_step_leaves_nothing_and_the_retry_the_rest(tmp_path, name):
    case = EVERY_KIND[name]
    asked = long_named(case.asked)
    expected, whole = undisturbed(tmp_path, case)
    for count in range(STEPS_MAX):
        path = tmp_path / f"{count}.db"
        store = make_with_small_pages(path)
        store.run(case.before)
        before = picture(store)
        size_bytes = path.with_name(f"{path.name}-wal").stat().st_size
        with file_size_limit(size_bytes + 300 * count):
            failed = fails(store, asked)
        if failed is None:
            break
        assert failed.retry
        assert str(path) in str(failed)
        if count % 2:  # the process goes on, or another opens the file
            store.close()
            store = make(path)
        assert picture(store) == before
        assert store.run([asked])[0] == expected
        assert picture(store) == whole
        store.check()
        store.close()
    assert count > 3, "hardly a step has failed"
    assert picture(store) == whole
    store.close()


# Files that cannot be used. What, which file, what to do.


def explained(error, path, code, *words):
    assert error.value.code == code
    text = str(error.value)
    assert str(path) in text
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_a_full_disk_is_said_and_what_is_known_is_still_answered(path):
    store = make_with_small_pages(path)
    first = ask(store, "op", RESERVE)
    with pages_left(store, 0), pytest.raises(StoreError) as error:
        store.run([write(LONG + str(n), RESERVE) for n in range(9)])
    explained(error, path, "full", "database or disk is full", "make room on its disk")
    with pages_left(store, 0):
        assert ask(store, "op", RESERVE) == Done(first.answer, replayed=True)
    assert len(list(store.records())) == 1
    store.close()


_HOLDING = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
db.execute("ROLLBACK")
print("free", flush=True)
"""


def test_a_file_that_another_process_keeps_locked_is_said_and_replays_are_answered(path):
    store = make(path, busy_timeout_s=0.05)
    first = ask(store, "op", RESERVE)
    command = [sys.executable, "-c", _HOLDING, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(StoreError) as error:
            ask(store, "other", RESERVE)
        explained(error, path, "locked", "database is locked", "another process keeps it")
        assert error.value.retry
        assert ask(store, "op", RESERVE) == Done(first.answer, replayed=True)
        again = make(path, busy_timeout_s=0.05)  # opening needs no lock either
        again.close()
        holder.stdin.write("go\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "free\n"
    assert ask(store, "other", RESERVE).answer.reserved == 2
    assert len(effects_of(store, "other")) == 1
    store.close()


def test_a_file_that_is_no_database_is_said(path):
    path.write_bytes(b"not a database, whatever it is" * 100)
    with pytest.raises(StoreError) as error:
        make(path)
    explained(error, path, "damaged", "file is not a database", "move it", "restore a copy")
    assert not error.value.retry


def test_a_damaged_file_is_said_by_the_check_and_when_the_damage_is_met(path):
    store = make(path)
    store.run([write(f"op-{n}", RESERVE) for n in range(200)])
    store.close()
    with path.open("r+b") as file:
        for page in range(1, path.stat().st_size // 4096):
            file.seek(4096 * page)
            file.write(b"\xff" * 64)
    with pytest.raises(StoreError) as error:
        make(path)
    explained(error, path, "damaged", "malformed", "restore a copy")


def test_damage_that_no_request_meets_is_found_by_the_check(path):
    store = make(path)
    store.run([write(f"op-{n:03}", RESERVE) for n in range(200)])
    (page,) = store._db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'operations_by_issue'").fetchone()
    store.close()
    with path.open("r+b") as file:
        file.seek(4096 * (page - 1))
        file.write(b"\xff" * 64)
    store = make(path)
    assert ask(store, "op-000", RESERVE).replayed
    with pytest.raises(StoreError) as error:
        store.check()
    explained(error, path, "damaged", "restore a copy")
    with pytest.raises(StoreError) as error:
        ask(store, "new", RESERVE)
    explained(error, path, "damaged", "malformed")
    store.close()


def changed(path, statement):
    make(path).close()
    file = sqlite3.connect(path)
    file.execute(statement)
    file.commit()
    file.close()


def test_a_file_of_a_newer_schema_is_refused(path):
    changed(path, f"PRAGMA user_version = {schema.SCHEMA + 1}")
    with pytest.raises(StoreError) as error:
        make(path)
    explained(error, path, "damaged", f"schema is {schema.SCHEMA + 1}", "start the program that wrote it")


def test_another_programs_database_is_refused(path):
    changed(path, "PRAGMA application_id = 7")
    with pytest.raises(StoreError) as error:
        make(path)
    explained(error, path, "damaged", "database of something else", "name another file")


def test_another_nodes_store_is_refused(path):
    make(path).close()
    with pytest.raises(StoreError) as error:
        Store(path, "b")
    explained(error, path, "damaged", "the store of a, and this node is b")


def test_a_file_in_a_folder_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / "missing" / "node.db"
    with pytest.raises(StoreError) as error:
        make(path)
    explained(error, path, "damaged", "No such file or directory", "name a file in a folder of yours")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(StoreError) as error:
        make(tmp_path)
    explained(error, tmp_path, "damaged", "unable to open", "let this user write")


def test_a_creation_that_is_broken_off_leaves_a_file_that_the_next_completes(path, monkeypatch):
    monkeypatch.setattr(schema, "INSERT_NODE", "INSERT INTO nowhere VALUES (?)")
    with pytest.raises(sqlite3.OperationalError):
        make(path)
    monkeypatch.undo()
    store = make(path)
    assert ask(store, "op", RESERVE).answer.applied
    store.close()

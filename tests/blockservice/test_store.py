import sqlite3
import stat
import threading

import msgspec
import pytest

from reference_impl.blockservice import schema
from reference_impl.blockservice import store as store_module
from reference_impl.blockservice.store import Done, Store, StoreError
from reference_impl.rules import blockgroups
from reference_impl.rules.blockgroups import (
    CancelMigrate,
    EngineSays,
    Group,
    GroupState,
    MigrationStatus,
    Pin,
    Refusal,
    Reserve,
    Unpin,
    View,
)
from reference_impl.rules.operations import Record, Retention, canonical
from tests.blockservice.store_kit import (
    BG,
    EVERY_KIND,
    EVICT,
    MADE_MS,
    NODES,
    NOW_MS,
    PIN,
    PLACE,
    PREPARE,
    RESERVE,
    START,
    UNPIN,
    Clock,
    Crash,
    ask,
    effects_of,
    make,
    picture,
    write,
)

replace = msgspec.structs.replace
KEEP = Retention(window_ms=1000, skew_ms=100)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "node.db"


@pytest.fixture
def store(path):
    made = make(path)
    yield made
    made.close()


def refusal(done):
    return done.answer.refusal


# One operation.


@pytest.mark.rule("KVC-IDEM-001", "KVC-IDEM-007")
@pytest.mark.parametrize("name", EVERY_KIND)
def test_every_kind_of_request_runs_once_and_is_replayed_after_a_restart(path, name):
    case = EVERY_KIND[name]
    store = make(path)
    store.run(case.before)
    first = store.run([case.asked])[0]
    assert (first.replayed, first.answer.outcome) == (False, case.outcome)
    after = picture(store)
    store.close()
    store = make(path)
    assert store.run([case.asked, case.asked]) == [Done(first.answer, replayed=True)] * 2
    assert picture(store) == after
    assert store.look("t", "op") == Record(canonical(case.asked.request), first.answer, NOW_MS)
    store.close()


@pytest.mark.rule("KVC-IDEM-001")
def test_a_saved_result_tells_of_its_moment_and_not_of_now(store):
    first = ask(store, "op", RESERVE)
    ask(store, "evict", EVICT)
    assert ask(store, "op", RESERVE) == Done(first.answer, replayed=True)
    assert store.group("t", BG).state is GroupState.EVICTED


@pytest.mark.rule("KVC-IDEM-001")
def test_a_refusal_stays_one_though_its_reason_has_gone(store):
    ask(store, "pin", PIN)
    assert refusal(ask(store, "evict", EVICT)) is Refusal.PINNED
    ask(store, "unpin", UNPIN)
    again = ask(store, "evict", EVICT)
    assert (refusal(again), again.replayed) == (Refusal.PINNED, True)
    assert ask(store, "evict-2", EVICT).answer.applied


@pytest.mark.rule("KVC-IDEM-004")
def test_other_parameters_are_refused_and_the_first_result_stays(store):
    first = ask(store, "op", RESERVE)
    before = picture(store)
    assert refusal(ask(store, "op", replace(RESERVE, slots=2))) is Refusal.ID_REUSED
    assert refusal(ask(store, "op", EVICT)) is Refusal.ID_REUSED
    assert picture(store) == before
    assert ask(store, "op", RESERVE) == Done(first.answer, replayed=True)


@pytest.mark.rule("KVC-IDEM-004")
def test_an_id_that_is_issued_anew_is_refused_and_never_answered_as_if_it_were_a_retry(path):
    """Answered, it would run again after the purge of the first, well within its own window."""
    clock = Clock()
    store = make(path, clock=clock, retention=KEEP)
    ask(store, "op", RESERVE)
    clock.now_ms += 900
    anew = ask(store, "op", RESERVE, issued_ms=clock.now_ms)
    assert (refusal(anew), anew.answer.field, anew.replayed) == (Refusal.ID_REUSED, "issued_ms", False)
    assert store.answered(write("op", RESERVE, issued_ms=clock.now_ms)) == anew
    assert ask(store, "op", RESERVE).replayed
    assert store.group("t", BG).reserved == len(effects_of(store, "op")) == 1
    store.close()


@pytest.mark.rule("KVC-IDEM-008")
def test_a_refusal_at_the_door_decides_nothing(path):
    clock = Clock()
    store = make(path, clock=clock, retention=KEEP)
    ask(store, "op", RESERVE)
    asked = [
        (write("op", replace(RESERVE, slots=2), issued_ms=NOW_MS + 900), Refusal.ID_REUSED),
        (write("early", RESERVE, issued_ms=NOW_MS + 900), Refusal.FROM_THE_FUTURE),
    ]
    before = picture(store)
    for one, expected in asked:
        assert refusal(store.run([one])[0]) is expected
    assert picture(store) == before
    clock.now_ms += 1101
    store.purge()
    for one, _ in asked:
        done = store.run([one])[0]
        assert (done.answer.applied, done.replayed) == (True, False)
    store.close()


@pytest.mark.rule("KVC-IDEM-008")
def test_two_tenants_may_use_one_id(store):
    store.publish("u", [Group(block_group_id=BG, location="a", epoch=7)])
    assert ask(store, "op", RESERVE).replayed is False
    assert ask(store, "op", replace(RESERVE, slots=3), tenant="u").replayed is False
    assert (store.group("t", BG).reserved, store.group("u", BG).reserved) == (1, 3)
    assert store.look("v", "op") is None


def test_reservations_of_all_tenants_share_the_nodes_slots(path):
    store = make(path, slots_max=5)
    store.publish("u", [Group(block_group_id="other", location="a")])
    other = Reserve(block_group_id="other", epoch=1, slots=3)
    assert ask(store, "1", replace(RESERVE, slots=3)).answer.applied
    assert refusal(ask(store, "2", other, tenant="u")) is Refusal.NO_ROOM
    ask(store, "3", EVICT)
    assert ask(store, "4", other, tenant="u").answer.applied
    store.close()


def test_what_is_reserved_in_all_is_the_sum_over_the_groups(store):
    known = store.group("t", BG)
    for reserved in (3, 5, 2):
        store._put_group("t", replace(known, reserved=reserved), store_module._ENGINE)
        store._put_group("t", replace(known, block_group_id="x", reserved=1), store_module._ENGINE)
        assert store._db.execute("SELECT reserved FROM node").fetchone() == (reserved + 1,)
    store._db.execute(schema.DELETE_GROUP, ("t", BG))
    assert store._db.execute("SELECT reserved FROM node").fetchone() == (1,)


@pytest.mark.rule("KVC-IDEM-006")
def test_one_operation_twice_in_one_batch_runs_once(store):
    told = store.run([write("op", RESERVE), write("other", RESERVE), write("op", RESERVE)])
    assert [done.replayed for done in told] == [False, False, True]
    assert told[0].answer == told[2].answer
    assert store.group("t", BG).reserved == 2


@pytest.mark.rule("KVC-IDEM-009")
def test_pins_are_a_set_of_requests(store):
    for number in range(3):
        assert ask(store, f"pin-{number}", PIN).answer.pins == 1
    assert ask(store, "pin-s", replace(PIN, request_id="s")).answer.pins == 2
    for number in range(3):
        assert ask(store, f"unpin-{number}", UNPIN).answer.pins == 1
    assert refusal(ask(store, "late", PIN)) is Refusal.UNPINNED_BEFORE
    assert store.pins("t", BG) == 1
    assert [standing.pins for standing in store.finals()] == [("s",)]


@pytest.mark.rule("KVC-IDEM-009")
def test_a_request_may_pin_again_in_the_next_epoch(store):
    ask(store, "1", PIN)
    ask(store, "2", UNPIN)
    ask(store, "3", EVICT)
    ask(store, "late", replace(UNPIN, epoch=8))
    store.publish("t", [Group(block_group_id=BG, location="a")])
    assert ask(store, "4", replace(PIN, epoch=9)).answer.pins == 1
    assert refusal(ask(store, "later", UNPIN)) is Refusal.STALE_EPOCH
    assert store.pins("t", BG) == 1


@pytest.mark.rule("KVC-IDEM-010")
def test_a_loan_stands_until_it_ends_or_expires(path):
    clock = Clock()
    store = make(path, clock=clock)
    second = replace(PLACE, transfer_token="token-2", expires_ms=NOW_MS + 1000)
    ask(store, "1", PREPARE, engine=EngineSays(place=PLACE))
    ask(store, "2", PREPARE, engine=EngineSays(place=second))
    assert refusal(ask(store, "3", EVICT)) is Refusal.TRANSFERRING
    store.end_transfers([PLACE.transfer_token, "unknown"])
    assert refusal(ask(store, "4", EVICT)) is Refusal.TRANSFERRING
    clock.now_ms += 1000
    assert ask(store, "5", EVICT).answer.applied
    assert [e.key for e in store.effects() if e.kind == "transfer"] == ["token-1", "token-2", "token-1"]
    store.close()


# What costs nothing.


@pytest.mark.rule("KVC-IDEM-001")
def test_replays_and_denials_write_nothing_and_pass_no_fail_point(path):
    passed = []
    store = make(path, reached=passed.append)
    ask(store, "op", RESERVE)
    assert passed == ["before_commit", "after_commit"]
    log = path.with_name("node.db-wal")
    size, at_ns = log.stat().st_size, log.stat().st_mtime_ns
    told = store.run([write("op", RESERVE), write("op", EVICT), write("old", RESERVE, issued_ms=1)])
    assert [refusal(done) for done in told] == [Refusal.NONE, Refusal.ID_REUSED, Refusal.ID_EXPIRED]
    assert (log.stat().st_size, log.stat().st_mtime_ns) == (size, at_ns)
    assert passed == ["before_commit", "after_commit"]
    store.close()


def test_a_batch_is_one_transaction(path):
    passed = []
    store = make(path, reached=passed.append)
    store.run([write(f"op-{n}", RESERVE) for n in range(50)])
    assert passed == ["before_commit", "after_commit"]
    assert store.group("t", BG).reserved == 50
    store.close()


def test_a_commit_is_synced_and_its_log_is_wal(store):
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_only_the_owner_may_read_the_files(path, store):
    ask(store, "op", RESERVE)
    for name in ("node.db", "node.db-wal", "node.db-shm"):
        assert stat.S_IMODE(path.with_name(name).stat().st_mode) == 0o600


# What is kept, and for how long.


@pytest.mark.rule("KVC-IDEM-008")
def test_an_id_older_than_the_window_is_refused_and_not_run(path):
    clock = Clock()
    store = make(path, clock=clock, retention=KEEP)
    clock.now_ms += 1000
    done = ask(store, "late", RESERVE)
    assert (refusal(done), done.answer.field) == (Refusal.ID_EXPIRED, "issued_ms")
    assert store.look("t", "late") is None
    assert effects_of(store, "late") == []
    store.close()


@pytest.mark.rule("KVC-IDEM-008")
def test_what_was_purged_is_never_run_again_even_if_the_clock_steps_back(path):
    clock = Clock()
    store = make(path, clock=clock, retention=KEEP)
    ask(store, "op", RESERVE)
    clock.now_ms += 1100
    assert store.purge() == 0, "a record stays as long as a caller whose clock is ahead may retry"
    assert ask(store, "op", RESERVE).replayed
    clock.now_ms += 1
    assert store.purge() == 2, "the record, and the effects but the newest"
    assert store.purged_ms() == NOW_MS
    clock.now_ms = NOW_MS - 500
    store.close()
    store = make(path, clock=clock, retention=KEEP)
    assert refusal(ask(store, "op", RESERVE)) is Refusal.ID_EXPIRED
    assert store.group("t", BG).reserved == 1
    clock.now_ms = NOW_MS + 1
    assert ask(store, "new", RESERVE, issued_ms=NOW_MS + 1).answer.applied
    store.close()


@pytest.mark.rule("KVC-IDEM-008")
def test_a_store_that_is_made_anew_runs_nothing_that_was_issued_before(path):
    clock = Clock()
    store = make(path, clock=clock)
    assert ask(store, "op", RESERVE).answer.applied
    store.close()
    for file in path.parent.iterdir():
        file.unlink()
    clock.now_ms += 1000
    for issued_ms in (NOW_MS, clock.now_ms):
        store = Store(path, "a", nodes=NODES, now_ms=clock)
        store.publish("t", [Group(block_group_id=BG, location="a", epoch=7)])
        assert store.purged_ms() == NOW_MS + 1000
        done = ask(store, "op", RESERVE, issued_ms=issued_ms)
        assert (refusal(done), done.answer.field) == (Refusal.ID_EXPIRED, "issued_ms")
        assert store.group("t", BG).reserved == 0
        store.close()
        clock.now_ms += 1000  # of a file that is there it is its beginning that counts, not when it is opened
    store = Store(path, "a", nodes=NODES, now_ms=clock)
    assert ask(store, "new", RESERVE, issued_ms=NOW_MS + 1001).answer.applied
    store.close()


@pytest.mark.rule("KVC-IDEM-009")
def test_a_late_pin_does_not_come_back_though_its_unpin_is_forgotten(path):
    clock = Clock()
    store = make(path, clock=clock, retention=KEEP)
    ask(store, "unpin", UNPIN)
    clock.now_ms += 1101
    store.purge()
    assert store._db.execute("SELECT count(*) FROM pins").fetchone() == (0,)
    clock.now_ms = NOW_MS
    assert refusal(ask(store, "pin", PIN)) is Refusal.ID_EXPIRED
    assert ask(store, "pin-2", PIN, issued_ms=NOW_MS + 1).answer.pins == 1
    store.close()


@pytest.mark.rule("KVC-IDEM-009")
def test_who_has_left_is_remembered_from_now_on_though_his_clock_is_behind(path):
    clock = Clock()
    store = make(path, clock=clock, retention=KEEP)
    ask(store, "unpin", UNPIN, issued_ms=NOW_MS - 900)
    clock.now_ms += 300
    assert store.purge() == 1
    assert refusal(ask(store, "pin", PIN)) is Refusal.UNPINNED_BEFORE
    store.close()


@pytest.mark.rule("KVC-IDEM-008")
def test_a_migration_whose_target_does_not_know_is_never_forgotten(path):
    clock = Clock()
    store = make(path, clock=clock, retention=KEEP)
    ask(store, "m", START)
    ended = store.end_migration("t", "m", MigrationStatus.SUCCEEDED)
    clock.now_ms += 5000
    store.purge()
    assert store.open_migrations() == [("t", ended)]
    assert store.group("t", BG).state is GroupState.MOVED
    store.set_told("t", "m")
    assert [e.cause for e in store.effects()][-1] == "migration"
    store.purge()
    assert store.group("t", BG) is None
    store.close()


@pytest.mark.rule("KVC-IDEM-008")
def test_a_purge_forgets_what_is_over_and_keeps_what_stands(path):
    clock = Clock()
    store = make(path, clock=clock, retention=KEEP)
    store.publish("t", [Group(block_group_id=name, location="a", epoch=7) for name in ("moving", "moved", "lent")])
    ask(store, "pin", PIN)
    ask(store, "unpin", replace(UNPIN, request_id="s"))
    ask(store, "moving", replace(START, block_group_id="moving"))
    ask(store, "moved", replace(START, block_group_id="moved"))
    store.end_migration("t", "moved", MigrationStatus.SUCCEEDED)
    store.set_told("t", "moved")
    ask(store, "lent", replace(PREPARE, block_group_id="lent"), engine=EngineSays(place=PLACE))
    before = list(store.finals())
    clock.now_ms = PLACE.expires_ms + 5000
    store.purge()
    assert list(store.records()) == []
    assert list(store.finals()) == [standing for standing in before if standing.group.block_group_id != "moved"]
    assert store.migration("t", "moving").status is MigrationStatus.PENDING
    assert store.migration("t", "moved") is None
    assert store._db.execute("SELECT count(*) FROM transfers").fetchone() == (0,)
    assert store._db.execute("SELECT request_id FROM pins").fetchall() == [("r",)]
    (last,) = store.effects()
    assert last.seq > 5, "the newest effect stays, and its number is not given again"
    ask(store, "next", replace(PIN, request_id="u"), issued_ms=clock.now_ms)
    assert [effect.seq for effect in store.effects()] == [last.seq, last.seq + 1]
    store.close()


@pytest.mark.rule("KVC-IDEM-008")
@pytest.mark.parametrize("gone", ["evicted", "moved"])
def test_a_group_that_is_gone_is_forgotten_and_starts_above_what_anybody_knew(path, gone):
    clock = Clock()
    store = make(path, clock=clock, retention=KEEP)
    store.publish("t", [Group(block_group_id="stays", location="a", epoch=50)])
    if gone == "evicted":
        ask(store, "evict", EVICT)
    else:
        ask(store, "m", START)
        store.end_migration("t", "m", MigrationStatus.SUCCEEDED)
        store.set_told("t", "m")
    known = store.group("t", BG)
    clock.now_ms += 1100
    store.purge()
    assert store.group("t", BG) == known
    clock.now_ms += 1
    effects = list(store.effects())[-1:]
    store.purge()
    assert store.group("t", BG) is None
    assert list(store.effects()) == effects, "to forget is no effect"
    assert store.group("t", "stays").epoch == 50
    again = Group(block_group_id=BG, location="a")
    assert store.publish("t", [again]) == [replace(again, epoch=9)]
    for operation_id, epoch in (("old", 7), ("older", 8)):
        late = write(operation_id, replace(RESERVE, epoch=epoch), issued_ms=clock.now_ms)
        assert refusal(store.run([late])[0]) is Refusal.STALE_EPOCH
    store.close()


def test_a_group_that_has_changed_lately_is_not_forgotten(path):
    clock = Clock()
    store = make(path, clock=clock, retention=KEEP)
    ask(store, "evict", EVICT)
    clock.now_ms += 600
    store.publish("t", [Group(block_group_id=BG, location="a")])
    store.lost("t", [BG])
    clock.now_ms += 600
    store.purge()
    assert store.group("t", BG).epoch == 10
    store.close()


@pytest.mark.rule("KVC-IDEM-005")
def test_every_other_way_into_the_node_is_above_what_was_forgotten_too(path):
    clock = Clock()
    store = make(path, clock=clock, retention=KEEP)
    ask(store, "evict", EVICT)
    clock.now_ms += 1101
    store.purge()
    assert store.accept("t", "m", replace(ARRIVING, block_group_id=BG)).epoch == 8
    assert store.settle("t", "m", ours=True).epoch == 9
    store.accept("t", "n", replace(ARRIVING, epoch=30))
    assert store.settle("t", "n", ours=False) is None
    assert store.publish("t", [Group(block_group_id="x", location="a")])[0].epoch == 31
    store.close()


def test_a_purge_that_fails_leaves_everything_and_no_bound(path, monkeypatch):
    clock = Clock()
    store = make(path, clock=clock, retention=KEEP)
    ask(store, "evict", EVICT)
    clock.now_ms += 1101
    before, node = picture(store), store._db.execute("SELECT * FROM node").fetchone()
    monkeypatch.setattr(schema, "PURGES", (*schema.PURGES, schema.Purge(("DELETE FROM nowhere WHERE ? < ?",))))
    with pytest.raises(sqlite3.OperationalError):
        store.purge()
    assert (picture(store), store._db.execute("SELECT * FROM node").fetchone()) == (before, node)
    monkeypatch.undo()
    assert store.purge() == 3, "a record, a group, and the effects but the newest"
    store.close()


@pytest.mark.rule("KVC-IDEM-008")
def test_a_purge_goes_in_slices_and_runs_nothing_again_between_them(path):
    clock = Clock()
    store = make(path, clock=clock, retention=KEEP)
    writes = [write(f"op-{n:02}", RESERVE) for n in range(50)]
    first = store.run(writes)
    store.publish("t", [Group(block_group_id=f"g{n}", location="a") for n in range(30)])
    store.lost("t", [f"g{n}" for n in range(30)])
    clock.now_ms += 1101
    rows = []
    while not rows or rows[-1] == 20:
        rows.append(store.purge(rows_max=20))
        left = {record.operation_id for record in store.records()}
        clock.now_ms -= 1101  # even if it steps back, to when they were issued
        for asked, done in zip(writes, store.run(writes), strict=True):
            if asked.operation_id in left:
                assert done == Done(first[writes.index(asked)].answer, replayed=True)
            else:
                assert refusal(done) is Refusal.ID_EXPIRED
        clock.now_ms += 1101
    assert rows[:2] == [20, 20]
    assert sum(rows) == 50 + 30 + 50 + 61 - 1, "operations, groups, and the effects of all, but the newest"
    assert store.group("t", BG).reserved == 50
    assert store.publish("t", [Group(block_group_id="g0", location="a")])[0].epoch == 3
    with pytest.raises(ValueError, match="rows_max must be at least 1, got 0"):
        store.purge(rows_max=0)
    store.close()


def test_a_purge_looks_only_at_what_it_forgets(store):
    """Every statement of a slice finds its rows by an index: what it costs does not grow with what is kept."""
    for purge in schema.PURGES:
        for statement in (*purge.statements, *filter(None, [purge.highest_epoch])):
            plan = [row[3] for row in store._db.execute(f"EXPLAIN QUERY PLAN {statement}", (0, 1))]
            scans = [step for step in plan if step.startswith("SCAN")]
            assert scans in ([], ["SCAN effects"]), (statement, plan)


def test_the_log_does_not_keep_the_room_of_one_large_transaction(store):
    assert store._db.execute("PRAGMA journal_size_limit").fetchone() == (16 << 20,)


# Migrations, at their source.


@pytest.mark.rule("KVC-IDEM-011")
def test_a_repeated_start_is_one_migration_and_another_is_refused(store):
    first = ask(store, "m", START)
    assert ask(store, "m", START) == Done(first.answer, replayed=True)
    assert refusal(ask(store, "n", START)) is Refusal.MIGRATING
    assert store.open_migrations() == [("t", first.answer.migration)]


@pytest.mark.rule("KVC-IDEM-011")
def test_a_migration_runs_ends_once_and_is_told(store):
    assert store.set_running("t", "m") is None
    ask(store, "m", START)
    running = store.set_running("t", "m")
    assert running.status is MigrationStatus.RUNNING
    assert store.set_running("t", "m") == running
    store.set_told("t", "m")
    assert store.open_migrations() == [("t", running)], "what has not ended cannot be told"
    ended = store.end_migration("t", "m", MigrationStatus.SUCCEEDED)
    assert (ended.status, store.migration("t", "m")) == (MigrationStatus.SUCCEEDED, ended)
    assert store.end_migration("t", "m", MigrationStatus.SUCCEEDED) == ended
    assert store.end_migration("t", "m", MigrationStatus.FAILED) is None
    assert store.set_running("t", "m") is None
    group = store.group("t", BG)
    assert (group.state, group.location, group.epoch) == (GroupState.MOVED, "b", 8)
    assert store.open_migrations() == [("t", ended)]
    store.set_told("t", "m")
    assert store.open_migrations() == []
    assert refusal(ask(store, "c", CancelMigrate(block_group_id=BG, epoch=8, migration_id="m"))) is Refusal.TOO_LATE


def test_only_a_status_that_ends_it_ends_a_migration(store):
    with pytest.raises(ValueError, match="status must be one that ends a migration, got RUNNING"):
        store.end_migration("t", "m", MigrationStatus.RUNNING)
    assert store.end_migration("t", "unknown", MigrationStatus.FAILED) is None


@pytest.mark.rule("KVC-IDEM-011")
def test_a_cancelled_migration_leaves_the_group_and_its_pins_as_they_were(store):
    ask(store, "unpin", UNPIN)
    ask(store, "m", START)
    assert ask(store, "c", CancelMigrate(block_group_id=BG, epoch=7, migration_id="m")).answer.applied
    assert store.end_migration("t", "m", MigrationStatus.SUCCEEDED) is None
    assert (store.group("t", BG).state, store.group("t", BG).epoch) == (GroupState.RESIDENT, 7)
    assert refusal(ask(store, "late", PIN)) is Refusal.UNPINNED_BEFORE


# Migrations, at their target.

ARRIVING = Group(block_group_id="x", location="b", epoch=4, reserved=9, size_bytes=5)


@pytest.mark.rule("KVC-IDEM-011")
def test_a_group_that_arrives_is_its_sources_until_it_is_settled(store):
    first = store.accept("t", "m", ARRIVING)
    assert first == replace(ARRIVING, state=GroupState.MIGRATING_IN, migration="m", reserved=0)
    assert store.accept("t", "m", ARRIVING) == first
    assert store.accept("t", "n", ARRIVING) is None
    assert refusal(ask(store, "p", Pin(block_group_id="x", epoch=4, request_id="r"))) is Refusal.MIGRATING
    ours = store.settle("t", "m", ours=True)
    assert (ours.state, ours.location, ours.epoch) == (GroupState.RESIDENT, "a", 5)
    assert store.settle("t", "m", ours=True) == store.settle("t", "m", ours=False) == ours
    assert store.accept("t", "m", ARRIVING) == ours
    assert store.accept("t", "n", ARRIVING) is None


@pytest.mark.rule("KVC-IDEM-011")
def test_a_copy_that_is_not_ours_goes_and_a_late_accept_does_not_bring_it_back(store):
    store.accept("t", "m", ARRIVING)
    assert store.settle("t", "m", ours=False) is None
    assert store.group("t", "x") is None
    assert store.accept("t", "m", ARRIVING) is None
    assert store.settle("t", "m", ours=False) is None
    assert store.settle("t", "unknown", ours=True) is None
    assert store.accept("t", "n", ARRIVING) is not None


@pytest.mark.rule("KVC-IDEM-011")
@pytest.mark.parametrize("ours", [False, True])
def test_a_settlement_that_overtakes_its_accept_leaves_nothing_to_accept(store, ours):
    assert store.settle("t", "m", ours=ours) is None
    assert store.accept("t", "m", ARRIVING) is None
    assert store.group("t", "x") is None
    assert store.settle("t", "m", ours=ours) is None


@pytest.mark.rule("KVC-IDEM-009")
@pytest.mark.parametrize("ours", [False, True])
def test_who_left_while_a_group_arrived_may_pin_it_in_its_next_epoch(store, ours):
    store.accept("t", "m", ARRIVING)
    assert ask(store, "u", Unpin(block_group_id="x", epoch=4, request_id="r")).answer.applied
    store.settle("t", "m", ours=ours)
    store.publish("t", [Group(block_group_id="x", location="a")])
    pin = Pin(block_group_id="x", epoch=store.group("t", "x").epoch, request_id="r")
    assert ask(store, "p", pin).answer.pins == 1


def test_a_copy_that_was_lost_is_ours_and_evicted(store):
    store.accept("t", "m", ARRIVING)
    lost = store.settle("t", "m", ours=True, node_lost_copy=True)
    assert (lost.state, lost.location, lost.epoch) == (GroupState.EVICTED, "a", 5)


def test_an_epoch_never_goes_back_whoever_the_group_comes_from(store):
    ask(store, "unpin", UNPIN)
    ask(store, "evict", EVICT)
    known = store.group("t", BG)
    arriving = store.accept("t", "m", replace(ARRIVING, block_group_id=BG))
    assert arriving.epoch == known.epoch == 8
    assert store.settle("t", "m", ours=False) == known
    store.accept("t", "n", replace(ARRIVING, block_group_id=BG))
    assert store.settle("t", "n", ours=True).epoch == 9
    assert ask(store, "pin", replace(PIN, epoch=9)).answer.pins == 1


def test_a_group_may_come_back_from_where_it_moved(store):
    ask(store, "m", START)
    store.end_migration("t", "m", MigrationStatus.SUCCEEDED)
    assert store.accept("t", "back", replace(ARRIVING, block_group_id=BG, epoch=8)).epoch == 8
    assert store.settle("t", "back", ours=True).epoch == 9


# What an engine says.


def test_what_an_engine_publishes_is_known_once(store):
    new = Group(block_group_id="x", location="a", size_bytes=4)
    again = replace(new, block_group_id=BG)
    assert store.publish("t", [new, again]) == [new, Group(block_group_id=BG, location="a", epoch=7)]
    assert store.publish("t", [new]) == [new]
    ask(store, "evict", EVICT)
    assert store.publish("t", [again]) == [replace(again, epoch=9)]


def test_a_group_whose_id_another_node_owns_is_returned_as_moved_and_stays_so(store):
    ask(store, "m", START)
    store.end_migration("t", "m", MigrationStatus.SUCCEEDED)
    known, before = store.group("t", BG), list(store.effects())
    assert known.state is GroupState.MOVED
    assert store.publish("t", [Group(block_group_id=BG, location="a")]) == [known]
    assert (store.group("t", BG), list(store.effects())) == (known, before)


def test_what_an_engine_lost_is_evicted_and_nothing_of_it_stands(store):
    ask(store, "lent", PREPARE, engine=EngineSays(place=PLACE))
    ask(store, "pin", PIN)
    store.lost("t", [BG, "unknown"])
    store.lost("t", [BG])
    assert (store.group("t", BG).state, store.group("t", BG).epoch) == (GroupState.EVICTED, 8)
    assert store.pins("t", BG) == 0
    store.publish("t", [Group(block_group_id=BG, location="a")])
    assert ask(store, "evict", replace(EVICT, epoch=9)).answer.applied
    by_engine = [(e.kind, e.key) for e in store.effects() if e.cause == "engine"]
    assert by_engine == [("group", ""), ("group", ""), ("pin", "r"), ("transfer", "token-1"), ("group", "")]


def test_a_migration_of_what_an_engine_lost_has_failed(store):
    ask(store, "m", START)
    store.lost("t", [BG])
    migration = store.migration("t", "m")
    assert (migration.status, migration.reason) == (MigrationStatus.FAILED, "the engine lost its blocks")
    assert store.group("t", BG).state is GroupState.EVICTED
    assert store.end_migration("t", "m", MigrationStatus.SUCCEEDED) is None


def test_another_engine_has_nothing_of_what_the_one_before_held(store):
    store.publish("t", [Group(block_group_id="moving", location="a", epoch=7)])
    ask(store, "pin", PIN)
    ask(store, "m", replace(START, block_group_id="moving"))
    store.accept("t", "in", ARRIVING)
    assert (store.arriving("t", "in"), store.arriving("t", "m")) == ("x", None)
    assert store.new_engine("one")
    assert not store.new_engine("one")
    states = {group.block_group_id: group.state for group in store.groups("t")}
    assert states == {BG: GroupState.EVICTED, "moving": GroupState.EVICTED, "x": GroupState.MIGRATING_IN}
    assert store.migration("t", "m").status is MigrationStatus.FAILED
    assert store.wanted() == [("t", store.group("t", "x"), True)]


def test_another_engine_has_no_loans_not_even_of_what_was_evicted(store):
    ask(store, "lent", PREPARE, engine=EngineSays(place=PLACE))
    ask(store, "gone", PREPARE, engine=EngineSays(here=False))
    assert store.open_transfers() == [PLACE.transfer_token]
    store.new_engine("two")
    assert store.open_transfers() == []


def test_an_engine_is_told_what_is_here_and_what_it_must_hold(store):
    names = ("free", "moving", "gone")
    store.publish("t", [Group(block_group_id=name, location="a", epoch=7) for name in names])
    ask(store, "pin", PIN)
    ask(store, "m", replace(START, block_group_id="moving"))
    ask(store, "evict", replace(EVICT, block_group_id="gone"))
    assert [(group.block_group_id, held) for _, group, held in store.wanted()] == [
        (BG, True), ("free", False), ("moving", True),
    ]  # fmt: skip


def test_groups_are_listed_in_pages_and_by_state(store):
    store.publish("t", [Group(block_group_id=f"g{n}", location="a") for n in range(4)])
    store.publish("u", [Group(block_group_id="another's", location="a")])
    ids = [group.block_group_id for group in store.groups("t", limit=3, after=BG)]
    assert ids == ["g0", "g1", "g2"]
    assert store.groups("t", state=GroupState.EVICTED) == []
    assert len(store.groups("t", state=GroupState.RESIDENT)) == 5


def test_the_engine_that_lost_a_group_as_it_was_asked_has_one_effect(store):
    ask(store, "pin", PIN)
    done = ask(store, "get", PREPARE, engine=EngineSays(here=False))
    assert (refusal(done), done.answer.pins) == (Refusal.NOT_RESIDENT, 0)
    assert [(e.kind, e.after == "") for e in effects_of(store, "get")] == [("group", False), ("pin", True)]
    assert store.pins("t", BG) == 0


# Effects.


def test_effects_read_as_the_rules_structs(store):
    ask(store, "m", START)
    group, migration = effects_of(store, "m")
    assert msgspec.json.decode(group.after, type=Group) == store.group("t", BG)
    assert msgspec.json.decode(migration.after, type=blockgroups.Migration) == store.migration("t", "m")
    assert (group.before, migration.before) != ("", "") == ("", migration.before)
    assert group.at_ns <= migration.at_ns
    assert (group.cause, migration.key) == ("client", "m")


def test_a_group_that_is_written_as_it_was_leaves_no_effect(store):
    before = list(store.effects())
    store._put_group("t", store.group("t", BG), store_module._ENGINE)
    assert list(store.effects()) == before


def test_records_tell_what_was_asked_and_answered(store):
    done = ask(store, "op", RESERVE, issued_ms=NOW_MS - 5)
    (kept,) = store.records()
    assert (kept.tenant, kept.operation_id, kept.method, kept.outcome) == ("t", "op", "reserve", "APPLIED")
    assert (kept.issued_ms, kept.done_ms) == (NOW_MS - 5, NOW_MS)
    assert kept.params == canonical(RESERVE).decode()
    assert msgspec.json.decode(kept.answer, type=blockgroups.Answer) == done.answer


@pytest.mark.rule("KVC-IDEM-006")
def test_four_stores_on_one_file_retry_one_operation_and_one_effect_is_there(path):
    make(path).close()
    told, gate = [], threading.Barrier(4)

    def retry():
        store = make(path)
        gate.wait(30)
        told.extend(store.run([write(f"op-{n}", RESERVE)])[0] for n in range(20))
        store.close()

    threads = [threading.Thread(target=retry) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    store = make(path)
    assert sum(not done.replayed for done in told) == store.group("t", BG).reserved == 20
    assert len(told) == 80
    store.close()


def test_a_view_is_of_one_moment(store):
    ask(store, "pin", PIN)
    ask(store, "r", RESERVE)
    view, purged_ms = store._view(write("op", replace(PIN, request_id="s")), NOW_MS)
    assert view == View(
        node="a", group=store.group("t", BG), pins=1, pin=None, reserved_total=1, nodes=frozenset({"a", "b"})
    )  # fmt: skip
    assert purged_ms == MADE_MS


@pytest.mark.rule("KVC-IDEM-019")
@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_an_operation_whose_answer_was_lost_can_be_asked_for_by_its_id(path, point):
    def reached(passed):
        if passed == point:
            raise Crash

    store = make(path, reached=reached)
    with pytest.raises(Crash):
        ask(store, "op", RESERVE)
    store.close()
    store = make(path)
    record = store.look("t", "op")
    assert (record is None) is (point == "before_commit")
    assert record is None or (record.answer.applied, record.answer.reserved) == (True, 1)
    assert store.look("u", "op") is None
    store.close()


def test_an_answer_can_be_had_without_running_anything(store):
    assert store.answered(write("op", RESERVE)) is None
    done = ask(store, "op", RESERVE)
    assert store.answered(write("op", RESERVE)) == Done(done.answer, replayed=True)
    assert refusal(store.answered(write("old", RESERVE, issued_ms=0))) is Refusal.ID_EXPIRED


def test_errors_say_whether_to_try_again():
    assert StoreError("full", "x").retry
    assert StoreError("locked", "x").retry
    assert not StoreError("damaged", "x").retry
    assert StoreError("damaged", "x", retry=True).retry

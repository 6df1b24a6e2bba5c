"""The document's six scenarios, each request in a new process, with the numbers that its own run printed."""

import subprocess
import sys

import msgspec
import pytest

from reference_impl.blockservice.store import Store, wall_ms
from reference_impl.rules.blockgroups import Group, Outcome, Refusal, Reserve
from tests.blockservice.one_request import EXIT_CODE, Order, Told
from tests.blockservice.store_kit import BG, effects_of, write
from tests.blockservice.witness import breaches

RESERVE = Reserve(block_group_id=BG, epoch=7, slots=1)


@pytest.fixture
def path(tmp_path):
    """A store as the document's: one group, epoch 7, reserved 0."""
    store = Store(tmp_path / "node.db", "a")
    store.publish("t", [Group(block_group_id=BG, location="a", epoch=7)])
    store.close()
    return tmp_path / "node.db"


def start(path, order):
    """Start a process that is about to run an order."""
    command = [sys.executable, "-m", "tests.blockservice.one_request", str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdin.write(msgspec.json.encode(order).decode() + "\n")
    process.stdin.flush()
    return process


_issued_ms = {}


def request(path, operation_id, request=RESERVE, *, exit_at="", unsafe=False):
    """Run one request in a process of its own; return its answer, None if the process was gone before it answered.

    An id that is asked again is a retry: it repeats the moment as well.
    """
    asked = write(operation_id, request, issued_ms=_issued_ms.setdefault((path, operation_id), wall_ms()))
    process = start(path, Order(writes=[asked], exit_at=exit_at, unsafe=unsafe))
    out, _ = process.communicate(timeout=30)
    assert process.returncode == (EXIT_CODE if exit_at else 0)
    return msgspec.json.decode(out, type=Told).done if out else None


def reserved(path):
    store = Store(path, "a")
    found = store.group("t", BG).reserved
    store.close()
    return found


def effects(path, operation_id="reserve-1"):
    store = Store(path, "a")
    found = effects_of(store, operation_id)
    store.close()
    return len(found)


def test_unsafe_a_response_is_lost_and_the_retry_has_the_effect_again(path):
    assert request(path, "reserve-1", exit_at="after_commit", unsafe=True) is None
    assert reserved(path) == 1
    assert request(path, "reserve-1", unsafe=True).answer.applied
    assert reserved(path) == 2
    assert effects(path) == 2, "the triggers have seen it twice"
    store = Store(path, "a")
    assert breaches(store.effects(), []) == ["t/reserve-1/group had 2 effects"]
    store.close()


@pytest.mark.rule("KVC-IDEM-001", "KVC-IDEM-003")
def test_safe_a_restart_and_the_same_id_replay_the_saved_result(path):
    assert request(path, "reserve-1", exit_at="after_commit") is None
    assert reserved(path) == 1
    retry = request(path, "reserve-1")
    assert (retry.replayed, retry.answer.outcome, retry.answer.reserved) == (True, Outcome.APPLIED, 1)
    assert request(path, "reserve-1") == retry
    assert (reserved(path), effects(path)) == (1, 1)


@pytest.mark.rule("KVC-IDEM-002", "KVC-IDEM-007")
def test_safe_a_crash_before_the_commit_leaves_nothing_and_the_retry_applies_once(path):
    assert request(path, "reserve-1", exit_at="before_commit") is None
    assert (reserved(path), effects(path)) == (0, 0)
    retry = request(path, "reserve-1")
    assert (retry.replayed, retry.answer.reserved) == (False, 1)
    assert (reserved(path), effects(path)) == (1, 1)


@pytest.mark.rule("KVC-IDEM-004")
def test_safe_the_same_id_with_changed_parameters_is_refused(path):
    request(path, "reserve-1")
    changed = request(path, "reserve-1", msgspec.structs.replace(RESERVE, slots=2))
    assert (changed.answer.outcome, changed.answer.refusal) == (Outcome.REFUSED, Refusal.ID_REUSED)
    assert (reserved(path), effects(path)) == (1, 1)


@pytest.mark.rule("KVC-IDEM-005")
def test_safe_a_new_id_with_a_stale_epoch_is_refused(path):
    request(path, "reserve-1")
    stale = request(path, "reserve-2", msgspec.structs.replace(RESERVE, epoch=6))
    assert (stale.answer.refusal, stale.answer.epoch) == (Refusal.STALE_EPOCH, 7)
    assert (reserved(path), effects(path, "reserve-2")) == (1, 0)


@pytest.mark.rule("KVC-IDEM-006")
def test_safe_four_concurrent_retries_have_one_effect_and_one_answer(path):
    order = Order(writes=[write("reserve-1", RESERVE, issued_ms=wall_ms())], wait=True)
    processes = [start(path, order) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    told = []
    for process in processes:  # all have the file open; now they race
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, _ = process.communicate(timeout=30)
        told.append(msgspec.json.decode(out, type=Told).done)
    assert sorted(done.replayed for done in told) == [False, True, True, True]
    assert len({msgspec.json.encode(done.answer) for done in told}) == 1
    assert (reserved(path), effects(path)) == (1, 1)


def test_four_processes_that_make_the_same_file_at_once_all_get_it(tmp_path):
    path = tmp_path / "new.db"
    later_ms = wall_ms() + 30_000  # than the file is made, whichever of them makes it
    processes = [start(path, Order(writes=[write(f"op-{n}", RESERVE, issued_ms=later_ms)])) for n in range(4)]
    for process in processes:
        out, _ = process.communicate(timeout=30)
        assert msgspec.json.decode(out, type=Told).done.answer.refusal is Refusal.UNKNOWN_GROUP

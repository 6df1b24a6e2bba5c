import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.rules import blockgroups
from reference_impl.rules.blockgroups import (
    PINS_MAX,
    Answer,
    CancelMigrate,
    EngineSays,
    Evict,
    Group,
    GroupState,
    Migration,
    MigrationStatus,
    Outcome,
    Pin,
    PinState,
    Place,
    PrepareGet,
    Refusal,
    Reserve,
    StartMigrate,
    Unpin,
    View,
    decide,
    end_migration,
    evicted,
    published,
)

replace = msgspec.structs.replace
BG = "bg_1"
RESIDENT = Group(block_group_id=BG, location="a", epoch=7, reserved=2, size_bytes=100)
EVICTED = replace(RESIDENT, state=GroupState.EVICTED, epoch=8, reserved=0)
LEAVING = replace(RESIDENT, state=GroupState.MIGRATING_OUT, migration="m")
ARRIVING = replace(RESIDENT, state=GroupState.MIGRATING_IN, location="b", migration="m")
MOVED = replace(RESIDENT, state=GroupState.MOVED, location="b", epoch=8, reserved=0, migration="m")
MOVE = Migration(operation_id="m", block_group_id=BG, src="a", dst="b", epoch=7)
PLACE = Place(node="a", handoff="{}", size_bytes=100, checksum="", transfer_token="token", expires_ms=9)
VIEW = View(node="a", group=RESIDENT, nodes=frozenset({"a", "b"}), slots_max=10, reserved_total=2)

RESERVE = Reserve(block_group_id=BG, epoch=7, slots=1)
PIN = Pin(block_group_id=BG, epoch=7, request_id="r")
UNPIN = Unpin(block_group_id=BG, epoch=7, request_id="r")
EVICT = Evict(block_group_id=BG, epoch=7)
PREPARE = PrepareGet(block_group_id=BG, epoch=7, request_id="r")
START = StartMigrate(block_group_id=BG, epoch=7, src="a", dst="b")
CANCEL = CancelMigrate(block_group_id=BG, epoch=7, migration_id="m")
ALL = (RESERVE, PIN, UNPIN, EVICT, PREPARE, START, CANCEL)
BY_EPOCH = (RESERVE, PIN, UNPIN, EVICT, PREPARE, START)


def run(request, **seen):
    return decide(request, "op", replace(VIEW, **seen))


def changes(decision):
    """What a decision writes beside its answer."""
    found = (decision.group, decision.pin, decision.migration, decision.transfer, decision.forget_pins)
    return [part for part in found if part not in (None, False)]


def refused(decision):
    """The refusal and the field at fault of a decision that changes nothing."""
    assert decision.answer.outcome is Outcome.REFUSED
    assert decision.answer.message
    assert changes(decision) == []
    return decision.answer.refusal, decision.answer.field


@pytest.mark.parametrize("request_", ALL)
def test_a_group_that_is_not_known_is_refused(request_):
    decision = run(request_, group=None)
    assert refused(decision) == (Refusal.UNKNOWN_GROUP, "block_group_id")
    assert (decision.answer.epoch, decision.answer.state) == (0, None)


@pytest.mark.rule("KVC-IDEM-005")
@pytest.mark.parametrize("request_", BY_EPOCH)
def test_a_stale_epoch_is_refused_with_the_current_one_and_changes_nothing(request_):
    decision = run(replace(request_, epoch=6), pin=PinState.PINNED, pins=1)
    assert refused(decision) == (Refusal.STALE_EPOCH, "epoch")
    assert decision.answer.epoch == 7


@pytest.mark.rule("KVC-IDEM-005")
@pytest.mark.parametrize("request_", ALL)
@pytest.mark.parametrize("group", [RESIDENT, EVICTED, LEAVING, ARRIVING, MOVED])
def test_an_epoch_from_the_future_is_refused_in_every_state(request_, group):
    decision = run(replace(request_, epoch=group.epoch + 1), group=group, migration=MOVE)
    assert refused(decision) == (Refusal.FUTURE_EPOCH, "epoch")
    assert decision.answer.epoch == group.epoch


@pytest.mark.rule("KVC-IDEM-010", "KVC-IDEM-011")
@pytest.mark.parametrize("request_", [RESERVE, PIN, PREPARE, START])
@pytest.mark.parametrize(
    ("group", "refusal"),
    [
        (EVICTED, Refusal.NOT_RESIDENT),
        (MOVED, Refusal.NOT_RESIDENT),
        (LEAVING, Refusal.MIGRATING),
        (ARRIVING, Refusal.MIGRATING),
    ],
)
def test_what_needs_a_resident_group_is_refused_in_every_other_state(request_, group, refusal):
    decision = run(replace(request_, epoch=group.epoch), group=group)
    assert refused(decision) == (refusal, "block_group_id")
    assert (decision.answer.state, decision.answer.location) == (group.state, group.location)


def test_reserve_adds_to_what_is_reserved():
    decision = run(replace(RESERVE, slots=3))
    assert decision.group == replace(RESIDENT, reserved=5)
    assert changes(decision) == [decision.group]
    assert (decision.answer.applied, decision.answer.reserved, decision.answer.epoch) == (True, 5, 7)


@pytest.mark.parametrize(("slots", "fits"), [(8, True), (9, False)])
def test_reserve_never_exceeds_what_the_node_has(slots, fits):
    decision = run(replace(RESERVE, slots=slots))
    assert decision.answer.applied is fits
    if not fits:
        assert refused(decision) == (Refusal.NO_ROOM, "slots")
        assert decision.answer.message == "9 slots wanted, 8 are left"


@pytest.mark.rule("KVC-IDEM-009")
def test_a_pin_counts_once_however_often_it_comes():
    first, again = run(PIN), run(PIN, pin=PinState.PINNED, pins=1)
    assert (changes(first), first.answer.pins) == ([PinState.PINNED], 1)
    assert (changes(again), again.answer.pins) == ([], 1)
    assert again.answer.applied


@pytest.mark.rule("KVC-IDEM-009")
def test_a_pin_after_its_unpin_is_refused():
    assert refused(run(PIN, pin=PinState.UNPINNED)) == (Refusal.UNPINNED_BEFORE, "request_id")


@pytest.mark.rule("KVC-IDEM-009")
@pytest.mark.parametrize(
    ("pin", "pins", "written", "left"),
    [
        (PinState.PINNED, 2, [PinState.UNPINNED], 1),
        (None, 2, [PinState.UNPINNED], 2),
        (PinState.UNPINNED, 2, [], 2),
    ],
)
def test_an_unpin_takes_its_own_pin_only_and_is_remembered(pin, pins, written, left):
    decision = run(UNPIN, pin=pin, pins=pins)
    assert (changes(decision), decision.answer.pins) == (written, left)
    assert decision.answer.applied


@pytest.mark.parametrize("group", [EVICTED, LEAVING, ARRIVING, MOVED])
def test_nobody_is_kept_from_leaving_by_the_state_of_a_group(group):
    assert run(replace(UNPIN, epoch=group.epoch), group=group).answer.applied


@pytest.mark.rule("KVC-IDEM-005", "KVC-IDEM-009")
@pytest.mark.parametrize("pin", [None, PinState.PINNED, PinState.UNPINNED])
def test_an_unpin_of_an_epoch_that_is_over_touches_no_pin_of_this_one(pin):
    assert refused(run(replace(UNPIN, epoch=6), pin=pin, pins=1)) == (Refusal.STALE_EPOCH, "epoch")


def test_a_group_has_a_bounded_number_of_pins():
    assert run(PIN, pins=PINS_MAX - 1).answer.applied
    assert refused(run(PIN, pins=PINS_MAX)) == (Refusal.TOO_MANY_PINS, "request_id")


@pytest.mark.rule("KVC-IDEM-010")
@pytest.mark.parametrize("request_", [EVICT, START])
@pytest.mark.parametrize(
    ("seen", "refusal"),
    [
        ({"pins": 1}, Refusal.PINNED),
        ({"transfers": 1}, Refusal.TRANSFERRING),
        ({"engine": EngineSays(leased=True)}, Refusal.LEASED),
    ],
)
def test_nothing_in_use_is_evicted_or_moved(request_, seen, refusal):
    assert refused(run(request_, **seen)) == (refusal, "block_group_id")


@pytest.mark.rule("KVC-IDEM-010")
@pytest.mark.parametrize("group", [LEAVING, ARRIVING])
def test_what_is_being_moved_is_not_evicted(group):
    assert refused(run(EVICT, group=group)) == (Refusal.MIGRATING, "block_group_id")


@pytest.mark.rule("KVC-IDEM-010")
def test_an_eviction_ends_the_epoch_and_gives_back_what_was_reserved():
    decision = run(EVICT)
    assert decision.group == EVICTED
    assert changes(decision) == [EVICTED, True]
    assert decision.forget_pins
    assert (decision.answer.epoch, decision.answer.reserved, decision.answer.pins) == (8, 0, 0)


@pytest.mark.rule("KVC-IDEM-010")
@pytest.mark.parametrize("epoch", [7, 8])
def test_evicting_what_is_evicted_succeeds_and_changes_nothing(epoch):
    decision = run(replace(EVICT, epoch=epoch), group=EVICTED)
    assert (decision.answer.applied, changes(decision)) == (True, [])
    assert decision.answer.state is GroupState.EVICTED


@pytest.mark.parametrize("request_", [PIN, PREPARE, START])
def test_blocks_that_the_engine_has_used_for_something_else_are_written_down_as_evicted(request_):
    pins = 0 if request_ is START else 3
    decision = run(request_, engine=EngineSays(here=False), pins=pins)
    assert (decision.answer.refusal, decision.group, decision.forget_pins) == (Refusal.NOT_RESIDENT, EVICTED, True)
    assert (decision.answer.epoch, decision.answer.state, decision.answer.reserved) == (8, GroupState.EVICTED, 0)
    assert decision.answer.pins == 0, "they are forgotten"


@pytest.mark.rule("KVC-IDEM-016")
def test_a_loan_is_answered_with_its_place():
    decision = run(PREPARE, engine=EngineSays(place=PLACE))
    assert (decision.transfer, decision.answer.place, decision.answer.applied) == (True, PLACE, True)
    assert changes(decision) == [True]


def test_without_an_engine_nothing_is_lent():
    assert refused(run(PREPARE)) == (Refusal.NOT_RESIDENT, "block_group_id")


@pytest.mark.rule("KVC-IDEM-011")
def test_a_migration_starts_pending_under_its_operations_id():
    decision = run(START)
    assert decision.migration == replace(MOVE, operation_id="op")
    assert decision.group == replace(LEAVING, migration="op")
    assert decision.answer.migration == decision.migration
    assert decision.migration.status is MigrationStatus.PENDING


@pytest.mark.parametrize("dst", ["a", "c"])
def test_a_migration_leads_to_another_node_that_is_known(dst):
    decision = run(replace(START, dst=dst))
    assert refused(decision) == (Refusal.WRONG_TARGET, "dst")
    assert decision.answer.message == f"{dst} is no other node of ours (b)"


def test_a_node_without_others_says_so():
    assert run(START, nodes=frozenset({"a"})).answer.message == "b is no other node of ours (none)"


def test_a_migration_starts_where_the_group_is():
    assert refused(run(replace(START, src="b"))) == (Refusal.WRONG_SOURCE, "src")


@pytest.mark.rule("KVC-IDEM-011")
@pytest.mark.parametrize("status", [MigrationStatus.PENDING, MigrationStatus.RUNNING])
def test_a_migration_that_is_not_decided_can_be_cancelled(status):
    decision = run(CANCEL, group=LEAVING, migration=replace(MOVE, status=status))
    assert decision.migration.status is MigrationStatus.CANCELLED
    assert decision.group == replace(RESIDENT, migration="m")
    assert decision.answer.migration == decision.migration


@pytest.mark.rule("KVC-IDEM-011")
def test_cancelling_what_is_cancelled_succeeds_and_changes_nothing():
    decision = run(CANCEL, migration=replace(MOVE, status=MigrationStatus.CANCELLED))
    assert (decision.answer.applied, changes(decision)) == (True, [])


@pytest.mark.rule("KVC-IDEM-011")
@pytest.mark.parametrize("status", [MigrationStatus.SUCCEEDED, MigrationStatus.FAILED])
def test_what_has_ended_otherwise_cannot_be_cancelled(status):
    ended = replace(MOVE, status=status)
    decision = run(CANCEL, group=MOVED, migration=ended)
    assert refused(decision) == (Refusal.TOO_LATE, "migration_id")
    assert decision.answer.migration == ended


@pytest.mark.parametrize("migration", [None, replace(MOVE, block_group_id="bg_2")])
def test_only_a_migration_of_the_group_can_be_cancelled(migration):
    assert refused(run(CANCEL, group=LEAVING, migration=migration)) == (Refusal.UNKNOWN_OPERATION, "migration_id")


@pytest.mark.rule("KVC-IDEM-011")
def test_the_owner_changes_when_a_migration_succeeds_and_only_then():
    ended, group = end_migration(MOVE, LEAVING, MigrationStatus.SUCCEEDED)
    assert (ended.status, group) == (MigrationStatus.SUCCEEDED, MOVED)
    for status in (MigrationStatus.FAILED, MigrationStatus.CANCELLED):
        ended, group = end_migration(MOVE, LEAVING, status, "why")
        assert (ended.status, ended.reason) == (status, "why")
        assert group == replace(RESIDENT, migration="m")


@pytest.mark.parametrize(
    ("status", "over"), list(zip(MigrationStatus, (False, False, True, True, True), strict=True))
)  # fmt: skip
def test_a_migration_has_ended_or_not(status, over):
    assert status.ended is over


def test_a_group_that_returns_starts_its_next_epoch_and_what_is_known_stays():
    new = Group(block_group_id=BG, location="a", size_bytes=5)
    assert published(None, new) == new
    assert published(EVICTED, new) == replace(new, epoch=9)
    for known in (RESIDENT, LEAVING, ARRIVING, MOVED):
        assert published(known, new) is None


@pytest.mark.rule("KVC-IDEM-005")
def test_a_group_that_is_new_starts_above_every_epoch_that_was_forgotten():
    new = Group(block_group_id=BG, location="a")
    assert published(None, new, 8) == replace(new, epoch=9)
    assert published(None, replace(new, epoch=12), 8).epoch == 12
    assert published(EVICTED, new, 20).epoch == 9, "its own epochs are known"
    assert published(MOVED, new, 20) is None


@pytest.mark.parametrize("request_", ALL)
def test_a_request_comes_back_from_json_as_it_was(request_):
    assert msgspec.json.decode(msgspec.json.encode(request_), type=blockgroups.Request) == request_


@pytest.mark.parametrize("bad", ["", "x" * 129, "two words", "é", "line\n"])
def test_ids_that_are_empty_enormous_or_not_printable_are_no_ids(bad):
    with pytest.raises(msgspec.ValidationError, match=r"\$\.request_id"):
        msgspec.convert({"type": "pin", "block_group_id": BG, "epoch": 1, "request_id": bad}, blockgroups.Request)


@pytest.mark.parametrize(
    ("field", "bad"), [("slots", 0), ("slots", -1), ("slots", 1 << 21), ("epoch", -1), ("epoch", 1 << 53)]
)
def test_numbers_out_of_bounds_are_refused_by_name(field, bad):
    good = {"type": "reserve", "block_group_id": BG, "epoch": 1, "slots": 1}
    with pytest.raises(msgspec.ValidationError, match=rf"\$\.{field}"):
        msgspec.convert(good | {field: bad}, blockgroups.Request)


# Random histories of one group, against what anybody would say of it.


class World:
    """One group at one node, kept in plain Python: `decide` is applied, and what it may never do is asserted."""

    def __init__(self):
        self.group = RESIDENT
        self.pins = {}
        self.transfers = 0
        self.migrations = {}
        self.said = set()
        """(epoch, request) that were told that they pin, and of those that left."""
        self.left = set()

    def view(self, request, engine):
        return View(
            node="a", group=self.group, pins=sum(p is PinState.PINNED for p in self.pins.values()),
            pin=self.pins.get(getattr(request, "request_id", "")), transfers=self.transfers,
            migration=self.migrations.get(getattr(request, "migration_id", "")), reserved_total=self.group.reserved,
            slots_max=10, nodes=frozenset({"a", "b"}), engine=engine,
        )  # fmt: skip

    def ask(self, request, operation_id, engine):
        before, view = self.group, self.view(request, engine)
        decision = decide(request, operation_id, view)
        if decision.group is not None:
            self.group = decision.group
        if decision.forget_pins:
            self.pins = {}
        if decision.pin is not None:
            self.pins[request.request_id] = decision.pin
        if decision.migration is not None:
            self.migrations[decision.migration.operation_id] = decision.migration
        self.transfers += decision.transfer
        self.judge(request, before, view, decision)

    def judge(self, request, before, view, decision):
        answer = decision.answer
        assert (answer.epoch, answer.state, answer.location, answer.reserved) == (
            self.group.epoch, self.group.state, self.group.location, self.group.reserved,
        )  # fmt: skip
        assert answer.pins == len(self.pinned())
        if not answer.applied and answer.refusal is not Refusal.NOT_RESIDENT:
            assert changes(decision) == []
        if self.group.state is not before.state and isinstance(request, Evict | StartMigrate):
            assert not view.pins
            assert not view.transfers
            assert not view.engine.leased or not view.engine.here
        if not isinstance(request, Evict | CancelMigrate) and answer.applied:
            assert request.epoch == before.epoch
        who = (before.epoch, getattr(request, "request_id", ""))
        if isinstance(request, Pin) and answer.applied:
            assert who not in self.left, "a late pin came back after its unpin"
            self.said.add(who)
        if isinstance(request, Unpin) and answer.applied:
            self.left.add(who)

    def pinned(self):
        return {request for request, pin in self.pins.items() if pin is PinState.PINNED}

    def publish(self):
        new = published(self.group, replace(RESIDENT, epoch=1, reserved=0))
        if new is not None:
            self.group, self.pins, self.transfers = new, {}, 0

    def lose(self):
        if self.group.state is GroupState.RESIDENT:
            self.group, self.pins, self.transfers = evicted(self.group), {}, 0

    def end(self, status):
        for name, migration in self.migrations.items():
            if not migration.status.ended:
                self.migrations[name], self.group = end_migration(migration, self.group, status)
                if status is MigrationStatus.SUCCEEDED:
                    self.pins = {}

    def check(self):
        open_ = [m for m in self.migrations.values() if not m.status.ended]
        assert len(open_) == (self.group.state is GroupState.MIGRATING_OUT)
        assert all(m.operation_id == self.group.migration and m.epoch == self.group.epoch for m in open_)
        expected = {request for epoch, request in self.said - self.left if epoch == self.group.epoch}
        assert self.pinned() == expected
        assert 0 <= self.group.reserved <= 10


requests = st.sampled_from([
    RESERVE, replace(RESERVE, slots=9), EVICT, PREPARE, START,
    *(kind(block_group_id=BG, epoch=7, request_id=r) for kind in (Pin, Pin, Unpin) for r in ("r", "s")),
    *(CancelMigrate(block_group_id=BG, epoch=7, migration_id=f"op-{n}") for n in range(0, 12, 3)),
])  # fmt: skip
says = st.sampled_from([
    EngineSays(), EngineSays(place=PLACE), EngineSays(place=PLACE), EngineSays(leased=True), EngineSays(here=False),
])  # fmt: skip
histories = st.lists(
    st.one_of(
        st.tuples(requests, says, st.integers(-2, 1)),
        st.sampled_from(["publish", "lose", "return", "SUCCEEDED", "FAILED"]),
    ),
    max_size=40,
)


def live(history, world):
    """Let a history happen. Epochs are counted from the one that the group has."""
    highest = 0
    for number, step in enumerate(history):
        if step == "publish":
            world.publish()
        elif step == "lose":
            world.lose()
        elif step == "return":
            world.transfers = 0
        elif isinstance(step, str):
            world.end(MigrationStatus(step))
        else:
            request, engine, off = step
            world.ask(replace(request, epoch=max(world.group.epoch + off, 0)), f"op-{number}", engine)
        world.check()
        assert world.group.epoch >= highest, "an epoch went back"
        highest = world.group.epoch


@pytest.mark.rule("KVC-IDEM-005", "KVC-IDEM-009", "KVC-IDEM-010", "KVC-IDEM-011")
@settings(max_examples=400, deadline=None)
@given(histories)
def test_whatever_comes_in_whatever_order_pins_are_sets_and_epochs_hold(history):
    live(history, World())


def test_an_answer_that_is_applied_says_so():
    assert Answer(outcome=Outcome.APPLIED).applied
    assert not Answer(outcome=Outcome.REFUSED).applied

"""Stores with one fault each, which their effects and answers convict: so they would convict ours."""

import msgspec
import pytest

from reference_impl.blockservice.store import Done, Store
from reference_impl.rules import blockgroups
from reference_impl.rules.blockgroups import Group, Pin, PinState, Unpin
from tests.blockservice.store_kit import BG, EVICT, PIN, RESERVE, UNPIN, Crash, make, write
from tests.blockservice.witness import breaches

replace = msgspec.structs.replace


class TwoTransactions(Store):
    """Commits the effect, and then its record."""

    def run(self, writes):
        self._later = []
        done = super().run(writes)
        with self._transaction():
            for kept in self._later:
                super()._keep(*kept)
        return done

    def _keep(self, *kept):
        self._later.append(kept)


class NoResult(Store):
    """Remembers that an operation ran, and not what it was answered."""

    def _keep(self, asked, answer, now_ms):
        super()._keep(asked, blockgroups.Answer(outcome=answer.outcome), now_ms)


class AnyParameters(Store):
    """Does not compare the parameters of a retry."""

    def _replay(self, asked, _now_ms):
        record = self.look(asked.tenant, asked.operation_id)
        return record and Done(record.answer, replayed=True)


class InMemory(Store):
    """Knows of operations until it is restarted."""

    def __init__(self, *arguments, **options):
        self._seen = {}
        super().__init__(*arguments, **options)

    def _replay(self, asked, _now_ms):
        answer = self._seen.get((asked.tenant, asked.operation_id))
        return answer and Done(answer, replayed=True)

    def _keep(self, asked, answer, _now_ms):
        self._seen[asked.tenant, asked.operation_id] = answer


class OneTenant(Store):
    """Looks ids up without their tenant."""

    def _replay(self, asked, now_ms):
        return super()._replay(replace(asked, tenant=""), now_ms)

    def _keep(self, asked, answer, now_ms):
        super()._keep(replace(asked, tenant=""), answer, now_ms)


class AnyEpoch(Store):
    """Does not look at the epoch."""

    def _first(self, asked, now_ms):
        known = self._group(asked.tenant, asked.request.block_group_id)
        return super()._first(replace(asked, request=replace(asked.request, epoch=known.epoch)), now_ms)


class Counter(Store):
    """Counts pins: each one more, each unpin one less."""

    def _view(self, asked, now_ms):
        view, purged_ms = super()._view(asked, now_ms)
        if isinstance(asked.request, Pin) and view.pin is PinState.PINNED:
            view = replace(view, pin=None)
        if isinstance(asked.request, Unpin) and view.pin is PinState.UNPINNED:
            view = replace(view, pin=PinState.PINNED)
        return view, purged_ms


class Resurrects(Store):
    """Forgets who has left."""

    def _view(self, asked, now_ms):
        view, purged_ms = super()._view(asked, now_ms)
        return replace(view, pin=None if view.pin is PinState.UNPINNED else view.pin), purged_ms


SCRIPT = (
    write("r1", RESERVE),
    "restart",
    write("r1", RESERVE),
    write("r1", replace(RESERVE, slots=2)),
    write("stale", replace(RESERVE, epoch=6)),
    write("r1", RESERVE, tenant="u"),
    write("p1", PIN),
    write("p2", PIN),
    write("u1", UNPIN),
    write("u2", UNPIN),
    write("late", PIN),
    write("early", replace(UNPIN, request_id="s")),
    write("late-s", replace(PIN, request_id="s")),
    "crash",
    write("r2", RESERVE),
    write("r2", RESERVE),
    write("e1", EVICT),
)


def perform(path, kind):
    """Play the script, with a restart and a crash right after a commit; return of what it is convicted."""
    crash = []

    def reached(point):
        if point == "after_commit" and crash:
            crash.clear()
            raise Crash

    def opened():
        store = make(path, kind=kind, reached=reached)
        store.publish("u", [Group(block_group_id=BG, location="a", epoch=7)])
        return store

    store, told = opened(), []
    for step in SCRIPT:
        if step == "crash":
            crash.append(True)
        elif step == "restart":
            store.close()
            store = opened()
        else:
            try:
                told.append((step, store.run([step])[0]))
            except Crash:
                store.close()
                store = opened()
    found = breaches(store.effects(), told)
    store.close()
    return found


def test_the_store_is_convicted_of_nothing(tmp_path):
    assert perform(tmp_path / "node.db", Store) == []


@pytest.mark.parametrize(
    ("twin", "sentence"),
    [
        pytest.param(TwoTransactions, "t/r2/group had 2 effects", marks=pytest.mark.rule("KVC-IDEM-007")),
        pytest.param(NoResult, "r1 of t was answered", marks=pytest.mark.rule("KVC-IDEM-003")),
        pytest.param(AnyParameters, "r1 of t ran with other parameters", marks=pytest.mark.rule("KVC-IDEM-004")),
        pytest.param(AnyEpoch, "stale had an effect with epoch 6, not 7", marks=pytest.mark.rule("KVC-IDEM-005")),
        pytest.param(Counter, "u2 changed nothing and was told of -1 pins", marks=pytest.mark.rule("KVC-IDEM-009")),
        pytest.param(Resurrects, "late-s pins again for s, which had left", marks=pytest.mark.rule("KVC-IDEM-009")),
        pytest.param(InMemory, "t/r1/group had 2 effects", marks=pytest.mark.rule("KVC-IDEM-003")),
        pytest.param(OneTenant, "r1 of u was applied and had no effect", marks=pytest.mark.rule("KVC-IDEM-008")),
    ],
)
def test_a_broken_twin_is_convicted_by_its_effects_and_answers(tmp_path, twin, sentence):
    found = perform(tmp_path / "node.db", twin)
    assert any(line.startswith(sentence) for line in found), found

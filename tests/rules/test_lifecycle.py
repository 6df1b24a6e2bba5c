import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.rules.lifecycle import EngineState, IllegalMove, Lifecycle, WakeFacts

ALL_FACTS = WakeFacts(weights_mapped=True, kv_mapped=True, canary_answered=True)
FACT_NAMES = ("weights_mapped", "kv_mapped", "canary_answered")

MOVES = {
    "park": lambda life: life.park(),
    "wake": lambda life: life.wake(life.epoch + 1),
    "activate": lambda life: life.activate(ALL_FACTS),
    "die": lambda life: life.die("killed"),
}
LEGAL = {
    (EngineState.INIT, "park"): EngineState.STANDBY,
    (EngineState.STANDBY, "wake"): EngineState.WAKING,
    (EngineState.WAKING, "activate"): EngineState.ACTIVE,
    **{(state, "die"): EngineState.DEAD for state in EngineState},
}


def engine_in(state: EngineState) -> Lifecycle:
    life = Lifecycle("e1")
    for move in ("park", "wake", "activate")[: list(EngineState).index(state)]:
        MOVES[move](life)
    if state is EngineState.DEAD:
        life.die("killed")
    assert life.state is state
    return life


@pytest.mark.parametrize(("state", "move"), list(itertools.product(EngineState, MOVES)))
def test_every_move_from_every_state_is_legal_or_names_both_states(state, move):
    life = engine_in(state)
    if (state, move) in LEGAL:
        MOVES[move](life)
        assert life.state is LEGAL[state, move]
        return
    with pytest.raises(IllegalMove) as caught:
        MOVES[move](life)
    assert life.state is state
    assert caught.value.here is state
    assert f"{state} -> {caught.value.there}" in str(caught.value)


@given(st.lists(st.sampled_from(sorted(MOVES)), max_size=12))
def test_only_an_active_engine_may_serve_or_register_whatever_was_tried(moves):
    life = Lifecycle("e1")
    expected = EngineState.INIT
    for move in moves:
        expected = LEGAL.get((expected, move), expected)
        with contextlib.suppress(IllegalMove):
            MOVES[move](life)
        assert life.state is expected
        assert life.may_serve is life.may_register is (expected is EngineState.ACTIVE)


@pytest.mark.parametrize("held", [c for n in range(3) for c in itertools.combinations(FACT_NAMES, n)])
def test_a_wake_with_a_fact_missing_fails_names_it_and_is_never_registered(held):
    life = engine_in(EngineState.WAKING)
    with pytest.raises(IllegalMove) as caught:
        life.activate(WakeFacts(**dict.fromkeys(held, True)))
    for name in FACT_NAMES:
        assert (name in str(caught.value)) is (name not in held)
    life.die("wake failed")
    with pytest.raises(IllegalMove):
        life.activate(ALL_FACTS)
    assert not life.may_register


@pytest.mark.parametrize(("seen", "epoch"), [(0, 0), (0, -1), (5, 5), (5, 4)])
def test_a_wake_needs_an_epoch_above_every_one_seen(seen, epoch):
    life = engine_in(EngineState.STANDBY)
    life.saw_epoch(seen)
    with pytest.raises(IllegalMove, match=f"epoch {epoch} is not above {seen}"):
        life.wake(epoch)
    assert life.state is EngineState.STANDBY
    life.wake(seen + 1)
    assert (life.state, life.epoch) == (EngineState.WAKING, seen + 1)


def test_a_shadow_that_hears_of_epochs_is_not_fenced_by_them():
    life = engine_in(EngineState.STANDBY)
    life.saw_epoch(7)
    assert not life.is_fenced


def test_an_active_engine_that_hears_of_a_successor_stops_serving():
    life = engine_in(EngineState.ACTIVE)
    life.saw_epoch(life.epoch)
    assert life.may_serve
    life.saw_epoch(life.epoch + 1)
    assert life.is_fenced
    assert not life.may_serve
    assert not life.may_register


def test_a_waking_engine_that_hears_of_a_successor_cannot_become_active():
    life = engine_in(EngineState.WAKING)
    life.saw_epoch(9)
    with pytest.raises(IllegalMove, match="fenced by 9"):
        life.activate(ALL_FACTS)
    assert life.state is EngineState.WAKING


def test_the_first_reason_of_a_death_counts():
    life = engine_in(EngineState.ACTIVE)
    life.die("SIGKILL")
    life.die("exit")
    assert life.reason == "SIGKILL"

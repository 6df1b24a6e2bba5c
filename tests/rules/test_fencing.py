import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.rules.fencing import EpochFence

admissions = st.lists(
    st.tuples(st.sampled_from(["w0", "w1"]), st.integers(-1, 6), st.sampled_from(["a", "b", "c"])), max_size=40
)


def contradictions(fence: EpochFence, calls: list[tuple[str, int, str]]) -> list[str]:
    """What `fence` admitted although a higher epoch, or another engine with the same one, was admitted before."""
    found = []
    admitted: dict[str, tuple[int, str]] = {}
    for key, epoch, engine in calls:
        if not fence.admit(key, epoch, engine).accepted:
            continue
        before, holder = admitted.get(key, (0, engine))
        if epoch < before or (epoch == before and engine != holder):
            found.append(f"{engine} with {epoch} after {holder} with {before}")
        admitted[key] = max((epoch, engine), (before, holder), key=lambda pair: pair[0])
    return found


@given(admissions)
def test_a_key_never_goes_back_to_a_lower_epoch_and_no_epoch_has_two_engines(calls):
    assert contradictions(EpochFence(), calls) == []


class _LetsEqualsIn(EpochFence):
    def admit(self, key, epoch, engine_id):
        holder = self._highest.get(key, (0, engine_id))[1]
        return super().admit(key, epoch, holder)


class _Forgets(EpochFence):
    def admit(self, key, epoch, engine_id):
        self._highest.clear()
        return super().admit(key, epoch, engine_id)


@pytest.mark.parametrize("twin", [_LetsEqualsIn, _Forgets])
def test_broken_fences_are_caught(twin):
    assert contradictions(twin(), [("w0", 2, "a"), ("w0", 2, "b"), ("w0", 1, "a")])


@given(admissions)
def test_a_refusal_changes_nothing_and_tells_the_current_epoch(calls):
    fence = EpochFence()
    for key, epoch, engine in calls:
        before = fence.epoch(key)
        answer = fence.admit(key, epoch, engine)
        assert answer.epoch == fence.epoch(key)
        assert bool(answer.reason) is not answer.accepted
        if answer.accepted:
            assert fence.is_current(key, epoch, engine)
        else:
            assert fence.epoch(key) == before


def test_the_same_engine_is_admitted_again_and_another_is_not():
    fence = EpochFence()
    assert fence.admit("w0", 3, "a").accepted
    assert fence.admit("w0", 3, "a").accepted
    refused = fence.admit("w0", 3, "b")
    assert (refused.accepted, refused.epoch) == (False, 3)
    assert "belongs to a" in refused.reason


def test_a_late_predecessor_is_refused_and_no_longer_current():
    fence = EpochFence()
    fence.admit("w0", 1, "a")
    assert fence.admit("w0", 2, "b").accepted
    refused = fence.admit("w0", 1, "a")
    assert (refused.accepted, refused.epoch) == (False, 2)
    assert not fence.is_current("w0", 1, "a")


def test_keys_do_not_know_each_other():
    fence = EpochFence()
    fence.admit("w0", 9, "a")
    assert fence.admit("w1", 1, "b").accepted
    assert (fence.epoch("w0"), fence.epoch("w1"), fence.epoch("w2")) == (9, 1, 0)


@pytest.mark.parametrize("epoch", [0, -3])
def test_an_epoch_that_no_lock_gives_out_is_refused(epoch):
    answer = EpochFence().admit("w0", epoch, "a")
    assert not answer.accepted
    assert "start at 1" in answer.reason

"""The mix of operations pins some groups twice for one request, keeps a few to the end, and takes each back once."""

from __future__ import annotations

from collections import Counter

import numpy as np

from reference_impl.rules.blockgroups import Pin, Refusal, Unpin
from workloads.operation_mix import KEPT_MAX, Asked, Known, Mix

KNOWN = [Known(node, f"{node}-g{n}", 1) for node in ("p0", "d0") for n in range(10)]


def mixed(operations: int, seed: int = 1) -> tuple[Mix, list[Asked]]:
    """Return a mix whose every operation went well at once, and what it asked."""
    mix = Mix(np.random.default_rng(seed), ["p0", "d0"], "default", ["tenant-1"], "op")
    asked = [a for n in range(operations) if (a := _next(mix, n)) is not None]
    return mix, asked


def _next(mix: Mix, now_ms: int) -> Asked | None:
    asked = mix.next(KNOWN, now_ms)
    if asked is not None:
        mix.ended(asked, "ok", "")
    return asked


def pins_of(asked: list[Asked]) -> Counter[str]:
    """Return how many operations pinned for each request."""
    ours = [a for a in asked if a.tenant == "default"]
    return Counter(r for _, r in {(a.operation_id, a.request.request_id) for a in ours if isinstance(a.request, Pin)})


def test_a_request_pins_again_under_another_operation_id() -> None:
    _, asked = mixed(2000)
    twice = [request_id for request_id, operations in pins_of(asked).items() if operations > 1]
    assert len(twice) > 20


def test_some_pins_are_kept_to_the_end_and_each_is_taken_back_once() -> None:
    mix, asked = mixed(3000)
    left = mix.release(0)
    names = [a.request.request_id for a in left if isinstance(a.request, Unpin)]
    assert len(names) == len(left) == len(set(names)) >= KEPT_MAX
    early = set(list(pins_of(asked))[: len(pins_of(asked)) // 2])
    assert len(early & set(names)) > KEPT_MAX // 2, "from the first half"


def test_a_pin_that_could_not_be_asked_for_again_may_still_stand() -> None:
    pin = Pin(block_group_id="g", epoch=1, request_id="r")
    asked = Asked("default", "p0", "op-1", 0, pin)
    for refusal, left in (("", 1), ("CIRCUIT_OPEN", 1), (Refusal.ID_REUSED, 1), (Refusal.UNPINNED_BEFORE, 0)):
        mix = Mix(np.random.default_rng(1), ["p0"], "default", [], "op")
        mix._note(asked)
        mix.ended(asked, "fail", refusal)
        assert len(mix.release(0)) == left, refusal


def test_a_pin_of_another_epoch_says_nothing_of_the_one_before() -> None:
    before = Asked("default", "p0", "op-1", 0, Pin(block_group_id="g", epoch=1, request_id="r"))
    later = Asked("default", "p0", "op-1", 0, Pin(block_group_id="g", epoch=2, request_id="r"))
    mix = Mix(np.random.default_rng(1), ["p0"], "default", [], "op")
    mix._note(before)
    mix.ended(later, "fail", Refusal.FUTURE_EPOCH)
    assert [a.request.epoch for a in mix.release(0)] == [1]
    mix.ended(later, "ok", "")
    mix.ended(before, "fail", Refusal.STALE_EPOCH)
    assert [a.request.epoch for a in mix.release(0)] == [2], "this one stands now"

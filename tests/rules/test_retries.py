"""When a call is tried again: pauses, jitter, and a budget (KVC-IDEM-013)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.rules.retries import RetryBudget, RetryPolicy, backoff_s

pytestmark = pytest.mark.rule("KVC-IDEM-013")

MIDDLE = 0.5
DRAWS = st.floats(0, 1, exclude_max=True)


def test_pauses_are_those_of_the_document() -> None:
    policy = RetryPolicy()
    assert [backoff_s(policy, retry, MIDDLE) for retry in (1, 2, 3)] == pytest.approx([0.01, 0.02, 0.04])


def test_a_pause_grows_to_its_limit_and_no_further() -> None:
    policy = RetryPolicy(max_s=0.05)
    assert [backoff_s(policy, retry, MIDDLE) for retry in (3, 4, 99)] == pytest.approx([0.04, 0.05, 0.05])


@given(retry=st.integers(1, 10_000), draw=DRAWS, jitter=st.floats(0, 1))
def test_jitter_keeps_within_its_share(retry: int, draw: float, jitter: float) -> None:
    policy = RetryPolicy(jitter=jitter)
    middle_s = min(0.01 * 2 ** (min(retry, 100) - 1), policy.max_s)
    low, high = middle_s * (1 - jitter), middle_s * (1 + jitter)
    assert low - 1e-12 <= backoff_s(policy, retry, draw) <= high + 1e-12


@given(draw=DRAWS, other=DRAWS)
def test_a_larger_draw_is_a_longer_pause(draw: float, other: float) -> None:
    policy = RetryPolicy()
    assert (backoff_s(policy, 1, draw) <= backoff_s(policy, 1, other)) == (draw <= other) or draw == pytest.approx(
        other
    )


def fullest_bin(policy: RetryPolicy, clients: int = 200, bin_s: float = 0.001) -> int:
    """Return how many of `clients` that failed together come back in the same millisecond, at their third retry."""
    pauses = [backoff_s(policy, 3, n / clients) for n in range(clients)]
    bins = [round(pause / bin_s) for pause in pauses]
    return max(bins.count(b) for b in set(bins))


def test_those_who_failed_together_do_not_come_back_together() -> None:
    assert fullest_bin(RetryPolicy()) < 20  # 200 over the 16 ms from 32 to 48


def test_without_jitter_they_come_back_in_one_wave() -> None:
    assert fullest_bin(RetryPolicy(jitter=0)) == 200


def failing(budget: RetryBudget, attempts: int) -> int:
    """Return how many of so many failed attempts might have been followed by another."""
    allowed = 0
    for _ in range(attempts):
        budget.failed()
        allowed += budget.may_retry
    return allowed


def test_a_fresh_budget_pays_for_less_than_half_its_tokens() -> None:
    budget = RetryBudget()
    assert failing(budget, 100) == 4  # 9, 8, 7, 6 are more than half of ten; 5 is not
    assert budget.tokens == 0


def test_successes_earn_retries_back() -> None:
    budget = RetryBudget()
    failing(budget, 100)
    earned = 0
    while not budget.may_retry:
        budget.succeeded()
        earned += 1
    assert earned == 51
    budget.failed()
    assert not budget.may_retry  # one success in ten pays for one retry, not a burst


def test_a_budget_never_holds_more_than_it_began_with() -> None:
    budget = RetryBudget(tokens_max=3)
    for _ in range(100):
        budget.succeeded()
    assert budget.tokens == 3
    assert failing(budget, 10) == 1


@given(st.lists(st.booleans(), max_size=400))
def test_in_the_long_run_retries_are_a_tenth_of_the_successes_and_half_the_tokens(fates: list[bool]) -> None:
    budget, retries = RetryBudget(), 0
    for fate in fates:
        if fate:
            budget.succeeded()
        else:
            budget.failed()
            retries += budget.may_retry
        assert 0 <= budget.tokens <= 10
    assert retries <= 5 + 0.1 * sum(fates) + 1e-9


def test_ten_tenths_are_one() -> None:
    budget = RetryBudget()
    budget.failed()
    for _ in range(10):
        budget.succeeded()
    assert budget.tokens == 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attempts_max", 0), ("attempts_max", 101), ("initial_s", -1), ("multiplier", 0.5), ("max_s", -1),
        ("jitter", 1.5), ("jitter", -0.1), ("attempt_timeout_s", 0), ("attempt_timeout_s", float("nan")),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_meant_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        RetryPolicy(**{name: value})


def test_a_budget_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens_max"):
        RetryBudget(tokens_max=0)
    with pytest.raises(ValueError, match="token_ratio"):
        RetryBudget(token_ratio=2)
    with pytest.raises(ValueError, match="retry must be"):
        backoff_s(RetryPolicy(), 0, MIDDLE)

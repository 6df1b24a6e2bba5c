"""Counts in words."""

from __future__ import annotations

import pytest

from harness.words import counted


@pytest.mark.parametrize(
    ("number", "many", "said"),
    [(1, "", "1 answer"), (1.0, "", "1 answer"), (0, "", "0 answers"), (2.0, "", "2 answers"),
     (1_200, "", "1,200 answers"), (3, "replies", "3 replies"), (None, "", "no count of answers"),
     (None, "replies", "no count of replies")],
)  # fmt: skip
def test_one_is_singular_and_everything_else_is_not(number: float | None, many: str, said: str) -> None:
    assert counted(number, "answer", many) == said

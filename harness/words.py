"""Counts in words, the same in verdicts and on pages."""

from __future__ import annotations


def counted(number: float | None, one: str, many: str = "") -> str:
    """Return 1 answer, 3 answers; `many` where more than an s is to be added. None: nobody counts them."""
    several = many or f"{one}s"
    if number is None:
        return f"no count of {several}"
    return f"{number:,.0f} {one if number == 1 else several}"

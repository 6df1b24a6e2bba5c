"""The designs that a page sets side by side: their names, and the tone in which each is drawn."""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from harness.errors import BadInput
from harness.run_folder import RunFolder
from reports import words
from reports.kv.setup import setup

LONG_S: Final = 60.0
"""A timeout from here on, at full scale, is drawn in the tone of the old design; a shorter one in that of the cut."""
DASHES: Final = {"lease": [1, 0], "long": [1, 0], "short": [5, 3]}


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a page. `key` is its place in `summary.json`; `tone` a class of the style sheet."""

    key: str
    title: str
    tone: str

    @property
    def colour(self) -> str:
        """Its colour, as a CSS variable of the page."""
        return f"var(--{self.tone})"

    @property
    def dash(self) -> list[int]:
        """Its line's dashes, so that lines are told apart without their colours."""
        return DASHES[self.tone]


def designs(runs: list[RunFolder]) -> list[Design]:
    """Return the design of each run, in order; of runs that share one, the later ones are numbered."""
    seen: Counter[str] = Counter()
    found = []
    for run in runs:
        arm = run.manifest.arm or "unnamed"
        seen[arm] += 1
        again = f", run {seen[arm]}" if seen[arm] > 1 else ""
        key = arm.replace(".", "_") + (f"-{seen[arm]}" if seen[arm] > 1 else "")
        found.append(Design(key=key, title=words.arm_title(arm) + again, tone=_tone(run)))
    return found


def _tone(run: RunFolder) -> str:
    terms = setup(run).terms
    if terms.renews:
        return "lease" if terms.clock_correction else "short"
    return "long" if terms.single_timeout * run.manifest.time_scale >= LONG_S else "short"


def in_order(runs: list[RunFolder]) -> list[RunFolder]:
    """Return the lease design first, then its baselines, the longest timeout first.

    Raises `BadInput` for runs of several scenarios.
    """
    scenarios = list(dict.fromkeys(run.manifest.scenario for run in runs))
    if len(scenarios) > 1:
        raise BadInput(f"runs of one scenario make a page, and these are of {', '.join(scenarios)}; draw them apart")

    def rank(run: RunFolder) -> tuple[bool, bool, float]:
        terms = setup(run).terms
        return not terms.renews, not terms.clock_correction, -terms.single_timeout

    return sorted(runs, key=rank)

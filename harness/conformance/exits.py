"""With what a conformance command ends."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final


class Exit(enum.IntEnum):
    """Exit codes; from 64 on those of sysexits.h, so that a script can tell a verdict from a mistake."""

    CONFORMANT = 0
    NOT_CONFORMANT = 1
    INCONCLUSIVE = 2
    STALE = 3
    """Expectations do not hold any more, or speak of nothing that there is."""
    USAGE = 64
    BAD_DATA = 65
    """Results that cannot be read."""
    OUR_FAULT = 70
    CONFIGURATION = 78
    """Expectations, or a subject's description, that cannot be used."""


_WORST_FIRST: Final = (Exit.OUR_FAULT, Exit.STALE, Exit.NOT_CONFORMANT, Exit.INCONCLUSIVE, Exit.CONFORMANT)


def worst(exits: Iterable[Exit]) -> Exit:
    """Return what several runs come to; of none, inconclusive."""
    seen = set(exits)
    return next((code for code in _WORST_FIRST if code in seen), Exit.INCONCLUSIVE)

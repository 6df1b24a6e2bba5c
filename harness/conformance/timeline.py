"""What happened in a world, in order: for people, and as evidence in results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from reference_impl.rules.clock import NS_PER_S
from reference_impl.rules.events import Scalar

ENTRIES_MAX: Final = 4_000
"""A history that says more has lost its beginning, and says that."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened. `who` is an engine's name, `world`, or `client`."""

    t_ns: int
    who: str
    what: str
    subject: str = ""
    detail: dict[str, Scalar] = {}


def lines(entries: Sequence[Entry]) -> list[str]:
    """Return a timeline as text, one line an entry."""
    return [
        f"{e.t_ns / NS_PER_S:10.3f} s  {e.who:10} {e.what:20} {e.subject:24} "
        + " ".join(f"{name}={value}" for name, value in e.detail.items())
        for e in entries
    ]

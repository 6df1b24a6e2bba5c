"""What a search finds, as data: for the process that searches, the one that asked, and files."""

from __future__ import annotations

import msgspec

from harness.conformance.search.actions import Action
from harness.conformance.search.history import Parameters
from harness.conformance.timeline import Entry
from harness.conformance.watch import Breach


class History(msgspec.Struct, frozen=True, kw_only=True, tag="history", forbid_unknown_fields=True):
    """A generated history: all that is needed to run it again."""

    parameters: Parameters = Parameters()
    actions: list[Action] = []

    @property
    def size(self) -> tuple[int, int]:
        """How long it is, for comparing: first by its actions, then by how much has to be said of them."""
        return len(self.actions), len(msgspec.json.encode(self))


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The shortest history that was found to break an invariant in one way."""

    history: History
    breach: Breach
    timeline: list[Entry] = []
    found_s: float = 0.0
    """After how many seconds of the search a history first broke it."""
    shrunk_s: float = 0.0
    """How long it took to make that one short."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a search did."""

    histories: int = 0
    seconds: float = 0.0
    """Real ones, those of shrinking among them."""
    median_ms: float = 0.0
    p99_ms: float = 0.0
    """Of one history, as it was drawn."""
    happened: dict[str, int] = {}
    """What was done, what went wrong, and what came of requests, over all of them."""

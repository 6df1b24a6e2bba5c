"""Which worker a request goes to: round robin over those registered, each with the epoch of its engine.

Rules KVC-ROUT-001 and KVC-LOCK-004: a worker that has gone is not chosen again, and a late predecessor (an epoch lower
than one seen) cannot register.
"""

from __future__ import annotations

import enum

import msgspec

from reference_impl.rules.fencing import EpochFence


class Role(enum.StrEnum):
    """What an engine does of a request."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Route(msgspec.Struct, frozen=True):
    """A worker's engine that may be chosen."""

    worker_id: str
    engine_id: str
    url: str
    epoch: int


class RouteTable:
    """The registered workers. Epochs are remembered beyond a worker's removal."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}
        self._fence = EpochFence()
        self._turn = 0

    @property
    def routes(self) -> list[Route]:
        """The registered workers, by worker id."""
        return [self._routes[w] for w in sorted(self._routes)]

    def register(self, route: Route) -> tuple[Route | None, str]:
        """Admit `route`; return the one it replaces (None if none), and the reason of a refusal ("" if admitted)."""
        admission = self._fence.admit(route.worker_id, route.epoch, route.engine_id)
        if not admission.accepted:
            return None, admission.reason
        before = self._routes.get(route.worker_id)
        self._routes[route.worker_id] = route
        return (before if before != route else None), ""

    def highest_epoch(self, worker_id: str) -> int:
        """Return the highest epoch seen for a worker, 0 if none."""
        return self._fence.epoch(worker_id)

    def remove(self, route: Route) -> bool:
        """Stop choosing exactly this route; return whether it was still there. A successor's route stays."""
        if self._routes.get(route.worker_id) != route:
            return False
        del self._routes[route.worker_id]
        return True

    def choose(self) -> Route | None:
        """Return the next worker in turn, or None if none is registered."""
        if not self._routes:
            return None
        routes = self.routes
        self._turn += 1
        return routes[self._turn % len(routes)]

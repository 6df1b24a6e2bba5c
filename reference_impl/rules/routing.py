"""Which worker a request goes to: round robin over those registered, each with the epoch of its engine.

Rules KVC-ROUT-001 and KVC-LOCK-004: a worker that has gone is not chosen again, and a late predecessor (an epoch lower
than one seen) cannot register. Where prefill and decode have workers of their own, each part has its own turn.
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

    def does(self, part: Role) -> bool:
        """Whether an engine of this role does this part of a request (BOTH: all of it)."""
        return self in (part, Role.BOTH)


class Route(msgspec.Struct, frozen=True):
    """A worker's engine that may be chosen."""

    worker_id: str
    engine_id: str
    url: str
    epoch: int
    role: Role = Role.BOTH
    kv_engine_id: str = ""
    """The engine's name among its peers, one a life: `remote_engine_id` of its hand-offs. Empty: as `engine_id`."""

    @property
    def name(self) -> str:
        """Worker and engine in one word, as rows and reports name them."""
        return f"{self.worker_id}/{self.engine_id}"


class RouteTable:
    """The registered workers. Epochs are remembered beyond a worker's removal."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}
        self._fence = EpochFence()
        self._turns = dict.fromkeys(Role, 0)

    @property
    def routes(self) -> list[Route]:
        """The registered workers, by worker id."""
        return [self._routes[w] for w in sorted(self._routes)]

    @property
    def disaggregated(self) -> bool:
        """Whether a request goes in two legs: somebody is registered who does only one of them."""
        return any(route.role is not Role.BOTH for route in self._routes.values())

    def find(self, kv_engine_id: str) -> Route | None:
        """Return the registered engine of this name among its peers, None if there is none."""
        return next((r for r in self._routes.values() if (r.kv_engine_id or r.engine_id) == kv_engine_id), None)

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

    def has(self, part: Role) -> bool:
        """Whether anybody is registered who does this part."""
        return any(route.role.does(part) for route in self._routes.values())

    def choose(self, part: Role = Role.BOTH) -> Route | None:
        """Return the next worker in turn of those that do this part, or None if none does. Each part has its turn."""
        routes = [route for route in self.routes if route.role.does(part)]
        if not routes:
            return None
        self._turns[part] += 1
        return routes[self._turns[part] % len(routes)]

"""Which order strikes what: those that stand, and how often each has met what it is meant for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from faults.nixl.orders import Direction, Kind, Order, What


class Strikes:
    """The orders that stand in the engine `engine`, with their counts."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._orders: tuple[Order, ...] = ()
        self._met: Counter[str] = Counter()

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of all orders that stand, whichever engine they are for."""
        return tuple(order.id for order in self._orders)

    def replace(self, orders: Iterable[Order]) -> None:
        """Let these orders stand, and no others. Those that stood before go on counting."""
        self._orders = tuple(orders)
        self._met = Counter({order.id: self._met[order.id] for order in self._orders})

    def stands(self, order: Order) -> bool:
        """Whether an order has not been taken back."""
        return any(each.id == order.id for each in self._orders)

    def meant(
        self, what: What, requests: Sequence[str], kind: Kind = Kind.ANY, direction: Direction | None = None
    ) -> list[Order]:
        """Return the orders that fit, whether or not it is their turn, and count nothing."""
        return [order for order in self._orders if self._fits(order, what, requests, kind, direction)]

    def strike(
        self, what: What, requests: Sequence[str], kind: Kind = Kind.ANY, direction: Direction | None = None
    ) -> Order | None:
        """Return the first order that strikes, and count for it and for those before it."""
        for order in self.meant(what, requests, kind, direction):
            before = self._met[order.id]
            self._met[order.id] += 1
            if before >= order.skip and (order.count == 0 or before < order.skip + order.count):
                return order
        return None

    def _fits(
        self, order: Order, what: What, requests: Sequence[str], kind: Kind, direction: Direction | None
    ) -> bool:  # fmt: skip
        if order.what is not what or order.engine not in self._engine:
            return False
        if what is What.NOTIFICATION and (order.direction is not direction or order.kind not in (Kind.ANY, kind)):
            return False
        return not order.request or any(order.request in request for request in requests)

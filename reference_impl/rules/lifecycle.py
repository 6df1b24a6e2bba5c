"""An engine's life: made, parked as a shadow, woken by the lock, serving, dead.

Every engine takes this road, the first one too. Rules: KVC-SHDW-001, KVC-SHDW-002, KVC-SHDW-005, KVC-LOCK-004.
"""

from __future__ import annotations

import enum

import msgspec


class EngineState(enum.StrEnum):
    """Where an engine is in its life."""

    INIT = "init"
    """Starting up: context, communicators, warm-up."""
    STANDBY = "standby"
    """Parked: all of that is done, no KV memory is mapped, nothing is served."""
    WAKING = "waking"
    """It holds the lock; weights and KV are being mapped and the canary asked."""
    ACTIVE = "active"
    DEAD = "dead"


class WakeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What must have happened before an engine is awake. All are false until somebody who saw it says so."""

    weights_mapped: bool = False
    kv_mapped: bool = False
    canary_answered: bool = False
    """The engine has answered a short request of its own, and rightly."""

    def missing(self) -> list[str]:
        """Return the names of the facts that do not hold."""
        return [name for name in self.__struct_fields__ if not getattr(self, name)]


class IllegalMove(Exception):
    """An engine was told to go where it may not go from where it is."""

    def __init__(self, engine_id: str, here: EngineState, there: EngineState, why: str) -> None:
        super().__init__(f"engine {engine_id}: {here} -> {there} is illegal: {why}")
        self.here = here
        self.there = there


class Lifecycle:
    """The life of the engine `engine_id`. It starts in INIT, and every illegal move raises IllegalMove.

    `epoch` is that of its lock, 0 before it woke. `reason` says why it died, and is empty until then.
    """

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.state = EngineState.INIT
        self.epoch = 0
        self.reason = ""
        self._epoch_seen = 0

    @property
    def is_fenced(self) -> bool:
        """Whether an epoch above its own is known: a successor holds the lock (KVC-LOCK-004)."""
        return 0 < self.epoch < self._epoch_seen

    @property
    def may_serve(self) -> bool:
        """Whether users' requests may be answered."""
        return self.state is EngineState.ACTIVE and not self.is_fenced

    @property
    def may_register(self) -> bool:
        """Whether it may enter itself at the router. A wake that failed never may (KVC-SHDW-005)."""
        return self.may_serve

    def saw_epoch(self, epoch: int) -> None:
        """Learn that somebody holds, or held, the lock with `epoch`. Legal in every state."""
        self._epoch_seen = max(self._epoch_seen, epoch)

    def park(self) -> None:
        """INIT -> STANDBY, when everything that can be done ahead of a wake is done."""
        self._move(EngineState.STANDBY, EngineState.INIT)

    def wake(self, epoch: int) -> None:
        """STANDBY -> WAKING, with the lock won at `epoch`, which must be above every epoch seen."""
        if self.state is EngineState.STANDBY and epoch <= self._epoch_seen:
            raise self._illegal(EngineState.WAKING, f"epoch {epoch} is not above {self._epoch_seen}, already seen")
        self._move(EngineState.WAKING, EngineState.STANDBY)
        self.epoch = self._epoch_seen = epoch

    def activate(self, facts: WakeFacts) -> None:
        """WAKING -> ACTIVE, with every fact of the wake true and no successor known."""
        if self.state is EngineState.WAKING:
            if missing := facts.missing():
                raise self._illegal(EngineState.ACTIVE, f"missing {', '.join(missing)}")
            if self.is_fenced:
                raise self._illegal(EngineState.ACTIVE, f"epoch {self.epoch} is fenced by {self._epoch_seen}")
        self._move(EngineState.ACTIVE, EngineState.WAKING)

    def die(self, reason: str) -> None:
        """Any state -> DEAD, for good. The first reason counts: dying twice is legal and changes nothing."""
        if self.state is not EngineState.DEAD:
            self.state = EngineState.DEAD
            self.reason = reason

    def _move(self, there: EngineState, only_from: EngineState) -> None:
        if self.state is not only_from:
            raise self._illegal(there, f"only from {only_from}")
        self.state = there

    def _illegal(self, there: EngineState, why: str) -> IllegalMove:
        return IllegalMove(self.engine_id, self.state, there, why)

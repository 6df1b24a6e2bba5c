"""What effects and answers show that must never be, from them alone: for a store's tests, and its broken twins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from reference_impl.blockservice.store import Done, Effect, Write
from reference_impl.rules.blockgroups import Group, Pin, PinState, Refusal, Reserve, Unpin

Told = tuple[Write, Done]
DENIED = (Refusal.ID_REUSED, Refusal.ID_EXPIRED)


class Witness:
    """Follows the effects of a store, knowing what its callers were told."""

    def __init__(self, told: Sequence[Told]) -> None:
        self.told = told
        self.first: dict[tuple[str, str], Told] = {}
        for asked, done in told:
            self.first.setdefault((asked.tenant, asked.operation_id), (asked, done))
        self.times: Counter[tuple[str, str, str]] = Counter()
        self.pins: dict[tuple[str, str, str], str] = {}
        self.most: Counter[tuple[str, str]] = Counter()
        self.epochs: dict[tuple[str, str], int] = {}
        self.found: list[str] = []

    def standing(self, place: tuple[str, str]) -> int:
        """Return how many pins of a tenant's group stand."""
        return sum(state == PinState.PINNED for (*of, _), state in self.pins.items() if tuple(of) == place)

    def see(self, effect: Effect) -> None:
        """Take one effect in."""
        if effect.kind == "pin":
            self._see_pin(effect)
        if effect.cause == "client" and effect.after:
            self._see_clients(effect)
        if effect.kind == "group" and effect.after:
            self.epochs[effect.tenant, effect.block_group_id] = msgspec.json.decode(effect.after, type=Group).epoch

    def _see_pin(self, effect: Effect) -> None:
        pin = (effect.tenant, effect.block_group_id, effect.key)
        state = msgspec.json.decode(effect.after)["state"] if effect.after else ""
        if (self.pins.get(pin), state) == (PinState.UNPINNED, PinState.PINNED):
            self.found.append(f"{effect.operation_id} pins again for {effect.key}, which had left")
        self.pins[pin] = state
        place = pin[:2]
        self.most[place] = max(self.most[place], self.standing(place))

    def _see_clients(self, effect: Effect) -> None:
        name = effect.operation_id
        self.times[effect.tenant, name, effect.kind] += 1
        if (effect.tenant, name) not in self.first:
            return
        asked, done = self.first[effect.tenant, name]
        place = (effect.tenant, effect.block_group_id)
        epoch = self.epochs[place]
        if asked.request.epoch != epoch:
            self.found.append(f"{name} had an effect with epoch {asked.request.epoch}, not {epoch}")
        standing = self.standing(place)
        if effect.kind == "pin" and done.answer.pins != standing:
            self.found.append(f"{name} was told of {done.answer.pins} pins, there are {standing}")

    def judge_answers(self) -> None:
        """Hold what one operation was told against what it was told before."""
        for asked, done in self.told:
            before, first = self.first[asked.tenant, asked.operation_id]
            if done.answer.refusal in DENIED:
                continue
            name = f"{asked.operation_id} of {asked.tenant}"
            if before.request != asked.request:
                self.found.append(f"{name} ran with other parameters")
            elif first.answer != done.answer:
                self.found.append(f"{name} was answered {first.answer} and {done.answer}")

    def judge_counts(self) -> None:
        """Hold the number of effects against one."""
        self.found += [f"{'/'.join(which)} had {count} effects" for which, count in self.times.items() if count > 1]
        changed = {(tenant, name) for tenant, name, _ in self.times}
        for which, (asked, done) in self.first.items():
            tenant, name = which
            if which in changed or not done.answer.applied:
                continue
            if isinstance(asked.request, Reserve):
                self.found.append(f"{name} of {tenant} was applied and had no effect")
            most = self.most[tenant, asked.request.block_group_id]
            if isinstance(asked.request, Pin | Unpin) and not 0 <= done.answer.pins <= most:
                self.found.append(f"{name} changed nothing and was told of {done.answer.pins} pins")


def breaches(effects: Iterable[Effect], told: Sequence[Told]) -> list[str]:
    """Return a sentence for everything that must never be."""
    witness = Witness(told)
    for effect in effects:
        witness.see(effect)
    witness.judge_answers()
    witness.judge_counts()
    return witness.found

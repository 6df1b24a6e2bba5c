"""One block group at one node, replayed from the changes that its database saw: every state that it was in, and when.

The replay itself finds changes that do not fit together: a row that is not as the change before left it, an epoch that
falls, a pin that comes back, a migration that ends twice, an end that no change explains.

Source: KVC-IDEM-005, -007, -009 to -011.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from reference_impl.rules.blockgroups import GroupState, MigrationStatus, PinState
from workloads.operation_rows import OF_CLIENT, OF_ENGINE, EffectRow, FinalRow

BEGINNING_NS: Final = -1
NS_PER_MS: Final = 1_000_000
LINK_NS: Final = 60_000 * NS_PER_MS
"""How long after the loss of what its predecessor held a new engine's coming may be told of: its node may crash."""
LEAVING: Final = (GroupState.EVICTED, GroupState.MOVED)


class Breach(msgspec.Struct, frozen=True, gc=False):
    """What must not be, in one sentence that names ids and times; `rule` is a catalogue id."""

    rule: str
    text: str


class Known(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What an effect shows of a group."""

    state: GroupState
    location: str
    epoch: int
    size_bytes: int = 0
    token_start: int = 0
    token_end: int = 0
    checksum: str = ""
    reserved: int = 0
    migration: str = ""


Engines: TypeAlias = Mapping[str, Sequence[int]]
"""By node: when it was told that another engine had come, sorted; ns of the host's monotonic clock."""


class _PinRow(msgspec.Struct, frozen=True, gc=False):
    state: PinState


class _TransferRow(msgspec.Struct, frozen=True, gc=False):
    expires_ms: int
    ended: bool


class _MigrationRow(msgspec.Struct, frozen=True, gc=False):
    status: MigrationStatus
    dst: str = ""


Snapshot: TypeAlias = tuple[str | None, str, int, int, int]
"""State (None: no such group), location, epoch, reserved slots, pins: what every answer tells of its group."""

_known = msgspec.json.Decoder(Known).decode
_pin_row = msgspec.json.Decoder(_PinRow).decode
_transfer_row = msgspec.json.Decoder(_TransferRow).decode
_migration_row = msgspec.json.Decoder(_MigrationRow).decode


def known(text: str) -> Known | None:
    """Return the group that an effect's `before` or `after` shows; None: there is none."""
    return _known(text) if text else None


def pin_state(text: str) -> PinState | None:
    """Return the state of the pin that an effect shows; None: nothing is remembered."""
    return _pin_row(text).state if text else None


def migration_status(text: str) -> MigrationStatus | None:
    """Return the status of the migration that an effect shows; None: there is none."""
    return _migration_row(text).status if text else None


def migration_target(text: str) -> str:
    """Return the node to which a migration goes that an effect shows; "": it does not say."""
    return _migration_row(text).dst if text else ""


def came_between(moments: Sequence[int], start_ns: int, end_ns: int) -> bool:
    """Whether one of these moments, sorted, lies in a span of time."""
    index = bisect_left(moments, start_ns)
    return index < len(moments) and moments[index] <= end_ns


class Timeline:
    """The states of one group at one node. State 0 is the one before the first effect, state n the one after the nth.

    State n stands from its effect's statement to the next one's: whoever decides, does it between two statements.
    """

    def __init__(self, where: str, start: Known | None = None, pins: int = 0) -> None:
        self.where = where
        self.at_ns = [BEGINNING_NS]
        self.groups: list[Known | None] = [start]
        self.pins = [pins]
        self.standing: dict[int, int] = {}
        """At each effect on the group itself: pins that stood when it came, also if the same change forgot them."""
        self.lent_until_ms: dict[int, int] = {}
        """There too: until when, by the node's wall clock, a transfer stood that had not ended; 0: none did."""
        self._seqs: list[int] = []
        self._pinned: dict[str, list[tuple[int, PinState | None]]] = {}
        self._index: dict[Snapshot, list[int]] = {}

    def add(self, effect: EffectRow, group: Known | None, pins: int) -> int:
        """Append the state after an effect, and return its number."""
        self._seqs.append(effect.seq)
        self.at_ns.append(max(effect.at_ns, self.at_ns[-1]))
        self.groups.append(group)
        self.pins.append(pins)
        return len(self._seqs)

    def add_pin(self, number: int, request_id: str, state: PinState | None) -> None:
        """Note that a request's pin is so from a state on."""
        self._pinned.setdefault(request_id, [(0, None)]).append((number, state))

    def after(self, effect: EffectRow) -> int:
        """Return the number of the state that an effect of this timeline made."""
        return bisect_left(self._seqs, effect.seq) + 1

    def snapshot(self, number: int) -> Snapshot:
        """Return what an answer given in a state says."""
        group, pins = self.groups[number], self.pins[number]
        if group is None:
            return None, "", 0, 0, pins
        return group.state, group.location, group.epoch, group.reserved, pins

    def was(
        self, snapshot: Snapshot, start_ns: int, end_ns: float, pin: tuple[str, PinState] | None = None
    ) -> bool:  # fmt: skip
        """Whether the group was so at some moment from start to end, and a request's pin too if one is named."""
        first = max(0, bisect_left(self.at_ns, start_ns) - 1)
        last = bisect_right(self.at_ns, end_ns) - 1
        if not self._index:
            for number in range(len(self.at_ns)):
                self._index.setdefault(self.snapshot(number), []).append(number)
        numbers = self._index.get(snapshot, [])
        if pin is None:
            return _any_between(numbers, first, last)
        return any(_any_between(numbers, a, b) for a, b in self._pin_spans(pin, first, last))

    def _pin_spans(self, pin: tuple[str, PinState], first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the stretches of states, within first to last, in which a request's pin was so."""
        request_id, wanted = pin
        changes = self._pinned.get(request_id, [])
        index = max(0, bisect_right(changes, first, key=lambda change: change[0]) - 1)
        while index < len(changes) and changes[index][0] <= last:
            begin, state = changes[index]
            index += 1
            end = changes[index][0] - 1 if index < len(changes) else len(self._seqs)
            if state is wanted:
                yield max(begin, first), min(end, last)


def _any_between(numbers: list[int], first: int, last: int) -> bool:
    index = bisect_left(numbers, first)
    return index < len(numbers) and numbers[index] <= last


class Replay:
    """Replays the effects on one group at one node, in their order.

    `window_ns`: what ended longer ago than this may have been forgotten without an effect. `whole`: nothing can have
    been forgotten before the history begins. `engines`: when another engine came to this node; None: nobody knows.
    """

    def __init__(
        self, where: str, effects: Sequence[EffectRow], *, window_ns: int, whole: bool,
        engines: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.breaches: list[Breach] = []
        self._engines = engines
        self._window_ns = window_ns
        self._whole = whole
        self._last: dict[tuple[str, str], EffectRow] = {}
        self._forgotten = 0
        self._lent: list[tuple[int, str]] = []
        """Heap of transfers by the end of their terms, the latest first; some have ended."""
        self._ended: set[str] = set()
        self._left: dict[str, int] = {}
        """The group's epoch in which each request has unpinned it."""
        firsts = {(e.kind, e.key): e for e in reversed(effects)}
        start = next((known(e.before) for (kind, _), e in firsts.items() if kind == "group"), None)
        pins = sum(pin_state(e.before) is PinState.PINNED for (kind, _), e in firsts.items() if kind == "pin")
        self.timeline = Timeline(where, start, pins)
        self._epoch = start.epoch if start else 0
        for effect in effects:
            self._add(effect)

    def final(self, row: FinalRow | None) -> Iterator[Breach]:
        """Yield what of a group's end its effects do not explain. `row`: how its node knew it at the end."""
        timeline = self.timeline
        where, group = timeline.where, timeline.groups[-1]
        found = None if row is None else _of_final(row)
        forgotten = not self._whole and not timeline.standing  # no change of the group itself is left
        if found != group and not forgotten:
            yield Breach("KVC-IDEM-007", f"{where} is {_shown(found)} at the end; its effects lead to {_shown(group)}")
        pinned = sorted(
            key for (kind, key), e in self._last.items() if kind == "pin" and pin_state(e.after) is PinState.PINNED
        )  # fmt: skip
        kept = [] if row is None else msgspec.json.decode(row.pins, type=list[str])
        if kept != pinned and (self._whole or set(pinned) - set(kept)):
            yield Breach("KVC-IDEM-009", f"{where} is pinned by {kept} at the end; its effects lead to {pinned}")

    def _add(self, effect: EffectRow) -> None:
        self._check_chain(effect)
        timeline = self.timeline
        match effect.kind:
            case "group":
                self._add_group(effect)
            case "pin":
                self._add_pin(effect)
            case "transfer":
                self._note_transfer(effect)
                timeline.add(effect, timeline.groups[-1], timeline.pins[-1])
            case _:
                self._check_migration(effect)
                timeline.add(effect, timeline.groups[-1], timeline.pins[-1])
        self._last[effect.kind, effect.key] = effect

    def _say(self, rule: str, effect: EffectRow, text: str) -> None:
        self.breaches.append(Breach(rule, f"{self.timeline.where}, {told(effect)}: {text}"))

    def _check_chain(self, effect: EffectRow) -> None:
        """Its `before` is the `after` of the effect before it."""
        last = self._last.get((effect.kind, effect.key))
        left = last.after if last else ""
        if effect.before == left or (last is None and not self._whole):
            return
        forgettable = last is not None and not effect.before and effect.kind != "group"
        if last is not None and forgettable and effect.at_ns - last.at_ns > self._window_ns:
            return
        then = f"effect {last.seq} left {left or 'nothing'}" if last else "there was none before it"
        self._say("KVC-IDEM-007", effect, f"it changes {effect.before or 'nothing'}, yet {then}")

    def _add_group(self, effect: EffectRow) -> None:
        before, after = self.timeline.groups[-1], known(effect.after)
        standing = self.timeline.pins[-1] + self._forgotten
        number = self.timeline.add(effect, after, self.timeline.pins[-1])
        self.timeline.standing[number] = standing
        self.timeline.lent_until_ms[number] = self._lent_until_ms()
        self._forgotten = 0
        if after is None:
            return
        if after.state is not GroupState.MIGRATING_IN:  # until it is settled, its epoch is another node's
            if after.epoch < self._epoch:
                self._say("KVC-IDEM-005", effect, f"its epoch falls from {self._epoch} to {after.epoch}")
            self._epoch = max(self._epoch, after.epoch)
        reserved = before.reserved if before else 0
        if after.reserved and (after.state in LEAVING or (effect.cause != OF_CLIENT and after.reserved != reserved)):
            text = f"{after.reserved} slots are reserved for it ({reserved} before), and it is {after.state}"
            self._say("KVC-IDEM-010", effect, text)
        if after.state is GroupState.MIGRATING_OUT and standing:
            self._say("KVC-IDEM-010", effect, f"it starts to move while {standing} requests pin it")
        if after.state is GroupState.EVICTED and standing and self._recycled(effect):
            self._say("KVC-IDEM-010", effect, f"its engine used its blocks while {standing} requests pinned it")

    def _recycled(self, effect: EffectRow) -> bool:
        """Whether an engine gave up what it was to hold. What another engine held goes with that one."""
        if effect.cause != OF_ENGINE or self._engines is None:
            return False
        return not came_between(self._engines, effect.at_ns, effect.at_ns + LINK_NS)

    def _add_pin(self, effect: EffectRow) -> None:
        timeline, before, after = self.timeline, pin_state(effect.before), pin_state(effect.after)
        change = (after is PinState.PINNED) - (before is PinState.PINNED)
        number = timeline.add(effect, timeline.groups[-1], timeline.pins[-1] + change)
        timeline.add_pin(number, effect.key, after)
        if before is PinState.PINNED and after is None:
            self._forgotten += 1
        left_in = self._left.get(effect.key)
        if after is PinState.PINNED and left_in == self._epoch:
            self._say("KVC-IDEM-009", effect, f"request {effect.key} had unpinned it, in the same epoch {self._epoch}")
        if after is PinState.UNPINNED:
            self._left[effect.key] = self._epoch

    def _note_transfer(self, effect: EffectRow) -> None:
        row = _transfer_row(effect.after) if effect.after else None
        if row is None or row.ended:
            self._ended.add(effect.key)
        else:
            heapq.heappush(self._lent, (-row.expires_ms, effect.key))

    def _lent_until_ms(self) -> int:
        while self._lent and self._lent[0][1] in self._ended:
            heapq.heappop(self._lent)
        return -self._lent[0][0] if self._lent else 0

    def _check_migration(self, effect: EffectRow) -> None:
        before, after = migration_status(effect.before), migration_status(effect.after)
        if before is not None and before.ended and after is not None and after is not before:
            self._say("KVC-IDEM-011", effect, f"migration {effect.key} had ended: {before}, and is {after} now")
        if after is MigrationStatus.CANCELLED and before is not after and effect.cause != OF_CLIENT:
            self._say("KVC-IDEM-011", effect, f"migration {effect.key} is CANCELLED, and no client cancelled it")


def told(effect: EffectRow) -> str:
    """Return an effect's name and moment, for a sentence."""
    of = f" of operation {effect.operation_id}" if effect.operation_id else ""
    return f"effect {effect.seq} ({effect.kind}{of}) at {effect.at_ns / 1e9:.6f} s"


def _shown(group: Known | None) -> str:
    if group is None:
        return "unknown to its node"
    return f"{group.state} at {group.location}, epoch {group.epoch}, {group.reserved} slots reserved"


def _of_final(row: FinalRow) -> Known:
    return Known(
        state=GroupState(row.state), location=row.location, epoch=row.epoch, size_bytes=row.size_bytes,
        token_start=row.token_start, token_end=row.token_end, checksum=row.checksum, reserved=row.reserved,
        migration=row.migration,
    )  # fmt: skip

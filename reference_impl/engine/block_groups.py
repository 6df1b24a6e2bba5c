"""The engine's prefix cache as block groups: what its node's control plane can see of it, hold, lend, fetch and drop.

A group is the full blocks of a prompt, named after the worker and the digest of its last block. It is here as long as
every one of its digests is found in the pool; blocks that nobody holds may be used for something else at any moment,
and are then told as gone. One that comes back under its old name is another to the service, which has not heard of it
yet: until it has (`Noted`, `Sync`), its questions mean the one that went.

No clock, socket or thread in here; `engine.block_link` talks to the service.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from reference_impl.blockservice import link
from reference_impl.content import BLOCK_BYTES, BLOCK_TOKENS
from reference_impl.engine.connector import Connector
from reference_impl.engine.core import EngineCore, Sequence
from reference_impl.rules.blockgroups import Group
from reference_impl.rules.blocks import OutOfBlocks
from reference_impl.rules.handoff import BadHandOff, parse

COPIES_MAX: Final = 4096
"""Migrations whose outcome is remembered; an older one would be begun anew, and find everything here."""
NUMBERS_MAX: Final = 4096
"""Prompts of which it is remembered that they are not called by their first name."""
LOOKS_MAX: Final = 1024
"""Groups that are looked at in one go: a millisecond of the event loop's time."""
FRESH_MAX: Final = 64
"""New groups that wait for their checksum; with more the newest are left out, and can be published another time."""


@dataclass(slots=True)
class _Here:
    """A group that this engine knows."""

    group: Group
    digests: list[bytes]
    held: list[int] = field(default_factory=list)
    """Its blocks, with a reference of ours on each, while it is held."""
    known: bool = False
    """Whether the service has it: told, or fetched by its order."""


@dataclass(slots=True)
class Fresh:
    """A group without a checksum: its blocks are held until it has one."""

    block_group_id: str
    digests: list[bytes]
    blocks: list[int]
    fetch: link.Fetch | None = None
    """Of a copy: the checksum must be this one's."""


class BlockGroups:
    """The groups of one engine. `connector` is None where no KV moves: then nothing is lent or fetched."""

    def __init__(
        self, core: EngineCore, connector: Connector | None, *, worker_id: str, hosts: tuple[str, ...]
    ) -> None:  # fmt: skip
        self._core, self._pool, self._connector = core, core.pool, connector
        self._worker_id, self._hosts = worker_id, hosts
        self._groups: dict[str, _Here] = {}
        self._sharing: Counter[bytes] = Counter()
        """By digest: how many groups it is part of."""
        self._holding: Counter[bytes] = Counter()
        """By digest: how many groups that are held it is part of."""
        self._numbers: dict[bytes, int] = {}
        """By last digest: which of its names a prompt has now; the ones before are other nodes'."""
        self._renamed: list[link.Publish] = []
        self._to_look_at: list[str] = []
        """Groups that `gone` has still to look at in this round."""
        self._lost: list[str] = []
        """Groups that were found gone when they were asked for, and are to be told."""
        self._loans: set[str] = set()
        self._copies: dict[str, tuple[str, link.Copy]] = {}
        """How copies ended, and with which hand-off, by migration."""
        self._fetching: dict[str, link.Fetch] = {}
        """Copies that are under way, by migration, until their checksum is known. One that is dropped is out of it."""
        self._unchecked: set[str] = set()
        """New groups that are not taken up yet."""
        self.fresh: deque[Fresh] = deque()
        """Groups whose checksum is to be computed, outside of the event loop; then `checked`."""
        self.left_out = 0

    def noticed(self, sequence: Sequence) -> None:
        """Take up the prompt of a sequence that has ended, if it is in the pool and is no group yet."""
        digests = sequence.digests[: sequence.prompt_tokens // BLOCK_TOKENS]
        if not digests:
            return
        name = self._name(digests[-1])
        if name in self._groups or name in self._unchecked or self._pool.find(digests) is None:
            return
        if len(self.fresh) >= FRESH_MAX:
            self.left_out += 1
            return
        self._unchecked.add(name)
        self.fresh.append(Fresh(name, digests, self._pool.take_prefix(digests)))

    def _name(self, last_digest: bytes) -> str:
        number = self._numbers.get(last_digest, 1)
        return f"{self._worker_id}{f'~{number}' if number > 1 else ''}.{last_digest.hex()}"

    def _rename(self, name: str) -> None:
        """Have a group under its next name, to be published by that."""
        here = self._groups.get(name)
        if here is None or here.known:
            return
        digest = here.digests[-1]
        self._numbers[digest] = self._numbers.get(digest, 1) + 1
        if len(self._numbers) > NUMBERS_MAX:
            del self._numbers[next(iter(self._numbers))]
        self._remove(name)
        group = msgspec.structs.replace(here.group, block_group_id=self._name(digest))
        self._add(_Here(group, here.digests))
        self._renamed.append(link.Publish(group))

    def take_renamed(self) -> list[link.Publish]:
        """Return, and forget, what is to be published under another name than before."""
        renamed, self._renamed = self._renamed, []
        return renamed

    def checked(self, fresh: Fresh, checksum: str) -> link.Publish | None:
        """Take up a group whose checksum is known; return what is to be told, None of a copy."""
        if fresh.fetch is not None:
            self._copied(fresh, fresh.fetch, checksum)
            return None
        self._unchecked.discard(fresh.block_group_id)
        if fresh.block_group_id in self._groups or self._pool.find(fresh.digests) is None:
            self._release(fresh.blocks)  # it came back as a copy meanwhile, or a part of it was dropped
            return None
        group = Group(
            block_group_id=fresh.block_group_id, location=self._worker_id, checksum=checksum,
            size_bytes=len(fresh.digests) * BLOCK_BYTES, token_end=len(fresh.digests) * BLOCK_TOKENS,
        )  # fmt: skip
        self._add(_Here(group, fresh.digests))
        self._release(fresh.blocks)
        return link.Publish(group)

    def hello(self, incarnation: str) -> link.Hello:
        """Return the introduction to a service."""
        return link.Hello(
            incarnation,
            [here.group for here in self._groups.values() if not here.known],
            [name for name, here in self._groups.items() if here.known],
            sorted(self._loans),
        )

    def gone(self) -> list[str]:
        """Return, and forget, groups whose last block has been used for something else: the last goes first."""
        if not self._to_look_at:
            self._to_look_at = list(self._groups)
        looked, self._to_look_at = self._to_look_at[-LOOKS_MAX:], self._to_look_at[:-LOOKS_MAX]
        found = [(name, self._groups[name]) for name in looked if name in self._groups]
        gone = [name for name, here in found if not here.held and not self._pool.find(here.digests[-1:])]
        for name in gone:
            self._remove(name)
        lost, self._lost = self._lost, []
        return gone + lost

    def loans_ended(self) -> list[str]:
        """Return, and forget, loans that have ended."""
        if self._connector is None:
            return []
        ended, self._connector.loans_ended = self._connector.loans_ended, []
        self._loans.difference_update(ended)
        return ended

    def take_fetched(self) -> None:
        """Take in the fetches that have ended: those that came wait for their checksum."""
        if self._connector is None:
            return
        fetched, self._connector.fetched = self._connector.fetched, []
        for over in fetched:
            fetch = self._fetching.get(over.fetch_id)
            if fetch is None:  # dropped meanwhile
                self._release(over.blocks)
            elif over.problem:
                self._over(fetch, link.Copy("FAILED", over.problem))
            else:
                self.fresh.appendleft(Fresh(fetch.group.block_group_id, fetch.digests, over.blocks, fetch))

    def answer(self, question: link.Question, now_ns: int) -> dict[str, Any]:
        """Do what a question says, and return the fields of its answer."""
        fields: dict[str, Any] = {}
        match question:
            case link.Hold():
                fields = {"here": self._hold(question.block_group_id, question.held)}
            case link.Look():
                fields = self._look(question.block_group_id)
            case link.Lend():
                fields = self._lend(question, now_ns)
            case link.TakeBack():
                self._take_back(question.token)
            case link.Drop():
                self._drop(question.block_group_id)
            case link.Fetch():
                fields = {"copy": self._fetch(question, now_ns)}
            case link.Noted():
                fields = {"here": self._noted(question.block_group_id)}
            case link.Elsewhere():
                self._rename(question.block_group_id)
            case link.Sync():
                self._sync(question)
        return fields

    def _hold(self, name: str, held: bool) -> bool:
        if not held:
            here = self._groups.get(name)
            if here is not None:
                self._let_go(here)
            return here is not None
        here = self._here(name)
        if here is not None and not here.held:
            here.held = self._pool.take_prefix(here.digests)
            self._holding.update(here.digests)
        return here is not None

    def _let_go(self, here: _Here) -> None:
        """Hold a group no longer. Harmless when it is not held."""
        if here.held:
            self._holding.subtract(here.digests)
            _clean(self._holding, here.digests)
            self._release(here.held)
            here.held = []

    def _here(self, name: str) -> _Here | None:
        """Return a group that the service knows, if it is all here; one that is not is forgotten, and told as gone."""
        here = self._groups.get(name)
        if here is None or not here.known:
            return None
        if here.held or self._pool.find(here.digests) is not None:
            return here
        self._remove(name)
        self._lost.append(name)
        return None

    def _look(self, name: str) -> dict[str, Any]:
        here = self._here(name)
        blocks = self._pool.find(here.digests) if here else None
        if here is None or blocks is None:
            return {}
        in_use = any(
            self._pool.references(b) > self._holding[d] for d, b in zip(here.digests, blocks, strict=True)
        )  # fmt: skip
        return {"here": True, "in_use": in_use}

    def _lend(self, lend: link.Lend, now_ns: int) -> dict[str, Any]:
        here = self._here(lend.block_group_id)
        if here is None:
            return {}
        if self._connector is None:
            return {"here": True, "problem": "this engine moves no KV"}
        blocks = self._pool.take_prefix(here.digests)
        try:
            handoff = self._connector.lend(lend.token, lend.block_group_id, blocks, here.digests[-1], now_ns)
        except ValueError as error:
            self._release(blocks)
            return {"here": True, "problem": str(error)}
        self._loans.add(lend.token)
        return {"here": True, "handoff": msgspec.json.encode(handoff.params()).decode(), "digests": here.digests}

    def _noted(self, name: str) -> bool:
        here = self._groups.get(name)
        if here is not None:
            here.known = True
        return self._here(name) is not None

    def _take_back(self, token: str) -> None:
        if self._connector is not None:
            self._connector.producer.abort(token)

    def _drop(self, name: str) -> None:
        for fetch in [f for f in self._fetching.values() if f.group.block_group_id == name]:
            self._give_up(fetch)
        here = self._remove(name)
        if here is not None:
            self._pool.drop(d for d in here.digests if not self._sharing[d])

    def _give_up(self, fetch: link.Fetch) -> None:
        """Forget a copy that is under way: what still comes of it is given back."""
        del self._fetching[fetch.migration]
        if self._connector is not None:
            self._connector.give_up_fetch(fetch.migration)

    def _fetch(self, fetch: link.Fetch, now_ns: int) -> link.Copy:
        """Begin a copy, or say how far it is. One that failed is begun anew with another loan, one dropped with any."""
        over = self._copies.get(fetch.migration)
        if over is not None:
            handoff, copy = over
            if copy.state == "COPIED" and fetch.group.block_group_id in self._groups:
                return copy
            if copy.state == "FAILED" and handoff == fetch.handoff:
                return copy
        if fetch.migration in self._fetching:
            return link.Copy("ARRIVING")
        if self._connector is not None and self._connector.fetching(fetch.migration):
            return link.Copy("ARRIVING")  # the one before; it has to end first, or nobody could tell them apart
        return self._begin(fetch, now_ns)

    def _begin(self, fetch: link.Fetch, now_ns: int) -> link.Copy:
        if self._connector is None:
            return link.Copy("FAILED", "this engine moves no KV")
        self._copies.pop(fetch.migration, None)
        try:
            asked = parse(msgspec.json.decode(fetch.handoff), block_tokens=BLOCK_TOKENS, hosts=self._hosts)
            if asked.load is None or len(asked.load.blocks) != len(fetch.digests):
                return link.Copy("FAILED", "its hand-off names other blocks than its digests")
            self._connector.fetch(fetch.migration, asked.load, fetch.digests, now_ns)
        except (BadHandOff, OutOfBlocks, msgspec.DecodeError) as error:
            return link.Copy("FAILED", str(error))
        self._fetching[fetch.migration] = fetch
        return link.Copy("ARRIVING")

    def _copied(self, fresh: Fresh, fetch: link.Fetch, checksum: str) -> None:
        """Index a copy whose bytes are right, and hold it; give back one whose bytes are not, or that was dropped."""
        if self._fetching.get(fetch.migration) is not fetch:
            self._release(fresh.blocks)
            return
        if checksum != fetch.group.checksum:
            self._release(fresh.blocks)
            reason = f"its bytes' checksum is {checksum}, not {fetch.group.checksum}"
            self._over(fetch, link.Copy("FAILED", reason))
            return
        for block, digest in zip(fresh.blocks, fresh.digests, strict=True):
            self._pool.seal(block, digest)
        held = self._pool.take_prefix(fresh.digests)
        self._release(fresh.blocks)
        self._remove(fresh.block_group_id)
        self._add(_Here(fetch.group, fresh.digests, held, known=True))
        self._holding.update(fresh.digests)
        self._over(fetch, link.Copy("COPIED"))

    def _over(self, fetch: link.Fetch, copy: link.Copy) -> None:
        """Remember how a copy ended."""
        self._fetching.pop(fetch.migration, None)
        self._copies[fetch.migration] = (fetch.handoff, copy)
        if len(self._copies) > COPIES_MAX:
            del self._copies[next(iter(self._copies))]

    def _sync(self, sync: link.Sync) -> None:
        """Keep what is to be so, and nothing else."""
        wanted = {known.block_group_id: known.held for known in sync.groups}
        arriving = {fetch.group.block_group_id for fetch in self._fetching.values()}
        for name in (self._groups.keys() | arriving) - wanted.keys():
            self._drop(name)
        for name, held in wanted.items():
            here = self._groups.get(name)
            if here is not None:
                here.known = True
                self._hold(name, held)
        for token in self._loans - set(sync.loans):
            self._take_back(token)

    def _add(self, here: _Here) -> None:
        self._groups[here.group.block_group_id] = here
        self._sharing.update(here.digests)

    def _remove(self, name: str) -> _Here | None:
        here = self._groups.pop(name, None)
        if here is None:
            return None
        self._sharing.subtract(here.digests)
        _clean(self._sharing, here.digests)
        self._let_go(here)
        return here

    def _release(self, blocks: list[int]) -> None:
        self._pool.release(reversed(blocks))


def _clean(counts: Counter[bytes], digests: list[bytes]) -> None:
    """Drop what is counted no more."""
    for digest in digests:
        if not counts[digest]:
            del counts[digest]

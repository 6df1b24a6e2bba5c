"""Block groups of real engines in virtual time: what is held stays, what is lent is read once, copies are right.

Two engines meet over the in-memory transport; what a block service would ask is asked by hand, or at random. After
every step all blocks are accounted for (K1), and at every end all are free or cached.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from reference_impl.blockservice import link
from reference_impl.blockservice.migration import _named
from reference_impl.content import BLOCK_BYTES, BLOCK_TOKENS, BLOCK_WORDS, Ints, block_digests
from reference_impl.engine.block_groups import FRESH_MAX, BlockGroups, Fresh
from reference_impl.engine.block_link import checksum
from reference_impl.engine.connector import Connector, Shaken
from reference_impl.engine.core import EngineCore, Sequence, audit
from reference_impl.rules.blockgroups import Group
from reference_impl.rules.events import EventKind, Scalar
from reference_impl.rules.handoff import Asked, BadHandOff, parse
from reference_impl.rules.messages import ID_CHARS_MAX
from reference_impl.rules.producer import Freed
from reference_impl.transport.base import ReadResult
from reference_impl.transport.memory import MemoryNetwork, ReadPlan
from tests.protocol.world import HOST, MS, PROFILE, TERMS, WEIGHT_WORDS, S, library, right_answer

STEP_NS = 50 * MS
SMALL = msgspec.structs.replace(PROFILE, kv_blocks=24)
TIGHT = msgspec.structs.replace(SMALL, reserve=False, requests_max=4)
Learn = Callable[["Party", Fresh], str]


class Shaker:
    """Handshakes that succeed at once, with whoever lives."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self._results: list[Shaken] = []

    def connect(self, engine_id: str, host: str, port: int) -> None:
        assert (host, port) != ("", 0)
        peer = self._party.pair.get(engine_id)
        if peer is None:
            self._results.append(Shaken(engine_id=engine_id, problem="connection refused"))
            return
        peer.connector.welcome(self._party.name, self._party.transport.addresses())
        self._results.append(
            Shaken(engine_id=engine_id, addresses=peer.transport.addresses(), interval_ns=TERMS.interval_ns)
        )  # fmt: skip

    def measure(self, engine_id: str, host: str, port: int) -> None:
        raise AssertionError(f"no clock is measured here, not that of {engine_id} at {host}:{port} either")

    def results(self) -> list[Shaken]:
        results, self._results = self._results, []
        return results


class Party:
    """One engine with its groups, and what it told its service."""

    def __init__(self, pair: Pair, name: str, port: int) -> None:
        self.pair, self.name = pair, name
        profile = pair.profile
        kv = np.zeros((profile.kv_blocks, BLOCK_WORDS), np.uint64)
        generations = np.zeros(profile.kv_blocks, np.uint64)
        self.core = EngineCore(profile, generations).bind(kv, WEIGHT_WORDS)
        self.transport = pair.network.join(name, kv, generations)
        self.said: list[tuple[EventKind, str, dict[str, Scalar]]] = []
        self.connector = Connector(
            self.core, TERMS, self.transport, Shaker(self), self._say, engine_id=name, host=HOST, port=port
        )  # fmt: skip
        self.groups = BlockGroups(self.core, self.connector, worker_id=name, hosts=(HOST,))
        self.running: list[Sequence] = []
        self.checking: list[Fresh] = []
        """Those of which the checksum is being computed."""
        self.learn: Learn = lambda party, fresh: checksum(party.core, fresh.blocks)
        self.slow = False
        """Whether checksums take until `hash` is called."""
        self.known: dict[str, Group] = {}
        """What the service knows, by what was told."""
        self.told: list[link.Publish | link.Gone | link.Ended] = []
        self._made: list[Sequence] = []

    def _say(self, kind: EventKind, subject: str, **detail: Scalar) -> None:
        self.said.append((kind, subject, detail))

    def submit(self, prompt: Ints, count: int = 4, params: dict[str, Any] | None = None) -> Sequence:
        asked = parse(params, block_tokens=BLOCK_TOKENS, hosts=(HOST,)) if params else Asked()
        request_id = f"{self.name}/{next(self.pair.numbers)}"
        sequence = self.connector.submit(request_id, prompt, count, asked, self.pair.now_ns)
        self.running.append(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        self.connector.abort(sequence)
        self.running.remove(sequence)

    def turn(self) -> None:
        made, self._made = self._made, []
        for sequence in made:
            self.connector.finished(sequence, self.pair.now_ns)
            if sequence in self.running:  # else it was aborted while its last step ran
                self.running.remove(sequence)
                tokens = sequence.tokens[: sequence.prompt_tokens]
                assert sequence.tokens[sequence.prompt_tokens :].tolist() == right_answer(tokens, len(
                    sequence.tokens) - sequence.prompt_tokens)  # fmt: skip
            self.groups.noticed(sequence)
        self.connector.poll(self.pair.now_ns)
        assert self.connector.failed == []
        if self.core.has_work:
            self._made = [s for s in self.core.step().produced if s.finished]
        self.pump()

    def pump(self) -> None:
        """What the link's pump does."""
        self.groups.take_fetched()
        while self.groups.fresh:
            self.checking.append(self.groups.fresh.popleft())
        if not self.slow:
            self.hash()
        gone, ended = self.groups.gone(), self.groups.loans_ended()
        self.told += [link.Gone(gone)] if gone else []
        self.told += [link.Ended(ended)] if ended else []
        for name in gone:
            self.known.pop(name, None)

    def hash(self) -> None:
        for fresh in self.checking:
            published = self.groups.checked(fresh, self.learn(self, fresh))
            if published is not None:
                self.told.append(published)
                self.known[published.group.block_group_id] = published.group
                self.ask(link.Noted(published.group.block_group_id))
        self.checking = []

    def ask(self, question: link.Question) -> link.Said:
        return link.Said(0, **self.groups.answer(question, self.pair.now_ns))

    def held(self) -> set[str]:
        return {name for name, here in self.groups._groups.items() if here.held}

    def elsewhere(self) -> list[int]:
        """Blocks that are held for no running request, once for each reference."""
        own = [fresh.blocks for fresh in (*self.groups.fresh, *self.checking)]
        own += [here.held for here in self.groups._groups.values()]
        own += [over.blocks for over in self.connector.fetched]
        own += [act.lease.blocks for act in self.connector.producer._actions if isinstance(act, Freed)]
        return self.connector.blocks_elsewhere + [block for blocks in own for block in blocks]

    def check(self) -> None:
        assert audit(self.core, elsewhere=self.elsewhere()) == []
        sharing = Counter(d for here in self.groups._groups.values() for d in here.digests)
        holding = Counter(d for here in self.groups._groups.values() if here.held for d in here.digests)
        assert (self.groups._sharing, self.groups._holding) == (sharing, holding)
        for here in self.groups._groups.values():
            if here.held:
                assert self.core.pool.find(here.digests) == here.held, "what is held is found"


class Pair:
    """Two engines, a and b, a network and a clock."""

    def __init__(self, profile: Any = SMALL) -> None:
        self.profile = profile
        self.numbers = itertools.count(1)
        self.network = MemoryNetwork()
        self.network.now_ns = 10 * S
        self.a, self.b = Party(self, "a", 7001), Party(self, "b", 7002)

    @property
    def now_ns(self) -> int:
        return self.network.now_ns

    def get(self, engine_id: str) -> Party | None:
        return next((p for p in (self.a, self.b) if p.name == engine_id), None)

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.network.deliver(self.network.now_ns + STEP_NS)
            for party in (self.a, self.b):
                party.turn()
                party.check()

    def group(self, party: Party, prompt: Ints) -> Group:
        """Have a prompt computed; return its group."""
        party.submit(prompt, 1)
        self.step(12)
        found = [m.group for m in party.told if isinstance(m, link.Publish)]
        assert found, "no group was published"
        return found[-1]

    def rest(self) -> None:
        """Let go of everything, and find every block free or cached."""
        for party in (self.a, self.b):
            party.slow = False
            party.ask(link.Sync([], []))
        self.network.read_policy = lambda _reader, _holder: ReadPlan()
        self.step(round(30 * S / STEP_NS))
        for party in (self.a, self.b):
            party.ask(link.Sync([], []))
            assert party.running == []
            assert not party.connector.busy
            assert party.core.pool.held == 0
            assert party.core.pool.audit() == []


def lend(party: Party, group: Group, token: str) -> dict[str, Any]:
    said = party.ask(link.Lend(group.block_group_id, token))
    assert said.handoff, said
    params: dict[str, Any] = json.loads(said.handoff)
    return params


def fetch_of(party: Party, group: Group, migration: str = "m", token: str = "xfer-m") -> link.Fetch:
    said = party.ask(link.Lend(group.block_group_id, token))
    assert said.handoff, said
    return link.Fetch(migration, group, said.digests, said.handoff)


def longer(prompt: Ints, seed: int = 3) -> Ints:
    full = prompt[: len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS]
    return np.concatenate([full, np.random.default_rng(seed).integers(0, 4096, 30)])


def events(party: Party, kind: EventKind) -> list[tuple[str, dict[str, Scalar]]]:
    return [(subject, detail) for what, subject, detail in party.said if what is kind]


PROMPT, SIBLING = library()[1], library()[7]  # both begin with the same 64 tokens


def test_a_finished_prompt_becomes_a_group_of_its_full_blocks() -> None:
    pair = Pair()
    group = pair.group(pair.a, PROMPT)
    full = len(PROMPT) // BLOCK_TOKENS
    assert (group.location, group.epoch, group.token_start, group.token_end) == ("a", 1, 0, full * BLOCK_TOKENS)
    assert (group.size_bytes, len(group.checksum)) == (full * BLOCK_BYTES, 32)
    assert group.block_group_id.startswith("a.")
    pair.group(pair.a, PROMPT)
    assert len([m for m in pair.a.told if isinstance(m, link.Publish)]) == 1, "the same prompt is the same group"
    pair.a.submit(PROMPT[: BLOCK_TOKENS - 1], 1)
    pair.step(4)
    assert len([m for m in pair.a.told if isinstance(m, link.Publish)]) == 1, "less than a block is none"
    pair.rest()


def test_a_prompt_that_comes_again_while_its_checksum_is_computed_is_one_group() -> None:
    pair = Pair()
    pair.a.slow = True
    for _ in range(3):
        pair.a.submit(PROMPT, 1)
        pair.step(4)
    assert len(pair.a.checking) == 1
    pair.a.hash()
    assert len([m for m in pair.a.told if isinstance(m, link.Publish)]) == 1
    pair.a.check()
    pair.rest()


def test_more_new_groups_than_may_wait_are_left_out_and_come_another_time() -> None:
    pair = Pair(msgspec.structs.replace(PROFILE, kv_blocks=400))
    prompts = [np.random.default_rng(seed).integers(0, 4096, 40) for seed in range(FRESH_MAX + 3)]
    held = []
    for prompt in prompts:
        sequence = pair.a.core.sequence("x", prompt, 1)
        while not sequence.finished:
            pair.a.core.step()
        pair.a.groups.noticed(sequence)
        held.append(sequence)
    assert pair.a.groups.left_out == 3
    pair.a.check()
    pair.a.pump()
    pair.a.groups.noticed(held[-1])
    pair.a.pump()
    assert len(pair.a.known) == FRESH_MAX + 1
    pair.rest()


@pytest.mark.rule("KVC-IDEM-009")
def test_what_is_held_outlives_the_pool_and_what_is_not_is_told_as_gone() -> None:
    pair = Pair()
    kept, other = pair.group(pair.a, PROMPT), pair.group(pair.a, library()[0])
    assert pair.a.ask(link.Hold(kept.block_group_id, held=True)).here
    assert pair.a.ask(link.Hold(kept.block_group_id, held=True)).here, "asked again, it is so already"
    for number in (2, 4, 6, 8):
        pair.a.submit(library()[number], 2)
        pair.step(12)
    gone = {name for m in pair.a.told if isinstance(m, link.Gone) for name in m.block_group_ids}
    assert other.block_group_id in gone
    assert kept.block_group_id not in gone
    assert not pair.a.ask(link.Hold(other.block_group_id, held=True)).here
    assert pair.a.ask(link.Look(kept.block_group_id)).here
    pair.a.ask(link.Hold(kept.block_group_id, held=False))
    pair.a.ask(link.Hold(kept.block_group_id, held=False))
    assert pair.a.core.pool.held == 0
    pair.rest()


def test_a_group_that_is_found_broken_is_not_here_and_is_told_as_gone() -> None:
    """Its last block may still be there: nobody may hold, look at or lend what is no longer whole."""
    for question in ("hold", "look", "lend", "sync"):
        pair = Pair()
        group = pair.group(pair.a, PROMPT)
        name = group.block_group_id
        first = pair.a.groups._groups[name].digests[0]
        pair.a.core.pool.drop([first])
        match question:
            case "hold":
                assert not pair.a.ask(link.Hold(name, held=True)).here
            case "look":
                assert not pair.a.ask(link.Look(name)).here
            case "lend":
                assert not pair.a.ask(link.Lend(name, "xfer-1")).here
            case _:
                pair.a.ask(link.Sync([link.Known(name, held=True)], []))
        assert pair.a.groups.gone() == [name], question
        again = pair.group(pair.a, PROMPT)
        assert again.block_group_id == name, "and it may come back"
        assert pair.a.ask(link.Hold(name, held=True)).here
        pair.rest()


def test_a_group_that_came_back_is_nobodys_until_the_service_has_heard_of_it() -> None:
    """What is asked by its name before means the one that went."""
    pair = Pair()
    group = pair.group(pair.a, PROMPT)
    pair.a.core.pool.forget()
    pair.step()
    pair.a.submit(PROMPT, 1)
    for _ in range(12):
        pair.network.deliver(pair.now_ns + STEP_NS)
        pair.a.turn()
        if pair.a.checking or group.block_group_id in pair.a.known:
            break
        pair.a.slow = True
    (fresh,) = pair.a.checking
    published = pair.a.groups.checked(fresh, checksum(pair.a.core, fresh.blocks))
    pair.a.checking = []
    assert published is not None
    name = published.group.block_group_id
    assert name == group.block_group_id
    assert not pair.a.ask(link.Hold(name, held=True)).here
    assert not pair.a.ask(link.Look(name)).here
    assert not pair.a.ask(link.Lend(name, "xfer-1")).handoff
    assert pair.a.groups.gone() == [], "it is not gone for that"
    assert name in [g.block_group_id for g in pair.a.groups.hello("x").groups]
    assert pair.a.ask(link.Noted(name)).here
    assert pair.a.ask(link.Hold(name, held=True)).here
    pair.rest()


def test_noting_a_group_that_is_gone_says_so() -> None:
    pair = Pair()
    group = pair.group(pair.a, PROMPT)
    pair.a.ask(link.Drop(group.block_group_id))
    assert not pair.a.ask(link.Noted(group.block_group_id)).here


def test_in_use_is_what_others_use_and_not_what_groups_hold() -> None:
    pair = Pair(msgspec.structs.replace(SMALL, kv_blocks=60))
    group, sibling = pair.group(pair.a, PROMPT), pair.group(pair.a, SIBLING)
    name = group.block_group_id
    assert group.block_group_id != sibling.block_group_id
    for held in (False, True):
        pair.a.ask(link.Hold(sibling.block_group_id, held=held))
        pair.a.ask(link.Hold(name, held=held))
        said = pair.a.ask(link.Look(name))
        assert (said.here, said.in_use) == (True, False)
    lend(pair.a, sibling, "xfer-1")
    assert pair.a.ask(link.Look(name)).in_use, "the blocks that both begin with are lent"
    pair.a.ask(link.TakeBack("xfer-1"))
    pair.step()
    assert not pair.a.ask(link.Look(name)).in_use
    running = pair.a.submit(longer(PROMPT), 20)
    pair.step()
    assert pair.a.ask(link.Look(name)).in_use
    pair.a.abort(running)
    assert not pair.a.ask(link.Look(name)).in_use
    pair.rest()


@pytest.mark.rule("KVC-IDEM-016")
def test_a_lent_group_is_read_as_the_prefix_of_a_longer_prompt_once() -> None:
    pair = Pair()
    group = pair.group(pair.a, PROMPT)
    params = lend(pair.a, group, "xfer-1")
    assert pair.a.groups.hello("x").loans == ["xfer-1"]
    assert pair.a.ask(link.Lend(group.block_group_id, "xfer-1")).problem, "a token is lent on once"
    pair.b.submit(longer(PROMPT), 4, params)
    pair.step(20)
    assert [d["blocks"] for _, d in events(pair.b, EventKind.LOAD_DONE)] == [group.token_end // BLOCK_TOKENS]
    assert [m for m in pair.a.told if isinstance(m, link.Ended)] == [link.Ended(["xfer-1"])]
    assert pair.a.groups.hello("x").loans == []
    pair.b.core.pool.forget()
    pair.b.submit(longer(PROMPT, 9), 4, params)  # and is recomputed
    pair.step(30)
    assert len(events(pair.b, EventKind.LOAD_DONE)) == 1
    assert [r for r, _ in events(pair.a, EventKind.CLAIM_REFUSED)] == ["xfer-1"]
    pair.rest()


@pytest.mark.rule("KVC-IDEM-016")
def test_a_second_reader_of_a_token_is_refused_while_the_first_one_reads() -> None:
    pair = Pair()
    group = pair.group(pair.a, PROMPT)
    params = lend(pair.a, group, "xfer-1")
    pair.network.read_policy = lambda _reader, _holder: ReadPlan(400 * MS)
    pair.b.submit(longer(PROMPT), 4, params)
    pair.step(3)
    pair.b.submit(longer(PROMPT, 9), 4, params)
    pair.step(40)
    assert len(events(pair.b, EventKind.LOAD_DONE)) == 1
    assert "works once" in str(events(pair.a, EventKind.CLAIM_REFUSED)[0][1]["reason"])
    pair.rest()


@pytest.mark.rule("KVC-IDEM-016")
def test_a_loan_that_nobody_reads_ends_by_itself_or_by_taking_it_back() -> None:
    pair = Pair()
    group = pair.group(pair.a, PROMPT)
    lend(pair.a, group, "xfer-1")
    pair.a.ask(link.TakeBack("xfer-1"))
    pair.a.ask(link.TakeBack("xfer-1"))
    pair.a.ask(link.TakeBack("xfer-none"))
    pair.step()
    assert pair.a.groups.hello("x").loans == []
    lend(pair.a, group, "xfer-2")
    pair.step(round(TERMS.first_ns / STEP_NS) + 2)
    assert pair.a.groups.hello("x").loans == []
    assert [m.loans for m in pair.a.told if isinstance(m, link.Ended)] == [["xfer-1"], ["xfer-2"]]
    pair.rest()


def test_a_read_in_progress_is_not_taken_back() -> None:
    pair = Pair()
    group = pair.group(pair.a, PROMPT)
    params = lend(pair.a, group, "xfer-1")
    pair.network.read_policy = lambda _reader, _holder: ReadPlan(400 * MS)
    pair.b.submit(longer(PROMPT), 4, params)
    pair.step(3)
    pair.a.ask(link.TakeBack("xfer-1"))
    pair.a.ask(link.Sync([], []))
    pair.a.ask(link.Drop(group.block_group_id))
    pair.step(30)
    assert len(events(pair.b, EventKind.LOAD_DONE)) == 1, "its blocks stay until it has ended (S1)"
    pair.rest()


@pytest.mark.parametrize("tokens", [BLOCK_TOKENS + 1, 10 * BLOCK_TOKENS])
def test_a_hand_off_of_a_group_that_does_not_fit_is_refused(tokens: int) -> None:
    pair = Pair()
    group = pair.group(pair.a, PROMPT)
    params = lend(pair.a, group, "xfer-1")
    blocks = list(range(-(-tokens // BLOCK_TOKENS)))
    with pytest.raises(BadHandOff, match="remote_num_tokens"):
        pair.b.submit(PROMPT[:40], 1, {**params, "remote_num_tokens": tokens, "remote_block_ids": [blocks]})
    pair.rest()


def test_a_copy_is_held_and_found_once_its_checksum_is_right() -> None:
    pair = Pair()
    group = pair.group(pair.a, PROMPT)
    fetch = fetch_of(pair.a, group)
    pair.b.slow = True
    assert pair.b.ask(fetch).copy == link.Copy("ARRIVING")
    assert pair.b.ask(fetch).copy == link.Copy("ARRIVING"), "asked again it tells how far it is"
    pair.step(8)
    assert len(pair.b.checking) == 1
    assert pair.b.core.pool.find(fetch.digests) is None, "not before its checksum is right"
    assert pair.b.ask(fetch).copy == link.Copy("ARRIVING")
    pair.b.hash()
    assert pair.b.ask(fetch).copy == link.Copy("COPIED")
    assert pair.b.held() == {group.block_group_id}
    assert pair.b.groups.hello("x").known == [group.block_group_id]
    assert not [m for m in pair.b.told if isinstance(m, link.Publish)]
    pair.step(round(TERMS.first_ns / STEP_NS))
    assert [m for m in pair.a.told if isinstance(m, link.Ended)], "and its loan has ended"
    sequence = pair.b.submit(longer(PROMPT), 2)
    pair.step(12)
    assert sequence.cached_tokens == group.token_end
    pair.rest()


def test_a_fetch_loads_only_what_is_missing() -> None:
    pair = Pair(msgspec.structs.replace(SMALL, kv_blocks=60))
    group = pair.group(pair.a, PROMPT)
    pair.group(pair.b, SIBLING)
    reads = []
    pair.network.read_policy = lambda _reader, _holder: reads.append(1) or ReadPlan()  # type: ignore[func-returns-value]
    fetch = fetch_of(pair.a, group)
    shared = len(pair.b.core.pool.take_prefix(fetch.digests))
    pair.b.core.pool.release(pair.b.core.pool.find(fetch.digests[:shared]) or [])
    pair.b.ask(fetch)
    assert (shared, len(pair.b.connector._fetches["m"])) == (4, len(fetch.digests))
    pair.step(8)
    assert pair.b.ask(fetch).copy == link.Copy("COPIED")
    assert len(reads) == 1
    pair.b.ask(link.Drop(group.block_group_id))
    pair.b.submit(PROMPT, 1)
    pair.step(12)
    fetch = fetch_of(pair.a, group, "m2", "xfer-m2")
    pair.b.ask(fetch)
    pair.step(4)
    assert pair.b.ask(fetch).copy == link.Copy("COPIED")
    assert len(reads) == 1, "nothing is read if all is here"
    pair.rest()


@pytest.mark.parametrize("how", ["wrong bytes", "failed read", "torn read", "no lease", "too slow", "no room"])
def test_a_copy_that_fails_gives_every_block_back_and_says_why(how: str) -> None:
    pair = Pair()
    group = pair.group(pair.a, PROMPT)
    fetch = fetch_of(pair.a, group)
    match how:
        case "wrong bytes":
            pair.b.learn = lambda _party, _fresh: "0" * 32
        case "failed read":
            pair.network.read_policy = lambda _reader, _holder: ReadPlan(MS, ReadResult.FAILED)
        case "torn read":
            pair.network.read_policy = lambda _reader, _holder: ReadPlan(MS, ReadResult.TORN)
        case "no lease":
            pair.a.ask(link.TakeBack("xfer-m"))
            pair.step()
        case "too slow":
            pair.network.read_policy = lambda _reader, _holder: ReadPlan(8 * S)
        case _:
            pair.b.core.pool.allocate(20)
    copy = pair.b.ask(fetch).copy
    if how == "no room":
        assert copy is not None
        assert (copy.state, copy.reason) == ("FAILED", f"{len(fetch.digests)} KV blocks wanted, 4 available")
        return
    assert copy == link.Copy("ARRIVING")
    pair.step(60)
    over = pair.b.ask(fetch).copy
    assert over is not None
    assert over.state == "FAILED", "who asks again is told, and does not wait for nothing"
    assert over.reason
    assert pair.b.held() == set()
    if how == "too slow":
        assert pair.b.core.pool.held == len(fetch.digests), "a read may still land there (S6)"
        another = fetch_of(pair.a, group, "m", "xfer-another")
        assert pair.b.ask(another).copy == link.Copy("ARRIVING"), "so it cannot be begun anew"
        assert len(pair.b.connector._draining) == 1
        pair.step(120)
    assert pair.b.core.pool.held == 0
    pair.network.read_policy = lambda _reader, _holder: ReadPlan()
    pair.b.learn = lambda party, fresh: checksum(party.core, fresh.blocks)
    again = fetch_of(pair.a, group, "m", "xfer-again")
    assert pair.b.ask(again).copy == link.Copy("ARRIVING"), "one that failed is begun anew"
    pair.step(8)
    assert pair.b.ask(again).copy == link.Copy("COPIED")
    pair.rest()


@pytest.mark.parametrize(
    "handoff", ["", "{}", "nonsense", "[1]", '{"do_remote_prefill": true}', '{"do_remote_decode": true}']
)
def test_an_order_with_a_damaged_hand_off_is_a_failed_copy(handoff: str) -> None:
    pair = Pair()
    group = pair.group(pair.a, PROMPT)
    copy = pair.b.ask(link.Fetch("m", group, [b"x"], handoff)).copy
    assert copy is not None
    assert copy.state == "FAILED"
    assert copy.reason
    assert pair.b.core.pool.held == 0
    unlike = msgspec.structs.replace(fetch_of(pair.a, group), digests=[b"x"])
    copy = pair.b.ask(unlike).copy
    assert copy is not None
    assert "other blocks" in copy.reason
    alone = BlockGroups(pair.b.core, None, worker_id="b", hosts=(HOST,))
    assert alone.answer(unlike, 0) == {"copy": link.Copy("FAILED", "this engine moves no KV")}
    pair.rest()


@pytest.mark.parametrize("at", ["asked", "reading", "landed", "checking", "copied"])
@pytest.mark.parametrize("how", ["drop", "sync"])
def test_a_copy_that_is_dropped_leaves_nothing_wherever_it_stands(at: str, how: str) -> None:
    pair = Pair()
    group = pair.group(pair.a, PROMPT)
    fetch = fetch_of(pair.a, group)
    pair.b.slow = at == "checking"
    if at == "reading":
        pair.network.read_policy = lambda _reader, _holder: ReadPlan(600 * MS)
    pair.b.ask(fetch)
    if at == "landed":
        pair.network.deliver(pair.now_ns + STEP_NS)
        for _ in range(6):
            for party in (pair.a, pair.b):
                party.connector.poll(pair.now_ns)
            pair.network.deliver(pair.now_ns + STEP_NS)
        assert pair.b.connector.fetched
    elif at != "asked":
        pair.step(5)
    question = link.Drop(group.block_group_id) if how == "drop" else link.Sync([], [])
    pair.b.ask(question)
    pair.b.check()
    pair.b.slow = False
    pair.network.read_policy = lambda _reader, _holder: ReadPlan()
    pair.step(20)
    assert pair.b.held() == set()
    assert pair.b.groups._groups == {}
    assert pair.b.core.pool.held == 0
    assert pair.b.core.pool.find(fetch.digests) is None
    assert [m for m in pair.a.told if isinstance(m, link.Ended)], "the source's loan is over"
    again = fetch_of(pair.a, group, "m", "xfer-again")
    pair.b.ask(again)
    pair.step(8)
    assert pair.b.ask(again).copy == link.Copy("COPIED"), "and the same may be asked for again"
    pair.rest()


def test_a_prompt_that_becomes_a_group_while_its_copy_comes_home_is_one_group() -> None:
    """A group that moved away is named after its first home: there its prompt makes the same name."""
    for first in ("copy", "prompt"):
        pair = Pair(msgspec.structs.replace(SMALL, kv_blocks=60))
        group = pair.group(pair.b, PROMPT)
        there = msgspec.structs.replace(group, location="a")
        pair.a.ask(fetch_of(pair.b, group))
        pair.step(8)
        assert pair.a.held() == {group.block_group_id}
        pair.b.ask(link.Drop(group.block_group_id))
        pair.b.slow = True
        if first == "prompt":
            pair.b.submit(PROMPT, 1)
            pair.step(6)
        home = fetch_of(pair.a, there, "back", "xfer-back")
        pair.b.ask(home)
        pair.step(6)
        if first == "copy":
            pair.b.submit(PROMPT, 1)
            pair.step(6)
        assert len(pair.b.checking) == 2
        pair.b.hash()
        pair.b.check()
        assert pair.b.ask(home).copy == link.Copy("COPIED")
        assert pair.b.held() == {group.block_group_id}
        pair.rest()


def test_dropping_a_group_leaves_what_others_share_with_it() -> None:
    pair = Pair(msgspec.structs.replace(SMALL, kv_blocks=60))
    group, sibling = pair.group(pair.a, PROMPT), pair.group(pair.a, SIBLING)
    digests = pair.a.groups._groups[group.block_group_id].digests
    cached = pair.a.core.pool.cached
    pair.a.ask(link.Drop(group.block_group_id))
    assert pair.a.core.pool.find(digests) is None
    assert pair.a.core.pool.find(digests[:4]) is not None
    assert cached - pair.a.core.pool.cached == len(digests) - 4
    assert pair.a.ask(link.Look(sibling.block_group_id)).here
    pair.a.ask(link.Drop(group.block_group_id))
    pair.a.ask(link.Drop(sibling.block_group_id))
    assert pair.a.core.pool.find(digests[:1]) is None
    pair.rest()


def test_a_group_is_not_published_if_a_part_of_it_was_dropped_meanwhile() -> None:
    pair = Pair(msgspec.structs.replace(SMALL, kv_blocks=60))
    group = pair.group(pair.a, PROMPT)
    pair.a.slow = True
    pair.a.submit(SIBLING, 1)
    pair.step(10)
    assert len(pair.a.checking) == 1
    pair.a.ask(link.Drop(group.block_group_id))
    pair.a.hash()
    assert set(pair.a.known) == {group.block_group_id}
    pair.a.check()
    pair.rest()


def test_after_a_sync_what_is_to_be_so_is_so_and_nothing_else() -> None:
    pair = Pair(msgspec.structs.replace(SMALL, kv_blocks=60))
    one, two, three = (pair.group(pair.a, library()[n]) for n in (0, 2, 4))
    for group in (one, three):
        pair.a.ask(link.Hold(group.block_group_id, held=True))
    lend(pair.a, two, "xfer-1")
    lend(pair.a, two, "xfer-2")
    known = [link.Known(one.block_group_id, held=False), link.Known(two.block_group_id, held=True)]
    for _ in range(2):
        pair.a.ask(link.Sync([*known, link.Known("a.unheard-of", held=True)], ["xfer-2", "xfer-unheard-of"]))
        pair.step()
        assert pair.a.held() == {two.block_group_id}
        assert set(pair.a.groups.hello("x").known) == {one.block_group_id, two.block_group_id}
        assert pair.a.groups.hello("x").loans == ["xfer-2"]
    assert not pair.a.ask(link.Look(three.block_group_id)).here
    pair.rest()


def test_a_copy_on_its_way_survives_a_sync_that_wants_it() -> None:
    pair = Pair()
    group = pair.group(pair.a, PROMPT)
    fetch = fetch_of(pair.a, group)
    pair.network.read_policy = lambda _reader, _holder: ReadPlan(300 * MS)
    pair.b.ask(fetch)
    pair.step(2)
    pair.b.ask(link.Sync([link.Known(group.block_group_id, held=True)], []))
    pair.step(12)
    assert pair.b.ask(fetch).copy == link.Copy("COPIED")
    pair.rest()


def test_names_that_travel_to_the_holder_fit_into_its_messages() -> None:
    name = _named("t" * 128, '"' * 128)
    assert len(name) <= ID_CHARS_MAX
    assert name != _named("t" * 127, 't"' + '"' * 127)


class History:
    """A random history of two engines and the services beside them; `seed` repeats it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.pair = Pair(self.chance.choice([SMALL, TIGHT]))
        self.pair.network.read_policy = self._read
        self.wanted: dict[str, set[str]] = {"a": set(), "b": set()}
        """What each service has had held, and has not been told gone."""
        self.copies: dict[tuple[str, str], link.Fetch] = {}
        self.handoffs: list[tuple[str, dict[str, Any], Ints]] = []
        self.prompts: dict[str, Ints] = {}
        self.copied = self.lent = self.gone = 0

    def _read(self, _reader: str, _holder: str) -> ReadPlan:
        kind = self.chance.random()
        if kind < 0.1:
            return ReadPlan(self.chance.randint(0, 900) * MS, self.chance.choice([ReadResult.FAILED, ReadResult.TORN]))
        return ReadPlan(self.chance.randint(0, 3000 if kind < 0.2 else 200) * MS)

    def happen(self) -> None:
        party = self.chance.choice([self.pair.a, self.pair.b])
        act = self.chance.choice([
            self.prompt, self.prompt, self.prompt, self.hold, self.hold, self.lend, self.read, self.fetch, self.fetch,
            self.look_after, self.drop, self.sync, self.abort, self.take_back, self.hash,
        ])  # fmt: skip
        act(party)

    def prompt(self, party: Party) -> None:
        prompt = self.chance.choice(library())
        party.submit(prompt, self.chance.randint(1, 4) if party.pair.profile.reserve else 20)

    def _any(self, party: Party) -> Group | None:
        return self.chance.choice(list(party.known.values())) if party.known else None

    def hold(self, party: Party) -> None:
        group = self._any(party)
        if group is None:
            return
        name, held = group.block_group_id, self.chance.random() < 0.4 and len(party.held()) < 2
        here = party.ask(link.Hold(name, held=held)).here
        if held and here:
            self.wanted[party.name].add(name)
        else:
            self.wanted[party.name].discard(name)

    def lend(self, party: Party) -> None:
        group = self._any(party)
        if group is None:
            return
        said = party.ask(link.Lend(group.block_group_id, f"xfer-{next(self.pair.numbers)}"))
        text = next((p for p in library() if _digest(p) == group.block_group_id.partition(".")[2]), None)
        if said.handoff and text is not None:
            self.handoffs.append((party.name, json.loads(said.handoff), text))
            self.lent += 1

    def read(self, party: Party) -> None:
        theirs = [h for h in self.handoffs if h[0] != party.name]
        if theirs:
            _, params, text = self.chance.choice(theirs)  # some are used twice, and late
            party.submit(self.chance.choice([text, longer(text)]), 2, params)

    def fetch(self, party: Party) -> None:
        other = self.pair.b if party is self.pair.a else self.pair.a
        group = self._any(other)
        if group is None or len(party.held()) > 1:
            return
        number = next(self.pair.numbers)
        said = other.ask(link.Lend(group.block_group_id, f"xfer-{number}"))
        if said.handoff:
            fetch = link.Fetch(f"move-{number}", group, said.digests, said.handoff)
            party.ask(fetch)
            self.copies[party.name, fetch.migration] = fetch

    def look_after(self, party: Party) -> None:
        """Ask how far copies are; give up, or take over."""
        for (name, migration), fetch in list(self.copies.items()):
            if name != party.name or (name, migration) not in self.copies:
                continue
            _, copy = party.groups._copies.get(migration, ("", None))
            if self.chance.random() < 0.2:
                party.ask(link.Drop(fetch.group.block_group_id))
                self._forget(party, fetch.group.block_group_id)
            elif copy is not None and copy.state == "COPIED":
                if fetch.group.block_group_id not in party.held():  # a copy of it came before, and was let go
                    del self.copies[name, migration]
                    continue
                assert party.ask(fetch).copy == copy
                here = party.groups._groups[fetch.group.block_group_id]
                assert here.group.checksum == checksum(party.core, here.held), "what came is what was sent"
                party.known[fetch.group.block_group_id] = fetch.group
                self.wanted[name].add(fetch.group.block_group_id)
                del self.copies[name, migration]
                self.copied += 1
            elif self.chance.random() < 0.5:
                party.ask(fetch)  # one that failed begins anew

    def _forget(self, party: Party, name: str) -> None:
        party.known.pop(name, None)
        self.wanted[party.name].discard(name)
        for key in [k for k, f in self.copies.items() if k[0] == party.name and f.group.block_group_id == name]:
            del self.copies[key]

    def drop(self, party: Party) -> None:
        group = self._any(party)
        if group is not None and self.chance.random() < 0.5:
            party.ask(link.Drop(group.block_group_id))
            self._forget(party, group.block_group_id)

    def sync(self, party: Party) -> None:
        if self.chance.random() < 0.7:
            return
        for name in [n for n in party.known if self.chance.random() < 0.3]:
            self._forget(party, name)
        keep = [link.Known(n, n in self.wanted[party.name]) for n in party.known]
        arriving = {f.group.block_group_id for (p, _), f in self.copies.items() if p == party.name}
        keep += [link.Known(n, held=True) for n in arriving - set(party.known)]
        hello = party.groups.hello("x")
        loans = [token for token in hello.loans if self.chance.random() < 0.5]
        party.ask(link.Sync(keep, loans))
        assert {g.block_group_id for g in hello.groups} | set(hello.known) >= self.wanted[party.name]

    def abort(self, party: Party) -> None:
        if party.running:
            party.abort(self.chance.choice(party.running))

    def take_back(self, party: Party) -> None:
        for token in party.groups.hello("x").loans[:1]:
            party.ask(link.TakeBack(token))

    def hash(self, party: Party) -> None:
        party.slow = not party.slow
        party.learn = self.chance.choice([_wrong, _right, _right, _right])

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.happen()
            for party in (self.pair.a, self.pair.b):
                party.check()
            self.pair.step()
            for party in (self.pair.a, self.pair.b):
                for message in party.told:
                    if isinstance(message, link.Gone):
                        assert not self.wanted[party.name] & set(message.block_group_ids), "what is held is not gone"
                        self.gone += len(message.block_group_ids)
                party.told = []
                assert self.wanted[party.name] <= party.held()
        self.pair.rest()


_DIGESTS: dict[bytes, str] = {}


def _digest(prompt: Ints) -> str:
    """What the prompt's group is named after."""
    key = prompt.tobytes()
    if key not in _DIGESTS:
        _DIGESTS[key] = block_digests(prompt[: len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS])[-1].hex()
    return _DIGESTS[key]


def _right(party: Party, fresh: Fresh) -> str:
    return checksum(party.core, fresh.blocks)


def _wrong(party: Party, fresh: Fresh) -> str:
    return "0" * 32 if fresh.fetch is not None else _right(party, fresh)


@pytest.mark.rule("KVC-IDEM-009")
def test_no_history_loses_a_block_or_what_is_held() -> None:
    copied = lent = gone = 0
    for seed in range(120):
        history = History(seed)
        try:
            history.run(60)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        copied, lent, gone = copied + history.copied, lent + history.lent, gone + history.gone
    assert min(copied, lent, gone) > 30, (copied, lent, gone)

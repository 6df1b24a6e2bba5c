"""The engine that third parties get: it computes rightly, shows foreign KV, and knows whose mistake an error is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.conformance import world as worlds
from harness.conformance.network import ReadPlan
from harness.conformance.simple_connector import Memory, Progress
from harness.conformance.simple_pool import BLOCK_TOKENS, CONTEXT_TOKENS_MAX, Pool, blocks_for, next_token, slots_of
from harness.conformance.subject import (
    Capability,
    EngineSpec,
    Host,
    How,
    Misuse,
    Params,
    Policy,
    Refused,
    Request,
    Role,
    Terms,
)
from harness.conformance.trial import FOR_REMOTE
from harness.conformance.watch import Watch
from harness.conformance.world import EngineDied, Leg, Life, World
from tests.conformance.steps import judged, step, subject

PROMPT = list(range(100, 180))
"""Five blocks."""


class Told:
    """A connector that does what a test says, and remembers what it was told."""

    def __init__(self, spec: EngineSpec, host: Host, memory: Memory) -> None:
        self.spec, self.host, self.memory = spec, host, memory
        self.said: list[tuple[Any, ...]] = []
        self.loads = 0
        self.keep = False
        self.progress = Progress()
        self.blocks: dict[str, list[int]] = {}

    def new_request(self, request: Request) -> None:
        self.said.append(("new", request.request_id))

    def scheduled(self, request: Request, blocks: list[int], cached: int) -> int:
        self.said.append(("scheduled", request.request_id, len(blocks), cached))
        self.blocks[request.request_id] = blocks
        return self.loads

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, Params | None]:
        self.said.append(("finished", request.request_id, len(blocks)))
        self.blocks[request.request_id] = blocks
        return self.keep, {"blocks": blocks} if self.keep else None

    def aborted(self, request_id: str) -> None:
        self.said.append(("aborted", request_id))

    def message(self, sender: str, data: bytes) -> None:
        self.said.append(("message", sender, data))

    def question(self, data: bytes) -> bytes | None:
        return data[::-1]

    def step(self) -> Progress:
        self.said.append(("step",))
        progress, self.progress = self.progress, Progress()
        return progress

    def metrics(self) -> dict[str, float]:
        return {"expired": 3}


class Bench:
    """A world with simple engines, and their connectors."""

    def __init__(self, *, cache: bool = True, policy: Policy = Policy.RECOMPUTE) -> None:
        self.connectors: dict[str, Told] = {}

        def factory(spec: EngineSpec, host: Host, memory: Memory) -> Told:
            made = self.connectors[spec.name] = Told(spec, host, memory)
            return made

        claims = {Capability.PREFIX_HITS} if cache else set()
        self.world = World(subject(factory, capabilities=claims), 1, Terms(policy=policy))

    def start(self, place: str, **more: Any) -> tuple[Life, Told]:
        life = self.world.start(place, Role.DECODE, **more)
        return life, self.connectors[life.name]

    def ask(self, life: Life, prompt: list[int] | None = None, *, steps: int = 0, **more: Any) -> Leg:
        leg = self.world.submit(life, prompt or PROMPT, **more)
        for _ in range(steps):
            self.world.step()
        return leg

    def ended(self, life: Life, prompt: list[int] | None = None, **more: Any) -> Leg:
        leg = self.ask(life, prompt, **more)
        assert self.world.over(leg)
        return leg


@pytest.fixture
def bench() -> Bench:
    return Bench()


# -- KV -------------------------------------------------------------------------------------------------------------


def test_a_slot_is_a_function_of_the_whole_prefix() -> None:
    tokens = np.array(PROMPT, np.int64)
    whole = slots_of(tokens)
    assert (slots_of(tokens[:30]) == whole[:30]).all()
    for place in (0, 17, 79):
        other = tokens.copy()
        other[place] += 1
        changed = slots_of(other) != whole
        assert not changed[:place].any()
        assert changed[place:].all()
    swapped = tokens[[1, 0, *range(2, 80)]]
    assert (slots_of(swapped)[:-1] != whole[:-1]).sum() == 79 or (slots_of(swapped) != whole).all()


def test_every_slot_makes_the_next_token() -> None:
    slots = slots_of(np.array(PROMPT, np.int64))
    tokens = set()
    for place in range(len(slots)):
        changed = slots.copy()
        changed[place] = 0
        tokens.add(next_token(changed))
    assert next_token(slots) not in tokens
    assert len(tokens) > len(slots) / 2


def test_a_pool_reads_what_it_wrote() -> None:
    pool, slots = Pool(8), slots_of(np.array(PROMPT, np.int64))
    pool.write([7, 2, 5, 0, 1], 0, slots[:20])
    pool.write([7, 2, 5, 0, 1], 20, slots[20:])
    assert (pool.read([7, 2, 5, 0, 1], 80) == slots).all()
    assert (pool.slots[2] == slots[16:32]).all()
    assert not pool.slots[[3, 4, 6]].any()
    assert blocks_for(0) == 0
    assert blocks_for(16) == 1
    assert blocks_for(17) == 2


# -- the loop -------------------------------------------------------------------------------------------------------


def test_a_request_is_answered_and_nothing_is_held(bench: Bench) -> None:
    life, connector = bench.start("d")
    leg = bench.ended(life, max_tokens=5)
    assert leg.end is not None
    assert leg.end.how is How.ANSWERED
    assert leg.end.right is True
    assert len(leg.end.answer) == 5
    assert bench.world.held(life) == {}
    hooks = [said for said in connector.said if said != ("step",)]
    assert hooks == [("new", "r1"), ("scheduled", "r1", 5, 0), ("finished", "r1", 6)]


def test_an_answer_is_a_function_of_the_prompt(bench: Bench) -> None:
    ends = [bench.ended(bench.start(place)[0], max_tokens=9).end for place in ("a", "b")]
    other = bench.ended(bench.start("c")[0], [1, *PROMPT[1:]], max_tokens=9).end
    assert ends[0] is not None
    assert ends[1] is not None
    assert other is not None
    assert ends[0].answer == ends[1].answer != other.answer


def test_what_does_not_fit_waits_in_its_order(bench: Bench) -> None:
    life, connector = bench.start("d", slots=1)
    first, second = bench.ask(life, max_tokens=6), bench.ask(life, max_tokens=2)
    bench.world.step()
    assert ("new", "r2") in connector.said
    assert "r2" not in bench.world.held(life)
    assert bench.world.over(first, second)
    assert first.end_ns < second.end_ns


def test_a_pool_that_is_full_makes_requests_wait(bench: Bench) -> None:
    life, _ = bench.start("d", blocks=8)
    legs = [bench.ask(life, [n, *PROMPT], max_tokens=4) for n in range(3)]
    bench.world.step()
    assert set(bench.world.held(life)) == {"r1"}
    assert bench.world.over(*legs)
    assert all(leg.right for leg in legs)


@pytest.mark.parametrize("cache", [True, False])
def test_a_prompt_that_comes_again_is_in_the_cache_if_there_is_one(cache: bool) -> None:
    bench = Bench(cache=cache)
    life, connector = bench.start("d")
    for prompt in (PROMPT, PROMPT, PROMPT[:40], [*PROMPT, 1, 2, 3]):
        assert bench.ended(life, prompt).right
    cached = [said[3] for said in connector.said if said[0] == "scheduled"]
    assert cached == ([0, 80, 32, 80] if cache else [0, 0, 0, 0])


def test_what_cannot_be_served_is_refused_new_and_aborted(bench: Bench) -> None:
    life, connector = bench.start("d", blocks=8)
    for prompt, tokens in ((PROMPT, 8 * BLOCK_TOKENS), (PROMPT, CONTEXT_TOKENS_MAX)):
        with pytest.raises(Refused, match="must have 128 at most"):
            bench.ask(life, prompt, max_tokens=tokens)
    assert connector.said == [("new", "r1"), ("aborted", "r1"), ("new", "r2"), ("aborted", "r2")]
    assert life.alive


def test_messages_come_before_the_step(bench: Bench) -> None:
    life, connector = bench.start("d")
    sender, _ = bench.start("p")
    bench.world.inject(sender, life, b"one")
    bench.world.inject(sender, life, b"two")
    assert connector.said == []
    bench.world.step()
    assert connector.said == [("message", "p.1", b"one"), ("message", "p.1", b"two"), ("step",)]


def test_questions_are_answered_by_the_connector(bench: Bench) -> None:
    life, _ = bench.start("d")
    asker, _ = bench.start("p")
    got: list[Any] = []
    asker.ask(life.spec.port, b"abc", lambda *reply: got.append(reply[0]))
    bench.world.pass_time(1.0)
    assert got == [b"cba"]
    assert bench.world.metrics(life) == {"expired": 3.0}


# -- keeping and loading --------------------------------------------------------------------------------------------


def test_kept_blocks_stay_until_they_are_released(bench: Bench) -> None:
    life, connector = bench.start("p")
    connector.keep = True
    leg = bench.ended(life, params=FOR_REMOTE)
    assert bench.world.held(life) == {"r1": connector.blocks["r1"]}
    assert leg.hand_off == {"blocks": connector.blocks["r1"]}
    bench.world.abort(leg)
    assert connector.said[-1] == ("aborted", "r1")
    assert bench.world.held(life)
    connector.progress.released.append("r1")
    bench.world.step()
    assert bench.world.held(life) == {}


def loading(bench: Bench, *, tokens: int = 80, **more: Any) -> tuple[Told, Told, Life, Leg]:
    """Return both sides' connectors, the reader's life and its request, which waits for KV."""
    p, holder = bench.start("p")
    holder.keep = True
    bench.ended(p)
    d, reader = bench.start("d", **more)
    reader.loads = tokens
    leg = bench.ask(d, steps=1)
    return holder, reader, d, leg


@pytest.mark.parametrize("tokens", [80, 32])
def test_what_was_read_is_used(bench: Bench, tokens: int) -> None:
    holder, reader, _, leg = loading(bench, tokens=tokens)
    count = tokens // BLOCK_TOKENS
    reading = reader.memory.read("p.1", holder.blocks["r1"][:count], reader.blocks["r2"][:count])
    assert reading.generations == []
    bench.world.step()
    assert reading.state == "done"
    assert reading.generations == holder.memory.generations(holder.blocks["r1"])[:count]
    reader.progress.loaded.append("r2")
    assert bench.world.over(leg)
    assert leg.right
    assert leg.end is not None
    assert leg.end.loaded == tokens


@pytest.mark.parametrize(
    "spoil",
    [
        lambda remote, local: (remote[::-1], local),
        lambda remote, local: (remote[:-1], local[:-1]),
        lambda remote, local: (remote, local[1:] + local[:1]),
        lambda remote, local: (remote[:1] * 5, local),
        lambda _remote, _local: ([], []),
    ],
)
def test_blocks_that_are_lost_or_others_make_the_answer_wrong(bench: Bench, spoil: Callable[..., Any]) -> None:
    holder, reader, _, leg = loading(bench)
    reader.memory.read("p.1", *spoil(holder.blocks["r1"], reader.blocks["r2"]))
    bench.world.step()
    reader.progress.loaded.append("r2")
    assert bench.world.over(leg)
    assert leg.end is not None
    assert leg.end.right is False
    assert [breach.rule for breach in bench.world.breaches] == ["S2"]


def test_a_block_that_was_given_to_others_shows_by_its_generation(bench: Bench) -> None:
    holder, reader, _, _ = loading(bench)
    before = holder.memory.generations(holder.blocks["r1"])
    holder.progress.released.append("r1")
    bench.world.step()
    p = bench.world.lives["p.1"]
    for n in range(20):
        bench.ended(p, [n, *PROMPT])
        holder.progress.released.append(f"r{n + 3}")
    reading = reader.memory.read("p.1", holder.blocks["r1"], reader.blocks["r2"])
    bench.world.step()
    assert all(now > then for now, then in zip(reading.generations, before, strict=True))


@pytest.mark.parametrize(
    ("policy", "word", "how"),
    [
        (Policy.RECOMPUTE, "failed", How.ANSWERED), (Policy.FAIL, "failed", How.FAILED),
        (Policy.RECOMPUTE, "declined", How.ANSWERED), (Policy.FAIL, "declined", How.ANSWERED),
        (Policy.RECOMPUTE, "abandoned", How.ANSWERED), (Policy.FAIL, "abandoned", How.FAILED),
    ],
)  # fmt: skip
def test_what_does_not_come_is_computed_or_fails(policy: Policy, word: str, how: How) -> None:
    bench = Bench(policy=policy)
    _, reader, d, leg = loading(bench)
    getattr(reader.progress, word)["r2"] = "no reason"
    assert bench.world.over(leg)
    assert leg.end is not None
    assert leg.end.how is how
    assert leg.end.error == ("no reason" if how is How.FAILED else "")
    assert leg.end.right is (None if how is How.FAILED else True)
    assert leg.end.loaded == 0
    assert bool(bench.world.held(d)) == (word == "abandoned")


@pytest.mark.parametrize("over", ["loaded", "failed"])
def test_blocks_in_which_something_may_land_are_nobodys(bench: Bench, over: str) -> None:
    """Given up, and aborted: the blocks are left alone until the connector says that the read is over."""
    holder, reader, d, leg = loading(bench, blocks=13)
    bench.world.network.reads = lambda *_: ReadPlan(takes_ns=5 * 10**9)
    destination = reader.blocks["r2"]
    reader.memory.read("p.1", holder.blocks["r1"], destination)
    reader.progress.abandoned["r2"] = "it takes too long"
    reader.loads = 0
    assert bench.world.over(leg)
    assert leg.right
    assert set(destination) <= set(bench.world.held(d)["r2"])
    other = bench.ended(d, [7, *PROMPT])
    bench.world.pass_time(6.0)
    assert other.right
    assert set(destination) <= set(bench.world.held(d)["r2"])
    if over == "loaded":
        reader.progress.loaded.append("r2")
    else:
        reader.progress.failed["r2"] = "it is over"
    bench.world.step()
    assert bench.world.held(d) == {}


@pytest.mark.parametrize(("moment", "hooks"), [(0, ["new", "aborted"]), (1, ["new", "scheduled", "aborted"])])
def test_an_abort_is_told_and_frees(bench: Bench, moment: int, hooks: list[str]) -> None:
    life, connector = bench.start("d")
    leg = bench.ask(life, max_tokens=50, steps=moment)
    bench.world.abort(leg)
    bench.world.step()
    assert [said[0] for said in connector.said if said != ("step",)] == hooks
    assert leg.end is not None
    assert leg.end.how is How.ABORTED
    assert bench.world.held(life) == {}


def test_an_abort_while_loading_keeps_the_destination(bench: Bench) -> None:
    _, reader, d, leg = loading(bench)
    bench.world.abort(leg)
    bench.world.step()
    assert leg.end is not None
    assert list(bench.world.held(d)) == ["r2"]
    reader.progress.failed["r2"] = "it is over"
    bench.world.step()
    assert bench.world.held(d) == {}


def test_a_read_of_nobody_fails(bench: Bench) -> None:
    _, reader, _, _ = loading(bench)
    reading = reader.memory.read("nobody", [0], reader.blocks["r2"][:1])
    bench.world.step()
    assert reading.state == "failed"


def test_blocks_beyond_a_holders_pool_cannot_be_read(bench: Bench) -> None:
    _, reader, _, _ = loading(bench)
    with pytest.raises(Misuse, match="blocks that there are not"):
        reader.memory.read("p.1", [64], reader.blocks["r2"][:1])


# -- whose mistake it is --------------------------------------------------------------------------------------------


def test_a_mistake_of_the_suite_is_not_the_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: Any) -> None:
        vars(Watch)["no such name"]

    monkeypatch.setattr(stumble, "__code__", stumble.__code__.replace(co_filename=worlds.__file__))
    monkeypatch.setattr(Watch, "sent", stumble)
    with pytest.raises(KeyError, match="no such name"):
        judged("KVC-REL-001.read", subject(step(4).Connector))


@pytest.mark.parametrize(
    ("files", "ours"),
    [
        (["world.py"], True),
        (["world.py", "simple_engine.py"], True),
        (["world.py", "/home/x/connector.py"], False),
        (["world.py", "/home/x/harness/conformance/connector.py"], False),
        (["world.py", "/home/x/connector.py", "world.py"], True),
        (["world.py", "simple_engine.py", "{numpy}/core/fromnumeric.py"], True),
        (["world.py", "/home/x/connector.py", "{numpy}/core/fromnumeric.py"], False),
        (["world.py", "/home/x/connector.py", "{stdlib}/json/decoder.py"], False),
        (["world.py", "{stdlib}/json/decoder.py", "<frozen importlib._bootstrap>"], True),
        (["world.py", "{stdlib}/site-packages/vllm/x.py"], False),
        (["world.py", "{stdlib}/site-packages/vllm/x.py", "{stdlib}/threading.py"], False),
    ],
)
def test_a_mistake_is_of_whoever_called_last(files: list[str], ours: bool) -> None:
    here = str(Path(worlds.__file__).parent)
    places = {"numpy": str(Path(np.__file__).parent), "stdlib": worlds._STANDARD.rstrip("/")}
    paths = [f"{here}/{file}" if file[0] not in "/{<" else file.format(**places) for file in files]
    with pytest.raises(ValueError, match="deep") as caught:
        raised_in(paths)
    error = caught.value
    error.__traceback__ = error.__traceback__.tb_next.tb_next if error.__traceback__ else None  # type: ignore[union-attr]
    assert worlds._ours(error) is ours
    assert not worlds._ours(Misuse("told by what stands in for the transport"))


def raised_in(paths: list[str]) -> None:
    """Raise an error whose frames lie in these files, the first one outside."""
    call: Callable[[], None] | None = None
    for path in reversed(paths):
        names: dict[str, Any] = {"call": call}
        exec(compile("def act():\n if call: call()\n raise ValueError('deep')", path, "exec"), names)
        call = names["act"]
    assert call is not None
    call()


def test_only_a_door_may_refuse() -> None:
    class Late(step(4).Connector):  # type: ignore[name-defined, misc]
        def step(self) -> Progress:
            raise Refused("too late for that")

    world = World(subject(Late), 1)
    life = world.start("p", Role.PREFILL)
    world.step()
    assert not life.alive
    assert [breach.rule for breach in world.breaches] == ["R1"]


def test_a_dead_engine_has_no_counters(bench: Bench) -> None:
    life, _ = bench.start("d")
    bench.world.crash(life)
    assert bench.world.held(life) == {}
    with pytest.raises(EngineDied):
        bench.world.metrics(life)

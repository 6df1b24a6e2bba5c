"""Two turns: the decode side keeps what a turn left, on a clock of its own, and the next turn's prefill reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from reference_impl.realclock import host_ns
from reference_impl.rules.clock import NS_PER_S
from reference_impl.rules.events import Event, EventKind
from reference_impl.time_namespace import available
from tests.deployment.split import Answered, Client, Split, prompt_of, split

PROBLEM = available()
pytestmark = [
    pytest.mark.nixl,
    pytest.mark.slow,
    pytest.mark.skipif(PROBLEM is not None, reason=f"no time namespace here: {PROBLEM}"),
]

TTL_S = 4.0
SLACK_S = 0.6
ANSWER = 100
one_clock_is_enough = pytest.mark.parametrize("served", [5000], indirect=True, scope="module", ids=["ahead"])


@pytest.fixture(scope="module", params=[5000, -5000], ids=["ahead", "behind"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    options = ["--prefill", "1", "--decode", "1", "--bidirectional", "--decoder-kv-blocks-ttl", str(TTL_S)]
    clock = ["--decode-clock-offset-s", str(request.param)]
    folder = tmp_path_factory.mktemp("turns")
    with split(folder, *options, *clock, "--kv-lease-duration", "3", profile="tiny") as found:
        yield found


@pytest_asyncio.fixture
async def client(served: Split) -> AsyncIterator[Client]:
    async with served.client() as found:
        yield found
        await found.until_free("p0", "d0")


class Session:
    """A conversation: each turn repeats everything before it and adds a little."""

    def __init__(self, client: Client, seed: int, tokens: int = 200) -> None:
        self._client = client
        self.said = prompt_of(seed, tokens)
        self.params: dict[str, Any] | None = None

    async def turn(self, *, stream: bool = True, worker_id: str = "") -> Answered:
        """Say a turn; its answer is right. Keeps the hand-off for the next."""
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await self._client.complete(
            self.said, ANSWER, stream=stream, params=self.params, worker_id=worker_id, **usage
        )
        assert answer.tokens == self._client.right(self.said, ANSWER)
        self.params = answer.params
        self.said = [*self.said, *answer.tokens, *prompt_of(len(self.said), 20)]
        return answer

    @property
    def held(self) -> str:
        """The id of what is kept for the next turn."""
        assert self.params is not None
        return str(self.params["remote_request_id"])

    async def let_go(self) -> None:
        """End the conversation, so that nothing is kept for it."""
        answer = await self._client.complete(self.said[:5], 1, worker_id="p0", params=self.params)
        assert answer.status == 400


def loads(served: Split, kind: EventKind, holders_id: str) -> list[Event]:
    return [e for e in served.events(kind) if e.detail.get("remote_request_id") == holders_id]


def clock_of_decode_ns(served: Split) -> int:
    """What the decode side's clock shows."""
    ahead_s = served.said.clock_offsets_s
    return host_ns() + round(ahead_s["d0"] * NS_PER_S)


@pytest.mark.rule("KVC-CLK-001", "KVC-CLK-002", "KVC-CLK-005")
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_second_turn_reads_what_the_first_one_left(client: Client, served: Split, stream: bool) -> None:
    session = Session(client, 1 + stream)
    await session.turn(stream=stream)
    for _ in range(2):
        held = session.held
        before = await client.metrics("p0")
        await session.turn(stream=stream)
        (judged,) = loads(served, EventKind.TURN_JUDGED, held)
        assert judged.detail["live"] is True
        (loaded,) = loads(served, EventKind.LOAD_DONE, held)
        assert int(str(loaded.detail["blocks"])) >= ANSWER // 16 - 1, "the answer's blocks: the prompt's are here"
        assert await client.grown("p0", before, "pdproof:loads_done_total") == [1]
        released = await asyncio.to_thread(served.event_of, EventKind.LEASE_RELEASED, held, 2.0)
        assert (released.detail["how"], released.detail["turn"]) == ("read", True)
    await session.let_go()


@pytest.mark.rule("KVC-CLK-001", "KVC-CLK-004", "KVC-CLK-005")
async def test_a_turn_lives_its_time_unrenewed_and_then_is_computed_again(client: Client, served: Split) -> None:
    session = Session(client, 5)
    await session.turn()
    assert session.params is not None
    left_s = session.params["remote_blocks_expiry_time"] - clock_of_decode_ns(served) / NS_PER_S
    assert TTL_S - SLACK_S < left_s <= TTL_S, "its expiry is on the decode side's clock"
    held = session.held
    granted = served.event_of(EventKind.LEASE_GRANTED, held)
    assert (granted.detail["duration_s"], granted.detail["turn"]) == (TTL_S, True)
    expired = await asyncio.to_thread(served.event_of, EventKind.LEASE_EXPIRED, held, TTL_S + SLACK_S)
    assert 0 <= (expired.t_ns - granted.t_ns) / NS_PER_S - TTL_S < SLACK_S
    before = await client.metrics("p0")
    await session.turn()
    (judged,) = loads(served, EventKind.TURN_JUDGED, held)
    assert judged.detail["live"] is False
    assert loads(served, EventKind.LOAD_DONE, held) == []
    assert await client.grown("p0", before, "pdproof:turns_expired_total", "pdproof:loads_failed_total") == [1, 0]
    await session.let_go()


@one_clock_is_enough
@pytest.mark.rule("KVC-CLK-007")
async def test_a_session_that_is_kept_alive_keeps_its_blocks(client: Client, served: Split) -> None:
    session = Session(client, 6)
    await session.turn()
    held, first = session.held, session.params
    assert first is not None
    due_ns = served.event_of(EventKind.LEASE_GRANTED, held).t_ns
    for _ in range(3):
        due_ns += round(TTL_S / 2 * NS_PER_S)
        await asyncio.sleep(max(0, due_ns - host_ns()) / NS_PER_S)
        renewed = await client.post("", {"kv_transfer_params": session.params}, "/v1/kv/renew")
        assert renewed.status == 200, renewed.text
        before, session.params = session.params, renewed.params
        assert renewed.params.keys() == first.keys()
        gained_s = renewed.params["remote_blocks_expiry_time"] - before["remote_blocks_expiry_time"]  # type: ignore[index]
        assert TTL_S / 2 - SLACK_S < gained_s < TTL_S / 2 + SLACK_S
    await session.turn()
    (judged,) = loads(served, EventKind.TURN_JUDGED, held)
    assert judged.detail["live"] is True
    assert len(loads(served, EventKind.LOAD_DONE, held)) == 1
    gone = await client.post("", {"kv_transfer_params": first}, "/v1/kv/renew")
    assert gone.status == 404
    await session.let_go()


@one_clock_is_enough
@pytest.mark.rule("KVC-CLK-004", "KVC-HSK-003")
async def test_a_turn_whose_holder_has_died_is_computed_again(client: Client, served: Split) -> None:
    session = Session(client, 7)
    await session.turn()
    held = session.held
    await asyncio.to_thread(served.kill, "d0")
    await client.at("d0")
    answer = await client.post("", {"kv_transfer_params": session.params}, "/v1/kv/renew")
    assert (answer.status, answer.error["param"]) == (404, "kv_transfer_params")
    await session.turn()
    assert loads(served, EventKind.LOAD_DONE, held) == []
    await session.turn()
    await session.let_go()

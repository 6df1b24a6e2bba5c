"""Live engines and a peer that misbehaves: a real NIXL agent and real sockets in this process (R1, L6, KVC-REL-006)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from reference_impl.content import BLOCK_BYTES, BLOCK_TOKENS
from reference_impl.engine.cli import EngineAnnouncement
from reference_impl.engine.config import MODEL_NAME
from reference_impl.realclock import now_ns
from reference_impl.rules.agreement import Hello
from reference_impl.rules.events import EventKind
from reference_impl.rules.messages import MESSAGE_BYTES_MAX, Answer, Claim, Heartbeat, How, Report, decode, encode
from reference_impl.rules.terms import KvTerms
from reference_impl.secret import TOKEN_VARIABLE
from reference_impl.transport.agent import opened, sealed
from reference_impl.transport.hello import HandshakeClient, HandshakeFailed, framed
from tests.deployment.split import TOKEN, Client, History, lone_engine, prompt_of, under_way
from tests.transport.holding_engine import shared_pool
from tests.waiting import until_async

pytestmark = [pytest.mark.nixl]

LEASE_S = 3.0
SECRET = TOKEN.encode()
TERMS = KvTerms(kv_lease_duration=LEASE_S)
MALFORMED = "pdproof:notifications_malformed_total"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peers")


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[dict[str, EngineAnnouncement]]:
    terms: dict[str, object] = {"kv_lease_duration": LEASE_S}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack, ThreadPoolExecutor() as pool:
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        starting = {
            name: pool.submit(stack.enter_context, lone_engine(folder, role, terms))
            for name, role in (("p0", "prefill"), ("d0", "decode"))
        }
        yield {name: started.result() for name, started in starting.items()}


@pytest_asyncio.fixture
async def client(engines: dict[str, EngineAnnouncement]) -> AsyncIterator[Client]:
    async with Client("", engines["p0"].weights, {name: said.url for name, said in engines.items()}) as found:
        yield found
        await found.assert_serves(next(_numbers) * 1000, 150, "d0")


class Stranger:
    """An engine of this test's making: it shakes hands as engines do, and then says what it likes."""

    def __init__(self) -> None:
        from reference_impl.transport.nixl import NixlTransport

        self.engine_id = f"stranger-{os.getpid()}-{next(_numbers)}"
        self.descriptor, self.kv = shared_pool(16)
        self.transport = NixlTransport(self.engine_id, self.kv, np.ones(16, np.uint64), 1, self.descriptor)
        self.received: list[bytes] = []

    def hello(self, **changes: Any) -> Hello:
        mine = Hello(
            engine_id=self.engine_id, role="decode", model=MODEL_NAME, block_tokens=BLOCK_TOKENS,
            block_bytes=BLOCK_BYTES, blocks=16, ranks=1, terms=TERMS, addresses=self.transport.addresses(),
        )  # fmt: skip
        return msgspec.structs.replace(mine, **changes)

    async def meet(self, params: dict[str, Any]) -> None:
        """Shake hands with the engine that a hand-off names."""
        met = await HandshakeClient(now_ns, SECRET).connect(
            params["remote_host"], params["remote_port"], self.hello(), params["remote_engine_id"], 5
        )
        self.transport.add_peer(met.theirs.engine_id, met.theirs.addresses)
        self.holder = met.theirs.engine_id

    def say(self, data: bytes) -> None:
        assert self.transport.send(self.holder, data)

    async def pump(self) -> None:
        """Let what was said leave: without a thread of its own NIXL makes progress only while it is called."""
        while True:
            self.received += [message for _, message in self.transport.receive()]
            await asyncio.sleep(0.001)

    async def heard(self, what: str) -> Answer:
        """Wait for the holder's next answer."""

        await until_async(lambda: self.received, 5, what)
        answer = decode(self.received.pop(0))
        assert isinstance(answer, Answer)
        return answer

    def close(self) -> None:
        self.transport.close()
        os.close(self.descriptor)


@pytest_asyncio.fixture
async def stranger() -> AsyncIterator[Stranger]:
    with contextlib.closing(Stranger()) as found:
        async with under_way(found.pump()):
            yield found


def noise() -> list[bytes]:
    """Notifications that mean nothing."""
    chance = random.Random(5)
    real = [
        encode(Heartbeat(["a", "b"])), encode(Claim("a", "b", 5, "c")), encode(Answer("a", "b", True)),
        encode(Report("a", "b", How.READ)),
    ]  # fmt: skip
    return [
        *(chance.randbytes(size) for size in (1, 2, 3, 4, 5, 16, 255, 4096, 65_000)),
        *(b"PDP1" + chance.randbytes(size) for size in range(1, 40)),
        *(message[:length] for message in real for length in range(1, len(message))),
        *(message + b"\0" for message in real),
        *(b"PDP2" + message[4:] for message in real),
        encode(Claim("a", "b", 5, "c" * 64)) + bytes(MESSAGE_BYTES_MAX),
        b"PDP1" + b"\x91" * 30_000,
        b"PDP1" + b"\xdf\xff\xff\xff\xff",
        b"PDP1" + msgspec.msgpack.encode(["hb", []]),
        b"PDP1" + msgspec.msgpack.encode(["hb", ["x" * 121]]),
        b"PDP1" + msgspec.msgpack.encode(["hb", ["x"] * 513]),
        b"PDP1" + msgspec.msgpack.encode(["claim", "a", "b", -1, ""]),
        b"PDP1" + msgspec.msgpack.encode(["claim", "a", "b", 1e300, ""]),
        b"PDP1" + msgspec.msgpack.encode(["report", "a", "b", "vanished"]),
        b"PDP1" + msgspec.msgpack.encode(["kill", "a"]),
    ]


@pytest.mark.rule("KVC-LEASE-005", "KVC-LEASE-007")
async def test_on_idle_engines_leases_end_at_their_deadline(client: Client, folder: Path) -> None:
    params = await client.prefilled(prompt_of(7, 100))
    before = await client.metrics("p0")
    expired = await asyncio.to_thread(
        History(folder).event_of, EventKind.LEASE_EXPIRED, params["remote_request_id"], LEASE_S + 2
    )
    assert LEASE_S * 1000 <= float(str(expired.detail["held_ms"])) < LEASE_S * 1000 + 500
    assert await client.grown("p0", before, "vllm:nixl_num_kv_expired_reqs_total") == [1]
    await client.until_free("p0", "d0")


@pytest.mark.rule("KVC-REL-006")
@pytest.mark.parametrize("worker_id", ["p0", "d0"])
async def test_noise_from_a_peer_is_dropped_and_counted(client: Client, stranger: Stranger, worker_id: str) -> None:
    params = await client.prefilled(prompt_of(1, 100))
    if worker_id == "d0":  # its address is told by what it keeps, so by a request that it is to keep
        params = await client.prefilled(prompt_of(1, 100), "d0")
    await stranger.meet(params)
    before = await client.metrics(worker_id)
    said = [data for data in noise() if not _means_something(data)]
    assert len(said) > 100
    for data in said:
        stranger.say(data)
    want = before[MALFORMED] + len(said)
    await client.until_metric(worker_id, MALFORMED, lambda v: v >= want, f"{len(said)} notifications are counted", 10)
    assert await client.grown(worker_id, before, MALFORMED) == [len(said)], "each once"


def _means_something(data: bytes) -> bool:
    from reference_impl.rules.messages import BadMessage

    try:
        decode(data)
    except BadMessage:
        return False
    return True


@pytest.mark.rule("KVC-REL-004", "KVC-LEASE-004")
async def test_real_messages_about_nothing_change_nothing(client: Client, stranger: Stranger) -> None:
    params = await client.prefilled(prompt_of(2, 100))
    await stranger.meet(params)
    before = await client.metrics("p0")
    for _ in range(20):
        stranger.say(encode(Heartbeat(["nobody", "x" * 120])))
        stranger.say(encode(Report("nobody", "me", How.READ)))
        stranger.say(encode(Answer("nobody", "me", True)))
        stranger.say(encode(Answer(params["remote_request_id"], "me", True)))
    want = before["pdproof:heartbeats_received_total"] + 20
    await client.until_metric("p0", "pdproof:heartbeats_received_total", lambda v: v >= want, "all are read")
    stranger.say(encode(Claim("nobody", "me", 5, "c")))
    refused = await stranger.heard("the claim is answered")
    assert (refused.granted, refused.reason) == (False, "no lease: it has ended, or never was")
    assert await client.grown(
        "p0", before, "pdproof:leases_extended_total", "pdproof:leases_released_total", MALFORMED,
        "pdproof:reads_after_expiry_total",
    ) == [0, 0, 0, 1]  # fmt: skip
    assert (await client.decoded(prompt_of(2, 100), 5, params)).tokens == client.right(prompt_of(2, 100), 5)


@pytest.mark.rule("KVC-REL-006", "KVC-REL-007")
async def test_claims_that_no_reader_would_make_are_refused(client: Client, stranger: Stranger) -> None:
    """With another's request id in hand a stranger gets nothing without the text, and no more time than is due."""
    prompt = prompt_of(3, 100)
    params = await client.prefilled(prompt)
    await stranger.meet(params)
    for content, within_ns, words in (("", 5, "another text"), ("f" * 32, 5, "another text")):
        stranger.say(encode(Claim(params["remote_request_id"], "me", within_ns, content)))
        refused = await stranger.heard("the claim is answered")
        assert not refused.granted
        assert words in refused.reason
    assert (await client.decoded(prompt, 5, params)).tokens == client.right(prompt, 5)


@pytest.mark.rule("KVC-REL-004", "KVC-REL-001")
async def test_messages_said_many_times_count_once(client: Client, stranger: Stranger, folder: Path) -> None:
    """A reader whose every message arrives five times renews and ends one lease, once."""
    params = await client.prefilled(prompt_of(4, 100))
    request_id = params["remote_request_id"]
    await stranger.meet(params)
    before = await client.metrics("p0")
    for _ in range(5):
        stranger.say(encode(Heartbeat([request_id])))
    for _ in range(5):
        stranger.say(encode(Report(request_id, "me", How.READ)))
    for _ in range(5):
        stranger.say(encode(Heartbeat([request_id])))
    want = before["pdproof:heartbeats_received_total"] + 10
    await client.until_metric("p0", "pdproof:heartbeats_received_total", lambda v: v >= want, "all are read")
    assert await client.grown(
        "p0", before, "pdproof:leases_released_total", "pdproof:leases_extended_total",
        "vllm:nixl_num_kv_expired_reqs_total",
    ) == [1, 5, 0]  # fmt: skip
    ends = History(folder).events(EventKind.LEASE_RELEASED, EventKind.LEASE_EXPIRED)
    assert [e.subject for e in ends].count(request_id) == 1


@pytest.mark.rule("KVC-HSK-001")
async def test_peers_that_do_not_suit_are_refused_with_a_reason(client: Client, stranger: Stranger) -> None:
    params = await client.prefilled(prompt_of(5, 100))
    changes: dict[str, Any] = {
        "protocol": 2, "model": "another", "block_tokens": 32, "block_bytes": 8192,
        "ranks": 3, "addresses": [], "engine_id": params["remote_engine_id"], "blocks": 17,
        "terms": msgspec.structs.replace(TERMS, bidirectional_kv_xfer=True),
    }  # fmt: skip
    for name, value in changes.items():
        with pytest.raises(HandshakeFailed, match="refused: "):
            await HandshakeClient(now_ns, SECRET).connect(
                params["remote_host"], params["remote_port"], stranger.hello(**{name: value}),
                params["remote_engine_id"], 5,
            )  # fmt: skip
    damaged = [msgspec.structs.replace(a, metadata=a.metadata[:-3] + b"xyz") for a in stranger.transport.addresses()]
    with pytest.raises(HandshakeFailed, match="damaged"):
        await HandshakeClient(now_ns, SECRET).connect(
            params["remote_host"], params["remote_port"], stranger.hello(addresses=damaged),
            params["remote_engine_id"], 5,
        )  # fmt: skip
    await stranger.meet(params)


@pytest.mark.rule("KVC-HSK-002")
async def test_noise_and_silence_on_the_side_channel_delay_nobody(client: Client, stranger: Stranger) -> None:
    params = await client.prefilled(prompt_of(6, 100))
    where = (params["remote_host"], params["remote_port"])
    chance = random.Random(6)
    frames = [
        b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(5000), struct.pack("!I", 0), struct.pack("!I", 2**31),
        struct.pack("!I", 1 << 20), struct.pack("!I", 100) + chance.randbytes(100), struct.pack("!I", 10) + b"half",
        struct.pack("!I", 50_000) + b"\x91" * 50_000,
        *(framed(body, SECRET) for body in _almost_hellos(stranger)),
        *(struct.pack("!I", len(body)) + body for body in _almost_hellos(stranger)),
    ]  # fmt: skip
    with ExitStack() as stack:
        for frame in frames:
            stack.enter_context(socket.create_connection(where, 5)).sendall(frame)
        for _ in range(200):  # more than the listener keeps
            stack.enter_context(socket.create_connection(where, 5))
        began_ns = now_ns()
        await stranger.meet(params)
        assert now_ns() - began_ns < 2e9
        assert (await client.decoded(prompt_of(6, 100), 5, params)).tokens == client.right(prompt_of(6, 100), 5)


@pytest.mark.rule("KVC-HSK-002")
async def test_an_introduction_that_the_secret_does_not_seal_never_reaches_nixl(
    client: Client, stranger: Stranger
) -> None:
    """Metadata that NIXL made, changed, behind a fresh digest: its parser would end the process (R1)."""
    params = await client.prefilled(prompt_of(8, 100))
    where = (params["remote_host"], params["remote_port"])
    good = stranger.transport.addresses()[0]
    chance = random.Random(8)
    for secret in (b"", b"another") * 20:
        changed = bytearray(opened(good.metadata))
        for _ in range(4):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        worse = stranger.hello(addresses=[msgspec.structs.replace(good, metadata=sealed(bytes(changed)))])
        with pytest.raises(HandshakeFailed):
            await HandshakeClient(now_ns, secret).connect(*where, worse, params["remote_engine_id"], 5)
    await stranger.meet(params)
    assert (await client.decoded(prompt_of(8, 100), 5, params)).tokens == client.right(prompt_of(8, 100), 5)


def _almost_hellos(stranger: Stranger) -> list[bytes]:
    good = msgspec.to_builtins(stranger.hello())
    return [
        msgspec.msgpack.encode({"type": "hello"}),
        msgspec.msgpack.encode({"type": "hello", "hello": good | {"ranks": "one"}}),
        msgspec.msgpack.encode({"type": "hello", "hello": good | {"terms": {"kv_lease_duration": -1}}}),
        msgspec.msgpack.encode({"type": "hello", "hello": good | {"terms": {"kv_lease_duration": float("nan")}}}),
        msgspec.msgpack.encode({"type": "bye"}),
        msgspec.msgpack.encode([1, 2, 3]),
    ]

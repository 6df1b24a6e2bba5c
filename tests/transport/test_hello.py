"""The side channel: introductions, refusals, clocks, and peers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from reference_impl.realclock import now_ns
from reference_impl.rules.agreement import Hello, RankAddress, incompatible
from reference_impl.rules.clock import ManualClock, s_to_ns
from reference_impl.rules.terms import KvTerms, LeaseDesign
from reference_impl.transport import hello as side_channel
from reference_impl.transport.base import PeerRefused
from reference_impl.transport.hello import (
    FRAME_BYTES_MAX,
    SAMPLES,
    HandshakeClient,
    HandshakeFailed,
    HandshakeServer,
    framed,
)
from tests.waiting import until_async

HOST = "127.0.0.1"
LIMIT_S = 5.0
SECRET = b"secret of a test"


def hello(engine_id: str = "P#1", **changes: Any) -> Hello:
    usual = Hello(
        engine_id=engine_id,
        role="prefill",
        model="oracle",
        block_tokens=16,
        block_bytes=4096,
        blocks=100,
        ranks=1,
        terms=KvTerms(),
        addresses=[RankAddress(b"metadata", 4096, 8192, 100)],
    )
    return msgspec.structs.replace(usual, **changes)


class Served:
    """A server and what it heard."""

    def __init__(self) -> None:
        self.clock = ManualClock(offset_ns=5_000)
        self.mine: Hello | None = hello()
        self.met: list[Hello] = []
        self.refuses = ""
        self.server = HandshakeServer(lambda: self.mine, self.meet, self.clock.now_ns, SECRET)

    def meet(self, theirs: Hello) -> None:
        if self.refuses:
            raise PeerRefused(self.refuses)
        self.met.append(theirs)

    async def connect(self, mine: Hello | None = None, expected: str = "P#1", limit_s: float = LIMIT_S) -> Any:
        client = HandshakeClient(now_ns, SECRET)
        return await client.connect(HOST, self.server.port, mine or hello("D#1"), expected, limit_s)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    found = Served()
    await found.server.start(HOST)
    yield found
    await found.server.close()


async def test_both_sides_learn_of_each_other(served: Served) -> None:
    before_ns = now_ns()
    shaken = await served.connect()
    assert shaken.theirs == hello()
    assert served.met == [hello("D#1")]
    assert len(shaken.samples) == SAMPLES
    for sample in shaken.samples:
        assert before_ns <= sample.sent_ns <= sample.received_ns <= now_ns()
        assert sample.remote_ns == 5_000


async def test_a_clock_is_measured_again(served: Served) -> None:
    served.clock.advance(77)
    sample = await HandshakeClient(lambda: 1, SECRET).ping(HOST, served.server.port, hello().engine_id, LIMIT_S)
    assert sample == (1, 5_077, 1)


@pytest.mark.rule("KVC-HSK-003")
async def test_the_clock_of_another_engine_on_the_same_address_is_not_taken(served: Served) -> None:
    with pytest.raises(HandshakeFailed, match="answers in the place of P#0"):
        await HandshakeClient(lambda: 1, SECRET).ping(HOST, served.server.port, "P#0", LIMIT_S)


@pytest.mark.rule("KVC-HSK-001")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 2}, "protocol differs: 1 here, 2 there"),
        ({"model": "other"}, "model differs: 'oracle' here, 'other' there"),
        ({"block_tokens": 32}, "block_tokens differs: 16 here, 32 there"),
        ({"block_bytes": 8192}, "block_bytes differs: 4096 here, 8192 there"),
        ({"terms": KvTerms(design=LeaseDesign.SINGLE_TIMEOUT)}, "design differs: 'lease' here, 'single-timeout' there"),
        ({"terms": KvTerms(bidirectional_kv_xfer=True)}, "bidirectional_kv_xfer differs: False here, True there"),
        ({"terms": KvTerms(kv_lease_duration=60.0)}, "kv_lease_duration differs: 30.0 here, 60.0 there"),
        ({"terms": KvTerms(read_limit=5.0)}, "read_limit differs: 10.0 here, 5.0 there"),
        ({"terms": KvTerms(decoder_kv_blocks_ttl=5.0)}, "decoder_kv_blocks_ttl differs: 480.0 here, 5.0 there"),
        ({"ranks": 3}, "ranks must be one of (1, 2, 4, 8), and D#1 has 3"),
        ({"ranks": 2}, "D#1 has 2 ranks and 1 addresses"),
        ({"blocks": 5}, "D#1 has 5 blocks and addresses that say otherwise"),
        ({"engine_id": "P#1"}, "engine_id is the same on both sides: 'P#1'"),
    ],
)
async def test_an_incompatible_peer_is_refused_with_a_reason(
    served: Served, changes: dict[str, Any], reason: str
) -> None:
    theirs = msgspec.structs.replace(hello("D#1"), **changes)
    assert incompatible(hello(), theirs) == reason
    with pytest.raises(HandshakeFailed) as failed:
        await served.connect(theirs)
    assert reason in str(failed.value)
    assert served.met == []
    assert (await served.connect()).theirs == hello()


@pytest.mark.rule("KVC-HSK-001")
async def test_the_asker_looks_for_itself(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.mine = hello(model="other")
    monkeypatch.setattr(served.server, "_answer", lambda _request: side_channel.Welcome(hello(model="other")))
    with pytest.raises(HandshakeFailed, match="P#1 does not suit us: model differs"):
        await served.connect()


def test_terms_that_may_differ_do() -> None:
    assert incompatible(hello(), hello("D#1", terms=KvTerms(load_limit=90.0), role="decode")) == ""


@pytest.mark.rule("KVC-HSK-003")
async def test_a_restarted_peer_is_recognised(served: Served) -> None:
    served.mine = hello("P#2")
    with pytest.raises(HandshakeFailed, match="is P#2, not P#1: restarted since the hand-off"):
        await served.connect()


async def test_a_peer_that_cannot_be_reached_back_is_refused(served: Served) -> None:
    served.refuses = "metadata of 3 bytes is damaged"
    with pytest.raises(HandshakeFailed, match="P#1 refused: metadata of 3 bytes is damaged"):
        await served.connect()
    served.refuses, served.mine = "", None
    with pytest.raises(HandshakeFailed, match="P#1 refused: this engine does not serve yet"):
        await served.connect()
    assert served.server.refused == 2


@pytest.mark.rule("KVC-HSK-002")
async def test_nobody_there_fails_at_once() -> None:
    for port in (1, 70_000, -1):
        with pytest.raises(HandshakeFailed, match="cannot be reached"):
            await HandshakeClient(now_ns, SECRET).connect(HOST, port, hello("D#1"), "P#1", LIMIT_S)


@contextlib.asynccontextmanager
async def answering(act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[int]:
    """A peer that answers as `act` does; yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await act(reader, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.rule("KVC-HSK-002")
async def test_a_silent_peer_costs_the_time_limit() -> None:
    done = asyncio.Event()

    async def silent(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await done.wait()

    async with answering(silent) as port:
        before_ns = now_ns()
        with pytest.raises(HandshakeFailed, match=r"did not answer within 0\.2 s"):
            await HandshakeClient(now_ns, SECRET).connect(HOST, port, hello("D#1"), "P#1", 0.2)
        assert now_ns() - before_ns < s_to_ns(LIMIT_S)
        done.set()


def frame(body: bytes) -> bytes:
    return framed(body, SECRET)


def unsealed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


REAL = msgspec.msgpack.encode(side_channel.Introduce(hello("D#1")))


NONSENSE = {
    "garbage": random.Random(1).randbytes(300),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "oversized": struct.pack("!I", FRAME_BYTES_MAX + 1) + b"x",
    "empty": struct.pack("!I", 0),
    "unsealed": unsealed(REAL),
    "shorter than a seal": unsealed(b"x" * 32),
    "under another secret": framed(REAL, b"another"),
    "under no secret": framed(REAL, b""),
    "changed under its seal": frame(REAL)[:-1] + b"x",
    "no message": frame(b"\xc1\xc1\xc1"),
    "another message": frame(msgspec.msgpack.encode({"type": "welcome"})),
    "deep": frame(b"\x91" * 100_000 + b"\xc0"),
    "bad terms": frame(
        msgspec.msgpack.encode({"type": "hello", "hello": {**msgspec.to_builtins(hello(), builtin_types=(bytes,)),
                                                           "terms": {"read_limit": -1}}})
    ),
}  # fmt: skip


@pytest.mark.rule("KVC-HSK-002")
@pytest.mark.parametrize("kind", NONSENSE)
async def test_a_client_that_speaks_nonsense_costs_only_its_connection(served: Served, kind: str) -> None:
    reader, writer = await asyncio.open_connection(HOST, served.server.port)
    writer.write(NONSENSE[kind])
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
    writer.transport.abort()
    await until_async(lambda: served.server.malformed == 1, LIMIT_S, "it is counted")
    assert (await served.connect()).theirs == hello()


@pytest.mark.rule("KVC-HSK-002")
@pytest.mark.parametrize("kind", NONSENSE)
async def test_a_server_that_speaks_nonsense_fails_the_handshake(kind: str) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(NONSENSE[kind])
        await writer.drain()
        writer.write_eof()
        await reader.read()

    async with answering(speak) as port:
        with pytest.raises(HandshakeFailed):
            await HandshakeClient(now_ns, SECRET).connect(HOST, port, hello("D#1"), "P#1", LIMIT_S)


@pytest.mark.rule("KVC-HSK-001")
async def test_nothing_is_decoded_or_met_that_the_secret_does_not_seal(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL's parser can end the process: no byte of a stranger's may come near it."""
    decoded: list[bytes] = []
    monkeypatch.setattr(side_channel, "_decoded", lambda _decoder, body: decoded.append(body))
    for secret in (b"", b"another"):
        with pytest.raises(HandshakeFailed, match="closed the connection"):
            await HandshakeClient(now_ns, secret).connect(HOST, served.server.port, hello("D#1"), "P#1", LIMIT_S)
    assert (decoded, served.met, served.server.malformed) == ([], [], 2)


async def test_an_answer_under_another_secret_is_not_taken(served: Served) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(framed(msgspec.msgpack.encode(side_channel.Welcome(hello())), b"another"))
        await reader.read()

    async with answering(speak) as port:
        with pytest.raises(HandshakeFailed, match="secret"):
            await HandshakeClient(now_ns, SECRET).connect(HOST, port, hello("D#1"), "P#1", LIMIT_S)


async def test_half_a_frame_is_given_up_after_a_while(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "FRAME_LIMIT_S", 0.2)
    reader, writer = await asyncio.open_connection(HOST, served.server.port)
    writer.write(struct.pack("!I", 100) + b"half")
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
    writer.transport.abort()
    assert served.server.malformed == 0


async def test_only_so_many_connections_are_held_and_the_oldest_gives_way(served: Served) -> None:
    held = [await asyncio.open_connection(HOST, served.server.port) for _ in range(side_channel.CONNECTIONS_MAX)]
    await until_async(
        lambda: len(served.server._connections) == side_channel.CONNECTIONS_MAX, LIMIT_S, "all are accepted"
    )
    assert (await served.connect()).theirs == hello()
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(held[0][0].read(), LIMIT_S) == b""
    assert len(served.server._connections) < side_channel.CONNECTIONS_MAX + 1
    for _, writer in held:
        writer.transport.abort()

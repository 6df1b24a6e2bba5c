"""The side channel: two engines introduce themselves over TCP, and compare clocks, before anything is read.

A connection carries requests and answers in turn, each a frame: four bytes of length (big endian), then the seal and
one msgpack message. The seal is HMAC-SHA256 of the message under the deployment's secret, and is looked at before the
message is: NIXL's own parser ends the process over metadata of an ill will, so nothing of a stranger's may get there.
Under the empty secret it guards against accident only. A frame that is heard can be said again, which tells an engine
what it knows already.

What a peer does wrong costs only its own connection, and after `FRAME_LIMIT_S` so does its silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import struct
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Final, TypeVar

import msgspec

from reference_impl.rules.agreement import Hello, incompatible
from reference_impl.rules.clocksync import Sample
from reference_impl.transport.base import PeerRefused

FRAME_BYTES_MAX: Final = 1 << 20
FRAME_LIMIT_S: Final = 5.0
CONNECTIONS_MAX: Final = 64
REQUESTS_MAX: Final = 64
"""Requests on one connection: a handshake has six."""
SAMPLES: Final = 5
_HEADER: Final = struct.Struct("!I")
_SEAL_BYTES: Final = 32


M = TypeVar("M")


class Introduce(msgspec.Struct, frozen=True, tag="hello"):
    """Asker: this is me. Answered by `Welcome` or `Refusal`."""

    hello: Hello


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answerer: and this is me; I can reach you from now on."""

    hello: Hello


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Answerer: we cannot exchange KV."""

    reason: Annotated[str, msgspec.Meta(max_length=4096)]


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asker: tell what your clock shows."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answerer: this. `engine_id` is "" of one that does not serve yet."""

    now_ns: int
    engine_id: str = ""


Request = Introduce | Ping
Reply = Welcome | Refusal | Pong
_requests: Final = msgspec.msgpack.Decoder(Request)
_replies: Final = msgspec.msgpack.Decoder(Reply)


class Handshake(msgspec.Struct, frozen=True):
    """What a handshake found out: who answered, and how its clock stands to ours."""

    theirs: Hello
    samples: list[Sample]


class HandshakeFailed(Exception):
    """No handshake; the message says why, in one line."""


class _Malformed(Exception):
    """Bytes that are no frame, not sealed with our secret, or no message."""


class HandshakeServer:
    """Answers handshakes. `mine` is asked for each, since addresses may come late (None is "not yet").

    `meet` makes a compatible peer reachable for us and raises `PeerRefused` if it cannot be. It must not block long:
    it runs in the event loop. `secret` is the deployment's: a frame that it does not seal is malformed.
    """

    def __init__(
        self,
        mine: Callable[[], Hello | None],
        meet: Callable[[Hello], None],
        now_ns: Callable[[], int],
        secret: bytes = b"",
    ) -> None:
        self._mine, self._meet, self._now_ns, self._secret = mine, meet, now_ns, secret
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], None] = {}
        """In the order of their arrival."""
        self.malformed = 0
        self.refused = 0
        self.port = 0

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen. Raises OSError, as for a port in use."""
        self._server = await asyncio.start_server(self._serve, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End the listener and every connection."""
        if self._server is not None:
            self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = None
        if len(self._connections) > CONNECTIONS_MAX:
            self._end_oldest()
        try:
            await self._converse(reader, writer)
        except _Malformed:
            self.malformed += 1
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # it went, it was silent, or we are closing
        finally:
            self._connections.pop(task, None)
            writer.transport.abort()

    def _end_oldest(self) -> None:
        """Make room: a handshake takes milliseconds, so who came first is silent, or slow (L6)."""
        oldest = next(iter(self._connections))
        del self._connections[oldest]
        oldest.cancel()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(REQUESTS_MAX):
            async with asyncio.timeout(FRAME_LIMIT_S):
                request = _decoded(_requests, await _read_frame(reader, self._secret))
            reply = self._answer(request)
            async with asyncio.timeout(FRAME_LIMIT_S):
                await _write_frame(writer, reply, self._secret)

    def _answer(self, request: Request) -> Reply:
        if isinstance(request, Ping):
            me = self._mine()
            return Pong(self._now_ns(), "" if me is None else me.engine_id)
        mine = self._mine()
        reason = "this engine does not serve yet" if mine is None else incompatible(mine, request.hello)
        if not reason:
            try:
                self._meet(request.hello)
            except PeerRefused as refused:
                reason = str(refused)
        if reason or mine is None:
            self.refused += 1
            return Refusal(reason[:4096])
        return Welcome(mine)


class HandshakeClient:
    """Asks for handshakes. `now_ns` is our clock, `secret` the deployment's."""

    def __init__(self, now_ns: Callable[[], int], secret: bytes = b"") -> None:
        self._now_ns, self._secret = now_ns, secret

    async def connect(self, host: str, port: int, mine: Hello, expected_engine_id: str, limit_s: float) -> Handshake:
        """Introduce ourselves to the engine `expected_engine_id` and take `SAMPLES` samples of its clock.

        Raises `HandshakeFailed` within `limit_s` seconds: refused by either side, silent, gone, not the engine that was
        expected (it was restarted: KVC-HSK-003), or not speaking our language.
        """
        async with _conversation(host, port, limit_s) as (reader, writer):
            answer = await self._ask(reader, writer, Introduce(mine))
            if isinstance(answer, Refusal):
                raise HandshakeFailed(f"{expected_engine_id} refused: {answer.reason}")
            if not isinstance(answer, Welcome):
                raise HandshakeFailed(f"{host}:{port} answered a hello with {type(answer).__name__}")
            theirs = answer.hello
            if theirs.engine_id != expected_engine_id:
                raise HandshakeFailed(
                    f"{host}:{port} is {theirs.engine_id}, not {expected_engine_id}: restarted since the hand-off"
                )
            if reason := incompatible(mine, theirs):
                raise HandshakeFailed(f"{expected_engine_id} does not suit us: {reason}")
            samples = [await self._sample(reader, writer, expected_engine_id) for _ in range(SAMPLES)]
        return Handshake(theirs, samples)

    async def ping(self, host: str, port: int, expected_engine_id: str, limit_s: float) -> Sample:
        """Take one more sample of an engine's clock. Raises `HandshakeFailed`, also if another engine answers."""
        async with _conversation(host, port, limit_s) as (reader, writer):
            return await self._sample(reader, writer, expected_engine_id)

    async def _sample(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, expected_engine_id: str
    ) -> Sample:
        sent_ns = self._now_ns()
        answer = await self._ask(reader, writer, Ping())
        received_ns = self._now_ns()
        if not isinstance(answer, Pong):
            raise HandshakeFailed(f"a ping was answered with {type(answer).__name__}")
        if answer.engine_id != expected_engine_id:
            raise HandshakeFailed(f"{answer.engine_id or 'nobody'} answers in the place of {expected_engine_id}")
        return Sample(sent_ns, answer.now_ns, received_ns)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request) -> Reply:
        await _write_frame(writer, request, self._secret)
        return _decoded(_replies, await _read_frame(reader, self._secret))


@contextlib.asynccontextmanager
async def _conversation(
    host: str, port: int, limit_s: float
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect for one conversation of `limit_s` seconds. Raises `HandshakeFailed` for all that can go wrong in it."""
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                yield reader, writer
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise HandshakeFailed(f"{where} did not answer within {limit_s:g} s") from None
    except asyncio.IncompleteReadError:
        raise HandshakeFailed(f"{where} closed the connection in the middle: it has ended, or another secret") from None
    except (OSError, OverflowError, UnicodeError) as error:  # the latter two: no port, no host name
        raise HandshakeFailed(f"{where} cannot be reached: {error}") from None
    except _Malformed as error:
        raise HandshakeFailed(f"{where} speaks another language: {error}") from None


def framed(body: bytes, secret: bytes) -> bytes:
    """Return a message as it goes over the wire."""
    return _HEADER.pack(_SEAL_BYTES + len(body)) + _seal(body, secret) + body


def _seal(body: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, body, "sha256")


async def _write_frame(writer: asyncio.StreamWriter, message: Request | Reply, secret: bytes) -> None:
    writer.write(framed(msgspec.msgpack.encode(message), secret))
    await writer.drain()


async def _read_frame(reader: asyncio.StreamReader, secret: bytes) -> bytes:
    """Return the next message, sealed with `secret`. Raises `_Malformed` before anything looks into another one."""
    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if not _SEAL_BYTES < size <= FRAME_BYTES_MAX:
        raise _Malformed(f"a frame announces {size} bytes; it may have {_SEAL_BYTES + 1} to {FRAME_BYTES_MAX}")
    frame = await reader.readexactly(size)
    seal, body = frame[:_SEAL_BYTES], frame[_SEAL_BYTES:]
    if not hmac.compare_digest(seal, _seal(body, secret)):
        raise _Malformed(f"a frame of {size} bytes is not sealed with our secret")
    return body


def _decoded(decoder: msgspec.msgpack.Decoder[M], body: bytes) -> M:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _Malformed(f"a frame of {len(body)} bytes is no message: {error}") from None

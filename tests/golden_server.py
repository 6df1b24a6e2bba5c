"""A server that knows its own truth: when the last byte of each request arrived, and when it wrote each chunk.

`python -m tests.golden_server --truth FILE --plans JSON` serves OpenAI streams on a free port of 127.0.0.1 and prints
that port. The n-th request gets the n-th plan, round and round. Each request leaves its id in FILE's sister with the
suffix `.arrived` when it is there, and one `Truth` line in FILE when its connection is closed. Hand-offs
(`kv_transfer_params`) that it never gave out get a 400. Each renewal of one leaves a line in the sister `.renewed`.
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import fcntl
import gc
import itertools
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import uvloop

from reference_impl import tokens
from reference_impl.realclock import now_ns

NS_PER_MS = 1e6
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
NODES = b"x-pdproof-worker: golden\r\nx-pdproof-engine: e0\r\nx-pdproof-prefill-worker: p0\r\n\r\n"


class Fault(enum.StrEnum):
    NONE = ""
    CUT = "cut"
    """Close the connection in the middle of the stream."""
    RESET = "reset"
    """Break it off with a reset."""
    STALL = "stall"
    """Say nothing more, and keep the connection."""
    ERROR = "error"
    """Send an error event."""
    GARBAGE = "garbage"
    """Send an event that is no JSON."""
    NO_DONE = "no_done"
    """End the HTTP message properly, but without [DONE]."""
    NO_FINISH = "no_finish"
    """Send [DONE], but never a finish_reason."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is answered."""

    first_ms: float = 20.0
    gap_ms: float = 20.0
    tokens_per_chunk: int = 1
    fault: Fault = Fault.NONE
    after_chunks: int = 0
    """Chunks sent before the fault."""
    status: int = 200
    split_bytes: int = 0
    """Write each event in pieces of so many bytes."""
    coalesce: int = 1
    """Write so many events at once."""
    hand_off: bool = False
    """End with `kv_transfer_params`."""
    cached_tokens: int | None = None
    """What the usage says of them."""
    token_ids: bool = True
    """Name the tokens of each chunk."""


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """What really happened, in monotonic ns; `chunk_ns[i]` is taken just before the write that completed chunk i."""

    request_id: str
    arrived_ns: int
    chunk_ns: list[int]
    plan: Plan
    body: msgspec.Raw
    """The request, `{}` if it was long."""


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """One renewal: when it came, the request whose hand-off it names, and that hand-off's end before it."""

    t_ns: int
    request_id: str
    expiry: float


class HandOff(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's `kv_transfer_params` as far as the tests need them."""

    remote_request_id: str
    remote_blocks_expiry_time: float = 480.0
    remote_engine_id: str = "golden-d"
    remote_block_ids: tuple[tuple[int, ...], ...] = ((3, 1, 2),)
    do_remote_prefill: bool = True
    do_remote_decode: bool = False

    def text(self) -> bytes:
        """As it is sent, with spaces that no encoder of the client's makes."""
        return msgspec.json.encode(self).replace(b":", b" :  ")


class _Asked(msgspec.Struct, frozen=True):
    max_tokens: int = 0
    kv_transfer_params: HandOff | None = None


_asked = msgspec.json.Decoder(_Asked).decode


def events(token_ids: list[int], chat: bool, finish: str | None, named: bool = True) -> bytes:
    """One content event as vLLM writes it."""
    text = tokens.decode(token_ids)
    content: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text, "logprobs": None}
    choice = {"index": 0, **content, "finish_reason": finish, "stop_reason": None}
    choice["token_ids"] = token_ids if named else None
    kind = "chat.completion.chunk" if chat else "text_completion"
    chunk = {"id": "cmpl-golden", "object": kind, "created": 1, "model": "golden", "choices": [choice], "usage": None}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


COMMON = {chat: [events([t], chat, None) for t in range(64)] for chat in (False, True)}


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Stream:
    """Answers one request by its plan, in absolute time."""

    def __init__(
        self, server: Server, transport: asyncio.Transport, plan: Plan, request_id: str, body: bytes, chat: bool
    ) -> None:
        asked = _asked(body)
        self.chunk_ns: list[int] = []
        self._request_id = request_id
        self._server, self._transport, self._plan, self._chat = server, transport, plan, chat
        self._chunks = -(-asked.max_tokens // plan.tokens_per_chunk)
        self._tokens = asked.max_tokens
        self._waiting = b""
        self._waiting_chunks = 0

    def begin(self, arrived_ns: int) -> None:
        self._first_ns = arrived_ns + self._plan.first_ms * NS_PER_MS
        self._transport.write(HEAD + NODES)
        if self._chat:
            role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
            self._transport.write(http_chunk(role))
        self._next(0)

    def _next(self, index: int) -> None:
        due_ns = self._first_ns + index * self._plan.gap_ms * NS_PER_MS
        self._server.loop.call_later(max(0.0, (due_ns - now_ns()) / 1e9), self._chunk, index)

    def _chunk(self, index: int) -> None:
        plan = self._plan
        if self._transport.is_closing():
            return
        if plan.fault and index == plan.after_chunks and plan.fault not in (Fault.NO_DONE, Fault.NO_FINISH):
            self._break()
            return
        last = index == self._chunks - 1
        self._waiting += http_chunk(self._event(index, last))
        self._waiting_chunks += 1
        if last or self._waiting_chunks == plan.coalesce:
            self._flush()
        if last:
            self._finish()
        else:
            self._next(index + 1)

    def _event(self, index: int, last: bool) -> bytes:
        size = self._plan.tokens_per_chunk
        if size == 1 and not last and self._plan.token_ids:
            return COMMON[self._chat][index % 64]
        count = min(size, self._tokens - index * size)
        finish = "length" if last and self._plan.fault is not Fault.NO_FINISH else None
        return events([(index * size + n) % 64 for n in range(count)], self._chat, finish, self._plan.token_ids)

    def _flush(self) -> None:
        data, self._waiting = self._waiting, b""
        size = self._plan.split_bytes or len(data)
        complete = data.rindex(b"\n\n")  # the newline that ends the last line of data
        for start in range(0, len(data), size):
            if start <= complete < start + size:
                self.chunk_ns += [now_ns()] * self._waiting_chunks
                self._waiting_chunks = 0
            self._transport.write(data[start : start + size])

    def _finish(self) -> None:
        details = b""
        if self._plan.cached_tokens is not None:
            details = b',"prompt_tokens_details":{"cached_tokens":%d}' % self._plan.cached_tokens
        params = b""
        if self._plan.hand_off:
            params = b',"kv_transfer_params":' + self._server.hand_out(HandOff(remote_request_id=self._request_id))
        counts = b'"prompt_tokens":1,"completion_tokens":%d' % self._tokens
        usage = b'data: {"choices":[],"usage":{%b%b}%b}\n\n' % (counts, details, params)
        done = b"" if self._plan.fault is Fault.NO_DONE else b"data: [DONE]\n\n"
        self._transport.write(http_chunk(usage + done) + b"0\r\n\r\n")
        self._transport.close()

    def _break(self) -> None:
        fault = self._plan.fault
        if fault is Fault.CUT:
            self._transport.close()
        elif fault is Fault.RESET:
            linger = struct.pack("ii", 1, 0)
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._transport.abort()
        elif fault is Fault.ERROR:
            self._transport.write(http_chunk(b'data: {"error":{"message":"golden trouble","code":500}}\n\n'))
        elif fault is Fault.GARBAGE:
            self._transport.write(http_chunk(b"data: {golden nonsense\n\n"))


class Connection(asyncio.Protocol):
    """One connection, which carries one request."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._pieces: list[bytes] = []
        self._missing = -1
        self._head = b""
        self._request_id = ""
        self._arrived_ns = 0
        self._body = b"{}"
        self._plan = Plan()
        self._stream: Stream | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        t_ns = now_ns()
        if self._missing < 0:
            self._head, end, data = (self._head + data).partition(b"\r\n\r\n")
            if not end:
                return
            length = re.search(rb"content-length: *(\d+)", self._head, re.IGNORECASE)
            self._missing = int(length[1]) if length else 0
        self._pieces.append(data)
        self._missing -= len(data)
        if self._missing == 0:
            self._arrived_ns = t_ns
            self._answer(b"".join(self._pieces))

    def _answer(self, body: bytes) -> None:
        if self._head.startswith(b"GET /v1/models "):
            self._whole(200, b'{"object":"list","data":[{"id":"golden","object":"model"}]}')
            return
        if self._head.startswith(b"POST /v1/kv/renew "):
            self._renew(body)
            return
        found = re.search(rb"x-request-id: *(\S+)", self._head, re.IGNORECASE)
        self._request_id = found[1].decode() if found else ""
        self._body = body if len(body) < 4096 else b"{}"
        plan = self._plan = next(self._server.plans)
        if (hand_off := _asked(body).kv_transfer_params) is not None and hand_off.text() not in self._server.handed_out:
            self._whole(400, b'{"error":{"message":"golden never gave out this hand-off"}}')
            return
        if plan.status != 200:
            self._whole(plan.status, b'{"error":{"message":"golden refusal"}}')
            return
        self._server.arrived.write(self._request_id.encode() + b"\n")
        chat = self._head.startswith(b"POST /v1/chat/")
        self._stream = Stream(self._server, self._transport, plan, self._request_id, body, chat)
        self._stream.begin(self._arrived_ns)

    def _renew(self, body: bytes) -> None:
        """Note the renewal; a good one is answered with the hand-off's new end."""
        hand_off = _asked(body).kv_transfer_params
        assert hand_off is not None
        assert hand_off.text() in self._server.handed_out
        expiry = hand_off.remote_blocks_expiry_time
        renewal = Renewal(t_ns=self._arrived_ns, request_id=hand_off.remote_request_id, expiry=expiry)
        self._server.renewed.write(msgspec.json.encode(renewal) + b"\n")
        if self._server.renew_status != 200:
            self._whole(self._server.renew_status, b"not now")
            return
        longer = self._server.hand_out(msgspec.structs.replace(hand_off, remote_blocks_expiry_time=expiry + 480))
        self._whole(200, b'{"kv_transfer_params":%b}' % longer)

    def _whole(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} Golden\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        if self._request_id:
            chunk_ns = self._stream.chunk_ns if self._stream else []
            truth = Truth(
                request_id=self._request_id,
                arrived_ns=self._arrived_ns,
                chunk_ns=chunk_ns,
                plan=self._plan,
                body=msgspec.Raw(self._body),
            )
            self._server.truth.write(msgspec.json.encode(truth) + b"\n")
            self._server.truth.flush()


class Server:
    """What all connections share."""

    def __init__(
        self, truth: BinaryIO, arrived: BinaryIO, renewed: BinaryIO, plans: list[Plan], renew_status: int
    ) -> None:
        self.truth = truth
        self.arrived = arrived
        self.renewed = renewed
        self.renew_status = renew_status
        self.handed_out: set[bytes] = set()
        self.plans: Iterator[Plan] = itertools.cycle(plans)
        self.loop = asyncio.get_running_loop()

    def hand_out(self, hand_off: HandOff) -> bytes:
        """Remember that it was given out, and return it as it is sent."""
        text = hand_off.text()
        self.handed_out.add(text)
        return text

    async def serve(self) -> None:
        listening = await self.loop.create_server(lambda: Connection(self), "127.0.0.1", 0, backlog=4096)
        sys.stdout.write(f"{listening.sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()
        await listening.serve_forever()


async def serve(truth: Path, plans: list[Plan], renew_status: int) -> None:
    with (
        truth.open("ab") as out,
        truth.with_suffix(".arrived").open("ab", buffering=0) as arrived,
        truth.with_suffix(".renewed").open("ab", buffering=0) as renewed,
    ):
        await Server(out, arrived, renewed, plans, renew_status).serve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--plans", default="[{}]")
    parser.add_argument("--renew-status", type=int, default=200, help="how renewals are answered")
    parser.add_argument("--core", type=int, default=-1, help="pin to this core")
    given = parser.parse_args()
    if given.core >= 0:
        os.sched_setaffinity(0, {given.core})
    gc.disable()  # its pauses would be held against the client
    with Path(os.devnull).open("rb") as nothing:  # grow the table of descriptors now: it stops a process for 10 ms
        os.close(fcntl.fcntl(nothing, fcntl.F_DUPFD_CLOEXEC, 8000))
    uvloop.run(serve(given.truth, msgspec.json.decode(given.plans, type=list[Plan]), given.renew_status))


if __name__ == "__main__":
    main()

"""Peers that break the protocol, stall or crowd: each costs only its own connection (KVC-MEM-011)."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference_impl.memory_service import wire
from reference_impl.memory_service.errors import BadRequest, ProtocolError
from reference_impl.rules.sessions import Mode, Reason, Tag
from tests.memory_service.running import RunningService, descriptors_of, running_service

pytestmark = pytest.mark.rule("KVC-MEM-011")

IMPATIENT = ("--handshake-s", "0.5", "--frame-s", "0.5")
OPEN = wire.Open(Tag.WEIGHTS, Mode.WRITER, "rogue", 0, 0.0)


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    """One service for all of them: that it lives to the end is part of the claim."""
    with running_service(*IMPATIENT) as running:
        yield running


def raw_frame(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


@contextmanager
def peer(service: RunningService) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(service.path))  # blocking: the backlog may be full for a moment
        sock.settimeout(10)
        yield sock


def everything(sock: socket.socket) -> bytes:
    """Read until the service closes the connection."""
    got = b""
    try:
        while data := sock.recv(1 << 16):
            got += data
    except ConnectionResetError:
        pass
    return got


def answer(sock: socket.socket) -> wire.Reply:
    reader = wire.FrameReader(wire.REPLY_BYTES_MAX)
    while (body := reader.take()) is None:
        data = sock.recv(1 << 16)
        assert data, "closed without an answer"
        reader.feed(data)
    return wire.decode_reply(body)


@contextmanager
def unharmed(service: RunningService) -> Iterator[None]:
    """Hold that a bystander's session lives on, and that the service holds no descriptor more than before."""
    with service.client(Tag.KV_CACHE, engine_id="bystander") as bystander:
        bystander.allocate("kv", 4096)
        idle = 1 + service.idle_descriptors(connections=1)
        used_bytes = service.figures().used_bytes
        yield
        bystander.allocate("more", 4096)
        assert service.figures().used_bytes == used_bytes + 4096
        service.descriptors_become(idle)


MALFORMED = {
    "empty": struct.pack("!I", 0),
    "oversized": struct.pack("!I", wire.REQUEST_BYTES_MAX + 1),
    "largest length": b"\xff\xff\xff\xff",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "not msgpack": raw_frame(b"\xc1\xc1"),
    "no request": raw_frame(msgspec.msgpack.encode({"type": "fire"})),
    "a reply": raw_frame(msgspec.msgpack.encode(wire.Done())),
    "wrong type": raw_frame(msgspec.msgpack.encode({"type": "open", "tag": "weights", "mode": 3})),
    "unknown tag": raw_frame(msgspec.msgpack.encode({**msgspec.to_builtins(OPEN), "tag": "gold"})),
    "unknown field": raw_frame(msgspec.msgpack.encode({**msgspec.to_builtins(OPEN), "more": 1})),
    "bad utf-8": raw_frame(b"\x81\xa4type\xa4\xff\xff\xff\xff"),
    "deeply nested": raw_frame(b"\x91" * 100_000 + b"\xc0"),
    "two at once": wire.frame(wire.GetFigures()) + b"x",
}


@pytest.mark.parametrize("name", list(MALFORMED))
def test_a_malformed_frame_is_told_of_and_ends_its_connection(service: RunningService, name: str) -> None:
    with unharmed(service), peer(service) as sock:
        sock.sendall(MALFORMED[name])
        reply = wire.decode_reply(everything(sock)[4:])
        assert isinstance(reply, wire.RefusedWith)
        assert reply.reason is Reason.BAD_REQUEST
        assert "\n" not in reply.message


def test_a_frame_in_time_is_answered_and_its_connection_stays(service: RunningService) -> None:
    """The twin of the test above."""
    with peer(service) as sock:
        for _ in range(2):
            sock.sendall(wire.frame(wire.GetFigures()))
            assert isinstance(answer(sock), wire.FiguresAre)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(min_size=1, max_size=300), st.booleans())
def test_any_bytes_at_all_leave_the_service_as_it_was(service: RunningService, data: bytes, framed: bool) -> None:
    with peer(service) as sock:
        sock.sendall(raw_frame(data) if framed else data)
        sock.shutdown(socket.SHUT_WR)
        everything(sock)
    assert service.figures().sessions == 0


values = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary())


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([OPEN, wire.Allocate("n", 1, 0.0), wire.Commit("c", b""), wire.Export(("n",)), wire.GetFigures()]),
    st.lists(st.tuples(st.integers(0, 9), values), max_size=2),
)
def test_any_values_in_a_session_leave_the_service_as_it_was(
    service: RunningService, request_: wire.Request, changes: list[tuple[int, object]]
) -> None:
    fields = msgspec.to_builtins(request_, builtin_types=(bytes,))
    for index, value in changes:
        fields[list(fields)[index % len(fields)]] = value
    with peer(service) as sock:
        sock.sendall(wire.frame(OPEN))
        assert isinstance(answer(sock), wire.Opened)
        sock.sendall(raw_frame(msgspec.msgpack.encode(fields)))
        sock.shutdown(socket.SHUT_WR)
        everything(sock)
    assert service.settled().used_bytes == 0


@pytest.mark.parametrize("sent", [b"", b"\x00", wire.frame(wire.GetFigures())[:-1]])
def test_a_silent_peer_and_half_a_frame_are_given_up(service: RunningService, sent: bytes) -> None:
    with unharmed(service), peer(service) as sock:
        sock.sendall(sent)
        assert everything(sock) == b""


def test_a_parked_client_may_be_silent_but_not_within_a_frame(service: RunningService) -> None:
    with peer(service) as quiet, peer(service) as halting:
        for sock in (quiet, halting):
            sock.sendall(wire.frame(wire.Open(Tag.KV_CACHE if sock is quiet else Tag.WEIGHTS, Mode.WRITER, "e", 0, 0)))
            assert isinstance(answer(sock), wire.Opened)
        halting.sendall(b"\x00\x00")
        assert everything(halting) == b""
        quiet.sendall(wire.frame(wire.Allocate("n", 1, 0.0)))
        assert isinstance(answer(quiet), wire.Done)


def test_a_request_with_descriptors_is_refused_and_none_is_kept(service: RunningService) -> None:
    with unharmed(service), peer(service) as sock:
        many = array.array("i", [0] * 200)
        sock.sendmsg([wire.frame(OPEN)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)])
        reply = wire.decode_reply(everything(sock)[4:])
        assert isinstance(reply, wire.RefusedWith)
        assert "descriptors" in reply.message


def test_a_peer_that_reads_no_answers_is_given_up() -> None:
    with running_service(*IMPATIENT) as service:
        with service.client() as writer:
            for number in range(64):
                writer.allocate(f"{number}".rjust(200, "n"), 4096)
            writer.commit(b"m" * (1 << 20))
        with unharmed(service), peer(service) as sock:
            sock.sendall(wire.frame(wire.Open(Tag.WEIGHTS, Mode.READER, "deaf", 0, 0.0)))
            service.settled(sessions=1)
            assert len(everything(sock)) < 1 << 20, "it was sent the whole answer in spite of reading none"


def test_too_many_peers_do_not_keep_an_engine_out() -> None:
    """More silent peers than the limit: the oldest of them makes room."""
    with running_service() as service, ExitStack() as crowd:
        bystander = crowd.enter_context(service.client(Tag.KV_CACHE))
        first = crowd.enter_context(peer(service))
        for _ in range(300):
            crowd.enter_context(peer(service))
        with service.client() as engine:
            engine.allocate("w", 1)
        bystander.allocate("kv", 1)
        assert everything(first) == b""
        assert descriptors_of(service.process.pid) < 300


def test_a_client_of_something_else_is_told_so() -> None:
    """The client distrusts the other side too: wrong answers, surplus descriptors, and none of them is kept."""
    ours, theirs = socket.socketpair()
    before = descriptors_of(os.getpid())
    surplus: list[int] = []
    with ours, theirs:
        many = array.array("i", [0] * (wire.DESCRIPTORS_MAX + 60))
        theirs.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)])
        data, cut = wire.receive(ours, 100, surplus)
        assert (data, cut) == (b"x", True)
        assert wire.DESCRIPTORS_MAX <= len(surplus) <= wire.DESCRIPTORS_MAX + 1
        wire.close_all(surplus)
        assert descriptors_of(os.getpid()) == before
    with pytest.raises(ProtocolError, match="no reply"):
        wire.decode_reply(b"\xc1")


def test_a_second_session_on_a_connection_and_none_at_all_are_refused(service: RunningService) -> None:
    with peer(service) as sock:
        sock.sendall(wire.frame(wire.Allocate("n", 1, 0.0)))
        assert isinstance(answer(sock), wire.RefusedWith)
        sock.sendall(wire.frame(OPEN))
        assert isinstance(answer(sock), wire.Opened)
        sock.sendall(wire.frame(OPEN))
        assert isinstance(answer(sock), wire.RefusedWith)
    with service.client(wait_s=5) as client:
        with pytest.raises(BadRequest, match="positive size"):
            client.allocate("n", 0)
        client.allocate("n", 1)
